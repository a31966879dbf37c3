"""The one training loop. Schemes and attacks bring their own loss; nobody writes another loop."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from deepseal.adapter.capture import NORMALISATION, PARAMETRIC, execution_order, require_layers
from deepseal.adapter.checkpoint import build_module
from deepseal.adapter.classifier import Classifier
from deepseal.adapter.data import Split
from deepseal.adapter.inputs import Batch, call
from deepseal.adapter.parallel import workers
from deepseal.adapter.parametrised import refresh
from deepseal.adapter.private_random import PrivateRandom
from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError, TrainingError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Parameters):
    """How to train. ``steps`` overrides ``epochs``."""

    optimizer: str = parameter("adam", "update rule", choices=("adam", "adamw", "sgd"))
    learning_rate: float = parameter(1e-3, "step size", minimum=1e-9, maximum=10.0)
    relative: bool = parameter(False, "step size in units of each weight tensor's root mean square, 0.001 at least")
    epochs: int = parameter(10, "passes over the training data", minimum=0, maximum=10_000)
    steps: int | None = parameter(None, "number of updates, instead of epochs", minimum=0)
    batch_size: int = parameter(128, "samples an update", minimum=2)
    momentum: float = parameter(0.9, "momentum, for sgd", minimum=0.0, maximum=0.999)
    weight_decay: float = parameter(0.0, "weight decay", minimum=0.0, maximum=1.0)
    schedule: str = parameter("constant", "course of the step size", choices=("constant", "linear", "cosine"))
    restart: int | None = parameter(None, "update at which optimiser and schedule start anew", minimum=1)

    def total_steps(self, samples: int) -> int:
        """Updates on a data set of that size."""
        return self.steps if self.steps is not None else self.epochs * math.ceil(samples / self.batch_size)

    def progress(self, index: int, total: int) -> float:
        """How far the schedule is (0 … 1) at an update; there are ``total``."""
        if self.restart is None or total <= self.restart:
            return index / max(1, total)
        if index < self.restart:
            return index / self.restart
        return (index - self.restart) / (total - self.restart)

    def factor(self, progress: float) -> float:
        """Factor of the step size at ``progress`` (0 … 1) of the training."""
        if self.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """What a loss sees of one update.

    Attributes:
        module: the module in training (a copy; the loss may run it again).
        x: (N, …) inputs of the batch in data space.
        y: (N,) labels.
        rows: (N,) their positions in the training data.
        forward: gives ``logits``, (N, classes), or (N, D) of a model without classes, graph attached; run on first use.
        index: number of this update, from 0.
        total: number of all updates.
        generator: the only randomness the loss may use.
    """

    module: nn.Module
    x: Batch
    y: Tensor
    rows: Tensor
    forward: Callable[[], Tensor]
    index: int
    total: int
    generator: torch.Generator

    @functools.cached_property
    def logits(self) -> Tensor:
        """The module's answers to the batch."""
        return self.forward()


# A scalar, or several one after the other: each is differentiated before the next is computed, so that their graphs
# are never in memory together.
Loss = Callable[[Step], Tensor | Iterator[Tensor]]


def cross_entropy(step: Step) -> Tensor:
    """Mean cross-entropy of the batch."""
    return nn.functional.cross_entropy(step.logits, step.y)


class Imitation:
    """Squared distance of the answers to those that a model gave, relative to the variance of each over the batch.

    mean_j (z_j - z0_j)^2 / (var_j + m / 10 + s / 10^4), m the mean variance and s the mean square of z0: so an answer
    that varies little, such as the corner of a box beside a probability, is held as well as the others, and one that is
    large but the same for all inputs does not hide them. Answers are asked for as they are needed, and kept as long as
    this value lives.

    Args:
        model: gives the answers; must not change meanwhile.
        weight: factor of the loss.
    """

    def __init__(self, model: Classifier, weight: float = 1.0) -> None:
        self._model, self._weight = model, weight
        self._answers: dict[int, Tensor] = {}

    def __call__(self, step: Step) -> Tensor:
        """The loss of a batch."""
        rows = step.rows.tolist()
        unknown = [place for place, row in enumerate(rows) if row not in self._answers]
        if unknown:
            fresh = self._model.query(step.x[torch.tensor(unknown)])
            self._answers.update(zip((rows[place] for place in unknown), fresh, strict=True))
        wanted = torch.stack([self._answers[row] for row in rows]).to(step.logits)
        spread = wanted.var(dim=0, unbiased=False)
        spread = spread + (spread.mean() / 10 + wanted.pow(2).mean() / 1e4).clamp(min=1e-12)
        return self._weight * ((step.logits - wanted).pow(2) / spread).mean()


