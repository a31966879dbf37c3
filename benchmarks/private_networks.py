"""The networks of the private-inference benchmark: data, trained models, compiled programs, kept in ``build/``."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, InputSpec, Recipe, Split, checkpoint, initialise, load, load_data, train
from deepseal.rng import Rng
from deepseal.secure_inference.compile import Program, Weights, compile_model

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / "build" / "benchmarks" / "private"
CALIBRATION = 512


def digest(*folders: str) -> str:
    """SHA-256 over our sources that decide a figure: what other code made is made again."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted((HERE.parent / folder).rglob("*.py")):
            total.update(path.read_bytes())
    return total.hexdigest()[:12]


class BasicBlock(nn.Module):
    """Residual block of He et al. (2016, figure 2), with a projection (their option B) where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def resnet20(spec: InputSpec) -> nn.Module:
    """ResNet-20 for 32x32 images (He et al., 2016, section 4.2), with projections as shortcuts."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(spec.shape[0], 16, 3, padding=1, bias=False), norm=nn.BatchNorm2d(16), act=nn.ReLU()
    )
    channels = 16
    for group, (wide, stride) in enumerate(((16, 1), (32, 2), (64, 2)), start=1):
        for index in range(3):
            layers[f"block{group}_{index}"] = BasicBlock(channels, wide, stride if index == 0 else 1)
            channels = wide
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, spec.num_classes))
    return nn.Sequential(layers)


@dataclass(frozen=True)
class Data:
    """Splits of one network, and what they are."""

    spec: InputSpec
    train: Split | None
    calibration: Split
    test: Split
    source: str


def real(source: str, name: str) -> Callable[[], Data]:
    def make() -> Data:
        data = load_data(source)
        return Data(data.spec, data.train, data.calibration, data.test, name)

    return make


def coloured() -> Data:
    """Fashion-MNIST in the shape of CIFAR-10: two pixels of border, the grey value in all three channels."""
    data = load_data("fashion-mnist")

    def widen(split: Split) -> Split:
        return Split(nn.functional.pad(split.x, (2, 2, 2, 2)).repeat(1, 3, 1, 1), split.y)

    spec = InputSpec((3, 32, 32), 10, (0.0, 1.0), mean=(0.5,) * 3, std=(0.5,) * 3)
    first = torch.arange(20_000)
    source = "Fashion-MNIST, padded to 32x32, three equal channels"
    return Data(spec, widen(data.train.take(first)), widen(data.calibration), widen(data.test), source)


def activities() -> Data:
    """Synthetic samples of the shape of daily and sports activities: no labels of their own."""
    spec = InputSpec((5625,), 19, (-4.0, 4.0))
    values = Rng(0).child("benchmark", "private", "activities").numpy().standard_normal((2000, 5625))
    x = torch.from_numpy(values.clip(-4, 4).astype(np.float32))
    none = torch.zeros(1000, dtype=torch.int64)
    return Data(spec, None, Split(x[:1000], none), Split(x[1000:], none), "synthetic, standard normal, clipped at 4")


@dataclass(frozen=True)
class Network:
    """One network of the benchmark.

    Attributes:
        name: in records and tables.
        title: what it is.
        architecture: ``module:factory``.
        data: makes its data.
        recipe: of its training; None: random weights.
        samples: most test samples that run through ``simulate``.
        questions: that are timed.
    """

    name: str
    title: str
    architecture: str
    data: Callable[[], Data]
    recipe: Recipe | None = Recipe(epochs=10)
    samples: int = 10_000
    questions: int = 40


_ZOO = "deepseal.adapter.zoo"
NETWORKS = {
    net.name: net
    for net in (
        Network("b1", "DeepSecure B1", f"{_ZOO}:deepsecure_b1", real("mnist", "MNIST")),
        Network("b2", "DeepSecure B2", f"{_ZOO}:deepsecure_b2", real("mnist", "MNIST")),
        Network("b3", "DeepSecure B3", f"{_ZOO}:deepsecure_b3", real("isolet", "ISOLET"), Recipe(epochs=100)),
        Network("b4", "DeepSecure B4", f"{_ZOO}:deepsecure_b4", activities, None, 1000, 20),
        Network("mlp", "MLP 784-128-128-10", f"{_ZOO}:mlp?hidden=(128,128)", real("mnist", "MNIST")),
        Network("lenet", "LeNet-5", f"{_ZOO}:lenet", real("mnist", "MNIST")),
        Network("resnet", "ResNet-20", "private_networks:resnet20", coloured, Recipe(epochs=2), 1000, 20),
    )
}


