"""Sets of detectors by name. Members were chosen on one seed's networks and are judged on others (``benchmarks``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepseal.adapter import BlackBox
from deepseal.defense.base import DETECTORS, Detector
from deepseal.errors import InputError, UnknownNameError

# ``fast``: one pass, shared with the victim. ``full``: further passes too. ``latent``: densities of several layers.
PRESETS: dict[str, tuple[str, ...]] = {
    "fast": ("max-softmax", "inrel", "ratio?layer=first", "magnet"),
    "full": ("max-softmax", "inrel", "ratio?layer=first", "magnet", "odds"),
    "latent": ("density?layer=early", "density?layer=middle", "density?layer=last", "input-pca"),
    "answers": ("max-softmax", "inrel", "magnet", "squeeze", "odds"),
}
PRESETS["deepfense"] = PRESETS["full"]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Detectors for a model, and a note for each of a preset that had to be left out."""

    detectors: tuple[Detector, ...]
    notes: tuple[str, ...]


def choose(model: BlackBox, words: Sequence[str]) -> Chosen:
    """Detectors placed on a model.

    Args:
        model: the victim.
        words: presets, or detectors as ``name?parameter=value``. What a preset names and the model does not allow is
            left out with a note; a detector named by itself is refused.

    Raises:
        UnknownNameError: neither a preset nor a detector.
        InputError: a detector that does not fit, the same twice, or nothing that fits.
    """
    found: dict[str, Detector] = {}
    notes: list[str] = []
    for word in words:
        for member in PRESETS.get(word, (word,)):
            try:
                placed = _built(member).placed(model)
            except InputError as error:
                if word not in PRESETS or isinstance(error, UnknownNameError):
                    raise
                notes.append(f"{member} is off: {error}")
                continue
            title = title_of(placed)
            if title in found and word not in PRESETS:
                raise InputError("each detector once", found=f"{title} twice", do="name it once")
            found[title] = placed
    if not found:
        raise InputError("at least one detector that fits the model", found="none", do="; ".join(notes) or "name one")
    return Chosen(tuple(found.values()), tuple(notes))


def title_of(detector: Detector) -> str:
    """Its name, with the layer where it reads one."""
    layer = detector.as_dict().get("layer")
    return detector.name if layer is None else f"{detector.name}@{layer}"


def _built(word: str) -> Detector:
    name, _, options = word.partition("?")
    if name not in DETECTORS.names():
        raise UnknownNameError("detector or preset", name, [*PRESETS, *DETECTORS.names()])
    values = dict(part.partition("=")[::2] for part in options.split("&") if part)
    return DETECTORS.build(name, values)
