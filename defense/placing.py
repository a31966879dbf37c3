"""Where detectors read a model when nobody said so."""

from __future__ import annotations

from torch import nn

from deepseal.adapter import BlackBox, Classifier
from deepseal.adapter.capture import Tap, execution_order
from deepseal.adapter.layers import activation_after, hidden_layers, layer_readings
from deepseal.defense.gaussian import WIDEST
from deepseal.errors import InputError

_POOLING = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
PLACES = ("first", "early", "middle", "last")


def tap_at(model: BlackBox, layer: str, pool: str = "auto") -> Tap:
    """A layer by name, or by its place among the hidden layers: ``first``, ``early``, ``middle``, ``last``.

    ``early`` is the second of three or more and the first of two, ``last`` the one before the answer. The output after
    the activation, and after the pooling that follows it, is read; maps of more than 4,096 values by their mean over
    space.

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
        layer = _pooled_after(model, activation_after(model, names[index[layer]]))
    if pool == "auto":
        pool = layer_readings(model, [_computing(model, layer)], "auto")[_computing(model, layer)].pool
    reading = layer_readings(model, [layer], pool)[layer]
    if pool == "none" and len(reading.shape) > 1 and reading.width > WIDEST:
        pool = "space"
    return Tap(layer, pool)


def _pooled_after(model: Classifier, layer: str) -> str:
    order = execution_order(model.module, model.probe())
    runs = [name for name, _, _ in order]
    after, module, _ = order[runs.index(layer) + 1]
    return after if isinstance(module, _POOLING) and runs.count(after) == 1 else layer


def _computing(model: Classifier, layer: str) -> str:
    """The layer whose output an activation, a pooling or a dropout passes on; else the layer itself."""
    order = execution_order(model.module, model.probe())
    names = [name for name, _, _ in order]
    if layer not in names or list(order[names.index(layer)][1].parameters()):
        return layer
    shapes = [shape for _, _, shape in order]
    place = names.index(layer)
    before = [i for i in range(place) if list(order[i][1].parameters()) and len(shapes[i]) == len(shapes[place])]
    return names[before[-1]] if before else layer