class Made:
    """A network with everything that follows from it, made when first asked for."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.rng = Rng(0).child("benchmark", "private", network.name)

    @cached_property
    def data(self) -> Data:
        data = self.network.data()
        return data if data.train is not None else _judged(data, self.model)

    @cached_property
    def model(self) -> Classifier:
        recipe = {} if self.network.recipe is None else self.network.recipe.as_dict()
        mark = hashlib.sha256(json.dumps([self.network.architecture, recipe, _ADAPTER]).encode()).hexdigest()[:12]
        path = CACHE / f"{self.network.name}-{mark}.safetensors"
        if not path.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            checkpoint.save(self._trained(), path, force=True)
        return load(path, architecture=self.network.architecture)

    @cached_property
    def tests(self) -> Split:
        return self.data.test.take(torch.arange(min(len(self.data.test), self.network.samples)))

    def program(self, **settings: Any) -> tuple[Path, Program, Weights]:
        """The compiled program and its folder."""
        text = json.dumps([self.model.fingerprint(), settings, _COMPILE], sort_keys=True)
        folder = CACHE / f"{self.network.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if not (folder / "secret" / "weights.npz").exists():
            program, weights = compile_model(self.model, self.data.calibration, **settings)
            folder.mkdir(parents=True, exist_ok=True)
            program.save(folder, force=True)
            weights.save(folder, force=True)
        program = Program.load(folder)
        return folder, program, Weights.load(folder, program)

    def _trained(self) -> Classifier:
        data = self.network.data()
        start = initialise(self.network.architecture, data.spec, self.rng.child("weights"))
        if self.network.recipe is None or data.train is None:
            return start
        return train(start, data.train, recipe=self.network.recipe, rng=self.rng.child("train"))


def _judged(data: Data, model: Classifier) -> Data:
    """Where there are no labels, the network's own are taken: accuracy is then agreement."""

    def label(split: Split) -> Split:
        return Split(split.x, model.predict(split.x))

    return Data(data.spec, None, label(data.calibration), label(data.test), data.source)


_ADAPTER = digest("adapter")
_COMPILE = digest("adapter", "secure_inference/compile", "secure_inference/netlist")


def flat(module: nn.Module, model: Classifier) -> Iterator[dict[str, Any]]:
    """The layers of a network as plain values for other frameworks, with batch normalisation folded in."""
    layers = list(module.children())
    index = 0
    while index < len(layers):
        layer = layers[index]
        index += 1
        if isinstance(layer, nn.Conv2d):
            if index < len(layers) and isinstance(layers[index], nn.BatchNorm2d):
                layer = nn.utils.fuse_conv_bn_eval(layer, layers[index])  # type: ignore[type-var]
                index += 1
            bias = torch.zeros(layer.out_channels) if layer.bias is None else layer.bias
            yield {"op": "conv", "weight": array(layer.weight), "bias": array(bias),
                   "stride": layer.stride[0], "padding": int(layer.padding[0])}  # fmt: skip
        elif isinstance(layer, nn.Linear):
            yield {"op": "linear", "weight": array(layer.weight), "bias": array(layer.bias)}
        elif isinstance(layer, nn.MaxPool2d):
            yield {"op": "max", "size": int(layer.kernel_size)}
        elif isinstance(layer, BasicBlock):
            names = (layer.conv1, layer.norm1, nn.ReLU(), layer.conv2, layer.norm2)
            yield {"op": "residual", "inner": list(flat(nn.Sequential(*names), model)),
                   "shortcut": list(flat(layer.shortcut, model))}  # fmt: skip
            yield {"op": "relu"}
        else:
            yield {"op": _PLAIN[type(layer)]}


_PLAIN = {nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.Flatten: "flatten",
          nn.AdaptiveAvgPool2d: "mean"}  # fmt: skip


def array(tensor: Tensor) -> Any:
    return tensor.detach().double().numpy()


def export(made: Made, folder: Path, count: int) -> None:
    """Write ``network.json`` and ``arrays.npz`` for a peer: layers, normalised inputs, the float network's logits."""
    arrays: dict[str, Any] = {}

    def stored(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays[f"a{len(arrays)}"] = value.astype(np.float32)
            return {"array": f"a{len(arrays) - 1}"}
        if isinstance(value, list):
            return [stored(item) for item in value]
        return {key: stored(item) for key, item in value.items()} if isinstance(value, dict) else value

    model = made.model.copy()
    model.module.eval()
    layers = stored(list(flat(model.module, model)))
    x = made.tests.x[:count]
    arrays["x"] = model.spec.normalise(x).numpy().astype(np.float32)
    arrays["logits"] = model.query(x).numpy()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "network.json").write_text(json.dumps({"layers": layers, "shape": list(model.spec.shape)}))
    np.savez(folder / "arrays.npz", **arrays)


def products(program: Program) -> int:
    """Multiplications with secret weights of one sample."""
    from deepseal.secure_inference.compile.program import Linear

    return sum(
        program.wires[step.target].size * math.prod(step.weight_shape[1:])
        for step in program.steps
        if isinstance(step, Linear)
    )
