"""Alignment before extraction: a suspect's neurons are put back into the places and scales of the owner's original.

Undone are permutation, positive scaling, changes of sign, dummy, duplicated and split neurons, and neurons that were
cut away. Neurons are matched layer by layer by their incoming weights alone (Hungarian algorithm on cosines: H. Kuhn,
1955; for networks S. Ainsworth, J. Hayase, S. Srinivasa, "Git Re-Basin", ICLR 2023, section 3.2, who match incoming and
outgoing weights); what no neuron of the original resembles is not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier
from deepseal.adapter.capture import NORMALISATION
from deepseal.adapter.wiring import Wiring, wiring_of
from deepseal.errors import InputError
from deepseal.watermark.matching import Floats, Matching, Rows, Similarity, identity, match, similarity

GATE = 0.5
_SWEEPS = 2
_SPREAD = 10.0


@dataclasses.dataclass(frozen=True)
class Alignment:
    """How a suspect's neurons correspond to the original's.

    Attributes:
        wiring: of the suspect; groups and segments are numbered as in the original's.
        widths: neurons of each of the original's groups.
        matchings: by group.
        scales: by segment, (m,): by which the suspect's activations are divided: the size of a neuron's incoming
            weights, over the mean size of the original's, and its change of sign. Not over the size of its partner's:
            where the original is marked, its sizes tell of the mark.
    """

    wiring: Wiring
    widths: tuple[int, ...]
    matchings: Mapping[int, Matching]
    scales: Mapping[int, Floats]

    def share(self, group: int) -> float:
        """Share of the original's neurons of a group that were found."""
        return float(self.matchings[group].found(self.widths[group]).mean())

    def summary(self) -> list[dict[str, Any]]:
        """A row for each group of neurons that can be moved, as plain values."""
        rows = []
        for index, group in enumerate(self.wiring.groups):
            if group.fixed is not None or not group.makers:
                continue
            matching = self.matchings[index]
            matched = matching.partner >= 0
            rows.append(
                {
                    "layers": list(group.makers),
                    "neurons": self.widths[index],
                    "neurons_of_the_suspect": group.width,
                    "matched_share": self.share(index),
                    "copies": int(matched.sum()) - len(np.unique(matching.partner[matched])),
                    "moved": int((matching.partner[matched] != np.flatnonzero(matched)).sum()),
                    "mean_cosine": float(matching.cosine[matched].mean()) if matched.any() else None,
                }
            )
        return rows


def align(original: Classifier, suspect: Classifier, *, gate: float = GATE, movable: bool = True) -> Alignment:
    """Match the neurons of a suspect, whose layers are named as the original's, to those of the original.

    Args:
        original: the owner's model: the one that was marked, or the one before it was marked.
        suspect: see ``aligned.in_terms_of`` for one whose layers have other names.
        gate: least cosine of a matched pair.
        movable: refuse networks without hidden neurons that can be moved one by one.

    Raises:
        InputError: a network that cannot be traced or has no hidden neurons to move, or a suspect of another structure.
    """
    ours, theirs = wiring_of(original), wiring_of(suspect)
    if movable:
        ours.free()
    check_same_structure(ours, theirs)
    return Walk(original.module, suspect.module, ours, theirs, gate).alignment()


