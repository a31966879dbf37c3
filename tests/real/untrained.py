"""torchvision's networks with random weights: they have no task, so their answers are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable

import photos
import torch
from subject import Measured, Subject, answers
from torch import Tensor, nn
from torchvision import models

SIZE = 64
CLASSES = 10


def resnet18() -> nn.Module:
    return _random(models.resnet18)


def resnet50() -> nn.Module:
    return _random(models.resnet50)


def mobilenet_v3() -> nn.Module:
    return _random(models.mobilenet_v3_small)


def vit_b_16() -> nn.Module:
    return _random(models.vit_b_16, image_size=SIZE)


def swin_t() -> nn.Module:
    return _random(models.swin_t)


def _random(make: Callable[..., nn.Module], **options: int) -> nn.Module:
    """Weights from a seed, and the statistics of batch normalisation from photographs, as after a training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make(weights=None, num_classes=CLASSES, **options)
        head = [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]
        nn.init.trunc_normal_(head.weight, std=0.02)  # some of them start at 0, and would answer the same to all
        norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
        for layer in norms:
            layer.momentum = None  # the plain average of all batches
        with torch.no_grad():
            for batch in photos.crops(photos.OWNER, 128, SIZE, seed=2).split(64 if norms else 128):
                module.train()(batch)
        for layer in norms:
            layer.momentum = 0.1
    return module.eval()


@functools.cache
def _before(build: Callable[[], nn.Module]) -> Tensor:
    return answers(build(), _judged())


@functools.cache
def _judged() -> Tensor:
    return photos.crops(photos.OTHERS, 200, SIZE, seed=1)


def _unchanged(build: Callable[[], nn.Module], module: nn.Module) -> Measured:
    """Share of the answers' variance over other photographs that is as before, and how often the largest one is."""
    before, after = _before(build), answers(module, _judged())
    left = (after - before).pow(2).sum() / (before - before.mean(dim=0)).pow(2).sum()
    return {"variance": 1.0 - float(left), "top-1": float((after.argmax(1) == before.argmax(1)).float().mean())}


UNTRAINED = {
    name: Subject(
        build,
        lambda: photos.crops(photos.OWNER, 600, SIZE, seed=0),
        functools.partial(_unchanged, build),
        {"shape": (3, SIZE, SIZE), "num_classes": CLASSES},
        packages=("skimage",),
        params={"groups": 16, "batch": 1, "batch_size": 16, "rounds": 1},
    )
    for name, build in {
        "resnet-18": resnet18,
        "resnet-50": resnet50,
        "mobilenet-v3": mobilenet_v3,
        "vit-b-16": vit_b_16,
        "swin-t": swin_t,
    }.items()
}
