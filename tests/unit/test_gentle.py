"""Marks that hold on to a model's own answers: which weights change."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from networks import encoder, sentences
from torch import nn

from deepseal.adapter import Split
from deepseal.adapter.capture import running_from
from deepseal.attacks import REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng

NORMALISED = nn.Sequential(
    OrderedDict(
        first=nn.Conv1d(1, 4, 3),
        second=nn.Conv1d(4, 4, 3),
        act=nn.ReLU(),
        norm=nn.BatchNorm1d(4),
        flatten=nn.Flatten(),
        head=nn.Linear(16, 2),
    )
)
X = torch.zeros(2, 1, 8)


def test_a_marked_layer_and_all_that_run_later():
    assert running_from(NORMALISED, X, ["second"]) == ["second", "norm", "head"]
    assert running_from(NORMALISED, X, ["head", "second"]) == ["second", "norm", "head"]
    assert running_from(NORMALISED, X, ["head"]) == ["head"]


def test_a_normalisation_is_marked_through_the_layer_before_it():
    assert running_from(NORMALISED, X, ["norm"]) == ["second", "norm", "head"]
    assert running_from(NORMALISED, X, ["act"]) == ["second", "norm", "head"]


def test_a_model_without_classes_has_no_labels_to_be_tuned_to():
    with pytest.raises(InputError, match="a model with classes"):
        REMOVAL.build("fine-tune", {"epochs": 1}).remove(encoder(), Split.unlabelled(sentences(8)), rng=Rng(0))
