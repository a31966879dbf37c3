"""Public masks and projections in programs: as data, in files, in the simulator and between two parties."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.errors import InputError
from deepseal.secure_inference.compile import (
    Linear,
    LinearWeights,
    Program,
    PublicArray,
    Weights,
    compile_model,
    compile_report,
    decode_output,
    encode_input,
    simulate,
)
from deepseal.secure_inference.compile.arrays import pack_public, unpack_public
from deepseal.secure_inference.compile.calibrate import CompileSettings
from deepseal.secure_inference.compile.projected import projected, projection_of, with_projection
from deepseal.secure_inference.compile.simulate import run_circuit, run_linear
from deepseal.secure_inference.compress import program_cost
from deepseal.secure_inference.roles.client import Client
from deepseal.secure_inference.roles.server import Server

SPEC = InputSpec((1, 6, 6), 4, mean=(0.3,), std=(0.5,))
FEW = settings(max_examples=40, deadline=None)


def model(module, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return Classifier(module.eval(), SPEC)


def sparse(share=0.8):
    """A convolution and two linear layers, most weights zero, one output channel wholly."""
    made = model(nn.Sequential(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, 8),
                               nn.Sigmoid(), nn.Linear(8, 4)))  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in made.module:
            if hasattr(layer, "weight"):
                layer.weight *= torch.rand(layer.weight.shape, generator=generator) > share
        made.module[0].weight[1] = 0
    return made


def behind_projection(columns=5):
    """A dense network whose first weight is A P."""
    made = model(nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 4)))
    drawn = np.linalg.qr(np.random.default_rng(0).standard_normal((36, columns)))[0].T
    matrix = drawn.astype(np.float32).astype(np.float64)
    with torch.no_grad():
        weight = made.module[1].weight.double()
        weight = weight @ torch.from_numpy(matrix.T) @ torch.from_numpy(matrix)
        made.module[1].weight.copy_(weight)
    return with_projection(made, matrix), matrix


def samples(count=64, seed=0):
    x = torch.rand(count, *SPEC.shape, generator=torch.Generator().manual_seed(seed))
    return Split(x, torch.zeros(count, dtype=torch.int64))


def between_two_parties(program, weights, x):
    """The answer of a server on loopback to a client that has the public program only."""
    server, up, address = Server(program, weights, timeout=20.0), threading.Event(), []
    ready = {"ready": lambda where: (address.append(where), up.set())}
    thread = threading.Thread(target=server.serve, args=("127.0.0.1:0",), kwargs=ready)
    thread.start()
    try:
        assert up.wait(10)
        with Client.connect(program, address[0], timeout=20.0) as client:
            return client.ask(x).values
    finally:
        server.stop()
        thread.join(20)


@FEW
@given(st.data())
def test_public_arrays_survive_their_file(data):
    arrays = {}
    for name in data.draw(st.lists(st.sampled_from(["projection", "0.mask", "3.mask"]), min_size=1, unique=True)):
        shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        arrays[name] = PublicArray(rng.random(shape) > 0.5 if "mask" in name else rng.standard_normal(shape))
    read = unpack_public(pack_public(arrays))
    assert read == arrays and {n: a.digest() for n, a in read.items()} == {n: a.digest() for n, a in arrays.items()}
    for name, public in arrays.items():
        np.testing.assert_array_equal(read[name].array, public.array)
        assert read[name].array.dtype == public.array.dtype


def test_public_arrays_are_values():
    given_array = np.array([[True, False]])
    public = PublicArray(given_array)
    given_array[0, 0] = False
    assert public.array[0, 0] and public == PublicArray([[True, False]])
    with pytest.raises(ValueError, match="read-only"):
        public.array[0, 0] = False
    others = ([[True, True]], [True, False], [[1.0, 0.0]])
    assert len({public, *(PublicArray(np.array(other)) for other in others)}) == 4
    for bad in ([1, 2], ["a"], [np.nan], [np.inf]):
        with pytest.raises(InputError):
            PublicArray(np.array(bad))


def test_a_mask_leaves_out_zero_connections():
    made = sparse()
    report = compile_report(made, samples(), CompileSettings(sparsity="public"))
    whole, whole_weights = compile_model(made, samples())
    program, weights = report.program, report.weights
    assert whole.public_arrays == {} and len(program.public_arrays) == 3
    for i, step in enumerate(program.steps):
        if not isinstance(step, Linear):
            continue
        integers = weights.layers[i].weight
        np.testing.assert_array_equal(step.mask.array, integers != 0)
        every, left = whole.steps[i].connections(whole), step.connections(program)
        kept = (integers.reshape(-1)[every.weights] != 0) & program.live[step.target][every.outputs]
        np.testing.assert_array_equal(left.outputs, every.outputs[kept])
        np.testing.assert_array_equal(left.weights, every.weights[kept])
        sources = [np.repeat(np.arange(len(c.starts) - 1), np.diff(c.starts)) for c in (every, left)]
        np.testing.assert_array_equal(sources[1], sources[0][kept])
        assert report.layers[i].products == len(left.weights)
    x = encode_input(program, samples(200, 5).x).values
    np.testing.assert_array_equal(simulate(program, weights, x), simulate(whole, whole_weights, x))
    before, after = program_cost(whole), program_cost(program)
    assert after.multiplications < 0.3 * before.multiplications and after.linear_bytes < 0.4 * before.linear_bytes
    assert (after.and_gates, after.table_bytes) == (before.and_gates, 32 * before.and_gates)


def test_only_what_nobody_reads_is_dead():
    """An element of a sum is dead exactly if no value of it, however large, reaches the output."""
    made = sparse(0.9)
    program, weights = compile_model(made, samples(), sparsity="public", permits="logits")
    assert compile_model(made, samples())[0].live is None
    x = encode_input(program, samples(30, 5).x).values
    expected, live = simulate(program, weights, x), program.live
    assert 0 < live[1].mean() < 1
    drawn = np.random.default_rng(0)
    values = simulate(program, weights, x, intermediates=True)
    for wanted in (False, True):
        there = {0: values[0]}
        noise = drawn.integers(-9999, 9999, size=values[1].reshape(30, -1).shape) * (live[1] == wanted)
        for i, step in enumerate(program.steps):
            if isinstance(step, Linear):
                there[step.target] = run_linear(program, step, weights.layers[i], there[step.source])
            else:
                there[step.target] = run_circuit(program, step, [there[o.source] for o in step.operands])
            if step.target == 1:
                there[1] = there[1] + noise.reshape(there[1].shape)
        assert np.array_equal(there[program.output], expected) == (not wanted)


@pytest.mark.parametrize("kind", ["mask", "projection"])
def test_two_parties_give_what_the_simulator_gives(kind, tmp_path):
    made = sparse(0.9) if kind == "mask" else behind_projection()[0]
    program, weights = compile_model(made, samples(), sparsity="public", permits="logits")
    program.save(tmp_path)
    weights.save(tmp_path)
    program = Program.load(tmp_path / "public")
    x = samples(5, 3).x
    expected = simulate(program, Weights.load(tmp_path, program), encode_input(program, x).values)
    np.testing.assert_array_equal(between_two_parties(program, weights, x), decode_output(program, expected))


def test_files_hold_masks_and_projection(tmp_path):
    made, matrix = behind_projection()
    with torch.no_grad():
        made.module[3].weight[:, ::2] = 0
    program, weights = compile_model(made, samples(), sparsity="public")
    program.save(tmp_path)
    weights.save(tmp_path)
    read = Program.load(tmp_path)
    assert read == program and read.digest() == program.digest()
    assert set(read.public_arrays) == set(program.public_arrays) >= {"projection"}
    np.testing.assert_array_equal(read.encoding.projection.array.reshape(matrix.shape), matrix)
    assert read.sample_shape == SPEC.shape and read.wires[0].shape == (5,)
    assert "which weights are zero" in "; ".join(read.disclosed) and "5 of the training samples" in str(read.disclosed)
    file = tmp_path / "public" / "arrays.npz"
    for content in (pack_public({}), b"", pack_public({**program.public_arrays, "projection": PublicArray(-matrix)})):
        file.write_bytes(content)
        with pytest.raises(InputError):
            Program.load(tmp_path)
    file.unlink()
    with pytest.raises(InputError):
        Program.load(tmp_path)


def test_the_digest_covers_masks_and_projection():
    made, matrix = behind_projection()
    program, _ = compile_model(made, samples())
    other = dataclasses.replace(program.encoding, projection=PublicArray(-matrix.reshape(5, *SPEC.shape)))
    mask = PublicArray(np.ones((8, 5), dtype=bool))
    masked = (dataclasses.replace(program.steps[0], mask=mask), *program.steps[1:])
    digests = {
        program.digest(),
        dataclasses.replace(program, encoding=other).digest(),
        dataclasses.replace(program, steps=masked).digest(),
    }
    assert len(digests) == 3
    assert "mask" not in str(program.as_dict()["steps"])  # programs without them keep their digests


def test_weights_outside_the_mask_are_refused():
    program, weights = compile_model(sparse(), samples(), sparsity="public")
    step = next(i for i, s in enumerate(program.steps) if isinstance(s, Linear))
    wrong = weights.layers[step].weight.copy()
    wrong[1] = 1
    layers = {**weights.layers, step: LinearWeights(wrong, weights.layers[step].bias)}
    with pytest.raises(InputError, match="public map"):
        Weights(program.digest(), layers).check(program)


@pytest.mark.parametrize(
    "bad", [np.ones((3, 1, 3, 2), bool), np.ones((3, 1, 3, 3)), np.ones(27, bool)], ids=["shape", "kind", "flat"]
)
def test_masks_that_do_not_fit_are_refused(bad):
    program, _ = compile_model(sparse(), samples())
    steps = (dataclasses.replace(program.steps[0], mask=PublicArray(bad)), *program.steps[1:])
    with pytest.raises(InputError, match="mask of booleans"):
        dataclasses.replace(program, steps=steps)


@pytest.mark.parametrize("bad", [np.ones((4, 36)), np.ones((5, 36), bool), np.ones(5)])
def test_projections_that_do_not_fit_are_refused(bad):
    program, _ = compile_model(behind_projection()[0], samples())
    with pytest.raises(InputError, match="projection to the input"):
        dataclasses.replace(program, encoding=dataclasses.replace(program.encoding, projection=PublicArray(bad)))


def test_the_client_projects():
    made, matrix = behind_projection()
    program, weights = compile_model(made, samples(512), activation_bits=12, weight_bits=12, permits="logits")
    x = samples(100, 7).x
    encoded = encode_input(program, x)
    wanted = SPEC.normalise(x).double().flatten(1).numpy() @ matrix.T
    number = program.wires[0].number
    step = program.encoding.unit * 2.0**-number.fraction
    inside = np.abs(wanted) < np.abs(np.array(program.input_range)).min() * step
    assert inside.mean() > 0.99
    assert np.abs(encoded.values * step - wanted)[inside].max() <= step / 2 * (1 + 1e-9)
    got = simulate(program, weights, encoded.values) * 2.0 ** -program.wires[program.output].number.fraction
    logits = made.query(x).numpy()
    assert np.sqrt(np.mean((got - logits) ** 2)) < 0.01 * np.sqrt(np.mean(logits**2))


def test_projected_values_out_of_range_are_clamped_and_counted_or_refused():
    program, _ = compile_model(behind_projection()[0], samples())
    x = np.random.default_rng(0).choice([0.0, 1.0], size=(50, *SPEC.shape))  # far beyond uniform samples
    encoded = encode_input(program, x)
    low, high = program.input_range
    assert encoded.clamped > 0 and encoded.values.min() >= low and encoded.values.max() <= high
    with pytest.raises(InputError, match="calibrated range"):
        encode_input(program, x, clamp=False)
    with pytest.raises(InputError, match=r"\(N, 1, 6, 6\)"):
        encode_input(program, np.zeros((2, 5)))


def test_a_model_that_left_its_projection_is_refused():
    made, matrix = behind_projection()
    with torch.no_grad():
        made.module[1].weight[0, 0] += 1
    with pytest.raises(InputError, match="projected input only"):
        compile_model(made, samples())
    convolved = with_projection(sparse(), matrix)
    with pytest.raises(InputError, match="linear layer on the whole input"):
        compile_model(convolved, samples())


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {},
        {"shape": [5, 36], "float32": "no base64"},
        {"shape": [5, 36], "float32": "AAAA"},
        {"shape": [0, 36], "float32": ""},
        {"shape": [1, 2], "float32": "AAAAAAAAAAA="},
    ],
)
def test_malformed_projections_in_metadata_are_refused(entry):
    made = behind_projection()[0].copy(metadata={"projection": entry})
    with pytest.raises(InputError):
        projection_of(made)


def test_the_projected_graph_is_the_network():
    from deepseal.secure_inference.compile.graph import run
    from deepseal.secure_inference.compile.lower import lower
    from deepseal.secure_inference.compile.projected import project

    made, _ = behind_projection()
    x = SPEC.normalise(samples(20).x.double())
    with torch.no_grad():
        graph = lower(made)
        small = projected(graph, projection_of(made))
        got = run(small, project(x, projection_of(made)))[small.output.node]
        wanted = run(graph, x)[graph.output.node]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
