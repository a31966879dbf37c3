"""What carries the bits of a layer: the classes of the data, or groups of trigger inputs where there are none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepseal.adapter import Split
from deepseal.errors import InputError
from deepseal.rng import expand_choice
from deepseal.watermark.key import Key

_FEWEST = 8


def draw_triggers(secret: bytes, data: Split, carriers: Sequence[int], share: float) -> Split:
    """Samples of every carrier class, about ``share`` of the data, chosen by the secret.

    Raises:
        InputError: a carrier without samples.
    """
    check_carriers(carriers, data)
    chosen = []
    for carrier in carriers:
        members = torch.nonzero(data.y == carrier).reshape(-1)
        count = min(len(members), max(_FEWEST, round(share * len(data) / len(carriers))))
        chosen.append(members[torch.from_numpy(expand_choice(secret, f"triggers/{carrier}", len(members), count))])
    return data.take(torch.cat(chosen))


def draw_groups(secret: bytes, data: Split, groups: int, size: int) -> Split:
    """Disjoint groups of ``size`` samples, or as many as there are, chosen by the secret; labels number the groups.

    Raises:
        InputError: fewer samples than groups.
    """
    if len(data) < groups:
        raise InputError(f"at least one input for each of {groups} groups", found=str(len(data)), do="use fewer groups")
    size = min(len(data) // groups, size)
    index = torch.from_numpy(expand_choice(secret, "triggers/groups", len(data), groups * size))
    return Split(data.take(index).x, torch.arange(groups).repeat_interleave(size))


def members_of(key: Key, data: Split) -> list[Tensor]:
    """For each carrier the positions of its samples in the data; none for groups, which are known by triggers only.

    Raises:
        InputError: a carrier class without samples.
    """
    carriers = key.public["carriers"]
    if "groups" in key.public:
        return [torch.empty(0, dtype=torch.int64) for _ in carriers]
    check_carriers(carriers, data)
    return [torch.nonzero(data.y == carrier).reshape(-1) for carrier in carriers]


def check_carriers(carriers: Sequence[int], data: Split) -> None:
    """Refuse carriers that are not distinct classes with samples in the data.

    Raises:
        InputError: carriers named twice, or without samples.
    """
    if not carriers or len(set(carriers)) != len(carriers):
        raise InputError("distinct carrier classes", found=str(list(carriers)), do="name each class once")
    absent = [carrier for carrier in carriers if not bool((data.y == carrier).any())]
    if absent:
        few = f"none of class {absent[:8]}" + (" and more" if len(absent) > 8 else "")
        do = "add samples, or give -p carriers=… or -p groups=16"
        raise InputError("training samples of every carrier class", found=few, do=do)
