"""The builds of the EMP toolkit that the second engine accepts: each passed the tests here, and no other is used.

An installed EMP does not say which commit it is, so a build is named by the SHA-256 of its headers, which the extension
computes when it is compiled::

    cd PREFIX/include
    find emp-tool emp-ot emp-sh2pc -name '*.h' -o -name '*.hpp' | LC_ALL=C sort | xargs sha256sum | sha256sum

A build enters the list when `tests/protocol/test_emp.py` passes with it. One that leaks delta never does: later EMP
versions derive one AES key for every eight hash calls and put no tweak into the block, so two AND gates that share a
wire and fall under one key give T_G xor T_G' = delta for half of all label pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from deepseal.errors import InputError

BUILDS: Mapping[str, str] = MappingProxyType(
    {
        "69466b277daad59dcb2dbf5c1420dcab55d44b761bda8d1d2e510b8cbf2d9cad": (
            "emp-tool 1eef346, emp-ot 07a6c79, emp-sh2pc c57fdcf (1.0 line, May 2026)"
        ),
    }
)


def check_build(headers: str, allowed: Iterable[str] = BUILDS) -> None:
    """Refuse an EMP that was not tested.

    Args:
        headers: SHA-256 of its headers, in hexadecimal.
        allowed: the digests that are good.

    Raises:
        InputError: the digest is not among them; the message prints it.
    """
    if headers not in set(allowed):
        raise InputError(
            "an EMP build that was tested here (secure_inference/protocol/emp_builds.py)",
            found=f"headers with the SHA-256 {headers}",
            do="install one of the listed builds and build deepseal._emp again, or use DeepSeal's own engine",
        )


def check_leaks(leaks: int, trials: int) -> None:
    """Refuse an EMP whose garbled tables reveal the free-XOR offset.

    Args:
        leaks: in how many trials the tables of AND(a, b) and AND(a, c) revealed it.
        trials: how many there were.

    Raises:
        InputError: any leak.
    """
    if leaks:
        raise InputError(
            "an EMP whose tables keep delta secret",
            found=f"{leaks} of {trials} pairs of AND gates that reveal it",
            do="install a build that is listed in secure_inference/protocol/emp_builds.py",
        )
