"""A suspect's residual streams turned back into the coordinates of the owner's original.

The rotation that a thief put on a stream is estimated from what writes into it: orthogonal Procrustes over the columns
of all writers (P. Schönemann, 1966), each column the trace of one input. Inputs that are neurons of hidden layers are
matched first, so both are repeated in sweeps. A rotation has many parameters and fits anything a little; it counts by
the columns that it was not fitted to (cross-validation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier
from deepseal.adapter.rotation import complement, embedded, rotated
from deepseal.adapter.streams import Stream, streams_of
from deepseal.adapter.wiring import wiring_of
from deepseal.watermark.align import GATE, Walk, check_same_structure
from deepseal.watermark.matching import Floats, chance_cosine

Columns = tuple[Floats, Floats]  # (d, n) of the original's writer, and of the suspect's
_SWEEPS = 3
_FOLDS = 5
_ENOUGH = 0.5  # of a layer's neurons, for its columns to be used


@dataclasses.dataclass(frozen=True)
class Turn:
    """What became of a stream.

    Attributes:
        stream: of the original.
        rotation: (d, d) Q with h_suspect = Q h_original; None where the stream was left as it stands.
        plain: mean over the writers of the cosine of their columns, as the suspect stands.
        cosine: the same after the best rotation, of columns that it was not fitted to.
        gate: cosine that was needed.
    """

    stream: Stream
    rotation: Floats | None
    plain: float
    cosine: float
    gate: float

    @property
    def found(self) -> bool:
        """Whether the suspect's stream is the original's, turned or not."""
        return max(self.plain, self.cosine) >= self.gate

    def summary(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "writers": [*self.stream.writers, *self.stream.parameters],
            "width": self.stream.width,
            "rotated": self.rotation is not None,
            "cosine_as_it_stands": self.plain,
            "cosine_of_left_out_columns": self.cosine,
            "needed": self.gate,
        }


def unrotate(original: Classifier, suspect: Classifier, *, gate: float = GATE) -> tuple[Classifier, tuple[Turn, ...]]:
    """The suspect with its streams turned back, which computes the same, and what was found of each stream.

    A stream is turned where that explains more of its writers than leaving it as it stands does. Gains of
    normalisations become the original's, and readers make up for it. A stream whose neurons were matched one by one,
    or that has another structure or width in the suspect, is left to that matching, and not listed.

    Args:
        original: the owner's model.
        suspect: with the layers' names of the original.
        gate: least mean cosine over the writers.

    Raises:
        InputError: a network that cannot be traced, or a suspect of another structure.
    """
    ours, theirs = wiring_of(original), wiring_of(suspect)
    kept = set(streams_of(suspect).free)
    streams = [stream for stream in streams_of(original).free if stream in kept]
    if not streams:
        return suspect, ()
    check_same_structure(ours, theirs)
    walk = Walk(original.module, suspect.module, ours, theirs, GATE)
    streams = [stream for stream in streams if not _is_matched(walk, stream)]
    plain = {stream: _mean_cosine(_columns(walk, stream, streams), stream, turned=False) for stream in streams}
    turns = {stream: np.eye(stream.width) for stream in streams}
    straight = suspect
    for sweep in range(_SWEEPS):
        for stream in streams:
            columns = _columns(walk, stream, streams, first=sweep == 0)
            if columns:
                turns[stream] = turns[stream] @ procrustes(columns, centred=stream.centred)
        straight = _turned_back(original, suspect, turns)
        walk = Walk(original.module, straight.module, ours, theirs, GATE)
    result = []
    for stream in streams:
        cosine = _mean_cosine(_columns(walk, stream, streams), stream, turned=True)
        chance = float(chance_cosine(np.array([stream.width - stream.centred], dtype=np.float64), 1)[0])
        needed = max(gate, chance)
        turned = cosine > plain[stream] and cosine >= needed
        result.append(Turn(stream, turns[stream] if turned else None, plain[stream], cosine, needed))
    used = {
        turn.stream: np.eye(turn.stream.width) if turn.rotation is None else turn.rotation
        for turn in result
        if turn.rotation is not None or (turn.found and not _same_gains(original, suspect, turn.stream))
    }
    return _turned_back(original, suspect, used) if used else suspect, tuple(result)


def procrustes(columns: Sequence[Columns], *, centred: bool) -> Floats:
    """The orthogonal Q that minimises ||B - Q A||, A and B the columns of original and suspect: U V^T of B A^T.

    ``centred``: among those that keep the mean over the features.
    """
    ours, theirs = (np.concatenate([pair[side] for pair in columns], axis=1) for side in (0, 1))
    if not centred:
        u, _, v = np.linalg.svd(theirs @ ours.T)
        return np.asarray(u @ v)
    width = len(ours)
    basis = complement(width).numpy()
    u, _, v = np.linalg.svd(basis.T @ theirs @ ours.T @ basis)
    return np.asarray(embedded(torch.from_numpy(u @ v), width).numpy())


def _mean_cosine(columns: Sequence[Columns], stream: Stream, *, turned: bool) -> float:
    """Mean over the writers of the cosine of their columns, after a rotation fitted to the other folds' columns."""
    if not columns:
        return 0.0
    dots = np.zeros(len(columns))
    for fold in range(_FOLDS if turned else 1):
        rest, own = [], []
        for ours, theirs in columns:
            left_out = np.arange(ours.shape[1]) % _FOLDS == fold if turned else np.ones(ours.shape[1], dtype=bool)
            rest.append((ours[:, ~left_out], theirs[:, ~left_out]))
            own.append((ours[:, left_out], theirs[:, left_out]))
        q = procrustes(rest, centred=stream.centred) if turned else np.eye(stream.width)
        dots += [float((theirs * (q @ ours)).sum()) for ours, theirs in own]
    sizes = np.array([np.linalg.norm(ours) * np.linalg.norm(theirs) for ours, theirs in columns])
    return float(np.divide(dots, sizes, out=np.zeros_like(dots), where=sizes > 0).mean())


