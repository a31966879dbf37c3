"""The papers' networks, sized by the data's input spec."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from deepseal.adapter.spec import InputSpec


def mlp(spec: InputSpec, hidden: tuple[int, ...] = (512, 512)) -> nn.Module:
    """Fully connected ReLU network; 784-512-512-10 on MNIST (Rouhani et al., DeepSigns, 2019, table 1)."""
    return _dense(spec, hidden, nn.ReLU)


def cnn(spec: InputSpec) -> nn.Module:
    """32C3-32C3-MP2-64C3-64C3-MP2-512FC, the CIFAR-10 network of DeepSigns (2019, table 1), with batch normalisation.

    The first convolution of each pair is padded; the second is too where its map would become smaller than 8 pixels.
    """
    channels, pixels = spec.shape[0], min(spec.shape[1:])
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for index, wide in enumerate((32, 32, 64, 64), start=1):
        padding = 1 if index in (1, 3) or pixels - 2 < 8 else 0
        pixels = (pixels - 2 * (1 - padding)) // (2 if index in (2, 4) else 1)
        blocks[f"conv{index}"] = nn.Conv2d(channels, wide, 3, padding=padding, bias=False)
        blocks[f"norm{index}"] = nn.BatchNorm2d(wide)
        blocks[f"act{index}"] = nn.ReLU()
        if index in (2, 4):
            blocks[f"pool{index // 2}"] = nn.MaxPool2d(2)
        channels = wide
    blocks["flatten"] = nn.Flatten()
    blocks["fc1"] = nn.Linear(_flat_size(nn.Sequential(blocks), spec), 512)
    blocks["act5"] = nn.ReLU()
    blocks["fc2"] = nn.Linear(512, spec.num_classes)
    return nn.Sequential(blocks)


def lenet(spec: InputSpec) -> nn.Module:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max pooling."""
    body = OrderedDict(
        conv1=nn.Conv2d(spec.shape[0], 6, 5, padding=2),
        act1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5, padding=2),
        act2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
    )
    body.update(
        fc1=nn.Linear(_flat_size(nn.Sequential(body), spec), 120),
        act3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        act4=nn.ReLU(),
        fc3=nn.Linear(84, spec.num_classes),
    )
    return nn.Sequential(body)


class _WideBlock(nn.Module):
    """Pre-activation residual block (Zagoruyko and Komodakis, 2016, figure 1)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = torch.relu(self.norm1(x))
        through = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(activated)
        residual: Tensor = self.conv2(torch.relu(self.norm2(self.conv1(activated))))
        return residual + through


def wrn(spec: InputSpec, depth: int = 16, width: int = 1) -> nn.Module:
    """Wide residual network WRN-depth-width (Zagoruyko and Komodakis, 2016); depth is 6 n + 4."""
    blocks = (depth - 4) // 6
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(spec.shape[0], 16, 3, padding=1, bias=False))
    channels = 16
    for group, (wide, stride) in enumerate(((16 * width, 1), (32 * width, 2), (64 * width, 2)), start=1):
        for index in range(blocks):
            layers[f"group{group}_{index}"] = _WideBlock(channels, wide, stride if index == 0 else 1)
            channels = wide
    layers.update(
        norm=nn.BatchNorm2d(channels),
        act=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(channels, spec.num_classes),
    )
    return nn.Sequential(layers)


def deepsecure_b1(spec: InputSpec) -> nn.Module:
    """DeepSecure benchmark 1 (Rouhani et al., 2018): 5x5 convolution, 5 maps, stride 2, padding 1; 100; classes."""
    conv = nn.Conv2d(spec.shape[0], 5, 5, stride=2, padding=1)
    size = _flat_size(nn.Sequential(conv, nn.Flatten()), spec)
    return nn.Sequential(
        OrderedDict(
            conv=conv,
            act1=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(size, 100),
            act2=nn.ReLU(),
            fc2=nn.Linear(100, spec.num_classes),
        )
    )


def deepsecure_b2(spec: InputSpec) -> nn.Module:
    """DeepSecure benchmark 2: 300 and 100 sigmoid units."""
    return _dense(spec, (300, 100), nn.Sigmoid)


def deepsecure_b3(spec: InputSpec) -> nn.Module:
    """DeepSecure benchmark 3: 50 tanh units (617 speech features, 26 letters)."""
    return _dense(spec, (50,), nn.Tanh)


def deepsecure_b4(spec: InputSpec) -> nn.Module:
    """DeepSecure benchmark 4: 2000 and 500 tanh units (5625 sensor features, 19 activities)."""
    return _dense(spec, (2000, 500), nn.Tanh)


def _dense(spec: InputSpec, hidden: tuple[int, ...], activation: type[nn.Module]) -> nn.Module:
    sizes = (math.prod(spec.shape), *hidden)
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for index, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False), start=1):
        layers[f"fc{index}"] = nn.Linear(inputs, outputs)
        layers[f"act{index}"] = activation()
    layers[f"fc{len(hidden) + 1}"] = nn.Linear(sizes[-1], spec.num_classes)
    return nn.Sequential(layers)


def _flat_size(body: nn.Module, spec: InputSpec) -> int:
    with torch.no_grad():
        body.eval()
        size = int(body(torch.zeros(1, *spec.shape)).flatten(1).shape[1])
    body.train()
    return size
