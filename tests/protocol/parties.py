"""Two parties for tests: both sides at once, and their certificates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepseal.secure_inference.transport import Tls
from deepseal.secure_inference.transport.certificates import Certificates, make_certificates


def together(*parts: Callable[[], object]) -> list[object]:
    """Run all parts at once, the last one in this thread: what each returned or raised."""
    results: list[object] = [None] * len(parts)

    def run(index: int) -> None:
        try:
            results[index] = parts[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(parts) - 1)]
    for thread in threads:
        thread.start()
    run(len(parts) - 1)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a side hangs"
    return results


@dataclass(frozen=True)
class Party:
    """The two sides' TLS settings, and the files they come from."""

    files: Certificates
    garbler: Tls
    evaluator: Tls


def party(folder: Path, **options: object) -> Party:
    made = make_certificates(folder, **options)
    one, two = (Tls(made.certificates[name], made.keys[name], made.ca) for name in ("garbler", "evaluator"))
    return Party(made, one, two)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