class Walk:
    """From the inputs to the outputs: each group is matched in the coordinates of those before it.

    A second sweep matches residual streams by all the layers that make them, once those are known.
    """

    def __init__(self, original: nn.Module, suspect: nn.Module, ours: Wiring, theirs: Wiring, gate: float) -> None:
        self.modules, self.ours, self._theirs, self._gate = (original, suspect), ours, theirs, gate
        self._matchings = {i: identity(g.width) for i, g in enumerate(ours.groups) if g.fixed or not g.makers}
        self._factors = {i: np.ones(theirs.groups[s.group].width) for i, s in enumerate(theirs.segments)}
        self._levels: dict[int, tuple[Floats, Floats]] = {}
        waiting = False
        for _ in range(_SWEEPS):
            for index, group in enumerate(ours.groups):
                if group.fixed is None and group.makers:
                    waiting |= self._group(index)
            if not waiting:
                break

    def alignment(self) -> Alignment:
        widths = tuple(group.width for group in self.ours.groups)
        scales = {index: self._scale(index) for index in range(len(self.ours.segments))}
        return Alignment(self._theirs, widths, self._matchings, scales)

    def share(self, group: int) -> float:
        """Share of the original's neurons of a group that were found."""
        return float(self._matchings[group].found(self.ours.groups[group].width).mean())

    def _scale(self, segment: int) -> Floats:
        """Sizes of the suspect's neurons over the mean of the original's, with the signs of their factors."""
        factors = self._factors[segment]
        if segment not in self._levels or self.ours.segments[segment].law not in ("any", "positive"):
            return np.sign(factors)
        ours, theirs = self._levels[segment]
        level = theirs / ours.mean() if ours.mean() > 0 else theirs
        return np.asarray(np.sign(factors) * np.where(level > 0, level, 1.0))

    def _group(self, index: int) -> bool:
        """Match a group; True when some of its makers could not be used, since what they read is not matched yet."""
        makers = self.ours.groups[index].makers
        known = [n for n in makers if self.ours.segments[self.ours.inputs[n].segment].group in self._matchings]
        by_segment: dict[int, list[str]] = {}
        for name in known:
            by_segment.setdefault(self.ours.outputs[name].segment, []).append(name)
        signed = [self.ours.segments[segment].law in ("any", "sign") for segment in by_segment]
        parts = [similarity(self.rows(names)) for names in by_segment.values()]
        matching = match(parts, signed, self._gate)
        self._matchings[index] = matching
        for segment, part in zip(by_segment, parts, strict=True):
            self._keep(segment, [_factors(part, matching)], [(part.original, part.suspect)])
        self._normalisations(index, by_segment)
        return len(known) < len(makers)

    def rows(self, names: list[str]) -> Rows:
        """Incoming weights of both, in the original's coordinates, each input weighed as the suspect holds it.

        So fine-tuning, which moves all weights of the suspect alike, is noise of the same size in every column. Very
        unequal weights are clipped, lest a few columns decide.
        """
        ours, theirs = [], []
        for name in names:
            place = self.ours.inputs[name]
            group = self.ours.segments[place.segment].group
            matching, scale = self._matchings[group], self._factors[place.segment]
            one, other = (_weight(module, name, place.block) for module in self.modules)
            taken = np.flatnonzero(matching.partner >= 0)
            partner = matching.partner[taken]
            summed = np.zeros((one.shape[1], len(other), one.shape[2]))
            np.add.at(summed, partner, (other[:, taken] * scale[taken][None, :, None]).swapaxes(0, 1))
            columns = summed.swapaxes(0, 1)
            held = np.zeros(one.shape[1])
            np.maximum.at(held, partner, np.abs(scale[taken]))
            there = held > 0
            typical = float(np.median(held[there])) if there.any() else 1.0
            held = np.clip(held, typical / _SPREAD, typical * _SPREAD)
            ours.append((one[:, there] / held[there][None, :, None]).reshape(len(one), -1))
            theirs.append((columns[:, there] / held[there][None, :, None]).reshape(len(other), -1))
        return Rows(np.concatenate(ours, axis=1), np.concatenate(theirs, axis=1))

    def _keep(self, segment: int, factors: list[Floats], levels: list[tuple[Floats, Floats]]) -> None:
        """Keep the mean of what was measured at the sources of a segment, as far as its law allows factors."""
        law = self.ours.segments[segment].law
        mean = _geometric_mean(factors)
        sign = np.where(mean < 0, -1.0, 1.0) if law in ("any", "sign") else 1.0
        size = np.abs(mean) if law in ("any", "positive") else np.ones_like(mean)
        self._factors[segment] = sign * np.where(size > 0, size, 1.0)
        ours, theirs = ([pair[side] for pair in levels] for side in (0, 1))
        self._levels[segment] = (_geometric_mean(ours), _geometric_mean(theirs))

    def _normalisations(self, index: int, made: Mapping[int, list[str]]) -> None:
        """Behind a batch normalisation the factor is the one before it times that of its gains."""
        partner = self._matchings[index].partner
        measured: dict[int, list[tuple[Floats, tuple[Floats, Floats]]]] = {}
        for name in self.ours.groups[index].norms:
            into, out = self.ours.inputs[name].segment, self.ours.outputs[name].segment
            if out in made or into not in self._levels:
                continue
            ours, theirs = (_gain(module.get_submodule(name)) for module in self.modules)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.nan_to_num(theirs / ours[partner.clip(min=0)], posinf=0.0, neginf=0.0)
            factor = np.where(partner >= 0, ratio * self._factors[into], 1.0)
            one, other = self._levels[into]
            measured.setdefault(out, []).append((factor, (one * np.abs(ours), other * np.abs(theirs))))
            self._keep(out, [f for f, _ in measured[out]], [level for _, level in measured[out]])


