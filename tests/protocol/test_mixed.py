"""Private inference, mixed mode: two parties give bit for bit what the simulator gives."""

import contextlib
import socket
import struct
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.secure_inference.compile import Weights, compile_model
from deepseal.secure_inference.compile.arrays import LinearWeights
from deepseal.secure_inference.compile.simulate import simulate
from deepseal.secure_inference.protocol.extension import TransferSettings
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.layers import prepare, prepare_server
from deepseal.secure_inference.roles.memory import Memory
from deepseal.secure_inference.roles.mixed import ClientSession, ServerSession
from deepseal.secure_inference.transport import Channel, Kind, memory_pair

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


def asked(program, weights, batches, settings=None, client_program=None, ahead=(), relay=None):
    """The answers to each batch of one session; both sides' counters.

    ``ahead``: samples of the questions that are prepared before the first one. ``relay``: see ``recorded``.
    """
    settings = settings or Settings()
    left, right = relay or memory_pair(timeout=20)
    trouble, counters = [], {}
    ready = prepare_server(program, weights)

    def serve():
        try:
            with left:
                session = ServerSession(left, ready, settings)
                while session.answer():
                    pass
                counters["server"] = left.counters
        except Exception as error:
            trouble.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with right:
            client = ClientSession(right, prepare(client_program or program), settings)
            for samples in ahead:
                client.prepare(samples)
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


@pytest.mark.parametrize("ahead", [(), (1, 3), (1,)], ids=["live", "ahead", "one ahead"])
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_the_simulator(name, ahead):
    program, weights = compiled(NETWORKS[name]())
    batches = [drawn(program, 1, 1), drawn(program, 3, 2)]
    answers, _ = asked(program, weights, batches, ahead=ahead)
    for x, answer in zip(batches, answers, strict=True):
        assert np.array_equal(answer, simulate(program, weights, x)), name


@pytest.mark.parametrize("ahead", [(), (2,)])
def test_logits_where_the_program_permits_them(ahead):
    program, weights = compiled(NETWORKS["dense"](), permits="logits")
    x = drawn(program, 2)
    (answer,), _ = asked(program, weights, [x], ahead=ahead)
    assert np.array_equal(answer, simulate(program, weights, x))


@pytest.mark.parametrize("transfer", [TransferSettings(k=1), TransferSettings(k=4, checks=True)])
def test_other_transfers(transfer):
    program, weights = compiled(NETWORKS["dense"]())
    x = drawn(program, 1)
    (answer,), _ = asked(program, weights, [x], Settings(transfer))
    assert np.array_equal(answer, simulate(program, weights, x))


def negated(program, weights):
    """Other weights of the same public program."""
    formats = {i: program.steps[i].weight for i in weights.layers}
    layers = {
        i: LinearWeights(np.clip(-w.weight, formats[i].low, formats[i].high), -w.bias)
        for i, w in weights.layers.items()
    }
    return Weights(weights.program, layers)


@pytest.mark.parametrize("ahead", [(), (2,)])
def test_lengths_depend_on_the_public_program_alone(ahead):
    """Two inputs, then two sets of weights: the same bytes in each phase, on both sides."""
    program, weights = compiled(NETWORKS["dense"]())
    seen = []
    for used, seed in ((weights, 1), (weights, 2), (negated(program, weights), 1)):
        _, counters = asked(program, used, [drawn(program, 2, seed)], ahead=ahead)
        seen.append(
            {
                side: {name: (phase["bytes_sent"], phase["bytes_received"]) for name, phase in found.phases.items()}
                for side, found in counters.items()
            }
        )
    assert seen[0] == seen[1] == seen[2]


def recorded():
    """Two channels, and the bytes that reach the first (the server's) and the second (the client's) through a relay."""
    sides = [socket.socketpair() for _ in range(2)]
    got = (bytearray(), bytearray())

    def carry(source, target, record):
        while data := source.recv(1 << 16):
            record += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    inner = [pair[1] for pair in sides]
    for source, target, record in ((inner[1], inner[0], got[0]), (inner[0], inner[1], got[1])):
        threading.Thread(target=carry, args=(source, target, record), daemon=True).start()
    return tuple(Channel(pair[0], timeout=20) for pair in sides), got


