"""Translations of PyTorch's operators into layers of a ``Graph``; keyword arguments are those of the operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from deepseal.secure_inference.compile.graph import Affine, Ref

if TYPE_CHECKING:
    from deepseal.secure_inference.compile.lower import Builder

# fmt: off
MOVES = frozenset((
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t", "numpy_T", "swapaxes",
    "movedim", "squeeze", "unsqueeze", "slice", "select", "expand", "expand_as", "chunk", "split",
    "split_with_sizes", "unbind", "constant_pad_nd", "pad", "flip", "roll", "narrow", "pixel_shuffle",
    "pixel_unshuffle", "index_select", "repeat", "tile", "view_as", "reshape_as", "unsafe_split", "unsafe_chunk",
    "channel_shuffle",
))
# fmt: on
HINTS: Mapping[str, str] = {
    "layer_norm": "use BatchNorm, or an affine layer as in ResMLP",
    "native_layer_norm": "use BatchNorm, or an affine layer as in ResMLP",
    "group_norm": "use BatchNorm",
    "instance_norm": "use BatchNorm",
    "rms_norm": "use BatchNorm",
    "embedding": "give the embedded vectors as input",
    "scaled_dot_product_attention": "use an MLP-Mixer block: products of two secrets of this size are not supported",
    "bmm": "one factor must be a parameter",
    "gru": "use an LSTM",
    "rnn_tanh": "use an LSTM",
    "elu": "use LeakyReLU, SiLU or GELU",
    "selu": "use LeakyReLU, SiLU or GELU",
    "softplus": "use ReLU or SiLU",
    "mish": "use SiLU",
    "conv_transpose2d": "use an upsampling view and a convolution",
    "conv_transpose1d": "use an upsampling view and a convolution",
    "conv3d": "reshape to two dimensions",
    "exp": "use a supported activation",
}


class Unsupported(Exception):  # noqa: N818
    """An operator that cannot be translated.

    Args:
        what: the operator, for people.
        hint: what to use instead.
    """

    def __init__(self, what: str, hint: str) -> None:
        self.what, self.hint = what, hint
        super().__init__(what)


def _array(value: Any) -> Any:
    """A constant as float64, without the batch dimension of size 1."""
    return value.detach().double().numpy() if isinstance(value, Tensor) else np.float64(value)


def _constant(value: Any, x: Ref) -> Any:
    """A constant that broadcasts with (N, …), as one that broadcasts with x."""
    array = _array(value)
    if array.ndim > len(x.shape):
        if array.shape[0] != 1:
            raise Unsupported("a constant that differs from sample to sample", "give it no batch dimension")
        array = array[0]
    if np.broadcast_shapes(array.shape, x.shape) != x.shape:
        raise Unsupported("a constant that widens a tensor", "expand the tensor first")
    return array


def _keep(builder: Builder, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _linear(builder: Builder, x: Ref, weight: Any, bias: Any = None) -> Ref:
    if not isinstance(x, Ref) or not isinstance(weight, Tensor):
        raise Unsupported("a product of two secret tensors", "one factor must be a parameter")
    w = _array(weight)
    b = np.zeros(len(w)) if bias is None else _array(bias)
    return builder.affine(x, Affine("linear", w, np.broadcast_to(b, (len(w),)).copy()))


def _addmm(builder: Builder, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Ref:
    if not isinstance(weight, Tensor) or isinstance(bias, Ref):
        raise Unsupported("a product of two secret tensors", "one factor must be a parameter")
    return _linear(builder, x, weight.T * alpha, bias * beta)


def _matmul(builder: Builder, x: Any, y: Any) -> Ref:
    if isinstance(x, Ref) and isinstance(y, Tensor) and y.ndim == 2:
        return _linear(builder, x, y.T)
    if isinstance(y, Ref) and isinstance(x, Tensor) and x.ndim == 2 and len(y.shape) >= 2:
        turned = Ref(y.node, np.swapaxes(y.index, -1, -2))
        result = _linear(builder, turned, x)
        return Ref(result.node, np.swapaxes(result.index, -1, -2))
    raise Unsupported("a product of two secret tensors", "one factor must be a parameter matrix")


def _sizes(value: Any, count: int) -> tuple[int, ...]:
    numbers = [int(n) for n in value] if isinstance(value, list | tuple) else [int(value)]
    return tuple(numbers * count if len(numbers) == 1 else numbers)


def _conv(count: int) -> Callable[..., Ref]:
    def translate(builder: Builder, x: Ref, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                  dilation: Any = 1, groups: int = 1) -> Ref:  # fmt: skip
        if not isinstance(weight, Tensor):
            raise Unsupported("a convolution with secret kernels of another layer", "use parameters")
        w = _array(weight)
        steps, wide = _sizes(stride, count), _sizes(dilation, count)
        if isinstance(padding, str):
            total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(wide, w.shape[2:], strict=True)]
            if any(n % 2 for n in total):  # more on the far side
                extra = [(0, 0), *((n // 2, n - n // 2) for n in total)]
                x, total = Ref(x.node, np.pad(x.index, extra, constant_values=-1)), [0] * count
            edges = tuple(n // 2 for n in total)
        else:
            edges = _sizes(padding, count)
        b = np.zeros(len(w)) if bias is None else _array(bias)
        op = "conv1d" if count == 1 else "conv2d"
        return builder.affine(x, Affine(op, w, b, steps, edges, wide, int(groups)))  # type: ignore[arg-type]

    return translate


def _convolution(builder: Builder, x: Ref, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
                 transposed: bool, output_padding: Any, groups: int) -> Ref:  # fmt: skip
    count = weight.ndim - 2
    if transposed or count not in (1, 2):
        raise Unsupported("a transposed or three-dimensional convolution", "use convolutions of one or two dimensions")
    return _conv(count)(builder, x, weight, bias, stride, padding, dilation, groups)


def _batch_norm(builder: Builder, x: Ref, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Ref:
    if mean is None or var is None:
        raise Unsupported("BatchNorm without running statistics", "train it with track_running_stats=True")
    epsilon = next(value for value in reversed(rest) if isinstance(value, float))
    factor = 1 / np.sqrt(_array(var) + epsilon) * (1 if weight is None else _array(weight))
    shift = (0 if bias is None else _array(bias)) - _array(mean) * factor
    shape = (-1, *(1,) * (len(x.shape) - 1))
    return builder.scale(x, factor.reshape(shape), shift.reshape(shape))


def _batch_norm_tuple(builder: Builder, *args: Any) -> tuple[Ref, None, None]:
    return _batch_norm(builder, *args), None, None


def _broadcast(x: Ref, y: Ref) -> tuple[Ref, Ref]:
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError as error:
        raise Unsupported("operands that do not broadcast within a sample", "reshape them") from error
    return tuple(Ref(r.node, np.array(np.broadcast_to(r.index, shape))) for r in (x, y))  # type: ignore[return-value]


def _add(builder: Builder, x: Any, y: Any, *, alpha: float = 1) -> Ref:
    return _combine(builder, x, y, alpha)


def _sub(builder: Builder, x: Any, y: Any, *, alpha: float = 1) -> Ref:
    return _combine(builder, x, y, -alpha)


def _rsub(builder: Builder, x: Any, y: Any, alpha: float = 1) -> Ref:
    return _combine(builder, y, x, -alpha)


def _combine(builder: Builder, x: Any, y: Any, factor: float) -> Ref:
    """Sum: x + factor y."""
    if not isinstance(x, Ref):
        return builder.scale(y, factor, _constant(x, y))
    if not isinstance(y, Ref):
        return builder.scale(x, 1.0, _constant(y, x) * factor)
    if abs(factor) != 1:
        y = builder.scale(y, abs(factor), 0.0)
    x, y = _broadcast(x, y)
    return builder.add("add", [x, y], x.shape, signs="++" if factor > 0 else "+-")


def _mul(builder: Builder, x: Any, y: Any) -> Ref:
    if isinstance(x, Ref) and isinstance(y, Ref):
        x, y = _broadcast(x, y)
        return builder.add("multiply", [x, y], x.shape)
    return builder.scale(x, _constant(y, x), 0.0) if isinstance(x, Ref) else builder.scale(y, _constant(x, y), 0.0)


def _div(builder: Builder, x: Any, y: Any, *, rounding_mode: str | None = None) -> Ref:
    if isinstance(y, Ref) or rounding_mode is not None:
        raise Unsupported("division by a secret", "divide by constants only")
    return builder.scale(x, 1 / _constant(y, x), 0.0)


def _neg(builder: Builder, x: Ref) -> Ref:
    return builder.scale(x, -1.0, 0.0)


def _activation(function: str) -> Callable[..., Ref]:
    def translate(builder: Builder, x: Ref) -> Ref:
        return builder.add("activation", [x], x.shape, function=function)

    return translate


def _clamp(builder: Builder, x: Ref, min: Any = None, max: Any = None) -> Ref:
    if isinstance(min, Ref | Tensor) or isinstance(max, Ref | Tensor):
        raise Unsupported("clamp by tensors", "clamp by numbers")
    low, high = -math.inf if min is None else float(min), math.inf if max is None else float(max)
    if low == 0 and high == math.inf:
        return builder.add("activation", [x], x.shape, function="relu")
    return builder.add("activation", [x], x.shape, function="clamp", low=low, high=high)


def _clamp_max(builder: Builder, x: Ref, max: Any) -> Ref:
    return _clamp(builder, x, None, max)


def _hardtanh(builder: Builder, x: Ref, min: float = -1.0, max: float = 1.0) -> Ref:
    return _clamp(builder, x, min, max)


def _relu6(builder: Builder, x: Ref) -> Ref:
    return _clamp(builder, x, 0.0, 6.0)


def _leaky(builder: Builder, x: Ref, slope: float = 0.01) -> Ref:
    if not 0 <= slope <= 1:
        raise Unsupported("LeakyReLU with a slope outside 0 … 1", "use a slope between 0 and 1")
    return builder.add("activation", [x], x.shape, function="leaky_relu", slope=float(slope))


def _prelu(builder: Builder, x: Ref, weight: Any) -> Ref:
    if not isinstance(weight, Tensor) or weight.numel() != 1:
        raise Unsupported("PReLU with a slope for each channel", "use one slope")
    return _leaky(builder, x, float(weight))


def _gelu(builder: Builder, x: Ref, *, approximate: str = "none") -> Ref:
    return _activation("gelu" if approximate == "none" else "gelu_tanh")(builder, x)


def _hardsigmoid(builder: Builder, x: Ref) -> Ref:
    return _clamp(builder, builder.scale(x, 1 / 6, 0.5), 0.0, 1.0)


def _hardswish(builder: Builder, x: Ref) -> Ref:
    return _mul(builder, x, _hardsigmoid(builder, x))


# Pooling


def _places(x: Ref, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
            dilation: tuple[int, ...], ceil: bool) -> list[Ref]:  # fmt: skip
    """The tensor of each place in the window, padding as -1."""
    count = len(kernel)
    head, sizes = x.shape[:-count], x.shape[-count:]
    lanes, edges = [], []
    for n, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        span = n + 2 * p - d * (k - 1) - 1
        lane = (-(-span // s) if ceil else span // s) + 1
        if ceil and (lane - 1) * s >= n + p:
            lane -= 1
        lanes.append(lane)
        edges.append((p, max((lane - 1) * s + d * (k - 1) + 1 - n - p, 0)))
    padded = np.pad(x.index, [*[(0, 0)] * len(head), *edges], constant_values=-1)
    found = []
    for place in np.ndindex(*kernel):
        window = tuple(
            slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in zip(place, dilation, lanes, stride, strict=True)
        )
        everything: tuple[Any, ...] = (..., *window)
        found.append(Ref(x.node, padded[everything].copy()))
    return found


def _max_pool(count: int, *, indices: bool = False) -> Callable[..., Any]:
    def translate(builder: Builder, x: Ref, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
                  ceil_mode: bool = False) -> Any:  # fmt: skip
        kernel = _sizes(kernel_size, count)
        steps = _sizes(stride, count) if stride else kernel
        places = _places(x, kernel, steps, _sizes(padding, count), _sizes(dilation, count), ceil_mode)
        result = builder.add("max", places, places[0].shape)
        return (result, None) if indices else result

    return translate


def _average(builder: Builder, x: Ref, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
             area: float) -> Ref:  # fmt: skip
    count, channels = len(kernel), x.shape[0]
    if len(x.shape) != count + 1:
        raise Unsupported("pooling of another shape than (N, channels, …)", "reshape first")
    weight = np.full((channels, 1, *kernel), 1 / area)
    op = "conv1d" if count == 1 else "conv2d"
    zeros = np.zeros(channels)
    ones = (1,) * count
    return builder.affine(x, Affine(op, weight, zeros, stride, padding, ones, channels, public=True))  # type: ignore[arg-type]


def _avg_pool(count: int) -> Callable[..., Ref]:
    def translate(builder: Builder, x: Ref, kernel_size: Any, stride: Any = (), padding: Any = 0,
                  ceil_mode: bool = False, count_include_pad: bool = True, divisor: Any = None) -> Ref:  # fmt: skip
        kernel = _sizes(kernel_size, count)
        edges = _sizes(padding, count)
        if ceil_mode or (any(edges) and not count_include_pad):
            raise Unsupported("average pooling whose windows differ", "use ceil_mode=False and count_include_pad=True")
        steps = _sizes(stride, count) if stride else kernel
        return _average(builder, x, kernel, steps, edges, float(divisor or math.prod(kernel)))

    return translate


def _adaptive(count: int, kind: str) -> Callable[..., Any]:
    def translate(builder: Builder, x: Ref, output_size: Any) -> Any:
        wanted = _sizes(output_size, count)
        sizes = x.shape[-count:]
        if any(n % w for n, w in zip(sizes, wanted, strict=True)):
            raise Unsupported(f"adaptive pooling of {sizes} to {wanted}", "choose sizes that divide each other")
        kernel = tuple(n // w for n, w in zip(sizes, wanted, strict=True))
        if kind == "average":
            return _average(builder, x, kernel, kernel, (0,) * count, float(math.prod(kernel)))
        places = _places(x, kernel, kernel, (0,) * count, (1,) * count, False)
        return builder.add("max", places, places[0].shape), None

    return translate


def _reduced(x: Ref, dim: Any, keepdim: bool) -> tuple[Ref, tuple[int, ...], tuple[int, ...]]:
    """The tensor with the reduced dimensions last and flat; the kept shape; the result's shape."""
    rank = len(x.shape) + 1
    dims = sorted({int(d) % rank for d in (dim if isinstance(dim, list | tuple) else [dim])})
    if 0 in dims or not dims:
        raise Unsupported("a mean or maximum over the batch", "reduce over other dimensions")
    axes = [d - 1 for d in dims]
    kept = [i for i in range(len(x.shape)) if i not in axes]
    shape = tuple(x.shape[i] for i in kept)
    moved = np.transpose(x.index, [*kept, *axes]).reshape(math.prod(shape), -1)
    result = tuple(1 if i in axes else n for i, n in enumerate(x.shape)) if keepdim else shape
    return Ref(x.node, moved), shape, result


