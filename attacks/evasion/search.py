"""What evasion attacks share: whom they attack, restarts, and the re-check of everything that they claim."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Split
from deepseal.adapter.classifier import BATCH
from deepseal.attacks.base import Perturbed
from deepseal.rng import Rng

# (N, …) inputs that the model gets right, (N,) labels, randomness -> (N, …) candidates.
Search = Callable[[Tensor, Tensor, torch.Generator], Tensor]
_OTHER_BATCH = 97
_ALONE = 64


def attacked(
    model: BlackBox, data: Split, search: Search, *, rng: Rng, restarts: int = 1, batch: int = BATCH
) -> Perturbed:
    """Run a search on every input that the model gets right, and keep the first candidate that fools it.

    A candidate counts as fooling only if it also does so in another batch and in another order, is within the bounds,
    is finite, and is neither blank (one value everywhere) nor the input itself; the others are put back. At most 64 are
    asked alone too. The model answers in evaluation mode throughout.

    Args:
        model: the victim.
        data: inputs with their right labels.
        search: the attack.
        rng: all randomness.
        restarts: how often the search is run on what did not fool yet.
        batch: inputs at a time.

    Raises:
        InputError: a model without classes, of integers or of several inputs, or data that do not fit it.
    """
    model.spec.require_plain("an evasion attack")
    model.spec.require_classes()
    data.check(model.spec)
    clean, generator = data.tensor, rng.child("search").torch()
    x, undone, rejected = clean.clone(), 0, 0
    fooled = torch.zeros(len(x), dtype=torch.bool)
    right = _labels(model, clean, batch) == data.y
    for _ in range(restarts):
        left = torch.nonzero(right & ~fooled).reshape(-1)
        for rows in left.split(batch) if len(left) else ():
            with torch.no_grad():
                found = search(clean[rows], data.y[rows], generator).detach()
            sound = _sound(found, clean[rows], model.spec.bounds)
            found = torch.where(_along(sound, found), found, clean[rows])
            wrong = sound & (_labels(model, found, batch) != data.y[rows])
            rejected += int((~sound).sum())
            x[rows[wrong]] = found[wrong]
            fooled[rows[wrong]] = True
        claimed = torch.nonzero(fooled).reshape(-1).flip(0)
        again = _labels(model, x[claimed], _OTHER_BATCH) != data.y[claimed]
        undone += int((~again).sum())
        fooled[claimed[~again]] = False
        x[claimed[~again]] = clean[claimed[~again]]
    some = torch.nonzero(fooled).reshape(-1)[:_ALONE]
    alone = sum(int(_labels(model, x[row : row + 1], 1) != data.y[row]) for row in some.tolist())
    change = (x - clean)[fooled].flatten(1)
    evidence = {
        "attacked": int(right.sum()),
        "fooled": int(fooled.sum()),
        "undone_in_another_batch": undone,
        "unsound_candidates": rejected,
        "asked_alone": len(some),
        "fooled_alone": alone,
        "mean_linf": float(change.abs().amax(dim=1).mean()) if len(change) else None,
        "mean_l2": float(change.norm(dim=1).mean()) if len(change) else None,
    }
    return Perturbed(x, fooled, evidence)


def _sound(found: Tensor, clean: Tensor, bounds: tuple[float, float]) -> Tensor:
    flat, low, high = found.flatten(1), *bounds
    inside = torch.isfinite(flat).all(dim=1) & (flat >= low).all(dim=1) & (flat <= high).all(dim=1)
    blank = flat.amax(dim=1) == flat.amin(dim=1)
    return inside & ~blank & (flat != clean.flatten(1)).any(dim=1)


def _labels(model: BlackBox, x: Tensor, batch: int) -> Tensor:
    if not len(x):
        return torch.zeros(0, dtype=torch.int64)
    answers = torch.cat([model.query(part) for part in x.split(batch)])
    return answers.to(torch.int64) if model.output == "labels" else answers.argmax(dim=1)


def _along(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (like.dim() - 1))