Watch = Callable[["Training", float], None]


class Training:
    """Training of a copy of ``model``, one update a ``step()``; ``result()`` is the trained classifier.

    Inside ``torch.autocast`` it trains in mixed precision, inside ``parallel.data_parallel`` with other processes.

    Args:
        model: where to start; never changed, and must not change meanwhile.
        data: training samples.
        recipe: optimiser, length, batch size.
        rng: all randomness (order of the batches, dropout, the loss's own).
        loss: what to minimise.
        trained: qualified names of the layers to train; None for all. The rest is frozen, its statistics too.
        evaluating: train in evaluation mode: no dropout, and the statistics of batch normalisation stay as they are.
        extra: further tensors to train, as (tensor, learning rate).

    Raises:
        InputError: data that do not fit the model.
        TrainingError: the loss is not finite.
    """

    def __init__(
        self,
        model: Classifier,
        data: Split,
        *,
        recipe: Recipe,
        rng: Rng,
        loss: Loss = cross_entropy,
        trained: Sequence[str] | None = None,
        extra: Sequence[tuple[Tensor, float]] = (),
        evaluating: bool = False,
    ) -> None:
        data.check(model.spec)
        require_layers(model.module)
        self._original, self._model = model, model.copy()
        self._data, self._recipe, self._loss = data, recipe, loss
        self._module = self._model.module.to(memory_format=torch.channels_last)  # faster convolutions, same numbers
        parameters = self._prepare(trained)
        self._updated = [*parameters, *(tensor for tensor, _ in extra)]
        if evaluating:
            self._module.eval()
        groups: list[dict[str, object]] = [{"params": parameters, "lr": recipe.learning_rate}]
        if recipe.relative:
            groups = [{"params": [tensor], "lr": recipe.learning_rate * _size(tensor)} for tensor in parameters]
        groups += [{"params": [tensor], "lr": learning_rate} for tensor, learning_rate in extra]
        self._optimizer = _optimizer(recipe, groups)
        self._base_rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._workers = workers()
        own = rng.child("worker", self._workers.rank) if self._workers.rank else rng
        self._generator = own.child("loss").torch()
        self._private_random = PrivateRandom(own.child("dropout"), model.device)
        self._batches = _batches(len(data), recipe.batch_size, rng.child("order").torch())
        if not parameters:
            raise InputError("parameters to train", found="all of them frozen", do="set requires_grad on some")
        if model.dtype == torch.float16:
            raise InputError("weights to train in float32 or bfloat16", found="float16", do="convert the model first")
        if torch.is_inference_mode_enabled():
            raise InputError("training outside inference_mode", found="inference_mode", do="call it outside")
        self._index = 0
        self._total = recipe.total_steps(len(data))

    def __len__(self) -> int:
        return self._total

    @property
    def recipe(self) -> Recipe:
        """How it trains."""
        return self._recipe

    def step(self) -> float:
        """One update; the value of the loss."""
        index = self._workers.share(next(self._batches))
        x, y = self._data.x[index].to(self._model.device), self._data.y[index].to(self._model.device)
        if self._index == self._recipe.restart:
            self._optimizer.state.clear()
        factor = self._recipe.factor(self._recipe.progress(self._index, self._total))
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor
        with self._private_random(), torch.enable_grad():
            self._optimizer.zero_grad(set_to_none=True)
            inputs = self._model.prepare(x)
            if isinstance(inputs, Tensor) and inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)

            def forward() -> Tensor:
                return self._model.spec.read(call(self._module, inputs), inputs)

            state = Step(self._module, x, y, index, forward, self._index, self._total, self._generator)
            value = self._differentiate(self._loss(state))
            self._workers.average_gradients(self._updated)
            self._optimizer.step()
        self._index += 1
        return value

    def _differentiate(self, loss: Tensor | Iterator[Tensor]) -> float:
        total = 0.0
        for term in [loss] if isinstance(loss, Tensor) else loss:
            value = float(term.detach())
            if not math.isfinite(value):
                raise TrainingError(f"the loss became {value} at update {self._index}; use a smaller learning rate")
            term.backward()
            total += value
        return total

    def run(self, progress: Progress | None = None, watch: Watch | None = None) -> Classifier:
        """All updates, then the result; ``watch`` sees the training and the loss of each update."""
        for index in range(self._total):
            loss = self.step()
            if progress is not None:
                progress(index + 1, self._total)
            if watch is not None:
                watch(self, loss)
        return self.result()

    def result(self) -> Classifier:
        """The classifier as trained up to now, with everything but parameters and buffers as in the original."""
        self._workers.average(self._module.buffers())
        result = self._original.copy()
        result.module.load_state_dict(self._module.state_dict())
        refresh(result.module)
        for parameter_ in result.module.parameters():
            parameter_.grad = None
        return result

    def _prepare(self, trained: Sequence[str] | None) -> list[nn.Parameter]:
        if trained is None:
            for layer in self._module.modules():
                own = list(layer.parameters(recurse=False))
                layer.training = layer.training or not own or any(p.requires_grad for p in own)
            return [p for p in self._module.parameters() if p.requires_grad]
        layers = dict(self._module.named_modules())
        self._module.eval()
        chosen: dict[int, nn.Parameter] = {}
        for name in trained:
            layers[name].train()
            own = list(layers[name].parameters())
            open_ = [p for p in own if p.requires_grad] or own  # what is frozen inside a layer that is not stays so
            chosen.update((id(p), p) for p in open_)
        for parameter_ in self._module.parameters():
            parameter_.requires_grad_(id(parameter_) in chosen)
        return list(chosen.values())


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Positions of one batch after the other, without end; a last one of a single sample is left out.

    No method of ``Training``, which would then refer to itself, and keep its copy of the network until Python looks for
    such rings.
    """
    while True:
        order = torch.randperm(count, generator=generator)
        for batch in order.split(size):
            if len(batch) > 1 or len(order) == 1:
                yield batch


def train(
    model: Classifier,
    data: Split,
    *,
    recipe: Recipe,
    rng: Rng,
    loss: Loss = cross_entropy,
    trained: Sequence[str] | None = None,
    extra: Sequence[tuple[Tensor, float]] = (),
    progress: Progress | None = None,
) -> Classifier:
    """Train a copy of ``model`` to the end (see ``Training``)."""
    return Training(model, data, recipe=recipe, rng=rng, loss=loss, trained=trained, extra=extra).run(progress)


def initialise(architecture: str, spec: InputSpec, rng: Rng) -> Classifier:
    """A freshly initialised classifier; the global random state is left alone.

    Raises:
        InputError: the architecture cannot be built.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.integer())  # not torch.manual_seed, which would seed every GPU too
        module = build_module(architecture, spec)
    return Classifier(module, spec, architecture=architecture)


def output_layer(model: Classifier) -> str:
    """Qualified name of the last layer with weights, the one that gives the logits.

    Raises:
        InputError: a model without linear or convolutional layers.
    """
    order = [name for name, layer, _ in execution_order(model.module, model.probe()) if isinstance(layer, PARAMETRIC)]
    if not order:
        raise InputError("a linear or convolutional layer", found="none in the model", do="use a model that has one")
    return order[-1]


def reinitialise(model: Classifier, layer: str, rng: Rng) -> Classifier:
    """A copy whose named layer has fresh random weights."""
    result = model.copy()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.integer())
        target = dict(result.module.named_modules())[layer]
        if not isinstance(target, (*PARAMETRIC, *NORMALISATION)):
            raise InputError("a layer that can be reset", found=f"{layer} ({type(target).__name__})", do="name another")
        target.reset_parameters()
    return result


def _size(tensor: Tensor) -> float:
    """Root mean square, or 0.001 where it is less (Shazeer, Stern, 2018, section 8)."""
    return max(1e-3, float(tensor.detach().float().pow(2).mean().sqrt()))


def _optimizer(recipe: Recipe, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    kind = torch.optim.AdamW if recipe.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, weight_decay=recipe.weight_decay, fused=True)
