"""Errors for people: one line that says what was expected, what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class DeepSealError(Exception):
    """Base of every error that DeepSeal raises on purpose; its text is one line, ready to be shown."""


class InputError(DeepSealError, ValueError):
    """The user's input cannot be used. The command line answers with exit code 2.

    Args:
        expected: what would have been right, as a noun phrase.
        found: what was there instead.
        do: the next step for the user, as an imperative.
    """

    def __init__(self, expected: str, *, found: str, do: str) -> None:
        self.expected, self.found, self.do = expected, found, do
        super().__init__(one_line(f"expected {expected}; found {found}; {do}"))


class UnknownNameError(InputError):
    """A name that is not among the known ones; the message lists the nearest.

    Args:
        kind: what the name stands for, such as "layer".
        name: the unknown name.
        known: all the names that would have been right.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = list(known)
        few = len(names) <= 6
        near = names if few else difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:12]
        more = ", …" if len(near) < len(names) and near == names[:12] else ""
        choice = "use " + " or ".join(repr(n) for n in near) + more if near else f"there is no {kind} here to choose"
        super().__init__(f"the name of a known {kind}", found=repr(name), do=choice)


class TrainingError(DeepSealError):
    """Training did not give a usable model, for instance since the loss became infinite."""


class VerificationError(DeepSealError):
    """An embedded mark could not be read back from the file that was written."""


class TransportError(InputError):
    """The connection to the other party could not be made, stalled or ended early."""


class ProtocolError(TransportError):
    """The other party sent what the protocol does not allow at this point, or refused to go on."""


@contextmanager
def understood(what: str, do: str) -> Iterator[None]:
    """Whatever a user's file or code raises inside becomes an ``InputError``.

    Args:
        what: what was expected, such as "a weights file at x".
        do: the next step for the user.
    """
    try:
        yield
    except DeepSealError:
        raise
    except Exception as error:
        raise InputError(what, found=f"{type(error).__name__}: {error}"[:200], do=do) from error


def one_line(text: str) -> str:
    """The text with every run of white space as one space, and what a terminal would obey or not show escaped."""
    words = " ".join(text.split())
    return words if words.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in words)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
