"""The networks of the defence benchmarks: LeNet-like, on MNIST and Fashion-MNIST, trained once a seed and kept."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from torch import nn

from deepseal.adapter import Classifier, Dataset, InputSpec, Recipe, checkpoint, initialise, load, train
from deepseal.rng import Rng

MODELS = Path(__file__).resolve().parent.parent / "build" / "benchmarks" / "defense"
RECIPE = Recipe(epochs=5)


def lenet_like(spec: InputSpec) -> nn.Module:
    """Conv 10x5x5, pool, conv 20x5x5, pool, dense 128, dense 10, with ReLU, for images of 28x28."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(spec.shape[0], 10, 5),
            act1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(10, 20, 5),
            act2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(320, 128),
            act3=nn.ReLU(),
            fc2=nn.Linear(128, spec.num_classes),
        )
    )


def lenet_on(data: Dataset, seed: int) -> Classifier:
    """The network trained on ``data.train`` (Adam, 5 epochs), from ``build/`` if it is there."""
    architecture = "defense_nets:lenet_like"
    path = MODELS / f"lenet-{data.name}-seed{seed}.safetensors"
    if not path.exists():
        rng = Rng(seed).child("defense", data.name)
        start = initialise(architecture, data.spec, rng.child("weights"))
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.save(train(start, data.train, recipe=RECIPE, rng=rng.child("train")), path, force=True)
    return load(path, architecture=architecture)