def _factors(part: Similarity, matching: Matching) -> Floats:
    """(m,) signed factor between each neuron of the suspect and its partner."""
    columns, rows = np.arange(len(matching.partner)), matching.partner.clip(min=0)
    sign = np.where(part.cosine[rows, columns] < 0, -1.0, 1.0)
    return np.asarray(np.where(matching.partner >= 0, sign * part.ratio[rows, columns], 1.0))


def _geometric_mean(factors: list[Floats]) -> Floats:
    sizes = np.stack([np.abs(factor) for factor in factors])
    size = np.exp(np.log(np.where(sizes > 0, sizes, 1.0)).mean(axis=0))
    return np.asarray(np.where(sum(np.sign(factor) for factor in factors) < 0, -size, size))


def _weight(module: nn.Module, name: str, block: int) -> Floats:
    """(outputs, neurons read, weights a neuron) of a layer; what is no number says as little as 0."""
    weight: Tensor = module.get_submodule(name).get_parameter("weight").detach().double().cpu()
    weight = torch.nan_to_num(weight, nan=0.0, posinf=0.0, neginf=0.0)
    return np.asarray(weight.reshape(weight.shape[0], weight.shape[1] // block, -1).numpy())


def _gain(layer: nn.Module) -> Floats:
    """(channels,) factor of a batch normalisation in evaluation; 1 where it has no statistics or no gain of its own."""
    assert isinstance(layer, NORMALISATION)  # noqa: S101
    if layer.running_var is None or layer.weight is None:
        return np.ones(layer.num_features)
    gain = layer.weight.detach().double() / (layer.running_var.double() + layer.eps).sqrt()
    return np.asarray(torch.nan_to_num(gain).cpu().numpy())


def check_same_structure(ours: Wiring, theirs: Wiring) -> None:
    """Refuse a suspect whose layers hang together in another way; widths of movable neurons may differ.

    Raises:
        InputError: another structure.
    """

    def shape(wiring: Wiring) -> list[tuple[Any, ...]]:
        return [
            (g.makers, g.norms, g.readers, g.fixed, g.width if g.fixed or not g.makers else None) for g in wiring.groups
        ]

    if shape(ours) != shape(theirs) or [s.group for s in ours.segments] != [s.group for s in theirs.segments]:
        expected = "a suspect with the original's layers and connections (their widths may differ)"
        differing = [
            str(one[0] or other[0]) for one, other in zip(shape(ours), shape(theirs), strict=False) if one != other
        ]
        found = f"differences at {', '.join(differing)}"[:300] if differing else "another number of layers"
        raise InputError(expected, found=found, do="name the architecture that the suspect has with --arch")