def _columns(walk: Walk, stream: Stream, streams: Sequence[Stream], *, first: bool = False) -> list[Columns]:
    """What each writer adds to the stream an input, in both models, as far as the inputs are known.

    At first those are inputs that nothing moves; later also matched neurons, and streams, which are turned back by now.
    """
    turned = {reader.layer for other in streams for reader in other.readers}
    found: list[Columns] = []
    for name in stream.writers:
        layers = [module.get_submodule(name) for module in walk.modules]
        if isinstance(layers[0], nn.Embedding):
            found.append(_pair([_floats(layer.get_parameter("weight")).T for layer in layers]))
            continue
        group = walk.ours.segments[walk.ours.inputs[name].segment].group
        if (first and (name in turned or walk.ours.groups[group].fixed is None)) or walk.share(group) < _ENOUGH:
            continue
        rows = walk.rows([name])
        ours, theirs = [rows.original], [rows.suspect]
        if layers[0]._parameters.get("bias") is not None:
            ours, theirs = (
                [*part, _floats(layer.get_parameter("bias"))[:, None]]
                for part, layer in zip((ours, theirs), layers, strict=True)
            )
        found.append((np.concatenate(ours, axis=1), np.concatenate(theirs, axis=1)))
    for name in stream.parameters:
        found.append(
            _pair([_floats(module.get_parameter(name)).reshape(-1, stream.width).T for module in walk.modules])
        )
    return found


def _is_matched(walk: Walk, stream: Stream) -> bool:
    """Whether the stream's neurons can be moved one by one, and were found so."""
    places = [walk.ours.outputs[name] for name in stream.writers if name in walk.ours.outputs]
    groups = {walk.ours.segments[place.segment].group for place in places}
    free = [group for group in groups if walk.ours.groups[group].fixed is None]
    return bool(free) and all(walk.share(group) >= _ENOUGH for group in free)


def _same_gains(original: Classifier, suspect: Classifier, stream: Stream) -> bool:
    ours, theirs = (_gains(model, stream) for model in (original, suspect))
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def _gains(model: Classifier, stream: Stream) -> dict[str, Tensor]:
    layers = {name: model.module.get_submodule(name) for name in stream.norms}
    weights = {name: layer._parameters.get("weight") for name, layer in layers.items()}
    return {name: weight.detach().cpu() for name, weight in weights.items() if weight is not None}


def _turned_back(original: Classifier, suspect: Classifier, turns: Mapping[Stream, Floats]) -> Classifier:
    """The suspect with h in place of Q h, and the original's gains."""
    gains = {name: gain for stream in turns for name, gain in _gains(original, stream).items()}
    back = {stream: torch.from_numpy(np.ascontiguousarray(q.T)) for stream, q in turns.items()}
    result = suspect.copy()
    rotated(suspect, back, result.module, gains=gains)
    return result


def _pair(values: Sequence[Floats]) -> Columns:
    ours, theirs = values
    return ours, theirs


def _floats(tensor: Tensor) -> Floats:
    values = torch.nan_to_num(tensor.detach().double().cpu(), nan=0.0, posinf=0.0, neginf=0.0)
    return np.asarray(values.numpy())
