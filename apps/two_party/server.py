"""The model owner's side: answer clients until Ctrl-C.

    python -m deepseal.apps.two_party.server program --listen 0.0.0.0:9001 --certs certs

``program`` is the folder that ``deepseal private compile`` wrote, ``certs`` one with ca.pem, server.pem and server.key
(``deepseal private certs --out certs --name server --name client``). Without ``--certs`` only this machine can ask.
Semi-honest: serve people who gain less by cheating than they lose by being found out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepseal.errors import DeepSealError
from deepseal.secure_inference.compile import Program, Weights
from deepseal.secure_inference.roles.reception import Served
from deepseal.secure_inference.roles.server import Server
from deepseal.secure_inference.transport import Tls


def main(arguments: list[str] | None = None) -> int:
    """Run the script; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path, help="folder with public/ and secret/")
    parser.add_argument("--listen", default="127.0.0.1:9001", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--certs", type=Path, help="folder with ca.pem, server.pem and server.key")
    parser.add_argument("--most-samples", type=int, help="samples that each client may ask about")
    options = parser.parse_args(arguments)
    try:
        program = Program.load(options.program)
        weights = Weights.load(options.program, program) if program.secret_steps else None
        server = Server(program, weights, most_samples=options.most_samples, report=_say)
        server.serve(
            options.listen,
            tls=certificates(options.certs, "server"),
            ready=lambda address: print(
                f"serving {program.name or 'a model'} on {address}; Ctrl-C ends it", flush=True
            ),
        )
    except DeepSealError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def certificates(folder: Path | None, name: str) -> Tls | None:
    """A party's TLS files in a folder, as ``deepseal private certs`` names them."""
    return None if folder is None else Tls(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")


def _say(served: Served) -> None:
    end = served.error or "done"
    print(f"client {served.client}: {served.questions} questions, {served.bytes_sent:,} bytes sent: {end}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
