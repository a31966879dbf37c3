"""Programs and weights as data: views, connections, files, digests, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseal.errors import InputError
from deepseal.secure_inference.compile import (
    Axis,
    Circuit,
    Encoding,
    Gather,
    Linear,
    LinearWeights,
    Number,
    Operand,
    Program,
    Weights,
    Window,
    Wire,
    encode_input,
    simulate,
)
from deepseal.secure_inference.compile.simulate import run_linear
from deepseal.secure_inference.compile.windows import view_index, view_of

BYTE, WEIGHT = Number(8, False, 8), Number(8, True, 7)
FEW = settings(max_examples=50, deadline=None)


def one_layer(op, shape, weight_shape, window=None, bits=32, **how):
    rng = np.random.default_rng(0)
    step = Linear(0, 1, op, weight_shape, WEIGHT, window=window, **how)
    target = step.target_shape(shape if window is None else window.shape)
    wires = (Wire(shape, BYTE, "activation"), Wire(target, Number(bits, True, 15), "accumulator"))
    weight = rng.integers(-127, 127, size=weight_shape)
    weights = LinearWeights(weight, rng.integers(-1000, 1000, size=weight_shape[0]))
    return Program(wires, (step,), 0, 1, permits="logits"), weights


def small(public=False):
    """input 1x6x6, convolution, relu, average pooling, linear layer, argmax."""
    wires = (
        Wire((1, 6, 6), BYTE, "activation"),
        Wire((2, 4, 4), Number(20, True, 15), "accumulator"),
        Wire((2, 4, 4), Number(8, False, 5), "activation"),
        Wire((2, 2, 2), Number(12, True, 7), "accumulator"),
        Wire((2, 2, 2), Number(8, True, 5), "activation"),
        Wire((3,), Number(20, True, 12), "accumulator"),
        Wire((), Number(2, False, 0), "activation"),
    )
    rng = np.random.default_rng(1)
    steps = (
        Linear(0, 1, "conv2d", (2, 1, 3, 3), WEIGHT, (1, 1), (0, 0), (1, 1), name="conv"),
        Circuit((Operand(1),), 2, "relu", {}, "act"),
        Linear(2, 3, "conv2d", (2, 1, 2, 2), Number(2, True, 2), (2, 2), (0, 0), (1, 1), 2, True, name="pool"),
        Circuit((Operand(3),), 4, "requantise", {"round": True}, "pool"),
        Linear(4, 5, "linear", (3, 8), WEIGHT, window=view_of(np.arange(8), (2, 2, 2)), name="fc"),
        Circuit(tuple(Operand(5, view_of(np.array(k), (3,))) for k in range(3)), 6, "argmax"),
    )
    pool = LinearWeights(np.ones((2, 1, 2, 2), np.int64), np.zeros(2, np.int64))
    program = Program(wires, steps, 0, 6, encoding=Encoding((0.0, 1.0), unit=256 / 255), constants={2: pool}, labels=3)
    layers = {
        0: LinearWeights(rng.integers(-127, 127, size=(2, 1, 3, 3)), rng.integers(-99, 99, size=2)),
        4: LinearWeights(rng.integers(-127, 127, size=(3, 8)), rng.integers(-99, 99, size=3)),
    }
    return program, Weights(program.digest(), layers)


LAYERS = [
    ("linear", (5,), (3, 5), {}),
    ("linear", (2, 4, 5), (3, 5), {}),
    ("linear", (4, 5), (3, 4), {"window": view_of(np.arange(20).reshape(4, 5).T, (4, 5))}),
    ("conv1d", (4, 9), (6, 2, 3), {"stride": (2,), "padding": (1,), "dilation": (2,), "groups": 2}),
    ("conv2d", (4, 9, 8), (6, 2, 3, 2), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}),
    ("conv2d", (3, 4, 4), (3, 1, 2, 2), {"stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "groups": 3}),
    ("conv1d", (6,), (2, 2, 2), {"window": view_of(np.pad(np.arange(6).reshape(2, 3), ((0, 0), (1, 0)),
     constant_values=-1), (6,)), "stride": (1,), "padding": (0,), "dilation": (1,)}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shape", "weight_shape", "how"), LAYERS)
@pytest.mark.parametrize("bits", [32, 15])
def test_connections_are_the_linear_step(op, shape, weight_shape, how, bits):
    program, weights = one_layer(op, shape, weight_shape, bits=bits, **how)
    step, size = program.steps[0], program.wires[0].size
    found = step.connections(program)
    assert found.starts.shape == (size + 1,) and found.starts[-1] == len(found.outputs) == len(found.weights)
    x = np.random.default_rng(2).integers(0, 255, size=(3, *shape))
    sources = np.repeat(np.arange(size), np.diff(found.starts))
    total = np.zeros((3, program.wires[1].size), dtype=np.int64)
    for row, sample in zip(total, x.reshape(3, -1), strict=True):
        np.add.at(row, found.outputs, sample[sources] * weights.weight.reshape(-1)[found.weights])
    total += weights.bias[step.channel_of(program.wires[1].shape)]
    half = 1 << (bits - 1)
    wrapped = (total + half) % (2 * half) - half
    np.testing.assert_array_equal(run_linear(program, step, weights, x).reshape(3, -1), wrapped)
    for i in range(size):
        assert np.all(np.diff(found.outputs[found.starts[i] : found.starts[i + 1]]) >= 0)


def test_integers_beyond_floating_point_are_exact():
    for op, shape, weight_shape, how in LAYERS:
        program, weights = one_layer(op, shape, weight_shape, bits=62, **how)
        huge = LinearWeights(weights.weight * 2**46, weights.bias)
        x = np.random.default_rng(2).integers(0, 255, size=(2, *shape))
        small_sums = run_linear(program, program.steps[0], LinearWeights(weights.weight, weights.bias * 0), x)
        expected = small_sums * 2**46 + weights.bias[program.steps[0].channel_of(program.wires[1].shape)].reshape(
            program.wires[1].shape
        )
        half = 1 << 61
        wrapped = ((expected + half) & ((1 << 62) - 1)) - half
        np.testing.assert_array_equal(run_linear(program, program.steps[0], huge, x), wrapped)


@FEW
@given(st.data())
def test_views_describe_any_index(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    size = int(np.prod(shape))
    index = np.arange(size).reshape(shape)
    kind = data.draw(st.sampled_from(["transpose", "slice", "pad", "window", "any"]))
    if kind == "transpose":
        index = index.transpose(data.draw(st.permutations(range(len(shape)))))
    elif kind == "slice":
        cuts = [(data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, 2))) for n in shape]
        index = index[tuple(slice(start, None, step) for start, step in cuts)]
    elif kind == "pad":
        index = np.pad(index, [(data.draw(st.integers(0, 2)), 1) for _ in shape], constant_values=-1)
    elif kind == "window":
        index = np.pad(index, [(1, 1)] * len(shape), constant_values=-1)[tuple(slice(0, None, 2) for _ in shape)]
    else:
        index = np.array(data.draw(st.lists(st.integers(-1, size - 1), min_size=1, max_size=9)))
    view = view_of(index, shape)
    if view is None:
        assert index.shape == shape and np.array_equal(index.reshape(-1), np.arange(size))
    else:
        assert view.shape == index.shape
        np.testing.assert_array_equal(view_index(view, size), index.reshape(-1))


def test_pooling_windows_are_short():
    index = np.pad(np.arange(2 * 28 * 28).reshape(2, 28, 28), ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    view = view_of(index[:, 0:28:2, 2:30:2].copy(), (2, 28, 28))
    assert isinstance(view, Window)
    assert view.axes[1] == Axis(14, 28, -1, 2, 28)
    assert isinstance(view_of(np.array([3, 1, 4, 1, 5]), (9,)), Gather)


def test_views_that_leave_the_wire_are_refused():
    gathers = Gather((2,), (0, 9)), Gather((2,), (0,)), Gather((1,), (-2,))
    windows = Window((Axis(4, 3),)), Window((Axis(0, 1),)), Window((Axis(1 << 40, 1),))
    for view in (*gathers, *windows):
        with pytest.raises(InputError):
            view_index(view, 9)


def test_files_and_digest(tmp_path):
    program, weights = small()
    program.save(tmp_path)
    weights.save(tmp_path)
    read = Program.load(tmp_path)
    assert read == program and read.digest() == program.digest()
    assert Program.load(tmp_path / "public").digest() == program.digest()
    assert oct((tmp_path / "secret" / "weights.npz").stat().st_mode & 0o777) == "0o600"
    again = Weights.load(tmp_path, read)
    for step, layer in weights.layers.items():
        np.testing.assert_array_equal(again.layers[step].weight, layer.weight)
        np.testing.assert_array_equal(again.layers[step].bias, layer.bias)
    x = encode_input(read, np.random.default_rng(0).random((50, 1, 6, 6))).values
    np.testing.assert_array_equal(simulate(read, again, x), simulate(program, weights, x))
    with pytest.raises(InputError, match="exists"):
        program.save(tmp_path)
    program.save(tmp_path, force=True)


def test_nothing_secret_is_public_or_shown(tmp_path):
    program, weights = small()
    program.save(tmp_path)
    assert sorted(path.name for path in (tmp_path / "public").iterdir()) == ["constants.npz", "program.json"]
    changed = Weights(program.digest(), {i: LinearWeights(-w.weight, w.bias + 7) for i, w in weights.layers.items()})
    program.save(tmp_path / "other")
    changed.check(program)
    for name in ("constants.npz", "program.json"):
        assert (tmp_path / "public" / name).read_bytes() == (tmp_path / "other" / "public" / name).read_bytes()
    shown = repr(weights) + repr(weights.layers[0]) + str(weights)
    assert shown.count("-") == 0 and "array" not in shown


def test_weights_belong_to_one_program(tmp_path):
    program, weights = small()
    other = dataclasses.replace(program, name="another")
    weights.save(tmp_path)
    with pytest.raises(InputError, match="weights of program"):
        Weights.load(tmp_path, other)
    with pytest.raises(InputError, match="weights of program"):
        simulate(other, weights, np.zeros((1, 1, 6, 6), np.int64))
    wrong = Weights(program.digest(), {**weights.layers, 4: LinearWeights(np.full((3, 8), 200), np.zeros(3, int))})
    with pytest.raises(InputError, match="weights of 8 bits"):
        wrong.check(program)
    with pytest.raises(InputError, match="shapes"):
        Weights(program.digest(), {**weights.layers, 4: weights.layers[0]}).check(program)
    with pytest.raises(InputError, match="steps"):
        Weights(program.digest(), {0: weights.layers[0]}).check(program)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"not json", b'{"format": 99}', b"\xff\xfe"])
def test_bad_program_files(tmp_path, content):
    (tmp_path / "program.json").write_bytes(content)
    with pytest.raises(InputError):
        Program.load(tmp_path)


def test_bad_weights_files(tmp_path):
    program, weights = small()
    weights.save(tmp_path)
    file = tmp_path / "secret" / "weights.npz"
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"PK" + whole[2:50], np.zeros(3).tobytes()):
        file.write_bytes(content)
        with pytest.raises(InputError):
            Weights.load(tmp_path, program)


def test_no_pickle_is_read(tmp_path):
    program, _ = small()
    (tmp_path / "secret").mkdir()
    bound = np.frombuffer(bytes.fromhex(program.digest()), dtype=np.uint8)
    with (tmp_path / "secret" / "weights.npz").open("wb") as file:
        np.savez(file, program=bound, **{"0.weight": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(InputError, match="archive"):
        Weights.load(tmp_path, program)


def test_constants_must_be_the_programs(tmp_path):
    program, _ = small()
    program.save(tmp_path)
    other = LinearWeights(np.zeros((2, 1, 2, 2), np.int64), np.zeros(2, np.int64))
    second = dataclasses.replace(program, constants={2: other})
    second.save(tmp_path / "second")
    (tmp_path / "public" / "constants.npz").write_bytes((tmp_path / "second" / "public" / "constants.npz").read_bytes())
    with pytest.raises(InputError, match="constants"):
        Program.load(tmp_path)


def edited(change):
    program, _ = small()
    plain = json.loads(json.dumps(program.as_dict()))
    change(plain)
    return program, plain


EDITS = {
    "reads ahead": lambda p: p["steps"][0].update(source=5),
    "no such wire": lambda p: p["steps"][1]["operands"][0].update(source=99),
    "written twice": lambda p: p["steps"][1].update(target=0),
    "fraction": lambda p: p["wires"][1]["number"].update(fraction=3),
    "shape": lambda p: p["wires"][1].update(shape=[2, 4, 5]),
    "huge": lambda p: p["wires"][0].update(shape=[1 << 20, 1 << 20]),
    "negative": lambda p: p["wires"][0].update(shape=[-1, 6, 6]),
    "gadget": lambda p: p["steps"][1].update(gadget="eval"),
    "option": lambda p: p["steps"][1].update(options={"code": 1}),
    "lanes": lambda p: p["steps"][1]["operands"][0].update(window={"view": "gather", "shape": [1], "indices": [0]}),
    "window": lambda p: p["steps"][4]["window"]["axes"][0].update(stride=9),
    "output": lambda p: p.update(output=5),
    "permits": lambda p: p.update(permits="logits"),
    "kind": lambda p: p["wires"][1].update(kind="secret"),
    "bits": lambda p: p["wires"][0]["number"].update(bits=65),
    "groups": lambda p: p["steps"][0].update(groups=0),
    "stride": lambda p: p["steps"][0].update(stride=[0, 1]),
    "padding": lambda p: p["steps"][0].update(padding=[-1, 0]),
    "public": lambda p: p["steps"][2].update(public=False),
    "type": lambda p: p["steps"][0].update(source="0"),
    "field": lambda p: p["steps"][0].update(extra=1),
    "step": lambda p: p.update(steps=[]),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_programs_are_refused(tmp_path, name):
    program, plain = edited(EDITS[name])
    program.save(tmp_path)
    (tmp_path / "public" / "program.json").write_text(json.dumps(plain))
    with pytest.raises(InputError):
        Program.load(tmp_path)


def test_an_edit_that_is_sound_changes_the_digest(tmp_path):
    program, plain = edited(lambda p: p["wires"][1]["number"].update(bits=21))
    program.save(tmp_path)
    (tmp_path / "public" / "program.json").write_text(json.dumps(plain))
    assert Program.load(tmp_path).digest() != program.digest()
