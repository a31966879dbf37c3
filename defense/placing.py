"""Where detectors read a model when nobody said so."""

from __future__ import annotations

from deepseal.adapter import BlackBox, Classifier
from deepseal.adapter.capture import Tap
from deepseal.adapter.layers import activation_after, hidden_layers, layer_readings
from deepseal.defense.gaussian import WIDEST
from deepseal.errors import InputError

PLACES = ("first", "early", "middle", "last")


def tap_at(model: BlackBox, layer: str, pool: str = "auto") -> Tap:
    """A layer by name, or by its place among the hidden layers: ``first``, ``early``, ``middle``, ``last``.

    ``early`` is the second of three or more and the first of two, ``last`` the one before the answer. The output after
    the activation is read, as ``layers.layer_readings`` says; maps of more than 4,096 values by their mean over space.

    Raises:
        UnknownNameError: no such layer.
        InputError: a model whose layers cannot be read.
    """
    if not isinstance(model, Classifier):
        found, do = "a model that only answers", "use detectors that read no layer, such as max-softmax"
        raise InputError("a model whose layers can be read", found=found, do=do)
    if layer in PLACES:
        names = [name for name, _, _ in hidden_layers(model)]
        index = {"first": 0, "early": min(1, (len(names) - 1) // 2), "middle": len(names) // 2, "last": len(names) - 1}
        layer = activation_after(model, names[index[layer]])
    reading = layer_readings(model, [layer], pool)[layer]
    if pool == "auto" and reading.width > WIDEST and len(reading.shape) > 1:
        reading = layer_readings(model, [layer], "space")[layer]
    return Tap(layer, reading.pool)
