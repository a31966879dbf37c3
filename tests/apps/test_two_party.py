"""The two-party scripts: two processes with certificates, as on two machines."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.secure_inference.compile import compile_model
from deepseal.secure_inference.compile.simulate import encode_input, simulate
from deepseal.secure_inference.transport.certificates import make_certificates


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a program, certificates and samples; the right labels."""
    folder = tmp_path_factory.mktemp("two-party")
    torch.manual_seed(0)
    model = Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval(), InputSpec(shape=(1, 8, 8), num_classes=10)
    )
    x = torch.rand(64, 1, 8, 8)
    program, weights = compile_model(model, Split(x, torch.zeros(64, dtype=torch.int64)))
    program.save(folder / "program")
    weights.save(folder / "program")
    make_certificates(folder / "certs", ("server", "client"))
    np.save(folder / "x.npy", x[:3].numpy())
    return folder, simulate(program, weights, encode_input(program, x[:3]).values).tolist()


def run(*arguments, cwd, **options):
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_server_and_client(place):
    folder, labels = place
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ("program", "--listen", "127.0.0.1:0", "--certs", "certs")
    with run("deepseal.apps.two_party.server", *arguments, cwd=folder, env=environment) as server:
        try:
            line = server.stdout.readline()
            address = line.split(" on ")[1].split(";")[0]
            client = run(
                "deepseal.apps.two_party.client",
                "program/public",
                "x.npy",
                "--connect",
                address,
                "--certs",
                "certs",
                cwd=folder,
                env=environment,
            )
            out, err = client.communicate(timeout=60)
            assert (client.returncode, err) == (0, "")
            assert out.startswith(f"x.npy: {labels} (")
            assert server.stdout.readline().startswith("client 1: 1 questions")
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("server", ("nowhere",), "expected a program"),
        ("server", ("program", "--certs", "nowhere"), "certificate"),
        ("server", ("program", "--listen", "0.0.0.0:9001"), "--allow-plain|TLS"),
        ("client", ("program/public", "nowhere.npy"), "expected an array"),
        ("client", ("program/public", "x.npy", "--connect", "here"), "HOST:PORT"),
    ],
)
def test_mistakes_are_one_line(place, module, arguments, said):
    process = run(f"deepseal.apps.two_party.{module}", *arguments, cwd=place[0])
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.count("\n") == 1
    assert any(part in err for part in said.split("|")), err
