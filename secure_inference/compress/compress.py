"""``compress``: projection, then pruning in steps with retraining; what it reaches and what it makes public."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, Dataset, Recipe, Step, train
from deepseal.adapter.training import cross_entropy
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng
from deepseal.secure_inference.compile.compiler import compile_model
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.projected import with_projection
from deepseal.secure_inference.compress import pruning
from deepseal.secure_inference.compress.cost import layers_of, masked_counts
from deepseal.secure_inference.compress.projection import (
    Dictionary,
    Reals,
    build_dictionary,
    first_linear,
    principal_axes,
    project_layer,
    unproject,
)

_TEMPERATURE = 2.0  # of distillation
METHODS = ("both", "projection", "pruning")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressSettings(Parameters):
    """How a network is made smaller."""

    method: str = parameter("both", "what is done", choices=METHODS)
    error: float = parameter(0.3, "projection error above which a sample joins", minimum=0.0, maximum=1.0)
    columns: int = parameter(256, "most columns of the dictionary", minimum=1)
    sparsity: float = parameter(0.8, "share of the multiplications that pruning leaves out", minimum=0.0, maximum=0.999)
    fold: float | None = parameter(None, "wanted fold of all multiplications, instead of sparsity", minimum=1.0)
    max_loss: float = parameter(0.5, "most points of accuracy to lose on the calibration split", minimum=0.0)
    criterion: str = parameter("saliency", "which weights go first", choices=("saliency", "magnitude"))
    steps: int = parameter(10, "steps of pruning", minimum=1)
    step_epochs: int = parameter(1, "passes over the training data after each step", minimum=0)
    epochs: int = parameter(15, "passes after the projection, and after the last step", minimum=0)
    distillation: float = parameter(0.5, "share of the given network's answers in the loss", minimum=0.0, maximum=1.0)
    learning_rate: float = parameter(2e-3, "of Adam", minimum=1e-9, maximum=10.0)
    batch_size: int = parameter(128, "samples an update", minimum=2)


@dataclasses.dataclass(frozen=True)
class Point:
    """One step of the way.

    Attributes:
        fold: multiplications of the given network over those that are left.
        multiplications: that are left, for one sample.
        zeros: weights that are gone.
        accuracy: on the calibration split, after the step's retraining.
        settled: whether this is the last, longer retraining.
    """

    fold: float
    multiplications: int
    zeros: int
    accuracy: float
    settled: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed:
    """What ``compress`` gives.

    Attributes:
        model: of the same architecture, with zeros where connections are gone; the projection is in its metadata.
        before: multiplications of the given network, for one sample.
        curve: the steps.
        calibration_accuracy: of the given network.
        dictionary: of the projection, or None without one.
        reached: whether the model is as small as was asked for, within ``max_loss`` on the calibration split.
        remark: why there is no projection although one was asked for.
    """

    model: Classifier
    before: int
    curve: tuple[Point, ...]
    calibration_accuracy: float
    dictionary: Dictionary | None
    reached: bool
    remark: str = ""

    @property
    def pruned(self) -> bool:
        """Whether connections are gone."""
        return self.curve[-1].zeros > 0

    @property
    def reveals(self) -> str:
        """What serving the compressed network makes public, in one sentence."""
        parts = []
        if self.dictionary is not None:
            parts.append(
                f"the projection: the space that {len(self.dictionary.basis)} training samples span and the directions "
                "in it along which the training data vary most, so whoever has a sample can test whether it is one "
                "of these (a sample of the dictionary has projection error 0)"
            )
        if self.pruned:
            parts.append("for each layer, the map of the connections whose weight is not zero (not the weights)")
        return f"Every client learns {'; and '.join(parts)}." if parts else "Nothing beyond the architecture."


Progress = Callable[[int, int], None]


def compress(model: Classifier, data: Dataset, *, settings: CompressSettings, rng: Rng,
             progress: Progress | None = None) -> Compressed:  # fmt: skip
    """Project and prune a copy of a model, and retrain it; all choices are made on the calibration split.

    A network that loses more than ``max_loss`` in the end is given up for the last one on the way that did not, which
    is then retrained as long; where there is none, the smallest is given.

    Args:
        model: stays as it is.
        data: its data; the test split is not looked at.
        settings: see ``CompressSettings``.
        rng: order of the stream, of batches.
        progress: told how many of all retrainings are done.

    Raises:
        InputError: data that do not fit, or a network that projection alone does not apply to.
    """
    for split in (data.train, data.calibration):
        split.check(model.spec)
    model.spec.require_plain("compression")
    work = _Work(model, data, settings, rng, progress)
    dictionary, axes, remark = None, None, ""
    if settings.method != "pruning":
        name = first_linear(work.model)
        if name is None:
            remark = "no projection: the first layer is no linear layer on the whole input, so it cannot be folded in"
            if settings.method == "projection":
                found, do = "another", "use -p method=pruning"
                raise InputError("a network whose first layer is linear on the whole input", found=found, do=do)
        else:
            x = model.spec.normalise(data.train.tensor).flatten(1).numpy()
            stream = rng.child("dictionary")
            dictionary = build_dictionary(x, error=settings.error, limit=settings.columns, rng=stream)
            axes = principal_axes(dictionary.basis, x)
            work.model = project_layer(work.model, name, axes)
    work.start(axes)
    if axes is not None:
        work.train("projection", last=settings.method == "projection")
    if settings.method != "projection":
        work.prune()
    if work.lost(work.curve[-1]) > settings.max_loss and work.good is not None:
        work.model = work.good
        work.train("again", last=True)
    result = work.result()
    reached = work.lost(work.curve[-1]) <= settings.max_loss
    if settings.fold is not None:
        reached = reached and work.curve[-1].fold >= settings.fold
    return Compressed(result, work.before, tuple(work.curve), work.accuracy, dictionary, reached, remark)


class _Work:
    """The network under way and the points that it has passed."""

    def __init__(self, model: Classifier, data: Dataset, settings: CompressSettings, rng: Rng,
                 progress: Progress | None) -> None:  # fmt: skip
        self.model, self.data, self.settings, self.rng, self._progress = model.copy(), data, settings, rng, progress
        self._teacher = model.copy()
        self.before = sum(int(count.sum()) for count in pruning.multiplications(model).values())
        self.accuracy = model.accuracy(data.calibration).value
        self.curve: list[Point] = []
        self.good: Classifier | None = None
        self.costs: dict[str, Tensor] = {}
        self._program: Program | None = None
        self._template = self.model
        self._axes: Reals | None = None

    def start(self, axes: Reals | None) -> None:
        """Add masks, and count multiplications: by the program where its layers are the network's, else by layer."""
        self._template, self._axes = self.model.copy(), axes
        pruning.add_masks(self.model.module)
        self.costs = pruning.multiplications(self.model)
        program, _ = compile_model(self.result(), self.data.calibration, accept_overflow=True)
        shapes = {name: step.weight_shape for name, (_, step) in layers_of(program).items()}
        if shapes == {name: tuple(cost.shape) for name, cost in self.costs.items()}:
            self._program = program

    def result(self) -> Classifier:
        """The network under way in the given one's architecture."""
        plain = pruning.without_masks(self.model, self._template)
        return plain if self._axes is None else with_projection(unproject(plain), self._axes)

    def left(self) -> int:
        """Multiplications that are left; those whose result nobody reads are left out."""
        masks = pruning.masks(self.model.module)
        if self._program is not None:
            self.costs = masked_counts(self._program, masks)
        return sum(int((masks[name].double() * cost).sum()) for name, cost in self.costs.items())

    def lost(self, point: Point) -> float:
        """Points of accuracy on the calibration split; rounded, so that 0.5 of 100 is not more than 0.5."""
        return round(100 * (self.accuracy - point.accuracy), 9)

    def train(self, name: str, *, last: bool) -> None:
        """Retrain, and note the point."""
        s = self.settings
        epochs = s.epochs if last or name == "projection" else s.step_epochs
        recipe = Recipe(epochs=epochs, learning_rate=s.learning_rate, batch_size=s.batch_size,
                        schedule="cosine" if epochs == s.epochs else "constant")  # fmt: skip
        rng = self.rng.child("train", name)
        self.model = train(self.model, self.data.train, recipe=recipe, rng=rng, loss=self._loss)
        left = self.left()
        zeros = sum(int((mask == 0).sum()) for mask in pruning.masks(self.model.module).values())
        accuracy = self.model.accuracy(self.data.calibration).value
        point = Point(self.before / max(left, 1), left, zeros, accuracy, last)
        self.curve.append(point)
        if self.lost(point) <= s.max_loss:
            self.good = self.model
        if self._progress is not None:
            self._progress(len(self.curve), max(len(self.curve), s.steps * (s.method != "projection") + 1))

    def _loss(self, step: Step) -> Tensor:
        """Cross-entropy with the labels and, mixed in, with the given network's answers (Hinton et al., 2015)."""
        share, labels = self.settings.distillation, cross_entropy(step)
        if share == 0:
            return labels
        with torch.no_grad():
            taught = (self._teacher.logits(step.x) / _TEMPERATURE).softmax(1)
        soft = nn.functional.cross_entropy(step.logits / _TEMPERATURE, taught) * _TEMPERATURE**2
        return (1 - share) * labels + share * soft

    def prune(self) -> None:
        """All steps, on the cubic course of Zhu and Gupta (2017)."""
        s, first = self.settings, self.left()
        target = self.before / s.fold if s.fold is not None else first * (1 - s.sparsity)
        for step in range(1, s.steps + 1):
            budget = target + max(first - target, 0.0) * (1 - step / s.steps) ** 3
            rng = self.rng.child("scores", step)
            scores = pruning.importance(self.model, self.data.train, self.costs, s.criterion, rng)
            self.model = self.model.copy()
            pruning.lower_masks(pruning.masks(self.model.module), scores, self.costs, budget)
            self.train(f"step {step}", last=step == s.steps)
