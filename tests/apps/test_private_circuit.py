"""`deepseal private circuit` and `private bench` as real processes: results, records, and every refusal."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepseal import _native
from deepseal.errors import InputError
from deepseal.secure_inference.protocol.bench import bench_memory, bench_transfer

OWN = Path(__file__).parents[1] / "data" / "bristol" / "subtract8.txt"
PUBLIC = Path(os.environ.get("DEEPSEAL_DATA", "/nonexistent")) / "bristol"
needs_circuits = pytest.mark.skipif(not PUBLIC.is_dir(), reason="DEEPSEAL_DATA names no folder with bristol/")
RUN = ("private", "circuit", "run")


def started(*words, cwd=None):
    command = [sys.executable, "-m", "deepseal", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True
    )


def finished(process):
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def deepseal(*words, cwd=None):
    return finished(started(*words, cwd=cwd))


EACH = """
import json, os, sys, tempfile
import typer.main
import deepseal.record, deepseal.secure_inference.protocol.circuit, deepseal.secure_inference.transport
from deepseal.apps.cli import app, main
typer.main.get_command(app)
results = []
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = ["deepseal", *words]
            main()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        results.append([code, *texts])
json.dump(results, sys.stdout)
"""


def deepseal_each(lines):
    """Many command lines, each in a process of its own that starts with everything imported."""
    command = [sys.executable, "-c", EACH]
    text = json.dumps([[str(word) for word in words] for words in lines])
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def pair(garbler, evaluator, *, cwd=None):
    """Both command lines at once: code, stdout and stderr of each."""
    one, two = started(*garbler, cwd=cwd), started(*evaluator, cwd=cwd)
    return finished(one), finished(two)


def refused(code, out, err, text):
    assert (code, out) == (2, ""), err
    (line,) = [line for line in err.splitlines() if "waiting for the other party" not in line]
    assert line.startswith("deepseal: ") and text in line, line


@needs_circuits
def test_the_command_lines_word_for_word(tmp_path):
    (tmp_path / "adder64.txt").symlink_to(PUBLIC / "adder64.txt")
    (tmp_path / "aes_128.txt").symlink_to(PUBLIC / "aes_128.txt")
    at = f"127.0.0.1:{free_port()}"
    garbler = f"private circuit run adder64.txt --role garbler --listen {at} --input 0x0123456789abcdef"
    evaluator = f"private circuit run adder64.txt --role evaluator --connect {at} --input 0x00000000000000ff --json"
    one, two = pair(garbler.split(), evaluator.split(), cwd=tmp_path)
    assert (one[0], two[0]) == (0, 0), one[2] + two[2]
    assert "0x0123456789abceee" in one[1]
    assert f"waiting for the other party on {at}" in one[2]
    assert two[2] == ""
    record = json.loads(two[1])
    results = record["results"]
    assert (record["kind"], record["status"]) == ("private.circuit", "ok")
    assert results["output"] == "0x0123456789abceee"
    assert results["and_gates"] == 63
    assert results["bytes_received"] > 63 * 32 and results["bytes_sent"] > 64 * 8
    assert 0 < results["seconds"] < 60
    assert results["security"] == "semi-honest"
    assert set(results["phases"]) == {"handshake", "base-ot", "inputs", "tables", "outputs"}
    for secret in ("0123456789abcdef", str(0x0123456789ABCDEF), "00000000000000ff"):
        assert secret not in one[1] + one[2] + two[1] + two[2]

    code, out, err = deepseal("private", "circuit", "info", "aes_128.txt", "--json", cwd=tmp_path)
    assert (code, err) == (0, "")
    results = json.loads(out)["results"]
    assert (results["and_gates"], results["xor_gates"], results["depth"]) == (6400, 28176, 60)
    assert results["not_gates"] == 2087
    assert (results["inputs"], results["outputs"], results["table_bytes"]) == ([128, 128], [128], 204800)


def test_tls_files_owners_readers_and_records(tmp_path):
    code, _, err = deepseal("private", "certs", "--out", "keys", cwd=tmp_path)
    assert code == 0, err
    (tmp_path / "secret.txt").write_text("  0A\n\n07\n")
    at = f"127.0.0.1:{free_port()}"

    def words(role, *more):
        files = ["--tls-cert", f"keys/{role}.pem", "--tls-key", f"keys/{role}.key", "--tls-ca", "keys/ca.pem"]
        owners = ["--owner", "evaluator", "--owner", "evaluator", "--reader", "garbler"]
        return [*RUN, OWN, "--role", role, *files, *owners, "--check-ot", "--ot-k", 4, "--json", *more]

    one, two = pair(
        words("garbler", "--connect", at, "--record", "garbler.json"),
        words("evaluator", "--listen", at, "--input-file", "secret.txt", "--record", "evaluator.json"),
        cwd=tmp_path,
    )
    assert (one[0], two[0]) == (0, 0), one[2] + two[2]
    results = [json.loads(out)["results"] for _, out, _ in (one, two)]
    assert results[0]["output"] == "0x003" and results[0]["outputs"] == ["0x003"]
    assert results[1]["output"] is None and results[1]["outputs"] is None
    assert all("deviation in the OT extension is caught" in result["security"] for result in results)
    records = [json.loads((tmp_path / f"{role}.json").read_text()) for role in ("garbler", "evaluator")]
    assert records[0]["fingerprints"] == records[1]["fingerprints"]
    assert records[0]["params"]["tls"] is True and records[0]["params"]["owners"] == ["evaluator", "evaluator"]
    assert results[0]["bytes_sent"] == results[1]["bytes_received"]


def test_a_party_of_another_authority(tmp_path):
    for folder in ("ours", "theirs"):
        assert deepseal("private", "certs", "--out", folder, cwd=tmp_path)[0] == 0
    at = f"127.0.0.1:{free_port()}"

    def words(role, folder, *more):
        files = [
            "--tls-cert",
            f"{folder}/{role}.pem",
            "--tls-key",
            f"{folder}/{role}.key",
            "--tls-ca",
            f"{folder}/ca.pem",
        ]
        return [*RUN, OWN, "--role", role, *files, "--input", "1", "--timeout", "20", *more]

    one, two = pair(
        words("garbler", "ours", "--listen", at), words("evaluator", "theirs", "--connect", at), cwd=tmp_path
    )
    refused(*one, "use certificates of one CA")
    refused(*two, "use certificates of one CA")


@pytest.mark.parametrize(
    ("garbler", "evaluator", "text"),
    [
        (["--role", "garbler"], ["--role", "garbler"], "two different roles"),
        (["--role", "garbler", "--ot-k", "3"], ["--role", "evaluator"], "ours softspoken-3, theirs softspoken-2"),
    ],
)
def test_settings_that_differ(garbler, evaluator, text):
    at = f"127.0.0.1:{free_port()}"
    common = ["--input", "5", "--timeout", "20"]
    one, two = pair(
        [*RUN, OWN, *garbler, "--listen", at, *common], [*RUN, OWN, *evaluator, "--connect", at, *common, "--json"]
    )
    refused(*one, text)
    refused(*two, "different roles" if "different" in text else "the same settings on both sides")


MEET = ["--listen", "127.0.0.1:0"]
FIVE = ["--input", "5"]
GARBLER = ["--role", "garbler"]


REFUSALS = [
    ([*GARBLER, *MEET, "--input", "0x5ecre7"], "an input value in hexadecimal; found 8 other characters"),
    ([*GARBLER, *MEET, "--input", "-5ecre7"], "an input value in hexadecimal; found 7 other characters"),
    ([*GARBLER, *MEET], "1 input values of the garbler; found 0"),
    ([*GARBLER, *MEET, *FIVE, *FIVE], "1 input values of the garbler; found 2"),
    ([*GARBLER, *MEET, "--input", "0xabc"], "an input value of 8 bits; found a value of 12 bits"),
    ([*GARBLER, *FIVE], "one of --listen and --connect; found neither"),
    ([*GARBLER, *FIVE, *MEET, "--connect", "127.0.0.1:1"], "one of --listen and --connect; found both"),
    (["--role", "reader", *FIVE, *MEET], "the role garbler or evaluator"),
    ([*GARBLER, *MEET, *FIVE, "--engine", "other"], "the engine native or emp; found 'other'"),
    ([*GARBLER, *MEET, *FIVE, "--owner", "nobody"], "2 owners, each garbler or evaluator; found nobody"),
    ([*GARBLER, *MEET, *FIVE, "--ot-k", "9"], "--ot-k"),
    ([*GARBLER, *MEET, *FIVE, "--input-file", OWN], "--input or --input-file; found both"),
    ([*GARBLER, *MEET, "--input-file", "/no/such/file"], "a file of input values"),
    ([*GARBLER, *MEET, *FIVE, "--tls-cert", OWN], "--tls-cert, --tls-key and --tls-ca; found 1 of them"),
    ([*GARBLER, "--listen", "0.0.0.0:0", *FIVE], "0.0.0.0"),
    ([*GARBLER, "--listen", "127.0.0.1:99999", *FIVE], "99999"),
    ([*GARBLER, *MEET, *FIVE, "--timeout", "0"], "time-out"),
    ([*GARBLER, *MEET, *FIVE, "--timeout", "nan"], "time-out"),
    ([*GARBLER, *MEET, *FIVE, "--timeout", "inf"], "time-out"),
    ([*GARBLER, *MEET, *FIVE, "--timeout", "1e300"], "time-out"),
    ([*GARBLER, *MEET, *FIVE, "--timeout", "1"], "expected a party to connect to"),
    ([*GARBLER, "--connect", "127.0.0.1:1", *FIVE, "--timeout", "1"], "connection refused; start the other side"),
]


def test_refusals():
    start = time.monotonic()
    results = deepseal_each([[*RUN, OWN, *words] for words, _ in REFUSALS])
    for (_, text), (code, out, err) in zip(REFUSALS, results, strict=True):
        refused(code, out, err, text)
        assert "5ecre7" not in err and "abc" not in err and "Traceback" not in err
    assert time.monotonic() - start < 60


def test_a_port_in_use_and_a_bad_circuit(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
        refused(*deepseal(*RUN, OWN, *GARBLER, "--listen", at, *FIVE), "choose another port")
    (tmp_path / "bad.txt").write_text("1 2\n1 1\n1 1\n\n1 1 0 1 NAND\n")
    paths = (tmp_path / "bad.txt", tmp_path / "none.txt", tmp_path)
    lines = [["private", "circuit", "info", path] for path in paths]
    for result in deepseal_each([*lines, *([*RUN, path, *GARBLER, *MEET, *FIVE] for path in paths)]):
        refused(*result, "expected ")


def test_refusals_before_the_other_party_comes():
    common = [*RUN, OWN, *GARBLER, *MEET, *FIVE, "--timeout", "1"]
    for code, out, err in deepseal_each(
        [[*common, *words] for words in (["--reader", "nobody"], ["--engine", "emp", "--reader", "garbler"])]
    ):
        assert (code, out) == (2, "") and "expected a party to connect" not in err


def test_emp_where_it_is_not_installed():
    try:
        from deepseal import _emp  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("EMP is installed here")
    at = f"127.0.0.1:{free_port()}"
    words = [*FIVE, "--engine", "emp", "--timeout", "20"]
    one, two = pair(
        [*RUN, OWN, *GARBLER, "--listen", at, *words], [*RUN, OWN, "--role", "evaluator", "--connect", at, *words]
    )
    for result in (one, two):
        refused(*result, "EMP")


def test_bench():
    code, out, err = deepseal("private", "bench", "--json", "--gates", 1_000_000, "--seconds", 0.05)
    assert code == 0, err
    record = json.loads(out)
    results = record["results"]
    assert record["kind"] == "private.bench"
    assert set(results["and_per_second"]) == {"garble", "evaluate", "loopback"}
    assert set(results["ot_per_second"]) >= {"loopback"}
    rates = [*results["and_per_second"].values(), *results["ot_per_second"].values()]
    assert all(rate > 1000 for rate in rates)
    assert 32 <= results["bytes_per_and"] < 32.1
    assert 8 <= results["bytes_per_ot"] < 8.1
    assert 0 < results["setup_seconds"] < 60
    assert abs(results["and_gates"] - 1_000_000) < 100_000
    assert record["params"]["kernels"] == _native.kernels()[0]


def test_bench_refusals():
    refused(*deepseal("private", "bench", "--json", "--gates", "0"), "--gates")
    for seconds in (0, -1, float("nan")):
        for measure in (bench_memory, bench_transfer):
            with pytest.raises(InputError, match="more than 0 seconds"):
                measure(seconds=seconds, repeats=1)
    with pytest.raises(InputError, match="at least one repeat"):
        bench_memory(seconds=0.01, repeats=0)
