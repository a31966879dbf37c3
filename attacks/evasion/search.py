"""What evasion attacks share: whom they attack, restarts, and the re-check of everything that they claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Split
from deepseal.attacks.base import Perturbed
from deepseal.rng import Rng

# (N, …) inputs that the model gets right, (N,) labels, randomness -> (N, …) candidates.
Search = Callable[[Tensor, Tensor, torch.Generator], Tensor]
# (N, …) inputs -> (N,) True where one raises the alarm.
Alarms = Callable[[Tensor], Tensor]
BATCH = 256  # beyond that the gradients of small networks leave the cache
_OTHER_BATCH = 97
_ALONE = 64


def attacked(
    model: BlackBox, data: Split, search: Search, *, rng: Rng, restarts: int = 1, batch: int = BATCH
) -> Perturbed:
    """Run a search on every input that the model gets right, again on what does not fool yet (see ``first_success``).

    Raises:
        InputError: a model without classes, of integers or of several inputs, or data that do not fit it.
    """
    found, _ = first_success(model, data, [search] * restarts, rng=rng, batch=batch)
    return found


def first_success(
    model: BlackBox,
    data: Split,
    searches: Sequence[Search],
    *,
    rng: Rng,
    alarms: Alarms | None = None,
    batch: int = BATCH,
) -> tuple[Perturbed, list[int]]:
    """Run searches one after the other on the inputs that the model gets right; each keeps the first that fools.

    A candidate counts as fooling only if it also does so in another batch and in another order, is within the bounds,
    is finite, and is neither blank (one value everywhere) nor the input itself; the others are put back. At most 64 are
    asked alone too. The model answers in evaluation mode throughout.

    Args:
        model: the victim.
        data: inputs with their right labels.
        searches: each is run on what did not fool yet.
        rng: all randomness.
        alarms: what a wrong answer must not raise to count.
        batch: inputs at a time.

    Returns:
        What was found, and how many inputs each search was the first to fool.

    Raises:
        InputError: a model without classes, of integers or of several inputs, or data that do not fit it.
    """
    model.spec.require_plain("an evasion attack")
    model.spec.require_classes()
    data.check(model.spec)

    def judge(x: Tensor, y: Tensor, size: int) -> tuple[Tensor, Tensor]:
        wrong = labels_of(model, x, size) != y
        silent = wrong.clone()
        if alarms is not None and bool(wrong.any()):
            silent[wrong] = ~torch.cat([alarms(part).cpu() for part in x[wrong].split(size)])
        return wrong, silent

    clean, generator = data.tensor, rng.child("search").torch()
    x, last, undone, rejected, firsts = clean.clone(), clean.clone(), 0, 0, []
    fooled, misled = torch.zeros(2, len(x), dtype=torch.bool)
    right = labels_of(model, clean, batch) == data.y
    for search in searches:
        before = fooled.clone()
        left = torch.nonzero(right & ~fooled).reshape(-1)
        for rows in left.split(batch) if len(left) else ():
            with torch.no_grad():
                found = search(clean[rows], data.y[rows], generator).detach()
            sound = _sound(found, clean[rows], model.spec.bounds)
            found = torch.where(along(sound, found), found, clean[rows])
            last[rows] = found
            wrong, success = (mask & sound for mask in judge(found, data.y[rows], batch))
            misled[rows[wrong]] = True
            rejected += int((~sound).sum())
            x[rows[success]] = found[success]
            fooled[rows[success]] = True
        claimed = torch.nonzero(fooled & ~before).reshape(-1).flip(0)
        _, again = judge(x[claimed], data.y[claimed], _OTHER_BATCH)
        undone += int((~again).sum())
        fooled[claimed[~again]] = False
        x[claimed[~again]] = clean[claimed[~again]]
        firsts.append(int((fooled & ~before).sum()))
    some = torch.nonzero(fooled).reshape(-1)[:_ALONE]
    alone = sum(int(judge(x[row : row + 1], data.y[row : row + 1], 1)[1]) for row in some.tolist())
    evidence = {
        "attacked": int(right.sum()),
        "fooled": int(fooled.sum()),
        "undone_in_another_batch": undone,
        "unsound_candidates": rejected,
        "asked_alone": len(some),
        "fooled_alone": alone,
        **sizes(x, clean, fooled),
    }
    if alarms is not None:
        evidence["wrong"] = int(misled.sum())
    return Perturbed(x, fooled, evidence, last), firsts


def sizes(x: Tensor, clean: Tensor, fooled: Tensor) -> dict[str, float | None]:
    """Mean length of the changes that fool, in both norms; None where there are none."""
    change = (x - clean)[fooled].flatten(1)
    return {
        "mean_linf": float(change.abs().amax(dim=1).mean()) if len(change) else None,
        "mean_l2": float(change.norm(dim=1).mean()) if len(change) else None,
    }


def labels_of(model: BlackBox, x: Tensor, batch: int = BATCH) -> Tensor:
    """(N,) labels that the model answers, so many inputs at a time."""
    if not len(x):
        return torch.zeros(0, dtype=torch.int64)
    answers = torch.cat([model.query(part) for part in x.split(batch)])
    return answers.to(torch.int64) if model.output == "labels" else answers.argmax(dim=1)


def ranked_class(model: BlackBox, x: Tensor, y: Tensor, rank: int) -> Tensor:
    """(N,) the wrong class of that rank, the likeliest being 0; round again where there are no more."""
    others = model.query(x).scatter(1, y[:, None], float("-inf")).argsort(dim=1, descending=True)[:, :-1]
    return others[:, rank % others.shape[1]]


def along(values: Tensor, like: Tensor) -> Tensor:
    """(N,) values, shaped so that they go with (N, …) inputs."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def _sound(found: Tensor, clean: Tensor, bounds: tuple[float, float]) -> Tensor:
    flat, low, high = found.flatten(1), *bounds
    inside = torch.isfinite(flat).all(dim=1) & (flat >= low).all(dim=1) & (flat <= high).all(dim=1)
    blank = flat.amax(dim=1) == flat.amin(dim=1)
    return inside & ~blank & (flat != clean.flatten(1)).any(dim=1)
