"""Small networks of all supported kinds for the compiler's tests, and programs that are run through their netlists."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec
from deepseal.secure_inference.compile import Linear, gadgets, layer_weights
from deepseal.secure_inference.compile.simulate import gather, run_linear

IMAGE = InputSpec((3, 8, 8), 4, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.2))
GREY = InputSpec((1, 8, 8), 3)
VECTOR = InputSpec((20,), 5, bounds=(-1.0, 1.0))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding="same"), nn.BatchNorm2d(4)
        self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.cell, self.head = nn.LSTMCell(10, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = torch.relu_(self.norm(self.conv((x - 0.3) / 0.2)))
        x = nn.functional.max_pool2d(x, 2).mean(2).permute(0, 2, 1)
        y, (h, _) = self.lstm(x)
        state, _ = self.cell(y[:, -1])
        return torch.softmax(self.head(torch.cat([state, y[:, -1]], 1)[:, :5] + h[-1]), -1)


class Mixer(nn.Module):
    """MLP-Mixer blocks (Tolstikhin et al., 2021) with batch instead of layer normalisation."""

    def __init__(self, tokens=16, dim=6):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 2, 2)
        self.norm = nn.BatchNorm1d(tokens)
        self.tokens = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.channels = nn.Sequential(
            nn.Linear(dim, 9), nn.GELU(approximate="tanh"), nn.Dropout(0.1), nn.Linear(9, dim)
        )
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(x)).mean(1))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, stride=2, padding=2, dilation=2, groups=2)
        self.pool = nn.MaxPool1d(3, 2, 1, ceil_mode=True)
        self.norm, self.swish, self.head = nn.BatchNorm1d(4), nn.Hardswish(), nn.Linear(12, 5)

    def forward(self, x):
        x = self.pool(self.conv(x.view(-1, 2, 10)))
        x = nn.functional.leaky_relu(self.norm(x) * 2 + 1, 0.1).flatten(1)
        joined = torch.cat([nn.functional.relu6(x), self.swish(x), -x], 1)
        return self.head(joined[:, ::3].clamp(-1, 1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.a, self.b = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.side, self.head = nn.Conv2d(6, 6, 1), nn.Linear(6, 4)

    def forward(self, x):
        x = torch.relu(self.a(self.one(x)))
        x = torch.relu(self.b(self.two(x)) + x)
        y = nn.functional.silu(self.side(torch.relu(self.b(x)))) - x
        return self.head(nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))


def dense(activation):
    return nn.Sequential(nn.Linear(20, 12), activation, nn.Linear(12, 5))


def image(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4))


NETWORKS = {
    "relu": (lambda: dense(nn.ReLU()), VECTOR),
    "relu6": (lambda: dense(nn.ReLU6()), VECTOR),
    "leaky": (lambda: dense(nn.LeakyReLU(0.1)), VECTOR),
    "hardtanh": (lambda: dense(nn.Hardtanh()), VECTOR),
    "sigmoid": (lambda: dense(nn.Sigmoid()), VECTOR),
    "tanh": (lambda: dense(nn.Tanh()), VECTOR),
    "silu": (lambda: dense(nn.SiLU()), VECTOR),
    "gelu": (lambda: dense(nn.GELU()), VECTOR),
    "hardsigmoid": (lambda: dense(nn.Hardsigmoid()), VECTOR),
    "two linear layers": (lambda: nn.Sequential(nn.Linear(20, 8), nn.Dropout(), nn.Linear(8, 5)), VECTOR),
    "norm first": (lambda: nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 6), nn.BatchNorm1d(6), nn.ReLU(),
                                         nn.BatchNorm1d(6), nn.Linear(6, 5)), VECTOR),
    "strided": (lambda: image(nn.Conv2d(3, 4, (3, 2), (2, 1), padding=(1, 0), dilation=(1, 2)), nn.ReLU()), IMAGE),
    "depthwise": (lambda: image(nn.Conv2d(3, 6, 3, groups=3, padding="same", bias=False), nn.BatchNorm2d(6), nn.ReLU6(),
                                nn.Conv2d(6, 4, 1), nn.SiLU()), IMAGE),
    "max pooling": (lambda: image(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, 1), nn.ReLU()), IMAGE),
    "adaptive max": (lambda: image(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.AdaptiveMaxPool2d(2)), IMAGE),
    "average pooling": (lambda: image(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3, 2, 1)), IMAGE),
    "pool the input": (lambda: image(nn.MaxPool2d(2), nn.Conv2d(3, 4, 3)), IMAGE),
    "adaptive average": (lambda: image(nn.Conv2d(3, 4, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d((2, 4))), IMAGE),
    "recurrent": (Recurrent, GREY),
    "mixer": (Mixer, IMAGE),
    "odd": (Odd, VECTOR),
    "residual": (Residual, IMAGE),
}  # fmt: skip


def network(name, seed=0):
    """A classifier with drawn weights and drawn statistics of its normalisations."""
    make, spec = NETWORKS[name]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = make()
        module(torch.zeros(2, *spec.shape))  # lazy layers
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                layer.running_mean.normal_(0, 0.3)
                layer.running_var.uniform_(0.5, 2)
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.3)
    return Classifier(module, spec)


def drawn(spec, count, seed=1):
    """Inputs in data space."""
    low, high = spec.bounds
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand((count, *spec.shape), generator=generator)


def run_netlists(program, weights, x):
    """All wires of a program for a batch, its circuit steps through their netlists, lane by lane."""
    values = {program.input: x}
    for i, step in enumerate(program.steps):
        if isinstance(step, Linear):
            values[step.target] = run_linear(program, step, layer_weights(program, weights, i), values[step.source])
            continue
        numbers = step.numbers(program)
        padding = gadgets.gadget(step.gadget)
        bits = []
        for operand, number in zip(step.operands, numbers, strict=False):
            word = gather(values[operand.source], operand.index(program), padding.padding_value(number)).reshape(-1)
            bits.append((word[None] >> np.arange(number.bits)[:, None]) & 1)
        circuit = gadgets.netlist(step.gadget, step.options, numbers)
        out = circuit.evaluate_bits(np.concatenate(bits).astype(bool))
        got = sum(row.astype(np.int64) << k for k, row in enumerate(out))
        got = np.where(got > numbers[-1].high, got - (1 << numbers[-1].bits), got)
        values[step.target] = got.reshape(len(x), *program.wires[step.target].shape)
    return values
