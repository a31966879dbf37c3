"""What embedding DeepSigns minimises: the robust loss and the paper's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, Split
from deepseal.adapter.capture import forward_to
from deepseal.adapter.inputs import Batch, concatenated, stored
from deepseal.adapter.outputs import pool
from deepseal.adapter.training import Imitation, Step, cross_entropy
from deepseal.errors import InputError
from deepseal.watermark.carriers import check_carriers, members_of
from deepseal.watermark.cells import cells_of, projection_of
from deepseal.watermark.key import Key
from deepseal.watermark.mark_loss import MarkLoss
from deepseal.watermark.robust import weathered_features

if TYPE_CHECKING:
    from deepseal.watermark.deepsigns import DeepSigns


class RobustLoss(MarkLoss):
    """Task + strength * mean [relu(margin - s / nu) + relu(relative_margin - s / ||mu||)], s = b A^T mu.

    The task is cross-entropy, or ``task``, such as agreement with the unmarked model's own answers.

    mu is the centred mean over a few inputs, read through weathered weights; nu is the mean norm of the original's. The
    first term makes the mark large, so that drift does not reach it; the second keeps the rest of mu from hiding it.
    """

    def __init__(
        self,
        model: Classifier,
        data: Split,
        key: Key,
        scheme: DeepSigns,
        *,
        task: Imitation | None = None,
    ) -> None:
        super().__init__(task or cross_entropy)
        self._settings, self._strength = scheme.settings(model.spec), scheme.strength
        self._centred = bool(key.public["centred"])
        self._layers, self._pool = list(key.public["layers"]), key.public.get("pool", {})
        self._targets = _targets(key, model)
        self._model, self._data = model, data.x
        self._members = members_of(key, data)
        labels, triggers = key.tensors["trigger_y"], stored(key.tensors, "trigger_x")
        if triggers is None:
            raise InputError("a key with its triggers", found="none", do="use an intact copy of it")
        self._own = [torch.nonzero(labels == carrier).reshape(-1) for carrier in key.public["carriers"]]
        self._triggers, self._running_statistics = triggers, task is not None
        observed = scheme.observe(model, key).values
        self._norms = {
            name: max(1e-12, float(centred_means(means, self._centred).norm(dim=1).mean()))
            for name, means in observed.items()
        }

    def _draw(self, generator: torch.Generator) -> Batch:
        """Inputs of every carrier in turn: half of them triggers, half any training samples of the class.

        Of a group, which has no other samples, as many triggers as there are: its mean is exact.
        """
        drawn: list[Batch] = []
        size = self._settings.batch
        for own, members in zip(self._own, self._members, strict=True):
            if len(members) == 0:
                drawn.append(self._triggers[own[torch.randperm(len(own), generator=generator)[:size]]])
                continue
            drawn.append(self._triggers[own[torch.randint(len(own), (size // 2,), generator=generator)]])
            rest = torch.randint(len(members), (size - size // 2,), generator=generator)
            drawn.append(self._data[members[rest]])
        return concatenated(drawn)

    def mark(self, module: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
        """The bits' shortfall."""
        settings = self._settings
        rate = settings.prune * float(torch.rand((), generator=generator))
        x = self._model.prepare(self._draw(generator))
        mask = self._model.spec.mask_of(x)
        with weathered_features(
            module,
            x,
            self._layers,
            prune=rate,
            drift=settings.drift,
            generator=generator,
            running_statistics=self._running_statistics,
        ) as features:
            yield self._strength * self._shortfall(features, mask)

    def _shortfall(self, features: Mapping[str, Tensor], mask: Tensor | None) -> Tensor:
        """How far the bits' scores fall short of their margins, on average."""
        settings, carriers = self._settings, len(self._own)
        shortfall = []
        for target in self._targets:
            pooled = pool(features[target.layer], self._pool.get(target.layer, "none"), mask)
            means = centred_means(_means(pooled, carriers), self._centred)
            absolute = target.scores(means / self._norms[target.layer])
            relative = target.scores(nn.functional.normalize(means, dim=1))
            shortfall.append(torch.relu(settings.margin - absolute) + torch.relu(settings.relative_margin - relative))
        return torch.cat(shortfall).mean()


