"""Data projection: a dictionary of training samples whose span the client projects its input on, outside the circuit.

Source: B. Rouhani, M. Riazi, F. Koushanfar, "DeepSecure: Scalable Provably-Secure Deep Learning", DAC 2018, data
pre-processing. The projection D D+ a is Q Q^T a for any orthonormal basis Q of the span of D.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepseal.adapter import Classifier
from deepseal.adapter.capture import PARAMETRIC, execution_order
from deepseal.errors import InputError, understood
from deepseal.rng import Rng

Reals = NDArray[np.float64]
Samples = NDArray[np.float32] | Reals
_BLOCK = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Dictionary:
    """What the stream left behind.

    Attributes:
        basis: (columns, features) float64, orthonormal rows that span the samples that joined.
        samples: (columns,) their positions in the data.
        full: the limit of columns kept out at least one sample whose error was above the threshold.
    """

    basis: Reals
    samples: NDArray[np.int64]
    full: bool


def build_dictionary(x: Samples, *, error: float, limit: int, rng: Rng) -> Dictionary:
    """Stream samples in a seeded order; one joins when ||D D+ a - a|| / ||a|| exceeds the threshold.

    Each new column is orthogonalised twice, which keeps the basis orthonormal to the last digits (Giraud, Langou,
    Rozložník, van den Eshof, Numer. Math. 101, 2005). Blocks give what single samples give: errors only shrink.

    Args:
        x: (N, features) samples, normalised as the network takes them.
        error: threshold, between 0 and 1.
        limit: most columns.
        rng: order of the stream.

    Raises:
        InputError: no sample that is not zero.
    """
    order = rng.numpy().permutation(len(x))
    basis = np.empty((min(limit, *x.shape), x.shape[1]))
    samples: list[int] = []
    full = False
    for start in range(0, len(order), _BLOCK):
        places = order[start : start + _BLOCK]
        block = x[places].astype(np.float64)
        sizes = np.linalg.norm(block, axis=1)
        known = len(samples)
        residual = block - (block @ basis[:known].T) @ basis[:known]
        above = (np.linalg.norm(residual, axis=1) > error * sizes) & (sizes > 0)
        for place, row in zip(places[above], residual[above] / sizes[above, None], strict=True):
            left = row
            for _ in range(2):
                left = left - (basis[: len(samples)] @ left) @ basis[: len(samples)]
            norm = float(np.linalg.norm(left))
            if norm <= max(error, 1e-10):
                continue
            if len(samples) == len(basis):
                full = True
                break
            basis[len(samples)] = left / norm
            samples.append(int(place))
        if full:
            break
    if not samples:
        raise InputError("samples that are not all zero", found="zeros only", do="check the data")
    return Dictionary(basis[: len(samples)].copy(), np.array(samples, dtype=np.int64), full)


def principal_axes(basis: Reals, x: Samples) -> Reals:
    """The same span, its basis turned to the principal axes of the samples in it, largest variance first.

    No row is then a sample of the dictionary, as the first one is after Gram-Schmidt.
    """
    moments = np.zeros((len(basis), len(basis)))
    for start in range(0, len(x), _BLOCK):
        inside = x[start : start + _BLOCK].astype(np.float64) @ basis.T
        moments += inside.T @ inside
    values, turn = np.linalg.eigh(moments)
    rows: Reals = turn[:, np.argsort(values)[::-1]].T @ basis
    largest = rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)]
    positive: Reals = rows * np.sign(largest)[:, None]
    return positive


def first_linear(model: Classifier) -> str | None:
    """Name of the layer that reads the whole input, if that is a linear one; only there projection applies."""
    order = [(name, layer) for name, layer, _ in execution_order(model.module, model.probe())
             if isinstance(layer, PARAMETRIC)]  # fmt: skip
    features = int(np.prod(model.spec.shape))
    if not order or not isinstance(order[0][1], nn.Linear) or order[0][1].in_features != features:
        return None
    return order[0][0]


class ProjectedLinear(nn.Linear):
    """A linear layer behind a projection: A (P x) + b. With W = A P it is the given network's layer again."""

    projection: Tensor

    def __init__(self, layer: nn.Linear, projection: Tensor) -> None:
        super().__init__(len(projection), layer.out_features, layer.bias is not None)
        self.to(layer.weight)
        self.register_buffer("projection", projection.to(layer.weight))
        with torch.no_grad():
            self.weight.copy_(layer.weight @ self.projection.T)  # W Q, the paper's starting point
            if layer.bias is not None:
                self.bias.copy_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, …, features) to (N, …, outputs)."""
        return super().forward(x @ self.projection.T)

    def plain(self) -> nn.Linear:
        """The same layer on the input itself, with weight A P."""
        layer = nn.Linear(self.projection.shape[1], self.out_features, self.bias is not None).to(self.weight)
        with torch.no_grad():
            layer.weight.copy_((self.weight.double() @ self.projection.double()).to(self.weight))
            if self.bias is not None:
                layer.bias.copy_(self.bias)
        return layer


def project_layer(model: Classifier, name: str, projection: Reals) -> Classifier:
    """A copy of a model whose named layer reads its input through a projection with orthonormal rows.

    Raises:
        InputError: a network that uses the layer's weight without calling the layer.
    """
    result = model.copy()
    layer = result.module.get_submodule(name)
    assert isinstance(layer, nn.Linear)  # noqa: S101
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        result.module.set_submodule(name, ProjectedLinear(layer, torch.from_numpy(projection)))
        with understood("a network that calls its first layer", "use -p method=pruning"):
            result.query(torch.full((1, *model.spec.shape), sum(model.spec.bounds) / 2))
    return result


def unproject(model: Classifier) -> Classifier:
    """A copy in which layers behind a projection are plain ones again, with weights A P."""
    result = model.copy()
    with torch.random.fork_rng(devices=[]):
        for name, layer in list(result.module.named_modules()):
            if isinstance(layer, ProjectedLinear):
                result.module.set_submodule(name, layer.plain())
    return result
