"""Images from a secret: abstract ones, and patterns to put on others, for any input shape."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepseal.adapter import InputSpec
from deepseal.rng import expand, expand_integers, expand_normal


def abstract(secret: bytes, purpose: str, count: int, spec: InputSpec) -> Tensor:
    """(count, …) smooth random fields folded by a sine: lines and blobs like nothing in a data set.

    Inputs that are no images (fewer than two dimensions) become uniform noise.
    """
    if not _is_image(spec):
        return uniform(secret, f"{purpose}/abstract", count, spec)
    height, width = spec.shape[-2:]
    channels = math.prod(spec.shape[:-2])
    field = torch.zeros(count, channels, height, width)
    for octave, size in enumerate((2, 4, 8)):
        coarse = torch.from_numpy(expand_normal(secret, f"{purpose}/octave/{octave}", (count, channels, size, size)))
        field += nn.functional.interpolate(coarse, size=(height, width), mode="bilinear") / (octave + 1)
    waves = 1.0 + 3.0 * torch.from_numpy(_uniform(secret, f"{purpose}/waves", count)).reshape(-1, 1, 1, 1)
    return _scaled(0.5 + 0.5 * torch.sin(waves * field), spec).reshape(count, *spec.shape)


def uniform(secret: bytes, purpose: str, count: int, spec: InputSpec) -> Tensor:
    """(count, …) independent uniform values."""
    values = _uniform(secret, f"{purpose}/uniform", count * math.prod(spec.shape))
    return _scaled(torch.from_numpy(values).reshape(count, *spec.shape), spec)


def noise(secret: bytes, purpose: str, count: int, spec: InputSpec, std: float) -> Tensor:
    """(count, …) Gaussian patterns to add; ``std`` is a share of the bounds' range."""
    low, high = spec.bounds
    return torch.from_numpy(expand_normal(secret, f"{purpose}/noise", (count, *spec.shape))) * std * (high - low)


def noisy(secret: bytes, purpose: str, count: int, spec: InputSpec) -> Tensor:
    """(count, …) inputs that are nothing but Gaussian noise."""
    return gaussian(torch.from_numpy(expand_normal(secret, f"{purpose}/noise", (count, *spec.shape))), spec)


def gaussian(normal: Tensor, spec: InputSpec) -> Tensor:
    """Standard normal numbers as inputs: around the middle of the bounds, a quarter of the range wide."""
    low, high = spec.bounds
    return (0.5 * (low + high) + 0.25 * (high - low) * normal).clamp(low, high)


def stamps(secret: bytes, purpose: str, count: int, spec: InputSpec, share: float) -> tuple[Tensor, Tensor]:
    """Patterns of the lowest and highest value, each at its own random place, and where they are.

    Args:
        secret: what place and pattern are expanded from.
        purpose: label of the expansion.
        count: number of stamps.
        spec: the inputs.
        share: side of the stamp as a share of the image's side; share of the features where inputs are no images.

    Returns:
        (count, …) values, and (count, …) booleans that are True under the stamp.
    """
    low, high = spec.bounds
    size = math.prod(spec.shape)
    ink = np.frombuffer(expand(secret, f"{purpose}/ink", count * size), np.uint8).reshape(count, *spec.shape) & 1
    values = torch.from_numpy(np.where(ink == 1, high, low).astype(np.float32))
    places = torch.zeros(count, *spec.shape, dtype=torch.bool)
    if not _is_image(spec):
        chosen = np.argsort(_uniform(secret, f"{purpose}/place", count * size).reshape(count, size), axis=1)
        places.reshape(count, size).scatter_(1, torch.from_numpy(chosen[:, : max(1, round(share * size))]), True)
        return values, places
    sides = [max(2, round(share * side)) for side in spec.shape[-2:]]
    for axis, (side, stamp) in enumerate(zip(spec.shape[-2:], sides, strict=True)):
        first = torch.from_numpy(expand_integers(secret, f"{purpose}/place/{axis}", count, side - stamp + 1))
        along = torch.arange(side)
        inside = (along >= first[:, None]) & (along < first[:, None] + stamp)
        shape = [count] + [1] * len(spec.shape)
        shape[len(spec.shape) - 1 + axis] = side
        places = inside.reshape(shape).expand_as(places) if axis == 0 else places & inside.reshape(shape)
    return values, places


def _is_image(spec: InputSpec) -> bool:
    return len(spec.shape) >= 2 and min(spec.shape[-2:]) >= 4


def _uniform(secret: bytes, label: str, count: int) -> NDArray[np.float32]:
    words = np.frombuffer(expand(secret, label, 4 * count), dtype="<u4")
    return ((words.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)


def _scaled(unit: Tensor, spec: InputSpec) -> Tensor:
    low, high = spec.bounds
    return low + (high - low) * unit
