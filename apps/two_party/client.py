"""The data owner's side: ask about samples that the server does not see.

    python -m deepseal.apps.two_party.client program/public --connect server.example:9001 --certs certs x.npy y.npy

Each .npy file holds samples as the model was trained on (in the range of its data, before normalisation); one line with
the labels, or logits, is printed for each. ``certs`` has ca.pem, client.pem and client.key.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from deepseal.apps.two_party.server import certificates
from deepseal.errors import DeepSealError, InputError
from deepseal.secure_inference.compile import Program
from deepseal.secure_inference.roles.client import Client


def main(arguments: list[str] | None = None) -> int:
    """Run the script; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", type=Path, help="the public program")
    parser.add_argument("samples", type=Path, nargs="+", help=".npy files")
    parser.add_argument("--connect", default="127.0.0.1:9001", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--certs", type=Path, help="folder with ca.pem, client.pem and client.key")
    options = parser.parse_args(arguments)
    try:
        program, arrays = Program.load(options.program), [_read(path) for path in options.samples]
        with Client.connect(program, options.connect, tls=certificates(options.certs, "client")) as client:
            for path, x in zip(options.samples, arrays, strict=True):
                answer = client.ask(x)
                print(f"{path}: {answer.values.tolist()} ({answer.seconds * 1e3:.1f} ms)", flush=True)
    except DeepSealError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _read(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise InputError(f"an array in {path}", found=str(error), do="save it with numpy.save") from error


if __name__ == "__main__":
    sys.exit(main())
