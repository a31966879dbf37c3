"""Can a stranger tell a marked model from an unmarked one? Property inference on weights and activations.

Source: T. Wang, F. Kerschbaum, "Attacks on digital watermarks for deep neural networks", ICASSP 2019 (the distribution
of the weights shows the mark); K. Ganju et al., "Property inference attacks on fully connected neural networks using
permutation invariant representations", CCS 2018 (a classifier trained on shadow models). Here the shadow models are the
comparison's own nets: one is left out, a linear discriminant is trained on the others, and judges it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseal.adapter import Classifier, Split
from deepseal.adapter.capture import PARAMETRIC, execution_order
from deepseal.rng import Rng
from deepseal.statistics import rate

SAMPLES = 500
_MOST_RELABELLINGS = 4096
_QUANTILES = (0.01, 0.1, 0.25, 0.75, 0.9, 0.99)


def describe(model: Classifier, data: Split) -> dict[str, float]:
    """What does not depend on the order of neurons: the distribution of each layer's weights and activations.

    Args:
        model: any classifier.
        data: inputs that nobody trained on.
    """
    x = data.x[:SAMPLES]
    layers = [
        (name, layer)
        for name, layer, shape in execution_order(model.module, model.probe())
        if shape and isinstance(layer, PARAMETRIC)
    ]
    found: dict[str, float] = {}
    answers = model.features(x, list(dict.fromkeys(name for name, _ in layers)))
    for name, layer in layers:
        weight = layer.get_parameter("weight") if "weight" in layer._parameters else None
        if weight is not None:
            rows = weight.detach().float().cpu().flatten(1)
            found |= _moments(f"{name}.weight", rows)
            singular = torch.linalg.svdvals(rows)
            found[f"{name}.weight.spectral"] = float(singular[0] / singular.norm())
            found[f"{name}.weight.row-norm.spread"] = float(rows.norm(dim=1).std(unbiased=False))
        found |= _moments(f"{name}.activation", answers[name].flatten(1))
        found[f"{name}.activation.positive"] = float((answers[name] > 0).float().mean())
    sure = model.query(x).softmax(dim=1).amax(dim=1)
    found |= {"confidence.mean": float(sure.mean()), "confidence.std": float(sure.std(unbiased=False))}
    return found


def inferred(nets: Sequence[tuple[Mapping[str, float], Sequence[Mapping[str, float]]]], rng: Rng) -> dict[str, Any]:
    """How well marked models are told from unmarked ones, and whether that can be luck.

    Every net is left out in turn, with all models made of it. The p-value is that of a permutation test: were marked
    and unmarked models alike, any of a net's models could as well be called the unmarked one. With few nets even a
    perfect separation has a large p-value; ``lowest_p_value`` says how large.

    Args:
        nets: of each net, the description of its unmarked model and of its marked ones.
        rng: draws relabellings where there are too many for all of them.
    """
    groups = [[unmarked, *marked] for unmarked, marked in nets if marked]
    if len(groups) < 2:
        return {"nets": len(groups), "reason": "at least two nets are needed, one to learn from and one to judge"}
    names = sorted(set[str].intersection(*(set(model) for group in groups for model in group)))
    values = [np.array([[model[name] for name in names] for model in group]) for group in groups]
    sizes = [len(group) for group in groups]
    total = int(np.prod([float(size) for size in sizes]).clip(max=1e9))
    if total <= _MOST_RELABELLINGS:
        labellings = list(itertools.product(*(range(size) for size in sizes)))
    else:
        drawn = rng.numpy().integers(0, sizes, size=(_MOST_RELABELLINGS - 1, len(sizes)))
        labellings = [(0,) * len(sizes), *(tuple(int(place) for place in row) for row in drawn)]
    scores = [_score(values, unmarked) for unmarked in labellings]
    observed = scores[0]  # the first relabelling is the true one
    right = _judged(values, (0,) * len(sizes))
    flat = [bool(one) for group in right for one in group]
    return {
        "nets": len(groups),
        "models": sum(sizes),
        "properties": len(names),
        "told_apart": rate(sum(flat), len(flat)).as_dict(),
        "balanced_accuracy": observed,
        "p_value": sum(score >= observed - 1e-12 for score in scores) / len(scores),
        "lowest_p_value": _least(sizes, len(scores)),
        "relabellings": len(scores),
    }


def _least(sizes: Sequence[int], relabellings: int) -> float:
    """The p-value of a perfect separation: where every net has two models, its mirror image separates as well."""
    return (2 if all(size == 2 for size in sizes) else 1) / relabellings


def _score(values: Sequence[NDArray[np.float64]], unmarked: tuple[int, ...]) -> float:
    """Balanced accuracy: the mean of the shares of unmarked and of marked models that are judged right."""
    right = _judged(values, unmarked)
    of_unmarked = [group[place] for group, place in zip(right, unmarked, strict=True)]
    of_marked = [one for group, place in zip(right, unmarked, strict=True) for one in np.delete(group, place)]
    return 0.5 * float(np.mean(of_unmarked)) + 0.5 * float(np.mean(of_marked))


def _judged(values: Sequence[NDArray[np.float64]], unmarked: tuple[int, ...]) -> list[NDArray[np.bool_]]:
    """Leave one net out: which of its models a discriminant trained on the others judges right."""
    labels = [np.arange(len(group)) != place for group, place in zip(values, unmarked, strict=True)]
    found = []
    for out in range(len(values)):
        x = np.concatenate([group for index, group in enumerate(values) if index != out])
        y = np.concatenate([label for index, label in enumerate(labels) if index != out])
        found.append((_discriminant(x, y, values[out]) > 0) == labels[out])
    return found


def _discriminant(x: NDArray[np.float64], y: NDArray[np.bool_], judged: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fisher's (1936) discriminant with a diagonal covariance, for there are more properties than models."""
    scale = x.std(axis=0)
    keep = scale > 1e-12
    if not keep.any():
        return np.zeros(len(judged))
    x, judged = x[:, keep] / scale[keep], judged[:, keep] / scale[keep]
    first, second = x[~y].mean(axis=0), x[y].mean(axis=0)
    within = np.concatenate([x[~y] - first, x[y] - second]).var(axis=0) + 0.01
    direction = (second - first) / within
    scores: NDArray[np.float64] = (judged - (first + second) / 2) @ direction
    return scores


def _moments(name: str, rows: Tensor) -> dict[str, float]:
    flat = rows.flatten().double()
    mean, std = flat.mean(), flat.std(unbiased=False)
    standard = (flat - mean) / std.clamp(min=1e-12)
    levels = torch.from_numpy(np.quantile(standard.numpy(), _QUANTILES))
    return {
        f"{name}.mean": float(mean),
        f"{name}.std": float(std),
        f"{name}.skewness": float(standard.pow(3).mean()),
        f"{name}.kurtosis": float(standard.pow(4).mean()),
        **{f"{name}.quantile-{q:g}": float(level) for q, level in zip(_QUANTILES, levels, strict=True)},
    }
