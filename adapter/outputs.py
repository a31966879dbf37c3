"""From what a module or a layer returns to one tensor a sample: selectors and pooling rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepseal.errors import InputError

REDUCTIONS = ("none", "mean", "mask", "first", "last", "all")
POOLS = ("none", "space", "time", "time-first", "mask")


def select(output: Any, path: str) -> Tensor:
    """The tensor at ``path``: keys, attributes or indices joined by dots, for instance ``logits`` or ``0.1``.

    Without a path the output itself, or the first tensor of a tuple, a mapping or a ``ModelOutput``.

    Raises:
        InputError: nothing there, or no tensor.
    """
    for part in filter(None, path.split(".")):
        output = _member(output, part, path)
    while not path and not isinstance(output, Tensor):
        parts = list(output.values()) if isinstance(output, Mapping) else output
        if not isinstance(parts, list | tuple) or not parts:
            break
        output = parts[0]
    if not isinstance(output, Tensor):
        found = type(output).__name__
        raise InputError(f"a tensor as output {path!r}" if path else "a tensor", found=found, do="state which output")
    return output


def reduce(values: Tensor, rule: str, mask: Tensor | None) -> Tensor:
    """(N, T, C) answers to (N, C) by one of ``REDUCTIONS``; (N, C) and (N,) are passed on.

    Args:
        values: one answer a frame or token.
        rule: ``mean`` over T, ``mask``: mean over what the (N, T) mask marks, ``first``, ``last`` (marked) position;
            ``all``: (N, T * C), all of them, 0 where the mask, if there is one, marks padding.
        mask: 1 where there is input, 0 where there is padding.

    Raises:
        InputError: a rule that needs a mask where there is none, or a mask of another length.
    """
    if values.ndim <= 2 or rule == "none":
        return values
    if rule == "mean":
        return values.flatten(1, -2).mean(dim=1)
    if rule == "mask":
        return _masked_mean(values, mask)
    if rule == "all":
        return (values if mask is None else values * _fitting(values, mask).to(values).unsqueeze(-1)).flatten(1)
    if rule == "first":
        return values[:, 0]
    if mask is None:
        return values[:, -1]
    last = (_fitting(values, mask).cumsum(dim=1).argmax(dim=1)).to(values.device)
    return values[range(len(values)), last]


def pool(values: Tensor, rule: str, mask: Tensor | None = None) -> Tensor:
    """A layer's output to (N, features) by one of ``POOLS``.

    Args:
        values: ``none``: anything, flattened; ``space``: (N, C, …), mean over all but C; ``time``: (N, …, D), mean over
            all but D; ``time-first``: (T, N, D), mean over T; ``mask``: (N, T, D), mean over what the mask marks.
        rule: one of these.
        mask: (N, T), 1 where there is input.

    Raises:
        InputError: values that the rule does not fit.
    """
    if rule == "mask":
        return _masked_mean(values, mask)
    if rule == "none":
        return values.flatten(1)
    if values.ndim < 3:
        return values
    if rule == "space":
        return values.flatten(2).mean(dim=2)
    return values.mean(dim=0) if rule == "time-first" else values.flatten(1, -2).mean(dim=1)


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if values.ndim < 3:
        return values
    weights = _fitting(values, mask).to(values).unsqueeze(-1)
    return (values * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def _fitting(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        raise InputError("an attention mask among the inputs", found="none", do="mark it in the input spec")
    if mask.shape != values.shape[:2] or values.ndim != 3:
        found = f"{tuple(values.shape)} for a mask of shape {tuple(mask.shape)}"
        raise InputError("values of shape (N, T, D) that the mask fits", found=found, do="choose another layer or rule")
    return mask


def _member(output: Any, part: str, path: str) -> Any:
    if isinstance(output, Mapping) and part in output:
        return output[part]
    if isinstance(output, list | tuple) and part.lstrip("-").isdigit() and -len(output) <= int(part) < len(output):
        return output[int(part)]
    if not part.startswith("_") and not isinstance(output, Tensor) and hasattr(output, part):
        return getattr(output, part)
    known = list(output) if isinstance(output, Mapping) else f"{type(output).__name__}"
    raise InputError(f"an output {path!r}", found=f"no {part!r} in {known}", do="correct the spec's output")
