"""Which part of what a module returns is its answer."""

from __future__ import annotations

import pytest
import torch

from deepseal.adapter import Field, Inputs, InputSpec
from deepseal.adapter.outputs import reduce
from deepseal.errors import InputError

BOXES, POINTS, FACE = torch.rand(3, 4), torch.rand(3, 5, 2), torch.rand(3, 1)


def test_several_answers_are_joined_in_the_order_that_is_stated():
    spec = InputSpec(shape=(2,), num_classes=0, output="2,0")
    assert torch.equal(spec.read((BOXES, POINTS, FACE), torch.zeros(3, 2)), torch.cat([FACE, BOXES], dim=1))
    assert InputSpec.from_dict(spec.as_dict()) == spec


def test_joined_answers_are_reduced_one_by_one():
    spec = InputSpec(shape=(2,), num_classes=0, output="a,b", reduce="mean")
    read = spec.read({"a": POINTS, "b": FACE}, torch.zeros(3, 2))
    assert torch.allclose(read, torch.cat([POINTS.mean(dim=1), FACE], dim=1))


def test_all_frames_count_but_padding():
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    assert torch.equal(reduce(POINTS, "all", None), POINTS.flatten(1))
    kept = reduce(POINTS, "all", mask).view(3, 5, 2)
    assert torch.equal(kept[0], POINTS[0])
    assert torch.equal(kept[1, :2], POINTS[1, :2])
    assert not kept[1, 2:].any()
    field = Field((-1,), bounds=(0, 1), integer=True, mask=True)
    spec = InputSpec(shape=(), num_classes=0, fields={"mask": field}, reduce="all")
    assert torch.equal(spec.read(POINTS, Inputs({"mask": mask})), kept.flatten(1))


def test_a_wrong_name_among_several_is_refused():
    with pytest.raises(InputError, match="no '7'"):
        InputSpec(shape=(2,), num_classes=0, output="0,7").read((BOXES, FACE), torch.zeros(3, 2))
