"""Delegation between processes: TLS, a proxy that is killed, and what a client needs."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from delegations import DEEPSEAL, ENV, LOOPBACK, opened
from lines import tapped
from parties import party
from test_mixed import NETWORKS, compiled, drawn
from test_server import reals, wait_for

from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.secure_inference.compile.simulate import decode_output, simulate
from deepseal.secure_inference.roles.delegate import DelegatedClient
from deepseal.secure_inference.roles.desk import Desk
from deepseal.secure_inference.roles.proxy import Proxy
from deepseal.secure_inference.transport import Kind, Tls


def test_tls(tmp_path, certified):
    parties = ("server.example", "proxy.example", "client.example")
    made = party_of(tmp_path / "certificates", parties)
    tls = {name: Tls(made.certificates[name], made.keys[name], made.ca) for name in parties}
    server, proxy, client = (tls[name] for name in parties)
    x = drawn(compiled(NETWORKS["dense"]())[0], 2)
    names = {"server_name": "server.example", "proxy_name": "proxy.example"}
    with opened(*compiled(NETWORKS["dense"]()), tls=(server, proxy), server_name="server.example") as place:
        place.check(x, tls=client, **names)
        with pytest.raises(TransportError, match=r"a certificate for server\.example"):
            place.client(tls=client, server=place.proxy, proxy=place.desk, **names)
        with pytest.raises(TransportError):  # another CA
            place.client(tls=certified.garbler)
        with pytest.raises(TransportError, match="greeting|TLS"):
            place.client()
    with opened(*compiled(NETWORKS["dense"]()), tls=(server, server)) as place:  # noqa: SIM117
        with pytest.raises(ProtocolError, match="one certificate for both"):
            place.client(tls=client)
    with opened(*compiled(NETWORKS["dense"]()), tls=(server, proxy), server_name="other.example") as place:
        with place.client(tls=client) as asking, pytest.raises(ProtocolError, match="got no answer"):
            asking.ask(reals(place.program, x))
        wait_for(lambda: place.found["proxy"])
        assert "other.example" in place.found["proxy"][0].error


def party_of(folder, names):
    return party(folder, names=("garbler", "evaluator", *names)).files


def test_plain_beyond_this_machine_is_refused():
    program, _ = compiled(NETWORKS["dense"]())
    with pytest.raises(InputError, match="TLS for an address beyond"):
        DelegatedClient.connect(program, server="192.0.2.1:9", proxy="127.0.0.1:9")
    assert "allow_plain" not in inspect.signature(DelegatedClient.connect).parameters
    with pytest.raises(InputError, match="TLS for an address beyond"), Desk(program).open("0.0.0.0:0"):
        pass
    with pytest.raises(InputError, match="TLS for an address beyond"):
        Proxy(program, "127.0.0.1:9").serve("0.0.0.0:0")
    for wrong in ({"most_clients": 0}, {"most_sessions": 0}):
        with pytest.raises(InputError, match="at least one"):
            Proxy(program, "127.0.0.1:9", **wrong)


@contextlib.contextmanager
def process(*words, said):
    """A command as a real process; what it said after ``said``, and the process."""
    command = [*DEEPSEAL, "private", *map(str, words)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        found = []
        try:
            while len(found) < len(said):
                line = run.stderr.readline()
                assert line, "it ended"
                found += [re.split(r"[;\s]|: ", line.split(text)[1])[0] for text in said if text in line]
            yield found, run
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                out, err = run.communicate(timeout=30)
                assert run.returncode == 0, err
                assert out.startswith("served ")
        finally:
            if run.poll() is None:
                run.kill()


def test_three_processes_and_a_proxy_that_is_killed(tmp_path):
    program, weights = compiled(NETWORKS["dense"]())
    program.save(tmp_path / "program")
    weights.save(tmp_path / "program")
    x = drawn(program, 3)
    np.save(tmp_path / "x.npy", reals(program, x))
    labels = decode_output(program, simulate(program, weights, x)).tolist()
    serve = ("serve", tmp_path / "program", "--listen", LOOPBACK, "--delegates", LOOPBACK, "--accept-public")
    public = tmp_path / "program" / "public"

    def ask(desk, proxy):
        words = ("delegate", public, "--server", desk, "--proxy", proxy, "--input", tmp_path / "x.npy", "--json")
        command = [*DEEPSEAL, "private", *map(str, words)]
        return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, timeout=120)

    victims = []

    def kill(frame):
        if frame.kind == Kind.TABLES and victims:
            victims.pop().kill()

    with process(*serve, said=("constrained clients on ", "serving on ")) as ((desk, server), _):
        with tapped(server, kill) as tap:
            command = ("proxy", public, "--connect", tap.address, "--listen", LOOPBACK)
            with process(*command, said=("proxy on ",)) as ((where,), run):
                done = ask(desk, where)
                assert done.returncode == 0, done.stderr
                assert "secure only if the proxy and the server do not work together" in done.stderr
                record = json.loads(done.stdout)
                assert (record["kind"], record["results"]["label"]) == ("private.delegate", labels)
                assert {"bytes_sent", "bytes_received", "seconds"} <= record["results"].keys()
                victims.append(run)
                done = ask(desk, where)
                assert (done.returncode, done.stdout) == (2, ""), done.stderr
                assert run.wait(10) == -signal.SIGKILL
                assert done.stderr.splitlines()[-1].startswith("deepseal: expected the other party to stay")
        with process("proxy", public, "--connect", server, "--listen", LOOPBACK, said=("proxy on ",)) as ((where,), _):
            done = ask(desk, where)
            assert json.loads(done.stdout)["results"]["label"] == labels, done.stderr


def test_a_client_needs_neither_the_engine_nor_public_key_cryptography(tmp_path, place):
    place.program.save(tmp_path)
    x = drawn(place.program, 1)
    np.save(tmp_path / "x.npy", reals(place.program, x))
    code = (
        "import sys; sys.modules['deepseal._native'] = sys.modules['nacl'] = None\n"
        "import pathlib, numpy as np\n"
        "from deepseal.secure_inference.compile.program import Program\n"
        "from deepseal.secure_inference.roles.delegate import DelegatedClient\n"
        f"program = Program.load(pathlib.Path({str(tmp_path)!r}))\n"
        f"with DelegatedClient.connect(program, server={place.desk!r}, proxy={place.proxy!r}) as client:\n"
        f"    print(client.ask(np.load({str(tmp_path / 'x.npy')!r})).values.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert done.stdout == f"{place.expected(x).tolist()}\n", done.stderr