def _mean(builder: Builder, x: Ref, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Ref:
    return _summed(builder, x, dim, keepdim, mean=True)


def _sum(builder: Builder, x: Ref, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Ref:
    return _summed(builder, x, dim, keepdim, mean=False)


def _summed(builder: Builder, x: Ref, dim: Any, keepdim: bool, *, mean: bool) -> Ref:
    rows, _, result = _reduced(x, dim, keepdim)
    size = rows.shape[1]
    total = _average(builder, rows, (size,), (1,), (0,), float(size) if mean else 1.0)
    return Ref(total.node, total.index.reshape(result))


def _amax(builder: Builder, x: Ref, dim: Any = (), keepdim: bool = False) -> Ref:
    rows, _, result = _reduced(x, dim, keepdim)
    columns = [Ref(x.node, rows.index[:, i].copy()) for i in range(rows.shape[1])]
    top = builder.add("max", columns, columns[0].shape)
    return Ref(top.node, top.index.reshape(result))


def _cat(builder: Builder, tensors: Sequence[Any], dim: int = 0) -> Ref:
    refs = [tensor for tensor in tensors if isinstance(tensor, Ref)]
    if len(refs) != len(tensors):
        raise Unsupported("concatenation with a constant", "put the constant into the next layer's bias")
    axis = int(dim) % (len(refs[0].shape) + 1) - 1
    if axis < 0:
        raise Unsupported("concatenation along the batch", "concatenate along another dimension")
    total = sum(ref.shape[axis] for ref in refs)
    parts, start = [], 0
    for ref in refs:
        edges = [(0, 0)] * len(ref.shape)
        edges[axis] = (start, total - start - ref.shape[axis])
        parts.append(Ref(ref.node, np.pad(ref.index, edges, constant_values=-1)))
        start += ref.shape[axis]
    if all(ref.node == refs[0].node for ref in refs):
        return Ref(refs[0].node, np.concatenate([ref.index for ref in refs], axis=axis))
    return builder.add("concat", parts, parts[0].shape)


def _stack(builder: Builder, tensors: Sequence[Any], dim: int = 0) -> Ref:
    if not all(isinstance(tensor, Ref) for tensor in tensors):
        raise Unsupported("stacking with a constant", "put the constant into the next layer's bias")
    axis = int(dim) % (len(tensors[0].shape) + 2)
    return _cat(builder, [Ref(t.node, np.expand_dims(t.index, axis - 1)) for t in tensors], axis)


# LSTM: gates i, f, g, o in torch's order


def _lstm(builder: Builder, x: Ref, states: Sequence[Any], weights: Sequence[Any], has_biases: bool, layers: int,
          dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Ref, Ref, Ref]:  # fmt: skip
    if any(isinstance(s, Ref) or bool(s.any()) for s in states) or x.batch != (0 if batch_first else 1):
        raise Unsupported("an LSTM with initial states or without a batch", "start with zeros")
    count = 4 if has_biases else 2
    if len(weights) != count * layers * (2 if bidirectional else 1):
        raise Unsupported("an LSTM with projections", "use proj_size=0")
    last, cells = [], []
    steps = [Ref(x.node, x.index[t]) for t in range(x.shape[0])]
    for layer in range(layers):
        sides = []
        for side in range(2 if bidirectional else 1):
            start = count * (layer * (2 if bidirectional else 1) + side)
            ways = steps if side == 0 else steps[::-1]
            h: Ref | None = None
            c: Ref | None = None
            outputs = []
            for step in ways:
                h, c = _cell(builder, step, h, c, weights[start : start + count])
                outputs.append(h)
            last.append(h)
            cells.append(c)
            sides.append(outputs if side == 0 else outputs[::-1])
        steps = sides[0] if len(sides) == 1 else [_cat(builder, pair, 1) for pair in zip(*sides, strict=True)]
    whole, final, state = (_stack(builder, part, 1) for part in (steps, last, cells))
    ends = Ref(final.node, final.index, 1), Ref(state.node, state.index, 1)
    return Ref(whole.node, whole.index, x.batch), *ends


def _lstm_cell(builder: Builder, x: Ref, states: Sequence[Any], *weights: Any) -> tuple[Ref, Ref]:
    given = [state if isinstance(state, Ref) else None for state in states]
    if any(isinstance(s, Tensor) and bool(s.any()) for s in states):
        raise Unsupported("an LSTM cell with constant states", "start with zeros")
    return _cell(builder, x, given[0], given[1], [w for w in weights if w is not None])


def _cell(builder: Builder, x: Ref, h: Ref | None, c: Ref | None, weights: Sequence[Any]) -> tuple[Ref, Ref]:
    bias = weights[2] + weights[3] if len(weights) == 4 else None
    gates = _linear(builder, x, weights[0], bias)
    if h is not None:
        again = _linear(builder, h, weights[1])
        gates = builder.add("add", [gates, again], gates.shape, signs="++")
    size = gates.shape[0] // 4
    i, f, g, o = (Ref(gates.node, gates.index[k * size : (k + 1) * size]) for k in range(4))
    i, f, o = (_activation("sigmoid")(builder, gate) for gate in (i, f, o))
    g = _activation("tanh")(builder, g)
    factors = [i, g] if c is None else [f, c, i, g]
    c = builder.add("multiply", factors, (size,))
    h = builder.add("multiply", [o, _activation("tanh")(builder, c)], (size,))
    return h, c


def _softmax(builder: Builder, x: Ref, dim: int, *rest: Any, **kwargs: Any) -> Ref:
    if int(dim) % (len(x.shape) + 1) != len(x.shape) or len(x.shape) != 1:
        raise Unsupported("softmax inside the network", "only one at the output can be left out")
    return x


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "linear": _linear,
    "addmm": _addmm,
    "mm": _matmul,
    "matmul": _matmul,
    "conv1d": _conv(1),
    "conv2d": _conv(2),
    "convolution": _convolution,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm_tuple,
    "add": _add,
    "sub": _sub,
    "subtract": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "multiply": _mul,
    "div": _div,
    "divide": _div,
    "neg": _neg,
    "relu": _activation("relu"),
    "sigmoid": _activation("sigmoid"),
    "tanh": _activation("tanh"),
    "silu": _activation("silu"),
    "gelu": _gelu,
    "relu6": _relu6,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "leaky_relu": _leaky,
    "prelu": _prelu,
    "max_pool1d": _max_pool(1),
    "max_pool2d": _max_pool(2),
    "max_pool2d_with_indices": _max_pool(2, indices=True),
    "avg_pool1d": _avg_pool(1),
    "avg_pool2d": _avg_pool(2),
    "adaptive_avg_pool1d": _adaptive(1, "average"),
    "adaptive_avg_pool2d": _adaptive(2, "average"),
    "_adaptive_avg_pool2d": _adaptive(2, "average"),
    "adaptive_max_pool1d": _adaptive(1, "max"),
    "adaptive_max_pool2d": _adaptive(2, "max"),
    "mean": _mean,
    "sum": _sum,
    "amax": _amax,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
    "lstm": _lstm,
    "lstm_cell": _lstm_cell,
    "softmax": _softmax,
    "_softmax": _softmax,
    "log_softmax": _softmax,
    "_log_softmax": _softmax,
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "alias", "clone", "contiguous",
         "detach", "lift_fresh_copy", "to", "_to_copy", "type_as", "positive"),
        _keep,
    ),
}  # fmt: skip