QUESTIONS = 400


def transcripts(program, choices, ahead):
    """What each side received for each question of one session, header bytes and all: (questions, bytes) twice.

    ``choices``: weights and input of each question; all weights belong to one program.
    """
    channels, got = recorded()
    used = {id(weights): prepare_server(program, weights) for weights, _ in choices}

    def serve():
        with channels[0]:
            session = ServerSession(channels[0], used[id(choices[0][0])], Settings())
            for weights, _ in choices:
                session._ready = used[id(weights)]
                for _ in range(1 + ahead):
                    session.answer()
            session.answer()

    thread = threading.Thread(target=serve)
    thread.start()
    parts = []
    with channels[1]:
        client = ClientSession(channels[1], prepare(program), Settings())
        for _, x in choices:
            before = [len(part) for part in got]
            if ahead:
                client.prepare(1)
            client.ask(x)
            parts.append([np.frombuffer(bytes(part[n:]), np.uint8) for part, n in zip(got, before, strict=True)])
        client.close()
    thread.join()
    return [np.stack([part[side] for part in parts[1:]]) for side in range(2)]  # the first one ends the set-up


def separation(rows, labels):
    """How well the 16 bits that differ most in half of the transcripts tell the other half apart: 0.5 is chance."""
    half = len(rows) // 2
    bits = np.unpackbits(rows, axis=1).astype(np.float32)
    direction = bits[:half][labels[:half]].mean(0) - bits[:half][~labels[:half]].mean(0)
    direction[np.argsort(np.abs(direction))[:-16]] = 0
    scores = bits[half:] @ direction
    one, two = scores[labels[half:]], scores[~labels[half:]]
    return float((one[:, None] > two).mean() + 0.5 * (one[:, None] == two).mean())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("what", ["input", "weights"])
def test_transcripts_do_not_tell_inputs_or_weights_apart(what, ahead):
    """By chance the area under the curve is 0.5 with a standard deviation of 0.04 (100 transcripts of each kind)."""
    program, weights = compiled(nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 3)))
    wire = program.wires[program.input]
    low, high = (np.full((1, *wire.shape), value) for value in (wire.number.low, wire.number.high))
    labels = np.random.default_rng(7).random(QUESTIONS) < 0.5
    if what == "input":
        pairs, reader = ((weights, low), (weights, high)), 0
    else:
        pairs, reader = ((weights, low), (negated(program, weights), low)), 1
    rows = transcripts(program, [pairs[int(label)] for label in labels], ahead)[reader]
    assert abs(separation(rows, labels[1:]) - 0.5) < 0.25
    rows[labels[1:], 500] = 7
    assert separation(rows, labels[1:]) > 0.9, "a control: one byte that differs"


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
        with client_of(program, weights) as client, pytest.raises(InputError):
            client.ask(bad)


@contextlib.contextmanager
def client_of(program, weights):
    left, right = memory_pair(timeout=5)
    ready = prepare_server(program, weights)
    thread = threading.Thread(target=lambda: _serve_quietly(left, ready))
    thread.start()
    with right:
        client = ClientSession(right, prepare(program), Settings())
        yield client
        client.close()
    thread.join()


def test_prepared_questions_are_asked_as_they_were_prepared():
    program, weights = compiled(NETWORKS["dense"]())
    with client_of(program, weights) as client:
        client.prepare(2)
        assert client.ahead == (2,)
        with pytest.raises(InputError, match="of 2 samples"):
            client.ask(drawn(program, 1))
        for samples in (0, 5000):
            with pytest.raises(InputError, match="samples ahead"):
                client.prepare(samples)
        x = drawn(program, 2)
        assert np.array_equal(client.ask(x), simulate(program, weights, x))
        assert client.ahead == ()
        assert np.array_equal(client.ask(x[:1]), simulate(program, weights, x[:1]))


