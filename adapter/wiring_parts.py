"""The parts of a wiring: groups of neurons, stretches of them, and where the outputs of layers lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deepseal.adapter.wiring_laws import Law
from deepseal.errors import InputError

CLASSES = "the order of the classes"
INPUT = "the order of the inputs"


@dataclasses.dataclass(frozen=True)
class Reader:
    """A layer that takes a group's neurons; each neuron is ``block`` consecutive inputs of it (after a flattening)."""

    layer: str
    block: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Neurons (or channels) that can only change places together.

    Attributes:
        width: number of neurons.
        makers: linear and convolutional layers that make them, in the order of the forward pass.
        norms: batch normalisations that they pass through.
        readers: linear and convolutional layers that take them.
        fixed: why they cannot change places; None when they can.
    """

    width: int
    makers: tuple[str, ...]
    norms: tuple[str, ...]
    readers: tuple[Reader, ...]
    fixed: str | None


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of a group between layers with weights (batch normalisation too), where one factor a neuron applies."""

    group: int
    law: Law


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer's output lies: its segment, the consecutive outputs that are one neuron, and the neurons' axis.

    ``last``: neurons lie on the last of three or more axes, as in (N, tokens, neurons); else on the one behind N.
    """

    segment: int
    block: int
    last: bool = False


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The neurons of a network.

    Attributes:
        groups: in the order of the forward pass.
        segments: stretches of the groups.
        inputs: segment and block that each linear or convolutional layer and batch normalisation reads.
        outputs: segment and block of the output of each layer that runs once.
        others: layers with weights that are not understood, and why.
    """

    groups: tuple[Group, ...]
    segments: tuple[Segment, ...]
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    others: Mapping[str, str]

    def free(self) -> list[int]:
        """Positions of the groups whose neurons can change places.

        Raises:
            InputError: there are none.
        """
        found = [index for index, group in enumerate(self.groups) if group.fixed is None and group.width > 1]
        if not found:
            reasons = "; ".join(sorted({group.fixed for group in self.groups if group.fixed})) or "no hidden layer"
            do = "use a network of linear, convolutional and batch normalisation layers"
            raise InputError("hidden neurons that can be moved", found=reasons[:300], do=do)
        return found

    def fixed(self) -> dict[str, str]:
        """Hidden layers whose neurons cannot be moved, and why (the classes do not count)."""
        made = {
            layer: group.fixed
            for group in self.groups
            for layer in group.makers
            if group.fixed is not None and group.fixed != CLASSES
        }
        return {**self.others, **made}
