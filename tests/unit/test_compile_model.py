"""Whole models: lowering equals torch, circuits equal the simulator, ranges are sound, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from compile_networks import IMAGE, NETWORKS, VECTOR, drawn, network, run_netlists
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.errors import InputError
from deepseal.secure_inference.compile import (
    CompileSettings,
    Linear,
    compile_model,
    compile_report,
    decode_output,
    encode_input,
    simulate,
)
from deepseal.secure_inference.compile.accuracy import compare, paired_difference
from deepseal.secure_inference.compile.graph import run
from deepseal.secure_inference.compile.lower import lower


def calibration(model, count=64):
    x = drawn(model.spec, count)
    return Split(x, model.predict(x))


@pytest.mark.parametrize("name", NETWORKS)
def test_lowering_gives_what_torch_gives(name):
    model = network(name)
    x = drawn(model.spec, 5, seed=3).double()
    with torch.no_grad():
        graph = lower(model)
        got = run(graph, model.spec.normalise(x))[graph.output.node]
        wanted = model.module.double().eval()(model.spec.normalise(x))
    got = got.flatten(1)[:, torch.from_numpy(graph.output.index.copy())]
    torch.testing.assert_close(got.softmax(1) if name == "recurrent" else got, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NETWORKS)
def test_circuits_give_what_the_simulator_gives(name):
    model = network(name)
    program, weights = compile_model(model, calibration(model))
    x = encode_input(program, drawn(model.spec, 3, seed=9)).values
    expected = simulate(program, weights, x, intermediates=True)
    for wire, value in run_netlists(program, weights, x).items():
        np.testing.assert_array_equal(value, expected[wire], err_msg=f"wire {wire}")


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_are_close_to_the_models(name):
    model = network(name)
    program, weights = compile_model(model, calibration(model), activation_bits=12, weight_bits=12, permits="logits")
    x = drawn(model.spec, 64, seed=5)
    got = decode_output(program, simulate(program, weights, encode_input(program, x).values))
    graph = lower(model)
    with torch.no_grad():
        logits = run(graph, model.spec.normalise(x.double()))[graph.output.node]
    wanted = logits.flatten(1)[:, torch.from_numpy(graph.output.index.copy())].numpy()
    assert np.sqrt(np.mean((got - wanted) ** 2)) < 0.02 * np.sqrt(np.mean(wanted**2))


@pytest.mark.parametrize("name", ["relu", "residual", "silu", "average pooling", "odd"])
def test_no_input_leaves_the_ranges(name):
    """Inputs that drive each sum to its extremes, and random ones, stay within what range analysis says."""
    model = network(name)
    report = compile_report(model, calibration(model), CompileSettings())
    program, weights = report.program, report.weights
    low, high = program.input_range
    rng = np.random.default_rng(0)
    x = rng.choice([low, high], size=(400, *model.spec.shape))
    first = next(i for i, step in enumerate(program.steps) if isinstance(step, Linear))
    if program.steps[first].op == "linear":
        x = np.concatenate([x, np.where(weights.layers[first].weight > 0, high, low)])
    values = simulate(program, weights, x, intermediates=True)
    for layer, step in zip(report.layers, program.steps, strict=True):
        got = values[step.target]
        assert layer.low <= got.min() and got.max() <= layer.high, layer
        if isinstance(step, Linear):
            assert max(layer.high.bit_length(), (-1 - layer.low).bit_length()) + 1 == layer.bits


def test_ranges_are_tight_for_one_layer():
    model = Classifier(nn.Linear(20, 5), VECTOR)
    report = compile_report(model, calibration(model), CompileSettings(permits="logits"))
    weight, (low, high) = report.weights.layers[0].weight, report.program.input_range
    x = np.concatenate([np.where(weight > 0, high, low), np.where(weight > 0, low, high)])
    got = simulate(report.program, report.weights, x)
    assert (got.min(), got.max()) == (report.layers[0].low, report.layers[0].high)


def test_overflow_is_refused_with_the_layers_name():
    model = network("relu")
    with pytest.raises(InputError, match=r"layer '2', which need \d+ bits|layer '0', which need \d+ bits"):
        compile_model(model, calibration(model), ring_bits=12)


def test_accepted_overflow_makes_smaller_rings_and_wraps():
    model = network("relu")
    sound, _ = compile_model(model, calibration(model))
    program, weights = compile_model(model, calibration(model), accept_overflow=True)
    pairs = list(zip(sound.wires, program.wires, strict=True))
    assert all(b.number.bits <= a.number.bits for a, b in pairs)
    narrow, _ = compile_model(model, calibration(model), accept_overflow=True, ring_bits=10)
    assert max(wire.number.bits for wire in narrow.wires) == 10
    x = drawn(model.spec, 200, seed=4)
    got = decode_output(program, simulate(program, weights, encode_input(program, x).values))
    assert np.mean(got == model.predict(x).numpy()) > 0.9


def test_the_model_is_left_alone(no_trace):
    model = network("recurrent")
    model.module.train()
    data = calibration(model)
    with no_trace(model):
        compile_model(model, data)


def test_the_same_model_gives_the_same_program():
    first, second = (compile_model(network("mixer"), calibration(network("mixer"))) for _ in range(2))
    assert first[0].digest() == second[0].digest()
    np.testing.assert_array_equal(first[1].layers[0].weight, second[1].layers[0].weight)


def test_all_unsupported_layers_in_one_message():
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ELU(), nn.Flatten(), nn.LayerNorm(128),
                         nn.Softmax(1), nn.Linear(128, 4))  # fmt: skip
    model = Classifier(body, IMAGE)
    with pytest.raises(InputError) as caught:
        compile_model(model, Split(drawn(IMAGE, 4), torch.zeros(4, dtype=torch.int64)))
    for part in ("group_norm in '1' (use BatchNorm)", "elu in '2'", "layer_norm in '4'", "softmax", "in '6'"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


class _Strange(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.head = function, nn.Linear(20, 5)

    def forward(self, x):
        return self.head(self.function(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x - x.mean(0, keepdim=True), "over the batch"),
        (lambda x: x / x, "division by a secret"),
        (lambda x: torch.exp(x), "operator exp"),
        (lambda x: (x[:, None, :] @ x[:, :, None]).flatten(1).expand(-1, 20), "two secret tensors"),
        (lambda x: x.flip(0), "across samples"),
        (lambda x: nn.functional.pad(x, (0, 0, 1, 1))[1:-1], "across samples"),
    ],
)
def test_what_cannot_be_lowered_is_named(function, message):
    with pytest.raises(InputError, match=message):
        lower(Classifier(_Strange(function), VECTOR))


def test_control_flow_is_an_input_error():
    with pytest.raises(InputError, match="torch.export"):
        lower(Classifier(_Strange(lambda x: x if x.sum() > 0 else -x), VECTOR))


def test_public_weights_of_pooling_are_exact_where_they_can_be():
    model = Classifier(nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12, 4)), IMAGE)
    program, weights = compile_model(model, calibration(model))
    pool = program.constants[0]
    assert program.steps[0].public and set(weights.layers) == {2}
    assert (pool.weight == 1).all() and program.steps[0].weight.fraction == 4


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("form", ["lut", "piecewise_linear", "piecewise_quadratic", "cordic"])
def test_bits_and_forms(bits, form):
    model = network("tanh")
    program, weights = compile_model(model, calibration(model), activation_bits=bits, activations=form)
    x = encode_input(program, drawn(model.spec, 4)).values
    expected = simulate(program, weights, x)
    np.testing.assert_array_equal(run_netlists(program, weights, x)[program.output], expected)


def test_sixteen_bits():
    for name in ("tanh", "silu"):
        model = network(name)
        program, weights = compile_model(
            model, calibration(model), activation_bits=16, weight_bits=16, permits="logits"
        )
        x = drawn(model.spec, 50)
        got = decode_output(program, simulate(program, weights, encode_input(program, x).values))
        wanted = model.query(x).numpy()
        assert np.abs(got - wanted).max() < 3e-3


def test_images_of_255_levels_are_exact():
    spec = InputSpec((1, 16, 16), 3)
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(256, 3)), spec)
    levels = torch.arange(256.0).reshape(1, 1, 16, 16) / 255
    program, _ = compile_model(model, Split(levels, torch.zeros(1, dtype=torch.int64)))
    assert encode_input(program, levels).values.reshape(-1).tolist() == list(range(256))


def test_inputs_outside_are_clamped_and_counted_or_refused():
    model = network("relu")
    program, _ = compile_model(model, calibration(model))
    x = np.zeros((2, 20))
    x[0, :3] = 5.0
    encoded = encode_input(program, x)
    assert encoded.clamped == 3
    np.testing.assert_array_equal(encoded.values[0, :3], encode_input(program, np.ones((1, 20))).values[0, :3])
    with pytest.raises(InputError, match=r"inputs in \[-1, 1\]; found 3 values outside"):
        encode_input(program, x, clamp=False)
    with pytest.raises(InputError, match="finite"):
        encode_input(program, x * np.nan)
    with pytest.raises(InputError, match="shape"):
        encode_input(program, np.zeros((2, 21)))
    with pytest.raises(InputError, match="encode_input"):
        simulate(program, None, np.full((1, 20), 10**6))
    with pytest.raises(InputError, match="secret weights"):
        simulate(program, None, encoded.values)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_drawn_shapes(data):
    """Convolutions and pooling of drawn shapes: circuits give what the simulator gives, and that is near the model."""
    draw = data.draw
    groups = draw(st.sampled_from([1, 2]))
    sizes = draw(st.tuples(st.integers(5, 9), st.integers(5, 9)))
    kernel, stride, padding, dilation = (
        draw(st.tuples(st.integers(low, high), st.integers(low, high)))
        for low, high in ((1, 3), (1, 2), (0, 1), (1, 2))
    )
    spec = InputSpec((2 * groups, *sizes), 3)
    pool = draw(st.sampled_from([nn.Identity(), nn.MaxPool2d(2, 1), nn.AvgPool2d((1, 2), 1), nn.AdaptiveAvgPool2d(1)]))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(draw(st.integers(0, 99)))
        conv = nn.Conv2d(2 * groups, 2 * groups, kernel, stride, padding, dilation, groups)
        activation = draw(st.sampled_from([nn.ReLU(), nn.Sigmoid(), nn.SiLU(), nn.ReLU6()]))
        module = nn.Sequential(conv, activation, pool, nn.Flatten(), nn.LazyLinear(3))
        try:
            module(torch.zeros(1, *spec.shape))
        except RuntimeError:
            return  # nothing is left of so small an image
    model = Classifier(module, spec)
    program, weights = compile_model(model, calibration(model), permits="logits")
    x = drawn(spec, 4, seed=7)
    encoded = encode_input(program, x).values
    expected = simulate(program, weights, encoded)
    np.testing.assert_array_equal(run_netlists(program, weights, encoded)[program.output], expected)
    # Numbers of 8 bits: rounded activations (SiLU before pooling: 0.099 was met) add up in the last layer.
    assert np.abs(decode_output(program, expected) - model.query(x).numpy()).max() < 0.15


def test_a_last_sigmoid_changes_no_label():
    module = nn.Sequential(nn.Linear(20, 5), nn.Sigmoid())
    model = Classifier(module, VECTOR)
    program, _ = compile_model(model, calibration(model))
    assert [type(step).__name__ for step in program.steps] == ["Linear", "Circuit"]
    program, weights = compile_model(model, calibration(model), permits="logits")
    x = drawn(VECTOR, 9)
    got = decode_output(program, simulate(program, weights, encode_input(program, x).values))
    assert np.abs(got - model.query(x).numpy()).max() < 0.02


class _Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(20, 5)

    def forward(self, x):
        return self.head(x).flip(1)


def test_logits_in_another_order_are_exact():
    model = Classifier(_Backwards(), VECTOR)
    program, weights = compile_model(model, calibration(model), permits="logits")
    x = encode_input(program, drawn(VECTOR, 6)).values
    values = run_netlists(program, weights, x)
    np.testing.assert_array_equal(values[program.output], values[1][:, ::-1])
    np.testing.assert_array_equal(simulate(program, weights, x), values[1][:, ::-1])


def test_settings_out_of_range_are_refused():
    model = network("relu")
    for wrong in ({"activation_bits": 1}, {"weight_bits": 17}, {"activations": "magic"}, {"permits": "all"}):
        with pytest.raises(InputError):
            compile_model(model, calibration(model), **wrong)
    with pytest.raises(InputError, match="parameter"):
        compile_model(model, calibration(model), bits=8)


@pytest.mark.parametrize("arch", ["mlp", "cnn", "deepsecure_b2"])
def test_accuracy_on_digits(digits, arch):
    from models import trained

    model = trained(digits, 0, f"deepseal.adapter.zoo:{arch}", epochs=6)
    report = compile_report(model, digits.calibration, CompileSettings())
    found = compare(report.program, report.weights, digits.test, model)
    assert found.agreement.value > 0.98
    assert abs(found.difference.value) <= 0.01
    assert all(layer.error is None or layer.error < 0.1 for layer in report.layers)


def test_report_names_layers_and_costs(digits, base):
    report = compile_report(base, digits.calibration, CompileSettings())
    assert [layer.name for layer in report.layers] == ["fc1", "act1", "fc2", "act2", "fc3", "argmax"]
    assert report.layers[0].products == 64 * 512
    assert report.layers[1].and_gates > 512 * 8
    assert dataclasses.asdict(report.layers[0]) == {**report.layers[0].as_dict(), "shape": (512,)}


def test_paired_interval():
    """36 right by both, 12 by the first only, 2 by the second only; and equal answers give no difference."""
    same = paired_difference(np.ones(50, bool), np.ones(50, bool))
    assert same.value == 0 and same.low < 0 < same.high
    first = np.array([True] * 36 + [True] * 12 + [False] * 2)
    second = np.array([True] * 36 + [False] * 12 + [True] * 2)
    found = paired_difference(first, second)
    assert (found.gained, found.lost) == (12, 2)
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(0.0569, abs=1e-3)
    assert found.high == pytest.approx(0.3404, abs=1e-3)