class PaperLoss:
    """CE + lambda1 L1 + lambda2 L2 with trainable centres (Rouhani et al., 2019, equations 2 to 5)."""

    def __init__(self, model: Classifier, data: Split, key: Key, scheme: DeepSigns) -> None:
        layers = list(key.public["layers"])
        if len(layers) != 1:
            raise InputError(
                "one layer for the paper's recipe", found=str(layers), do="give -p layers=NAME or recipe=robust"
            )
        if "groups" in key.public:
            raise InputError("carrier classes for the paper's recipe", found="groups", do="use recipe=robust")
        check_carriers(key.public["carriers"], data)
        self._scheme, self._layer, self._model = scheme, layers[0], model
        self._rule = key.public.get("pool", {}).get(layers[0], "none")
        self._targets = _targets(key, model)
        self._carriers = torch.tensor(key.public["carriers"])
        sample = data.take(torch.arange(min(len(data), 5000)))
        features = model.features(sample.x, layers, pool={self._layer: self._rule})[self._layer].to(model.device)
        overall = features.mean(dim=0)
        classes = range(model.spec.num_classes)
        centres = [features[sample.y == c].mean(dim=0) if bool((sample.y == c).any()) else overall for c in classes]
        self.means = torch.stack(centres).requires_grad_(True)

    def __call__(self, step: Step) -> Tensor:
        scheme, means = self._scheme, self.means
        x = self._model.prepare(step.x)
        features = pool(forward_to(step.module, x, [self._layer])[self._layer], self._rule, self._model.spec.mask_of(x))
        carriers = self._carriers.to(means.device)
        centre = means.new_zeros(())
        for carrier in self._carriers.tolist():
            members = features[step.y == carrier]
            if len(members):
                centre = centre + (means[carrier] - members.mean(dim=0)).pow(2).sum()
        others = torch.ones(len(means), dtype=torch.bool, device=means.device)
        others[carriers] = False
        centre = centre - torch.cdist(means[carriers], means[others]).pow(2).sum()
        scores = torch.cat([target.scores(means[carriers]) for target in self._targets])
        embedding = nn.functional.softplus(-scores).sum()
        return cross_entropy(step) + scheme.lambda1 * centre + scheme.lambda2 * embedding


@dataclasses.dataclass(frozen=True)
class _Target:
    """One layer's signed projections, (carriers, features, bits), and which entries are real bits."""

    layer: str
    projection: Tensor = dataclasses.field(repr=False)
    real: Tensor = dataclasses.field(repr=False)

    def scores(self, means: Tensor) -> Tensor:
        """Projections in the direction of the message, of all real bits; ``means`` is (carriers, features)."""
        return torch.einsum("cf,cfb->cb", means, self.projection)[self.real]


def _targets(key: Key, model: Classifier) -> list[_Target]:
    carriers, message = list(key.public["carriers"]), key.message()
    cells = cells_of(key)
    targets = []
    for layer in key.public["layers"]:
        own = [cell for cell in cells if cell.layer == layer]
        width, most = int(key.public["features"][layer]), max((cell.bits for cell in own), default=0)
        projection = np.zeros((len(carriers), width, most), dtype=np.float32)
        real = np.zeros((len(carriers), most), dtype=bool)
        for row, cell in enumerate(own):
            signs = 2.0 * message[cell.start : cell.start + cell.bits] - 1.0
            projection[row, :, : cell.bits] = projection_of(key.secret, cell, width) * signs
            real[row, : cell.bits] = True
        on_device = torch.from_numpy(projection).to(model.device, model.dtype)
        targets.append(_Target(layer, on_device, torch.from_numpy(real).to(model.device)))
    return targets


def centred_means(means: Tensor, centred: bool) -> Tensor:
    """What sets each carrier's mean apart from the average of all carriers, where attacks move all of them alike."""
    return means - means.mean(dim=0, keepdim=True) if centred else means


def _means(features: Tensor, carriers: int) -> Tensor:
    return features.flatten(1).reshape(carriers, -1, features[0].numel()).mean(dim=1)
