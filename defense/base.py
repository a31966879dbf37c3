"""What a detector is: unsupervised, fitted on clean data only, and asked for one number an input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from deepseal.adapter import BlackBox
from deepseal.adapter.capture import Tap
from deepseal.defense.context import Context, Reference
from deepseal.registry import Registry
from deepseal.rng import Rng

# Fitted tensors by name: what a monitor file holds of a detector.
State = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a detector asks of the model.

    Attributes:
        access: ``query``: answers; ``gradient``: also their gradients; ``module``: hidden layers.
        passes: forward passes beside the one that is shared.
        differentiable: whether its score has a useful gradient in the input; False: through a surrogate only.
        images: whether it needs inputs of shape (C, H, W).
        taps: hidden layers that it reads.
        supervised: whether it is fitted on attacks. None of ours is; some baselines of the field are.
    """

    access: Literal["query", "gradient", "module"] = "query"
    passes: int = 0
    differentiable: bool = True
    images: bool = False
    taps: tuple[Tap, ...] = ()
    supervised: bool = False


class Detector(Protocol):
    """Scores how unlike clean data an input is. Instances are frozen parameters; what they learn is a ``State``."""

    name: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """The parameters as plain values."""
        ...

    @property
    def needs(self) -> Needs:
        """What it asks of the model; the layers that ``placed`` settled."""
        ...

    def placed(self, model: BlackBox) -> Detector:
        """The same detector with everything that was left ``auto`` settled for this model, such as its layer.

        Raises:
            InputError: a model that it does not fit.
        """
        ...

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Learn from clean data.

        Raises:
            InputError: data that are too few.
        """
        ...

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) scores, each of its own input alone; higher is more suspicious. Differentiable where the context is."""
        ...


DETECTORS: Registry[Detector] = Registry(
    "detector",
    "deepseal.detectors",
    {
        "max-softmax": "deepseal.defense.confidence:MaxSoftmax",
        "energy": "deepseal.defense.confidence:Energy",
        "density": "deepseal.defense.density:LatentDensity",
        "dictionary": "deepseal.defense.dictionary:Dictionary",
        "deepfense-latent": "deepseal.defense.latent_defender:DeepFenseLatent",
        "hdda": "deepseal.defense.hdda:HDDA",
        "ratio": "deepseal.defense.ratio:DistanceRatio",
        "inrel": "deepseal.defense.input_pca:RelativeReconstruction",
        "input-pca": "deepseal.defense.input_pca:Reconstruction",
        "odds": "deepseal.defense.odds:Odds",
        "dist": "deepseal.defense.boundary:BoundaryDistance",
        "squeeze": "deepseal.defense.squeezing:FeatureSqueezing",
        "flip": "deepseal.defense.flip:FlipConsistency",
        "mahalanobis": "deepseal.defense.mahalanobis:Mahalanobis",
        "lid": "deepseal.defense.lid:LID",
        "knn": "deepseal.defense.knn:NearestNeighbours",
        "kernel-density": "deepseal.defense.kernel_density:KernelDensity",
        "magnet": "deepseal.defense.magnet:MagNet",
        "vim": "deepseal.defense.vim:ViM",
        "gram": "deepseal.defense.gram:Gram",
        "constant": "deepseal.defense.constant:Constant",
    },
)
