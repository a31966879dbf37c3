"""Answers as votes for classes, and how far a vote is from turning."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepseal.watermark.key import Key
from deepseal.watermark.scheme import Observation


def counted(labels: Tensor, clear: Tensor, key: Key) -> NDArray[np.int64]:
    """(groups, classes) votes."""
    votes = nn.functional.one_hot(labels, key.spec.num_classes) * clear[:, None]
    return votes.reshape(key.bits, -1, key.spec.num_classes).sum(dim=1).numpy()


def label_margins(
    observation: Observation, votes: NDArray[np.int64], labels: NDArray[np.int64], usable: NDArray[np.bool_], key: Key
) -> NDArray[np.float64]:
    """(groups,) scores of the labels, in standard deviations of those of all labels that a stranger could have."""
    rows = np.arange(key.bits)
    leader, most = votes.argmax(axis=1), votes.max(axis=1)
    without = votes.copy()
    without[rows, leader] = -1
    best = np.repeat(most[:, None], votes.shape[1], axis=1)  # of the other classes, for every class
    best[rows, leader] = without.max(axis=1)
    if "scores" in observation.values:
        top = observation.values["scores"].topk(2, dim=1)
        gaps = observation.values["scores"] - top.values[:, :1]
        gaps.scatter_(1, top.indices[:, :1], top.values[:, :1] - top.values[:, 1:])
        scores = deciding_gaps(torch.where(observation.values["clear"][:, None], gaps, 0.0), votes, best)
    else:
        scores = (votes - best) / int(key.public["votes"])
    possible = np.ones(votes.shape, dtype=bool)
    if "sides" in key.tensors:
        possible[:] = False
        np.put_along_axis(possible, key.tensors["sides"].numpy(), True, axis=1)
    elif "avoided" in key.tensors:
        possible[rows, key.tensors["avoided"].numpy()] = False
    strangers = scores[possible & usable[:, None]]
    unit = float(strangers.std()) if len(strangers) else 0.0
    own: NDArray[np.float64] = scores[rows, labels] / (unit if unit > 0 else 1.0)
    return own


def deciding_gaps(gaps: Tensor, votes: NDArray[np.int64], best: NDArray[np.int64]) -> NDArray[np.float64]:
    """(groups, classes) gap of a class to the best other one, in the image at which the group's vote turns.

    That is the one, in the order of the gaps, with which the class wins or loses, if answers go over from the best
    other class or to it.

    Args:
        gaps: (groups * votes, classes) of each image, 0 where it is no vote.
        votes: (groups, classes) of each class.
        best: (groups, classes) votes of the best other class.
    """
    gaps = gaps.nan_to_num(0.0, posinf=0.0, neginf=-1e3)
    ordered = np.sort(gaps.reshape(len(votes), -1, votes.shape[1]).numpy(), axis=1)[:, ::-1]
    wins = votes > best
    needed = np.where(wins, -(-(votes - best) // 2), (best - votes) // 2 + 1)
    place = np.where(wins, votes - needed, votes + needed - 1).clip(0, ordered.shape[1] - 1)
    gap: NDArray[np.float64] = np.take_along_axis(ordered, place[:, None], axis=1)[:, 0]
    return gap
