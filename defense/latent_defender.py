"""DeepFense's latent defender by its recipe: a fine-tuned copy of the victim, and densities in its hidden layer.

Source: B. Rouhani, M. Samragh, M. Javaheripi, T. Javidi, F. Koushanfar, "DeepFense: online accelerated defense against
adversarial deep learning", ICCAD 2018, section 4.1. The copy's features f at the checkpoint are scaled to length 1, and
it is tuned at a tenth of the step size on cross-entropy plus gamma times

    |f - C_y|^2 - sum_{c != y} |f - C_c|^2 + sum_c (|C_c| - 1)^2

with trained centres C. Features are then projected to the principal directions that hold 99 % of the variance, and each
class is one Gaussian; the score is minus the log density under that of the class that the *victim* predicts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deepseal.adapter import Batch, BlackBox, Classifier, Split, Step
from deepseal.adapter.capture import hooked, layer_name
from deepseal.adapter.classifier import BATCH
from deepseal.adapter.outputs import pool as pooled
from deepseal.adapter.precision import in_single_precision
from deepseal.adapter.training import Training
from deepseal.attacks.base import owner_recipe
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.defense.gaussian import ClassGaussians, Moments, log_density, principal
from deepseal.defense.layered import AtLayer
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import Rng

_TUNED = "tuned."
_CENTRES_RATE = 1e-2
_KEPT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepFenseLatent(AtLayer):
    """Rouhani et al., 2018: log density in the hidden layer of a copy that was tuned to keep its classes apart.

    One further pass, through the copy, whose weights are part of what is learned. A larger gamma makes features
    collapse: the centres are driven away from all features, and these away from all centres.
    """

    name: ClassVar[str] = "deepfense-latent"

    gamma: float = parameter(0.01, "weight of the centre terms", minimum=0.0, maximum=1e3)
    epochs: int = parameter(3, "passes over the data while tuning", minimum=0, maximum=10_000)
    rate: float = parameter(0.1, "step size, in units of the victim's own", minimum=1e-6, maximum=10.0)
    variance: float = parameter(0.99, "share of the variance that the directions keep", minimum=0.1, maximum=1.0)
    directions: int = parameter(128, "most directions", minimum=1, maximum=4096)
    shrinkage: float = parameter(0.01, "how far covariances are drawn to trace/D", minimum=0.0, maximum=1.0)

    @property
    def needs(self) -> Needs:
        return Needs(access="module", passes=1)

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Tune the copy; directions and Gaussians of its features, in two passes over the data.

        Raises:
            InputError: no data, a victim that cannot be tuned, or a layer that is too wide.
        """
        tuned = self._tune(_single(_classifier(reference.model)), reference.split, rng)
        moments = None
        for rows, _ in self._stream(tuned, reference.split):
            moments = (moments or Moments.empty(rows.shape[1])).add(rows)
        if moments is None:
            raise InputError("samples to fit a density on", found="none", do="pass data")
        directions, _ = principal(moments, self.variance, self.directions)
        classes = [Moments.empty(directions.shape[1]) for _ in range(reference.classes)]
        for rows, labels in self._stream(tuned, reference.split):
            placed = (rows.double() - moments.mean) @ directions
            for label in labels.unique().tolist():
                classes[label] = classes[label].add(placed[labels == label])
        gaussians = ClassGaussians.of(classes, self.shrinkage)
        weights = {_TUNED + name: value.detach().clone() for name, value in tuned.tensors().items()}
        return {
            **weights,
            "mean": moments.mean.float(),
            "directions": directions.float().contiguous(),
            "means": gaussians.means.float(),
            "whiten": gaussians.whiten.float(),
            "offset": gaussians.offset.float(),
        }

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) negative log densities under the Gaussian of the class that the victim predicts."""
        with torch.set_grad_enabled(context.graph):
            rows = self._features(_tuned(_classifier(context.model), state), context.x).to(context.logits.device)
            placed = (rows - state["mean"].to(rows)) @ state["directions"].to(rows)
            laws = [state[name].to(placed) for name in ("means", "whiten", "offset")]
            return -log_density(placed, context.predicted, *laws)

    def _tune(self, model: Classifier, split: Split, rng: Rng) -> Classifier:
        owner = owner_recipe(model, epochs=self.epochs)
        recipe = dataclasses.replace(owner, learning_rate=self.rate * owner.learning_rate)
        start = model.copy()
        if not self.epochs:
            return start
        start.module.requires_grad_(True)
        centres = self._centres(model, split).requires_grad_(True)

        def loss(step: Step) -> Tensor:
            with self._normalised(step.module) as seen:
                answer = nn.functional.cross_entropy(step.logits, step.y)
            return answer + self.gamma * centre_terms(self._read(model, seen), step.y, centres)

        extra = [(centres, _CENTRES_RATE)]
        return Training(start, split, recipe=recipe, rng=rng.child("tune"), loss=loss, extra=extra).run()

    def _centres(self, model: Classifier, split: Split) -> Tensor:
        """(C, D) class means of the features to start from; of a class without samples the mean of all."""
        sums: Tensor | None = None
        counts = torch.zeros(model.spec.num_classes)
        for rows, labels in self._stream(model, split):
            one_hot = nn.functional.one_hot(labels, model.spec.num_classes).to(rows)
            sums = one_hot.T @ rows + (0.0 if sums is None else sums)
            counts += one_hot.sum(dim=0)
        assert sums is not None  # noqa: S101 - a split is never empty
        means = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], sums.sum(dim=0) / counts.sum())
        return means.to(model.device)

    def _stream(self, model: Classifier, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        for x, labels in zip(split.tensor.split(BATCH), split.y.split(BATCH), strict=True):
            with torch.no_grad():
                yield self._features(model, x).cpu(), labels

    def _features(self, model: Classifier, x: Batch) -> Tensor:
        with self._normalised(model.module) as seen:
            model.logits(x)
        return self._read(model, seen)

    def _read(self, model: Classifier, seen: Mapping[str, Tensor]) -> Tensor:
        if self.layer not in seen:
            raise InputError(
                "a layer that runs in a forward pass", found=f"{self.layer!r} never ran", do="name another"
            )
        return pooled(seen[self.layer], self.pool).float()

    @contextmanager
    def _normalised(self, module: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Inside, the checkpoint's output goes on scaled to length 1, and is kept."""
        seen: dict[str, Tensor] = {}

        def hook(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Tensor:
            if not isinstance(output, Tensor):
                raise InputError("a checkpoint of one tensor", found=type(output).__name__, do="name another layer")
            flat = nn.functional.normalize(output.flatten(1), dim=1)
            seen[self.layer] = flat.reshape(output.shape)
            return seen[self.layer]

        with hooked(module, [(layer_name(self.layer), hook)]):
            yield seen


def centre_terms(features: Tensor, labels: Tensor, centres: Tensor) -> Tensor:
    """Mean over the batch of |f - C_y|^2 - sum over the other classes of |f - C_c|^2, plus sum_c (|C_c| - 1)^2.

    Args:
        features: (N, D).
        labels: (N,).
        centres: (C, D).
    """
    squared = (features[:, None, :] - centres[None, :, :]).square().sum(dim=2)
    own = squared.gather(1, labels[:, None]).squeeze(1)
    lengths = centres.square().sum(dim=1).clamp_min(1e-12).sqrt()
    return (2.0 * own - squared.sum(dim=1)).mean() + (lengths - 1.0).square().sum()


def _classifier(model: BlackBox) -> Classifier:
    if not isinstance(model, Classifier):
        found, do = "a model that only answers", "use detectors that read no layer, such as max-softmax"
        raise InputError("a model that can be copied", found=found, do=do)
    return model


def _single(model: Classifier) -> Classifier:
    return Classifier(in_single_precision(model.module), model.spec, metadata=model.metadata)


# Tuned copies by victim: one is built from its weights once, not for every batch.
_COPIES: WeakKeyDictionary[Classifier, dict[tuple[int, str], tuple[Tensor, Classifier]]] = WeakKeyDictionary()


def _tuned(model: Classifier, state: State) -> Classifier:
    built, key = _COPIES.setdefault(model, {}), (id(state["mean"]), str(model.device))
    if key not in built:
        copy = _single(model).copy()
        weights = {name[len(_TUNED) :]: value for name, value in state.items() if name.startswith(_TUNED)}
        copy.module.load_state_dict(weights)
        copy.module.requires_grad_(False)
        while len(built) >= _KEPT:
            built.pop(next(iter(built)))
        built[key] = state["mean"], copy  # the tensor is kept, so that no other has its id
    return built[key][1]
