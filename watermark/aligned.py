"""A suspect seen in the original's coordinates: its own answers and activations, at the original's places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepseal.adapter import Classifier
from deepseal.adapter.capture import NORMALISATION, PARAMETRIC, evaluating, execution_order
from deepseal.adapter.inputs import Batch
from deepseal.adapter.rewiring import Links, Move, Scale, rewired
from deepseal.adapter.tracing import is_rms_norm
from deepseal.adapter.widths import widen
from deepseal.errors import InputError
from deepseal.watermark.align import Alignment
from deepseal.watermark.unrotate import Turn


class Aligned(Classifier):
    """The suspect as its original's twin.

    Answers are the suspect's. Activations are the suspect's too, at the places and scales of their partners in the
    original, and 0 where a neuron has no partner; so are those of a whole layer of which too few were found. ``module``
    is the original's architecture with the suspect's weights at their partners' places, and 0 elsewhere: what schemes
    read that look at weights.

    Args:
        original: the owner's model.
        suspect: with the layers' names of the original, see ``in_terms_of``.
        alignment: of the two.
        minimum: least share of a layer's neurons that must be found, for the layer to be read.
        turns: what was found of residual streams; ``alignment`` is that of the suspect turned back.
        straight: the suspect turned back; None where it is the suspect itself.
    """

    def __init__(
        self,
        original: Classifier,
        suspect: Classifier,
        alignment: Alignment,
        *,
        minimum: float,
        turns: Sequence[Turn] = (),
        straight: Classifier | None = None,
    ) -> None:
        straight = straight or suspect
        self._original, self._minimum = original, minimum
        self._suspect, self._straight, self._alignment, self._turns = suspect, straight, alignment, tuple(turns)
        self._unread = {index for index in range(len(alignment.widths)) if alignment.share(index) < minimum}
        lost = [turn.stream for turn in turns if not turn.found]
        self._lost = {name for s in lost for name in (*s.writers, *(reader.layer for reader in s.readers))}
        module = _moved(original, straight, alignment, self._unread)
        with torch.no_grad():
            for name in self._lost:
                for tensor in module.get_submodule(name).parameters():
                    tensor.zero_()
        super().__init__(module, suspect.spec, architecture=original.architecture, metadata=suspect.metadata)

    @property
    def alignment(self) -> Alignment:
        """How the neurons correspond."""
        return self._alignment

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was found of the residual streams."""
        return self._turns

    def unread(self) -> list[str]:
        """Layers that are not read: too few of their neurons were found, or not the stream that they write or read."""
        wiring = self._alignment.wiring
        places = wiring.outputs.items()
        few = [name for name, place in places if wiring.segments[place.segment].group in self._unread]
        return list(dict.fromkeys([*few, *sorted(self._lost)]))

    def logits(self, x: Batch) -> Tensor:
        """The suspect's answers."""
        return self._suspect.logits(x)

    def stream(
        self, x: Batch, layers: Sequence[str], *, pool: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """The suspect's activations at the places and scales of the original."""
        for part in self._straight.stream(x, layers, pool=pool):
            yield {name: self._placed(name, values) for name, values in part.items()}

    def copy(self, *, metadata: Mapping[str, Any] | None = None) -> Aligned:
        """A view of a copy of the suspect."""
        suspect, straight = (model.copy(metadata=metadata) for model in (self._suspect, self._straight))
        return Aligned(
            self._original,
            suspect,
            self._alignment,
            minimum=self._minimum,
            turns=self._turns,
            straight=straight,
        )

    def _placed(self, layer: str, values: Tensor) -> Tensor:
        """(N, features of the suspect) to (N, features of the original); copies of one neuron are averaged."""
        if layer in self._lost:
            return torch.zeros_like(values)
        wiring = self._alignment.wiring
        place = wiring.outputs.get(layer)
        if place is None:
            raise InputError("a layer that alignment follows", found=layer, do="verify without --align")
        group = wiring.segments[place.segment].group
        matching, width = self._alignment.matchings[group], self._alignment.widths[group]
        if wiring.groups[group].fixed is not None:
            return values
        index = np.flatnonzero(matching.sure & (group not in self._unread))
        partner = torch.from_numpy(matching.partner[index])
        copies = torch.bincount(partner, minlength=width).clamp(min=1)[partner]
        factor = 1.0 / (torch.from_numpy(self._alignment.scales[place.segment][index]) * copies)
        maker = wiring.groups[group].width
        if place.last:  # (N, …, neurons), or pooled
            parts = values.reshape(len(values), -1, maker).transpose(1, 2)
        else:
            parts = values.reshape(len(values), maker, -1)
        taken = parts[:, torch.from_numpy(index)].double()
        placed = torch.zeros(len(values), width, taken.shape[2], dtype=torch.float64)
        placed.index_add_(1, partner, taken * factor[None, :, None])
        return (placed.transpose(1, 2) if place.last else placed).flatten(1).float()


def in_terms_of(original: Classifier, suspect: Classifier) -> Classifier:
    """The suspect with the names of the original's layers, found by the order in which both run.

    Raises:
        InputError: other layers in another order, or a suspect that computes something else in the original's
            architecture (other functions between its layers).
    """
    pairs = _pairs(original, suspect)
    if all(one == other for one, other in pairs):
        layers = dict(original.module.named_modules())
        movable = {one for one, _ in pairs if isinstance(layers[one], (*PARAMETRIC, *NORMALISATION))}
        _check_same_tensors(original, suspect, movable)
        return suspect
    given = suspect.tensors()
    state = {
        f"{one}.{name.removeprefix(other + '.')}": tensor
        for one, other in pairs
        for name, tensor in given.items()
        if name.startswith(other + ".")
    }
    module = original.copy().module
    widen(module, state)
    missing, unexpected = module.load_state_dict(state, strict=False)
    result = Classifier(module, suspect.spec, architecture=original.architecture, metadata=suspect.metadata)
    probe = suspect.spec.probe(8)
    if missing or unexpected or not torch.allclose(result.query(probe), suspect.query(probe), rtol=1e-3, atol=1e-4):
        found = "another function" if not (missing or unexpected) else f"other tensors: {[*missing, *unexpected][:4]}"
        do = "name the original's architecture with --arch"
        raise InputError("a suspect that computes the same in the original's architecture", found=found, do=do)
    return result


def _check_same_tensors(original: Classifier, suspect: Classifier, movable: set[str]) -> None:
    """Refuse other layers under the same names; the sizes of movable ones may differ."""
    ours, theirs = (
        {name: None if name.rpartition(".")[0] in movable else tensor.shape for name, tensor in state.items()}
        for state in (original.module.state_dict(), suspect.module.state_dict())
    )
    differing = sorted({name for name, _ in ours.items() ^ theirs.items()})
    if differing:
        found = f"others: {', '.join(differing)}"[:200]
        do = "name the architecture that the suspect has with --arch"
        raise InputError("a suspect with the original's layers and tensors", found=found, do=do)


def _pairs(original: Classifier, suspect: Classifier) -> list[tuple[str, str]]:
    """Names of the layers with weights of both, in the order in which they run."""
    runs = []
    for model in (original, suspect):
        with evaluating(model.module):
            order = execution_order(model.module, model.probe())
        own = [(n, layer) for n, layer, _ in order if list(layer.parameters()) or isinstance(layer, NORMALISATION)]
        runs.append([(n, "RMSNorm" if is_rms_norm(layer) else type(layer).__name__) for n, layer in own])
    one, other = runs
    if [kind for _, kind in one] != [kind for _, kind in other]:
        found = ", ".join(kind for _, kind in other)[:200]
        raise InputError("the original's layers, in its order", found=found, do="name the suspect's architecture")
    return [(mine, its) for (mine, _), (its, _) in zip(one, other, strict=True)]


def _moved(original: Classifier, suspect: Classifier, alignment: Alignment, unread: set[int]) -> torch.nn.Module:
    """The original's module with the suspect's weights, as far as they have a place in it."""
    moves, scales = {}, {}
    for index, group in enumerate(alignment.wiring.groups):
        if group.fixed is not None or not group.makers:
            continue
        matching, width = alignment.matchings[index], alignment.widths[index]
        taken = np.flatnonzero(matching.partner >= 0)
        order = np.full(width, -1, dtype=np.int64)
        best = taken[np.argsort(matching.cosine[taken], kind="stable")]
        order[matching.partner[best]] = best  # of several copies the most similar one, which comes last
        if index in unread:
            order[:] = -1
        partner = torch.from_numpy(matching.partner[taken])
        links = Links(torch.from_numpy(taken), partner, torch.ones(len(taken), dtype=torch.float64))
        moves[index] = Move(torch.from_numpy(order), links)
    for segment, factors in alignment.scales.items():
        group_index = alignment.wiring.segments[segment].group
        if group_index in moves:
            after = torch.ones(alignment.widths[group_index], dtype=torch.float64)
            scales[segment] = Scale(torch.from_numpy(factors), after)
    template = original.copy().module
    return rewired(suspect, alignment.wiring, moves, scales, template)
