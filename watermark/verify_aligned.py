"""The verdict on a suspect whose neurons were put back first.

What alignment may not do is to make evidence. Aligned to the model *before* it was marked, nothing that is done to the
suspect depends on the key's secret coins, and the p-value stays exact. Aligned to the marked model it does: embedding
leaves alone the neurons that agree with the message anyway, so keeping just the neurons that resemble the marked ones
most, in their sizes, makes any relative of it (same initialisation) carry the mark. Therefore the gate is low, sizes
are the suspect's own, and nearly all of the neurons must be found where the original is a marked one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from deepseal.adapter import BlackBox, Classifier
from deepseal.errors import InputError
from deepseal.watermark.align import GATE, align
from deepseal.watermark.aligned import Aligned, in_terms_of
from deepseal.watermark.key import Key
from deepseal.watermark.unrotate import unrotate
from deepseal.watermark.verify import Verification, verify

READINGS = 2  # as the suspect stands, and aligned
MINIMUM = 0.5
MINIMUM_MARKED = 0.95
_MARKED = 1e-3  # p-value at which an original counts as marked


@dataclasses.dataclass(frozen=True)
class AlignedVerification:
    """A verdict, and the alignment that it rests on.

    Attributes:
        verification: of the aligned suspect; the rate is divided by the readings too.
        alignment: plain values: rows of ``Alignment.summary``, gate, minimum, layers that were not read, readings
            that were paid for, and whether the original carries the mark.
    """

    verification: Verification
    alignment: dict[str, Any]


def aligned_view(original: Classifier, suspect: Classifier, *, gate: float = GATE, minimum: float = MINIMUM) -> Aligned:
    """The suspect in the original's coordinates; layers of which less than ``minimum`` was found are not read.

    Nor are those of a residual stream whose writers have a lower mean cosine than that.

    Raises:
        InputError: networks that cannot be traced, or a suspect of another structure.
    """
    named = in_terms_of(original, suspect)
    straight, turns = unrotate(original, named, gate=max(gate, minimum))
    alignment = align(original, straight, gate=gate, movable=not turns)
    return Aligned(original, named, alignment, minimum=minimum, turns=turns, straight=straight)


def verify_aligned(
    model: Classifier,
    key: Key,
    original: Classifier,
    *,
    max_false_positive: float = 1e-6,
    null_keys: int = 0,
    null_models: Sequence[BlackBox] = (),
    tried: int = 1,
    gate: float = GATE,
) -> AlignedVerification:
    """Align a suspect to the original, and decide (see ``verify``).

    The rate is divided by two: whoever aligns has two readings to choose from. A layer of which less than half of the
    neurons were found, 95 % with a marked original, is not read: its bits are erasures. When no layer of the key is
    left, the verdict is ``inconclusive``.

    Args:
        model: the suspect, with any widths.
        key: the owner's key.
        original: best the model before it was marked (see the module's docstring), or the marked one.
        max_false_positive: greatest probability of ``owned`` for a model that is independent of the key.
        null_keys: strangers' keys for the empirical null.
        tried: keys or models among which this pair was chosen.
        null_models: independent models, each of which is aligned like the suspect.
        gate: least cosine of the incoming weights of two neurons that are the same.

    Raises:
        InputError: a suspect of another structure, or what ``verify`` raises.
    """
    in_terms_of(original, model)  # whether they fit at all, before what the key says of the original
    marked = _is_marked(original, key)
    minimum = MINIMUM_MARKED if marked else MINIMUM
    view = aligned_view(original, model, gate=gate, minimum=minimum)
    others = [aligned_view(original, other, gate=gate, minimum=minimum) for other in map(_white, null_models)]
    result = verify(
        view,
        key,
        max_false_positive=max_false_positive,
        null_keys=null_keys,
        null_models=others,
        tried=tried * READINGS,
    )
    layers = _layers(key, view)
    unread = [layer for layer in layers if layer in view.unread()]
    warnings = list(result.warnings)
    if marked:
        warnings.append(
            "aligned to a marked model, so for models of the same initialisation the p-value is not exact; "
            "align to the model before it was marked"
        )
    if unread:
        found = f"less than {100 * minimum:g} % of their neurons, or of the stream around them, found in the suspect"
        warnings.append(f"{', '.join(unread)} not read: {found}")
    if unread and len(unread) == len(layers):
        result = dataclasses.replace(result, verdict="inconclusive", message=None)
    summary = {
        "groups": view.alignment.summary(),
        "streams": [turn.summary() for turn in view.turns],
        "gate": gate,
        "minimum_share": minimum,
        "layers_not_read": unread,
        "readings": READINGS,
        "original_is_marked": marked,
    }
    return AlignedVerification(dataclasses.replace(result, warnings=tuple(warnings)), summary)


def _layers(key: Key, view: Aligned) -> list[str]:
    """The layers that a key reads: those that it names, else all."""
    stated = key.public.get("layers", key.public.get("layer"))
    named = [stated] if isinstance(stated, str) else stated
    return list(named) if isinstance(named, list) and named else list(view.alignment.wiring.outputs)


def _is_marked(original: Classifier, key: Key) -> bool:
    try:
        return verify(original, key, max_false_positive=_MARKED).verdict == "owned"
    except InputError as error:
        found = f"another model (expected {error.expected}; found {error.found})"
        do = "pass your own model, as it was before it was marked"
        raise InputError("an original that the key was made for", found=found, do=do) from error


def _white(model: BlackBox) -> Classifier:
    if not isinstance(model, Classifier):
        do = "leave it out, or pass its weights"
        raise InputError("independent models with their weights", found=f"{model!r}", do=do)
    return model
