"""A public linear projection in front of a network: how it travels with a model, and the graph behind it."""

from __future__ import annotations

import base64
import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray

from deepseal.adapter import Classifier
from deepseal.errors import InputError, understood
from deepseal.secure_inference.compile.graph import Graph, Ref, identity

Reals = NDArray[np.float64]
ENTRY = "projection"
_TOLERANCE = 1e-4


def with_projection(model: Classifier, projection: Reals) -> Classifier:
    """A copy of a model whose metadata name the projection that its first layer reads its input through.

    Args:
        model: its first layer's weight must be A P.
        projection: P, (columns, features); kept as float32.
    """
    stored = np.ascontiguousarray(projection, dtype="<f4")
    entry = {"shape": list(stored.shape), "float32": base64.b64encode(stored.tobytes()).decode()}
    return model.copy(metadata={ENTRY: entry})


def projection_of(model: Classifier) -> Reals | None:
    """(columns, *input shape) float64: the projection that travels with a model, or None.

    Raises:
        InputError: not a projection of the model's input.
    """
    entry = model.metadata.get(ENTRY)
    if entry is None:
        return None
    with understood("a projection in the model's metadata", "compress the model again"):
        columns, features = map(int, entry["shape"])
        flat = np.frombuffer(base64.b64decode(entry["float32"], validate=True), dtype="<f4").astype(np.float64)
        matrix = flat.reshape(columns, features)
        if not 1 <= columns <= features or features != math.prod(model.spec.shape) or not np.isfinite(matrix).all():
            raise InputError(f"a projection of {math.prod(model.spec.shape)} finite values", found=str(matrix.shape),
                             do="compress the model again")  # fmt: skip
        return matrix.reshape(columns, *model.spec.shape)


def project(x: torch.Tensor, projection: Reals) -> torch.Tensor:
    """(N, …) normalised inputs to (N, columns) float64."""
    matrix = torch.from_numpy(projection.reshape(len(projection), -1))
    return x.double().flatten(1) @ matrix.T


def projected(graph: Graph, projection: Reals) -> Graph:
    """The same network on the projected input: weights W = A P of layers that read the input become A.

    Raises:
        InputError: a layer that reads the input is not a linear one on all of it, or its weight is not A P.
    """
    matrix = projection.reshape(len(projection), -1)
    inverse = np.linalg.pinv(matrix)
    nodes = list(graph.nodes)
    readers = graph.consumers()[0]
    do = "compress the model again, or drop its projection"
    for reader in readers:
        node = nodes[reader] if reader >= 0 else None
        if node is None or node.affine is None or node.affine.op != "linear" or node.inputs[0].index.ndim != 1:
            found = "another" if node is None else repr(node.name)
            raise InputError("a linear layer on the whole input behind a projection", found=found, do=do)
        index = node.inputs[0].index
        weight = np.zeros((len(node.affine.weight), matrix.shape[1]))
        weight[:, index[index >= 0]] = node.affine.weight[:, index >= 0]
        small = weight @ inverse
        if np.abs(small @ matrix - weight).max() > _TOLERANCE * np.abs(weight).max():
            raise InputError(f"weights of {node.name!r} that read the projected input only", found="others", do=do)
        small[np.abs(small) < _TOLERANCE * np.abs(small).max()] = 0.0
        affine = dataclasses.replace(node.affine, weight=small)
        nodes[reader] = dataclasses.replace(node, inputs=(identity(0, (len(matrix),)),), affine=affine)
    nodes[0] = dataclasses.replace(nodes[0], shape=(len(matrix),))
    output = graph.output
    return Graph(tuple(nodes), Ref(output.node, output.index, output.batch))
