"""Private inference, mixed mode: two parties give bit for bit what the simulator gives."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.errors import InputError, ProtocolError
from deepseal.secure_inference.compile import compile_model
from deepseal.secure_inference.compile.simulate import simulate
from deepseal.secure_inference.protocol.extension import TransferSettings
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.mixed import ClientSession, ServerSession
from deepseal.secure_inference.transport import memory_pair

SHAPE = (1, 8, 8)


def classifier(module, shape=SHAPE, classes=10, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return Classifier(module.eval(), InputSpec(shape=shape, num_classes=classes))


def compiled(module, seed=0, **options):
    model = classifier(module, seed=seed)
    x = torch.rand(64, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return compile_model(model, Split(x, torch.zeros(64, dtype=torch.int64)), **options)


def asked(program, weights, batches, settings=None, client_program=None):
    """The answers to each batch of one session; both sides' counters."""
    settings = settings or Settings()
    left, right = memory_pair(timeout=20)
    trouble, counters = [], {}

    def serve():
        try:
            with left:
                session = ServerSession(left, program, weights, settings)
                while session.answer():
                    pass
                counters["server"] = left.counters
        except Exception as error:
            trouble.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with right:
            client = ClientSession(right, client_program or program, settings)
            answers = [client.ask(x) for x in batches]
            client.close()
            counters["client"] = right.counters
    finally:
        thread.join()
    if trouble:
        raise trouble[0]
    return answers, counters


def drawn(program, count, seed=0):
    wire = program.wires[program.input]
    return np.random.default_rng(seed).integers(wire.number.low, wire.number.high + 1, (count, *wire.shape))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4 * 16, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + x)
        return self.last(nn.functional.max_pool2d(x, 2).flatten(1))


NETWORKS = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)),
    "sigmoid": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, 10)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10)
    ),
    "max pooling with padding": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(18, 10)
    ),
    "average pooling": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)
    ),
    "residual": Residual,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_the_simulator(name):
    program, weights = compiled(NETWORKS[name]())
    batches = [drawn(program, 1, 1), drawn(program, 3, 2)]
    answers, _ = asked(program, weights, batches)
    for x, answer in zip(batches, answers, strict=True):
        assert np.array_equal(answer, simulate(program, weights, x)), name


def test_logits_where_the_program_permits_them():
    program, weights = compiled(NETWORKS["dense"](), permits="logits")
    x = drawn(program, 2)
    (answer,), _ = asked(program, weights, [x])
    assert np.array_equal(answer, simulate(program, weights, x))


@pytest.mark.parametrize("transfer", [TransferSettings(k=1), TransferSettings(k=4, checks=True)])
def test_other_transfers(transfer):
    program, weights = compiled(NETWORKS["dense"]())
    x = drawn(program, 1)
    (answer,), _ = asked(program, weights, [x], Settings(transfer))
    assert np.array_equal(answer, simulate(program, weights, x))


def test_lengths_depend_on_the_public_program_alone():
    """Two inputs, then two sets of weights: the same bytes in each phase, on both sides."""
    one, two = (compiled(NETWORKS["dense"](), seed=seed) for seed in (0, 0))
    assert one[0].digest() == two[0].digest()
    seen = []
    for program, weights, seed in ((*one, 1), (*one, 2), (*two, 1)):
        _, counters = asked(program, weights, [drawn(program, 2, seed)])
        seen.append(
            {
                side: {name: (phase["bytes_sent"], phase["bytes_received"]) for name, phase in found.phases.items()}
                for side, found in counters.items()
            }
        )
    assert seen[0] == seen[1] == seen[2]


def test_refusals():
    program, weights = compiled(NETWORKS["dense"]())
    other, _ = compiled(NETWORKS["tanh"]())
    with pytest.raises(ProtocolError, match="program"):
        asked(program, weights, [drawn(other, 1)], client_program=other)
    wire = program.wires[program.input]
    for bad in (
        np.zeros((1, 1, 8, 9), np.int64),
        np.zeros((0, *wire.shape), np.int64),
        np.full((1, *wire.shape), wire.number.high + 1),
        np.full((1, *wire.shape), wire.number.low - 1),
    ):
        left, right = memory_pair(timeout=5)
        session = threading.Thread(target=lambda left=left: _serve_quietly(left, program, weights))
        session.start()
        with right:
            client = ClientSession(right, program, Settings())
            with pytest.raises(InputError):
                client.ask(bad)
            client.close()
        session.join()


def _serve_quietly(channel, program, weights):
    with channel:
        session = ServerSession(channel, program, weights, Settings())
        while session.answer():
            pass
