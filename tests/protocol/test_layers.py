"""Every supported layer, in every protocol: two parties give the simulator's integers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from parties import together

from deepseal.adapter import Split
from deepseal.secure_inference.compile import compile_model
from deepseal.secure_inference.compile.simulate import encode_input, simulate
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.modes import PROTOCOLS, client_ready, server_ready, start_client, start_server
from deepseal.secure_inference.transport import memory_pair

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from compile_networks import NETWORKS, drawn, network

HEAVY = {"recurrent", "mixer"}  # in yao, several seconds each


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_the_simulator(name, protocol):
    if name in HEAVY and protocol == "yao-client":
        pytest.skip("takes long, and the walk through the layers is that of yao")
    model = network(name, seed=3)
    data = drawn(model.spec, 60)
    permits = "logits" if name in ("relu", "residual") else "label"
    program, weights = compile_model(model, Split(data, torch.zeros(60, dtype=torch.int64)), permits=permits)
    x = encode_input(program, drawn(model.spec, 2, seed=4)).values
    left, right = memory_pair(timeout=60)
    served = server_ready(program, weights, protocol)

    def serve():
        with left:
            session = start_server(left, served, Settings(), protocol, lambda _samples: True)
            while session.answer():
                pass

    def ask():
        with right:
            session = start_client(right, client_ready(program, protocol), Settings(), protocol)
            answers = [session.ask(x)]
            if protocol == "mixed":
                session.prepare(2)
                answers.append(session.ask(x))
            session.close()
            return answers

    end, answers = together(serve, ask)
    assert end is None, end
    assert isinstance(answers, list), answers
    for answer in answers:
        assert np.array_equal(answer, simulate(program, weights, x))
