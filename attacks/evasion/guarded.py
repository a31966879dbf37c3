"""What attacks through a detector share: who is a guarded model, and the best that a search has met so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.attacks.base import Guarded, Perturbed
from deepseal.attacks.evasion.search import Search, first_success
from deepseal.errors import InputError
from deepseal.rng import Rng

BATCH = 128  # inputs at a time: a detector's graph holds several passes


def guarded(model: Differentiable) -> Guarded:
    """The model as one with a detector beside it.

    Raises:
        InputError: there is none.
    """
    if not all(hasattr(model, name) for name in ("limit", "suspicion", "alarms")):
        found, do = "a model without a detector", "attack a guarded model, or use pgd or cw"
        raise InputError("a guarded model for an adaptive attack", found=found, do=do)
    return model  # type: ignore[return-value]


def surrogates(choice: str) -> tuple[str, ...]:
    """The surrogates that a parameter asks for: one by name, or both."""
    return ("identity", "smooth") if choice == "both" else (choice,)


def averaged_suspicion(model: Guarded, x: Tensor, surrogate: str, draws: int) -> Tensor:
    """(N,) mean over draws of the detector's noise (expectation over transformation; A. Athalye et al., ICML 2018)."""
    return torch.stack([model.suspicion(x, surrogate=surrogate) for _ in range(draws)]).mean(dim=0)


class Walk:
    """For each of N inputs the wrongly answered one that the detector minds least; the last one while none is wrong.

    Attributes:
        best: (N, …).
        least: (N,) its suspicion; infinite while none is wrong.
    """

    def __init__(self, x: Tensor) -> None:
        self.best = x.clone()
        self.least = torch.full((len(x),), float("inf"))

    def meet(self, rows: Tensor, x: Tensor, wrong: Tensor, suspicion: Tensor) -> None:
        """What was met at the rows: inputs, whether each is answered wrongly, and its suspicion if so."""
        better = wrong & (suspicion < self.least[rows])
        moved = better | torch.isinf(self.least[rows])
        self.best[rows[moved]] = x[moved]
        self.least[rows[better]] = suspicion[better]


def adaptive(model: Guarded, data: Split, trials: Sequence[tuple[Mapping[str, Any], Search]], *, rng: Rng) -> Perturbed:
    """Run trials one after the other; ``fooled`` is wrong and unflagged, and the evidence says what each trial added.

    ``wrong`` in the evidence counts the inputs that some trial left misclassified, flagged or not.

    Raises:
        InputError: see ``search.first_success``.
    """
    searches = [search for _, search in trials]
    found, firsts = first_success(model, data, searches, rng=rng, alarms=model.alarms, batch=BATCH)
    evidence = {
        **found.evidence,
        "wrong_and_unflagged": int(found.fooled.sum()),
        "limit": float(model.limit),
        "trials": [{**settings, "first": first} for (settings, _), first in zip(trials, firsts, strict=True)],
    }
    return dataclasses.replace(found, evidence=evidence)
