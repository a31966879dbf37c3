"""Networks for digits (1, 8, 8) as people store them: pruned, normalised, wrapped, tied."""

from __future__ import annotations

import warnings
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from deepseal.adapter import InputSpec

NET = "checkpoint_networks:net"
SPEC = InputSpec(shape=(1, 8, 8), num_classes=10)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        return self.fc(self.features(x))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT if weight.shape[0] == weight.shape[1] else weight * 2


def net(kind="plain"):
    """The network with a parametrised convolution and linear layer, its buffers moved away from their defaults."""
    model = Net()
    for layer in (model.features[0], model.fc):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PARAMETRISE[kind](layer)
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind == "inner":
        model.features = nn.DataParallel(model.features)
    return model


PARAMETRISE = {
    "plain": lambda layer: layer,
    "compiled": lambda layer: layer,
    "inner": lambda layer: layer,
    "prune": lambda layer: [prune.l1_unstructured(layer, part, 0.5) for part in ("weight", "bias")],
    "prune_channels": lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    "weight_norm_old": lambda layer: nn.utils.weight_norm(layer),
    "weight_norm_old_inputs": lambda layer: nn.utils.weight_norm(layer, dim=1),
    "weight_norm_old_all": lambda layer: nn.utils.weight_norm(layer, dim=None),
    "weight_norm": lambda layer: parametrizations.weight_norm(layer),
    "weight_norm_all": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "spectral_old": lambda layer: nn.utils.spectral_norm(layer),
    "spectral": lambda layer: parametrizations.spectral_norm(layer),
    "orthogonal": lambda layer: parametrizations.orthogonal(layer),
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric(), unsafe=True),
}


class Language(nn.Module):
    """Six tokens of sixteen, as numbers; the mean of their embeddings scores the next one."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.register_buffer("positions", torch.linspace(0.5, 1.5, 6), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.mix((self.embed(x.long()) * self.positions[:, None].to(self.mix.weight)).mean(1)).relu())


def language(tied=True):
    return Language(tied=tied)


def bare(module: nn.Module) -> nn.Module:
    """The network inside its wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None) or (module.module if isinstance(module, nn.DataParallel) else None)
        if inner is None:
            return module
        module = inner


def moved(module: nn.Module) -> nn.Module:
    """The module after a few forward passes in training, so that no buffer has its first value."""
    torch.manual_seed(0)
    module.train()
    with torch.no_grad():
        for _ in range(3):
            module(torch.rand(8, 1, 8, 8))
    return module.eval()


def write(path: Path, module: nn.Module) -> Path:
    state = {name: value.detach().clone().contiguous() for name, value in module.state_dict().items()}
    safetensors.torch.save_file(state, path)
    return path


def x() -> torch.Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