def test_material_is_overwritten_when_it_is_used_and_when_the_session_ends():
    program, weights = compiled(NETWORKS["dense"]())
    with client_of(program, weights) as client:
        for _ in range(2):
            client.prepare(1)
        bundles = list(client._bundles)
        secrets = [[*b.frames, *b.seeds, *(labels for _, labels in b.transfers)] for b in bundles]
        assert all(part.any() for kept in secrets for part in kept)
        client.ask(drawn(program, 1))
        assert not any(part.any() for part in secrets[0])
        assert not bundles[0].frames
        client.erase()
        assert not any(part.any() for part in secrets[1])


def test_the_server_overwrites_its_part_too():
    """Used, not asked, and when the client leaves in the middle of its use."""
    program, weights = compiled(NETWORKS["dense"](), permits="logits")
    ready, kept, sessions = prepare_server(program, weights), [], []

    class Watched(ServerSession):
        def _use(self, bundle):
            kept.append([*bundle.masks, bundle.share])
            super()._use(bundle)

    def serve(channel):
        with contextlib.suppress(ProtocolError, TransportError), channel:
            session = Watched(channel, ready, Settings(), memory=memory)
            sessions.append(session)
            try:
                while session.answer():
                    pass
            finally:
                session.erase()

    memory = Memory()
    left, right = memory_pair(timeout=5)
    thread = threading.Thread(target=serve, args=(left,))
    thread.start()
    with contextlib.suppress(ProtocolError), right:
        client = ClientSession(right, prepare(program), Settings())
        for _ in range(3):
            client.prepare(1)
        client.ask(drawn(program, 1))
        kept.append([*sessions[0]._bundles[-1].masks, sessions[0]._bundles[-1].share])
        assert memory._held > 0
        right.send(Kind.INPUT, struct.pack("<BI", 3, 1))
        right.flush()
        right.refuse("gone in the middle")
    thread.join()
    assert len(kept) == 3
    assert not any(part.any() for parts in kept for part in parts)
    assert memory._held == 0


def test_more_than_fits_into_memory_is_refused():
    program, weights = compiled(NETWORKS["convolution"]())
    ready = prepare_server(program, weights)
    for protocol, session in (("ask", 1), ("prepare", 2)):
        left, right = memory_pair(timeout=5)
        memory = Memory(3 * ready.label_bytes)
        thread = threading.Thread(target=_serve_quietly, args=(left, ready, memory))
        thread.start()
        with pytest.raises(ProtocolError, match="at most 3 samples at once"), right:
            client = ClientSession(right, prepare(program), Settings())
            client.ask(drawn(program, 3))
            right.send(Kind.INPUT, struct.pack("<BI", session, 4))
            right.receive(Kind.OUTPUT, at_most=1)
        thread.join()
        assert memory._held == 0, protocol


@pytest.mark.parametrize("name", NETWORKS)
def test_label_bytes_bound_what_is_held(name):
    """Memory that grows with the samples is below the bound, and not far below it."""
    program, weights = compiled(NETWORKS[name]())
    ready, samples = prepare_server(program, weights), 40
    asked(program, weights, [drawn(program, 1)])
    tracemalloc.start()
    asked(program, weights, [drawn(program, samples)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    bound = 2 * samples * ready.label_bytes  # both parties run here
    assert 0.1 * bound < peak < 1.2 * bound + (4 << 20)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [((3, 1), "prepared"), ((9, 1), "question"), ((1, 0), "question"), ((1, 5000), "question"), ((1,), "bytes")],
)
def test_requests_that_are_refused(request_, reason):
    program, weights = compiled(NETWORKS["dense"]())
    left, right = memory_pair(timeout=5)
    ready = prepare_server(program, weights)
    thread = threading.Thread(target=lambda: _serve_quietly(left, ready))
    thread.start()
    with pytest.raises(ProtocolError, match=reason), right:
        ClientSession(right, prepare(program), Settings())
        right.send(Kind.INPUT, struct.pack("<BI", *request_) if len(request_) == 2 else b"x")
        right.receive(Kind.OUTPUT, at_most=100)
    thread.join()


def _serve_quietly(channel, ready, memory=None):
    with contextlib.suppress(ProtocolError), channel:
        session = ServerSession(channel, ready, Settings(), memory=memory)
        while session.answer():
            pass
