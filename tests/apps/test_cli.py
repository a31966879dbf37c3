"""The command line: the promised lines, exit codes, streams, and the worst that users type."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from deepseal.adapter import checkpoint
from deepseal.record import read_record
from deepseal.watermark import load_key, save_key

RECORD = {"schema", "kind", "status", "environment", "seed", "params", "results", "started", "seconds"}
RECORDS = Path(__file__).resolve().parents[1] / "data" / "records"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "DEEPSEAL_PASSPHRASE"} | {"OMP_NUM_THREADS": "1"}


def deepseal(*arguments, cwd, **options) -> subprocess.CompletedProcess:
    """Run the command line as a user does, in a process of its own."""
    command = [sys.executable, "-m", "deepseal", *map(str, arguments)]
    environment = ENVIRONMENT | options.pop("env", {})
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False, **options
    )


def record_of(out: str) -> dict:
    record = json.loads(out)
    assert record.keys() >= RECORD
    return record


def give_capabilities_away() -> None:
    """Of this process: capset(2) with three empty sets, in the third version of its structures."""
    empty = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, empty):
        raise OSError(ctypes.get_errno(), "capset")


@pytest.fixture
def folder(files: Path, tmp_path: Path) -> Path:
    """A fresh working folder with base.safetensors, marked.safetensors and owner.key."""
    for path in files.iterdir():
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def run(capsys, monkeypatch, folder, *arguments, env=()):
    """Run the command line in this process: exit code, stdout, stderr."""
    from deepseal.apps import cli

    monkeypatch.chdir(folder)
    for name, value in dict(env).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["deepseal", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return caught.value.code, out, err


class TestPromisedLines:
    """The whole story, as the README has it."""

    def test_story(self, tmp_path, capsys, monkeypatch):
        def ok(*arguments, code=0):
            left, out, err = run(capsys, monkeypatch, tmp_path, *arguments)
            assert left == code, err
            return record_of(out) if "--json" in arguments else err

        arch = "deepseal.adapter.zoo:mlp"
        base = "base.safetensors"
        trained = ok(*f"model train --arch {arch} --data digits --epochs 15 --seed 0 --out {base} --json".split())
        assert trained["kind"] == "model.train"
        assert trained["seed"] == 0
        evaluated = ok(*f"model evaluate --model {base} --data digits --json".split())
        assert evaluated["results"]["accuracy"] == trained["results"]["accuracy"] > 0.9
        made = ok(
            *f"watermark keygen --model {base} --data digits --scheme deepsigns -p bits=256".split(),
            *("--owner", "Example Ltd", "--seed", "0", "--out", "owner.key"),
        )
        assert "not encrypted" in made
        assert (tmp_path / "owner.key").stat().st_mode & 0o777 == 0o600
        line = f"watermark embed --model {base} --data digits --key owner.key --out marked.safetensors --json"
        embedded = ok(*line.split())
        assert embedded["results"]["bit_errors"] == 0
        assert embedded["results"]["verified_from_file"] is True
        verify = "watermark verify --key owner.key --max-false-positive 1e-9 --json --model"
        results = ok(*verify.split(), "marked.safetensors")["results"]
        assert results["verdict"] == "owned"
        assert results["message"] == "Example Ltd"
        assert {"n", "mean_bit_error_rate", "lowest_bit_error_rate"} <= results["null"].keys()
        names = {"verdict", "bits", "bit_errors", "bit_error_rate", "p_value", "max_false_positive", "null"}
        assert names <= results.keys()
        assert ok(*verify.split(), base, code=1)["results"]["verdict"] == "not-owned"
        for name, params, out in (
            ("prune", ["sparsity=0.9"], "pruned"),
            ("fine-tune", ["mode=ftal", "epochs=20"], "tuned"),
            ("overwrite", ["strength=10"], "over"),
        ):
            options = [part for param in params for part in ("-p", param)]
            line = f"attack run {name} --model marked.safetensors --data digits --out {out}.safetensors --json"
            attacked = ok(*line.split(), *options, "--record", f"{out}.json")
            assert attacked["results"]["evidence"]["relative_weight_change"] > 0
            assert json.loads((tmp_path / f"{out}.json").read_text()) == attacked
            checked = ok(*verify.split(), f"{out}.safetensors", "--record", f"{out}-verify.json")
            assert checked["results"]["verdict"] == "owned"
        line = "attack run pgd -p epsilon=0.2 -p steps=5 --model base.safetensors --data digits --limit 50 --json"
        evaded = ok(*line.split(), "--out", "adversarial.npz")["results"]
        with np.load(tmp_path / "adversarial.npz") as saved:
            assert saved["x"].shape == (50, 1, 8, 8)
            assert int(saved["fooled"].sum()) == evaded["success"]["count"] > 25
        assert evaded["accuracy_under_attack"]["count"] == evaded["accuracy"]["count"] - evaded["success"]["count"]
        ok("report", "html", *sorted(tmp_path.glob("*.json")), "--out", "report.html")
        assert "owned" in (tmp_path / "report.html").read_text()
        written = ok("report", "pdf", *sorted(tmp_path.glob("*.json")), "--out", "report.pdf", "--json")["results"]
        assert (tmp_path / "report.pdf").stat().st_size == written["bytes"]


class TestHelp:
    def test_imports_no_torch(self, tmp_path):
        code = (
            "import sys; sys.argv = ['deepseal', '--help']\n"
            "from deepseal.apps.cli import main\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            "loaded = {'torch', 'numpy', 'scipy', 'pydantic', 'matplotlib', 'sklearn'} & set(sys.modules)\n"
            "assert not loaded, loaded\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "watermark" in done.stdout

    @pytest.mark.parametrize("command", ["model", "watermark", "attack", "report", "info", "demo"])
    def test_every_command_explains_itself(self, command, capsys, monkeypatch, tmp_path):
        code, out, _ = run(capsys, monkeypatch, tmp_path, command, "--help")
        assert code == 0
        assert "Usage" in out

    def test_installed_script(self, tmp_path):
        script = Path(sys.executable).with_name("deepseal")
        if not script.exists():
            pytest.skip(f"no script {script}: not installed with pip")
        done = subprocess.run([script, "info", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False)
        results = json.loads(done.stdout)["results"]
        assert {"aes", "vaes", "avx512f"} <= results["cpu"].keys()
        assert "deepsigns" in results["schemes"]


class TestTables:
    def test_attack_list_and_show(self, capsys, monkeypatch, tmp_path):
        code, out, _ = run(capsys, monkeypatch, tmp_path, "attack", "list", "--json")
        names = [row["name"] for row in json.loads(out)["results"]["attacks"]]
        assert code == 0
        assert names[:4] == ["none", "fine-tune", "prune", "overwrite"]
        assert {"quantise", "permute", "distil", "query-noise"} <= set(names)
        for name in names:
            code, out, _ = run(capsys, monkeypatch, tmp_path, "attack", "show", name, "--json")
            assert code == 0
            assert json.loads(out)["results"]["name"] == name
        code, out, _ = run(capsys, monkeypatch, tmp_path, "attack", "show", "prune")
        assert code == 0
        assert "sparsity" in out

    def test_inspect_model(self, capsys, monkeypatch, folder):
        code, out, _ = run(capsys, monkeypatch, folder, "watermark", "inspect", "--model", "base.safetensors", "--json")
        assert code == 0
        assert [row["layer"] for row in json.loads(out)["results"]["layers"]] == ["fc1", "fc2"]
        code, out, _ = run(capsys, monkeypatch, folder, "model", "inspect", "--model", "base.safetensors", "--json")
        assert code == 0
        assert json.loads(out)["results"]["architecture"] == "deepseal.adapter.zoo:mlp"

    def test_inspect_key_shows_no_secret(self, capsys, monkeypatch, folder):
        code, out, err = run(capsys, monkeypatch, folder, "watermark", "inspect", "--key", "owner.key", "--json")
        assert code == 0
        assert load_key(folder / "owner.key").secret.hex() not in out + err
        assert json.loads(out)["results"]["owner"] == "Example Ltd"

    @pytest.mark.parametrize(
        "arguments", [["info"], ["attack", "list"], ["watermark", "inspect", "--model", "base.safetensors"]]
    )
    def test_text_for_people(self, arguments, capsys, monkeypatch, folder):
        code, out, _ = run(capsys, monkeypatch, folder, *arguments)
        assert code == 0
        assert out.strip()
        assert not out.lstrip().startswith("{")


class TestVerdicts:
    def test_exit_codes(self, capsys, monkeypatch, folder, marked):
        def verify(model, *more):
            return run(
                capsys, monkeypatch, folder, "watermark", "verify", "--model", model, "--key", "owner.key", *more
            )[0]

        assert verify("marked.safetensors") == 0
        assert verify("base.safetensors") == 1
        broken = marked.copy()
        with torch.no_grad():
            broken.module.fc1.weight.fill_(float("nan"))
        checkpoint.save(broken, folder / "nan.safetensors")
        assert verify("nan.safetensors") == 3

    @pytest.mark.parametrize(
        ("params", "do"),
        [
            ("-p steps=1", "with more steps"),
            ("--scheme zhang -p steps=1 -p settle=0 -p rounds=1", "-p drift=0.1"),
        ],
    )
    def test_a_mark_that_does_not_read_back_is_not_kept(self, params, do, capsys, monkeypatch, folder):
        code, _, _ = run(
            capsys,
            monkeypatch,
            folder,
            *f"watermark keygen --model base.safetensors --data digits --owner me --out weak.key {params}".split(),
        )
        assert code == 0
        line = "watermark embed --model base.safetensors --data digits --key weak.key --out weak.safetensors"
        line += " --record r.json"
        code, out, err = run(capsys, monkeypatch, folder, *line.split())
        assert (code, out) == (1, "")
        assert "read back from the saved file" in err and do in err
        assert not (folder / "weak.safetensors").exists()
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        failed = read_record(folder / "r.json")
        assert failed.status == "failed"
        assert "bits wrong" in (failed.error or "")


class TestPassphrase:
    def test_from_file_and_environment(self, folder, capsys, monkeypatch):
        (folder / "pass").write_text("correct horse\n")
        line = "watermark keygen --model base.safetensors --data digits --owner me --out e.key --seed 0"
        code, _, err = run(capsys, monkeypatch, folder, *line.split(), "--passphrase-file", "pass")
        assert code == 0
        assert "not encrypted" not in err
        verify = "watermark verify --model base.safetensors --key e.key".split()
        code, out, err = run(capsys, monkeypatch, folder, *verify)
        assert (code, out) == (2, "")
        assert "DEEPSEAL_PASSPHRASE" in err
        assert run(capsys, monkeypatch, folder, *verify, "--passphrase-file", "pass")[0] == 1
        assert run(capsys, monkeypatch, folder, *verify, env={"DEEPSEAL_PASSPHRASE": "correct horse"})[0] == 1
        code, out, err = run(capsys, monkeypatch, folder, *verify, env={"DEEPSEAL_PASSPHRASE": "wrong"})
        assert (code, out) == (2, "")
        assert "wrong" in err
        embed = "watermark embed --model base.safetensors --data digits --key e.key --out m.safetensors --json".split()
        code, out, err = run(capsys, monkeypatch, folder, *embed, env={"DEEPSEAL_PASSPHRASE": "correct horse"})
        assert code == 0, err
        assert "correct horse" not in out + err

    def test_encrypt_needs_a_terminal_or_a_file(self, folder):
        line = "watermark keygen --model base.safetensors --data digits --owner me --out e.key --encrypt"
        done = deepseal(*line.split(), cwd=folder, stdin=subprocess.DEVNULL)
        assert done.returncode == 2
        assert not (folder / "e.key").exists()


def refused(result, *words):
    code, out, err = result
    assert code == 2, err
    assert out == ""
    lines = [line for line in err.splitlines() if "not encrypted" not in line]
    assert len(lines) == 1, err
    assert lines[0].startswith("deepseal: ")
    assert "Traceback" not in err
    for word in words:
        assert word in lines[0], lines[0]


KEYGEN = "watermark keygen --model base.safetensors --data digits --owner me --out new.key"


class TestBadInput:
    """One line that says what was expected, what was found and what to do; exit code 2; nothing left behind."""

    @pytest.fixture(autouse=True)
    def _leaves_nothing(self, folder):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.made: set[Path] = set()
        yield
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path not in self.made}
        assert after == before

    def make(self, path: Path, data: bytes) -> str:
        path.write_bytes(data)
        self.made.add(path)
        return path.name

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (f"{KEYGEN} -p layers=fc9", ["known layer", "'fc9'", "'fc1'"]),
            (f"{KEYGEN} -p bits=99999", ["bits a carrier"]),
            (f"{KEYGEN} -p bits=many", ["bits as a whole number", "'many'"]),
            (f"{KEYGEN} -p bts=64", ["'bits'"]),
            (f"{KEYGEN} -p steps=1e9", ["steps as a whole number", "'1e9'"]),
            (f"{KEYGEN} --owner {'x' * 1001}", ["the owner's name", "1001 characters"]),
            (KEYGEN.replace("base.safetensors", "/dev/zero"), ["a regular file", "/dev/zero"]),
            ("watermark verify --model base.safetensors --key /dev/zero", ["a regular file"]),
            ("watermark verify --model base.safetensors --key owner.key --record /dev/full", ["a regular file"]),
            ("watermark verify --url ftp://127.0.0.1/v2/models/x --key owner.key", ["http or https", "ftp"]),
            ("watermark verify --url ftp://127.0.0.1/x --key owner.key", ["http or https", "ftp"]),
            ("report show /dev/zero", ["a regular file"]),
            ("model train --arch deepseal.adapter.zoo:mlp --data digits -p epochs=3 --out x.safetensors", ["--epochs"]),
            ("model train --arch deepseal.adapter.zoo:Input --data digits --out x.safetensors", ["use 'lenet'"]),
            (f"{KEYGEN} -p bits", ["name=value"]),
            (f"{KEYGEN} -p carriers=11", ["carrier classes 0 … 9"]),
            (f"{KEYGEN} --scheme deepsing", ["'deepsigns'"]),
            (f"{KEYGEN} --seed -1", ["seed"]),
            (KEYGEN.replace("digits", "digitz"), ["'digits'"]),
            (KEYGEN.replace("digits", "absent.npz"), ["no such file"]),
            (KEYGEN.replace("base.safetensors", "absent.safetensors"), ["no such file"]),
            (KEYGEN.replace("base.safetensors", "owner.key"), ["safetensors"]),
            (KEYGEN.replace("new.key", "owner.key"), ["--force"]),
            (KEYGEN.replace("new.key", "absent/new.key"), ["folder does not exist"]),
            (KEYGEN.replace("new.key", "."), ["file name"]),
            ("watermark verify --model base.safetensors --key base.safetensors", ["key file"]),
            ("watermark verify --model base.safetensors --key absent.key", ["no such file"]),
            ("watermark verify --model owner.key --key owner.key", ["safetensors"]),
            ("watermark verify --model base.safetensors --key owner.key --max-false-positive 2", ["between 0 and 1"]),
            ("watermark verify --model base.safetensors --key owner.key --tried 0", ["tried"]),
            ("watermark verify --model base.safetensors --key owner.key --arch nothing", ["package.module:factory"]),
            ("watermark verify --model base.safetensors --key owner.key --arch no.such:thing", ["no"]),
            (
                "watermark verify --model base.safetensors --key owner.key --arch deepseal.adapter.zoo:lenet",
                ["missing"],
            ),
            ("watermark verify --model base.safetensors", ["--key"]),
            ("watermark inspect", ["either --model or --key"]),
            ("watermark nonsense", ["nonsense"]),
            ("attack run prun --model base.safetensors --data digits --out x.safetensors", ["'prune'"]),
            ("attack run prune -p sparsity=2 --model base.safetensors --data digits --out x.safetensors", ["sparsity"]),
            ("attack run prune --model base.safetensors --data digits --out base.safetensors", ["different files"]),
            ("attack run prune --model base.safetensors --data digits --out marked.safetensors", ["--force"]),
            ("attack run fine-tune -p mode=all --model base.safetensors --data digits --out x.safetensors", ["'ftal'"]),
            (
                "attack run overwrite -p scheme=plain --model base.safetensors --data digits --out x.safetensors",
                ["strength"],
            ),
            ("attack show prun", ["'prune'"]),
            ("attack run pgd --model base.safetensors --data digits --out x.safetensors", ["ends in .npz"]),
            ("attack run pgd -p norm=l3 --model base.safetensors --data digits --out x.npz", ["'linf'"]),
            ("attack run pgd --limit 0 --model base.safetensors --data digits --out x.npz", ["--limit"]),
            ("attack run prune --limit 5 --model base.safetensors --data digits --out x.safetensors", ["--limit"]),
            ("model train --arch deepseal.adapter.zoo:mpl --data digits --out x.safetensors", ["'mlp'"]),
            ("model train --arch deepseal.adapter.zoo:mlp?hidden=x --data digits --out x.safetensors", ["arguments"]),
            ("model train --arch deepseal.adapter.zoo:mlp --data digits --epochs x --out x.safetensors", ["epochs"]),
            (
                "model train --arch deepseal.adapter.zoo:mlp --data digits -p learning_rate=nan --out x.safetensors",
                ["range"],
            ),
            ("model evaluate --model base.safetensors --data digits --record base.safetensors", ["different files"]),
            ("model evaluate --model base.safetensors --data digits --record owner.key", ["--force"]),
            ("attack run none --model base.safetensors --data digits --out x --record x --force", ["different files"]),
            ("report show owner.key", ["record"]),
            ("report html absent.json --out r.html", ["no such file"]),
            ("report pdf absent.json --out r.pdf", ["no such file"]),
            ("report pdf owner.key --out r.pdf", ["record"]),
            ("report html --out r.html", ["'records'", "deepseal report html --help"]),
            ("demo --out owner.key", ["folder"]),
            ("demo --out .", ["--force"]),
        ],
    )
    def test_one_line(self, line, words, capsys, monkeypatch, folder):
        refused(run(capsys, monkeypatch, folder, *line.split()), *words)

    @pytest.mark.parametrize(
        ("arrays", "words"),
        [
            ({"y": np.arange(60) % 9 + 5}, ["labels 0 … 9", "labels 5 … 13"]),
            ({"x": np.full((60, 1, 8, 8), np.nan, np.float32)}, ["finite"]),
            ({"x": np.zeros((0, 1, 8, 8), np.float32), "y": np.zeros(0, int)}, ["at least three"]),
            ({"x": np.zeros((60, 3, 8, 8), np.float32)}, ["shape"]),
            ({"x": np.full((60, 1, 8, 8), 9.0, np.float32)}, ["inputs in [0, 1]"]),
            ({"y": np.zeros(60, int)}, ["every carrier class"]),
        ],
    )
    def test_bad_data(self, arrays, words, capsys, monkeypatch, folder):
        sound = {"x": np.zeros((60, 1, 8, 8), np.float32), "y": np.arange(60) % 10}
        np.savez(folder / "d.npz", **{**sound, **arrays})
        self.made.add(folder / "d.npz")
        refused(run(capsys, monkeypatch, folder, *KEYGEN.replace("digits", "d.npz").split()), *words)

    def test_truncated_and_foreign_keys(self, capsys, monkeypatch, folder):
        data = (folder / "owner.key").read_bytes()
        verify = "watermark verify --model marked.safetensors --key bad.key".split()
        for content in (b"", data[:10], data[: len(data) // 2], data[:-1], data[:-1] + b"?", os.urandom(2000)):
            self.make(folder / "bad.key", content)
            refused(run(capsys, monkeypatch, folder, *verify), "key file")

    def test_pickles(self, capsys, monkeypatch, folder, base):
        torch.save(base.module.state_dict(), folder / "model.pt")
        self.made.add(folder / "model.pt")
        line = "watermark verify --model model.pt --key owner.key --arch deepseal.adapter.zoo:mlp".split()
        refused(run(capsys, monkeypatch, folder, *line), "--insecure-allow-pickle")
        assert run(capsys, monkeypatch, folder, *line, "--insecure-allow-pickle")[0] == 1
        self.make(folder / "fake.safetensors", pickle.dumps({"a": 1}))
        line[3] = "fake.safetensors"
        refused(run(capsys, monkeypatch, folder, *line), "pickle")

    def test_weights_that_do_not_fit(self, capsys, monkeypatch, folder, base):
        state = {name: tensor.clone() for name, tensor in base.module.state_dict().items()}
        state["fc1.weight"] = state["fc1.weight"][:100].clone()
        safetensors.torch.save_file(state, folder / "cut.safetensors")
        self.made.add(folder / "cut.safetensors")
        line = "watermark verify --model cut.safetensors --key owner.key --arch deepseal.adapter.zoo:mlp".split()
        refused(run(capsys, monkeypatch, folder, *line), "fc1.weight (100, 64) instead of (512, 64)")

    def test_file_without_architecture_or_spec(self, capsys, monkeypatch, folder, base):
        state = {name: tensor.clone() for name, tensor in base.module.state_dict().items()}
        safetensors.torch.save_file(state, folder / "bare.safetensors")
        self.made.add(folder / "bare.safetensors")
        line = "model inspect --model bare.safetensors".split()
        refused(run(capsys, monkeypatch, folder, *line), "--arch")
        line += ["--arch", "deepseal.adapter.zoo:mlp"]
        refused(run(capsys, monkeypatch, folder, *line), "--data")
        assert run(capsys, monkeypatch, folder, *line, "--data", "digits")[0] == 0

    @pytest.mark.parametrize("words", [[], ["watermark"], ["attack"]])
    def test_a_group_alone_shows_its_help(self, words, capsys, monkeypatch, folder):
        code, out, err = run(capsys, monkeypatch, folder, *words)
        assert (code, out) == (2, "")
        assert err.startswith("Usage: deepseal") and len(err.splitlines()) > 5

    def test_a_report_is_not_written_over_its_record(self, capsys, monkeypatch, folder):
        for kind in ("html", "pdf"):
            record = Path(self.make(folder / f"{kind}.json", (RECORDS / "05-verify-marked.json").read_bytes()))
            line = ["report", kind, str(record), "--out", str(record), "--force"]
            refused(run(capsys, monkeypatch, folder, *line), "different files")
            assert read_record(folder / record).status == "ok"

    def test_an_owner_of_spaces(self, capsys, monkeypatch, folder):
        refused(
            run(capsys, monkeypatch, folder, *KEYGEN.replace(" me ", " OWNER ").split(), "--owner", "  "), "owner's"
        )

    @pytest.mark.timeout(60)
    def test_pipes_are_not_waited_for(self, capsys, monkeypatch, folder):
        os.mkfifo(folder / "pipe")
        for line in (
            "report show pipe",
            "watermark verify --model pipe --key owner.key",
            "watermark inspect --key pipe",
        ):
            refused(run(capsys, monkeypatch, folder, *line.split()), "a regular file")

    def test_no_permission(self, folder):
        """Root is stopped by permissions like anybody once the child has given its capabilities away."""
        locked = folder / "locked"
        locked.mkdir(mode=0o555)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.dup2(writer, 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                sys.stderr = os.fdopen(2, "w", buffering=1)
                give_capabilities_away()
                line = "model train --arch deepseal.adapter.zoo:mlp --data digits --epochs 1 --out"
                sys.argv = ["deepseal", *line.split(), str(locked / "x.safetensors")]
                from deepseal.apps.cli import main

                main()
            except SystemExit as leaving:
                sys.stderr.flush()
                os._exit(int(leaving.code or 0))
            finally:
                os._exit(99)
        os.close(writer)
        with os.fdopen(reader) as stream:
            said = stream.read()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 2, said
        refused((2, "", said), "permission")
        assert list(locked.iterdir()) == []

    def test_disk_full(self, folder):
        """Every file of the child is limited to 100 kB, which the weights do not fit into."""
        line = "attack run prune --model base.safetensors --data digits --out x.safetensors --record r.json"

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        done = deepseal(*line.split(), cwd=folder, preexec_fn=limit, env={"PYTHONDONTWRITEBYTECODE": "1"})
        refused((done.returncode, done.stdout, done.stderr), "x.safetensors to be writable", "larger than allowed")
        assert read_record(folder / "r.json").status == "failed"
        self.made.add(folder / "r.json")

    def test_full_file_system(self, folder):
        small = folder / "small"
        small.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
        try:
            line = "attack run prune --model base.safetensors --data digits --out small/x.safetensors"
            done = deepseal(*line.split(), cwd=folder)
            refused((done.returncode, done.stdout, done.stderr), "the disk is full")
            assert list(small.iterdir()) == []
        finally:
            subprocess.run(["umount", small], check=True)


class TestForce:
    def test_force_replaces(self, capsys, monkeypatch, folder):
        line = "attack run none --model base.safetensors --data digits --out marked.safetensors --force"
        assert run(capsys, monkeypatch, folder, *line.split())[0] == 0
        assert (
            run(capsys, monkeypatch, folder, *"watermark verify --model marked.safetensors --key owner.key".split())[0]
            == 1
        )


def test_own_module_and_checkpoint(tmp_path, capsys, monkeypatch):
    """A user's own module file, weights without metadata, and data: from key to verdict."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(),"
        " nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))\n"
        "def data():\n"
        "    from sklearn.datasets import load_digits\n"
        "    bunch = load_digits()\n"
        "    return bunch.images[:, None] / 16.0, bunch.target\n"
    )

    def ok(line):
        code, out, err = run(capsys, monkeypatch, tmp_path, *line.split())
        assert code == 0, err
        return out

    ok("model train --arch mine:net --data mine:data --epochs 10 --out own.safetensors")
    weights = safetensors.torch.load_file(tmp_path / "own.safetensors")
    safetensors.torch.save_file({f"module.{k}": v for k, v in weights.items()}, tmp_path / "bare.safetensors")
    given = "--model bare.safetensors --arch mine:net --data mine:data"
    ok(f"watermark keygen {given} --owner Me --out my.key -p bits=128")
    embedded = record_of(ok(f"watermark embed {given} --key my.key --out marked.safetensors --json"))
    assert embedded["results"]["bit_errors"] == 0
    assert "owned" in ok("watermark verify --model marked.safetensors --arch mine:net --key my.key")


def test_demo(tmp_path):
    """The demonstration tells the story: marked and attacked copies are owned, the independent model is not."""
    done = deepseal("demo", "--out", "show", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["model"]: row for row in record_of(done.stdout)["results"]["rows"]}
    assert rows.pop("independent")["verdict"] == "not-owned"
    assert len(rows) == 10
    assert {row["verdict"] for row in rows.values()} == {"owned"}
    assert rows["marked"]["bit_errors"] == 0
    assert all(0 <= row["accuracy"] <= 1 for row in rows.values())
    page = (tmp_path / "show" / "report.html").read_text()
    assert "<svg" in page or "data:image/png" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    names = sorted(path.name for path in (tmp_path / "show" / "records").iterdir())
    assert len(names) == 24
    again = deepseal("demo", "--out", "show", cwd=tmp_path)
    assert again.returncode == 2
    assert "--force" in again.stderr


def test_the_fresh_process_runs_nothing_from_the_working_folder(tmp_path):
    from deepseal.apps.workflow import _CHILD

    for name in ("typer", "torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code from the working folder was run')")
    command = [sys.executable, "-c", _CHILD, "attack", "list"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_normalised_networks_on_the_command_line(tmp_path, capsys, monkeypatch):
    """``mean`` and ``std`` behind the data's name; without them a network that expects them is warned about."""
    (tmp_path / "normal.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),"
        " nn.Linear(256, 10))\n"
    )
    from sklearn.datasets import load_digits

    bunch = load_digits()
    np.savez(tmp_path / "d.npz", x=(bunch.images[:, None] / 16.0).astype(np.float32), y=bunch.target)

    def ok(line):
        code, out, err = run(capsys, monkeypatch, tmp_path, *line.split())
        assert code == 0, err
        return json.loads(out)["results"] if "--json" in line else err

    given = "--arch normal:net --data d.npz?mean=0.5&std=0.02"
    trained = ok(f"model train {given} --epochs 10 --out n.safetensors --json")
    bare = safetensors.torch.load_file(tmp_path / "n.safetensors")
    safetensors.torch.save_file(bare, tmp_path / "bare.safetensors")
    assert ok(f"model evaluate --model bare.safetensors {given} --json")["accuracy"] == trained["accuracy"] > 0.9
    raw = "--arch normal:net --data d.npz"
    assert ok(f"model evaluate --model bare.safetensors {raw} --json")["accuracy"] < trained["accuracy"] - 0.05
    ok(f"watermark keygen --model bare.safetensors {raw} --owner me --out raw.key")
    embedded = ok(f"watermark embed --model bare.safetensors {raw} --key raw.key --out raw.safetensors --json")
    assert "mean=" in embedded["warnings"][0]


def test_saved_key_stays_private_when_replaced(folder, key):
    (folder / "owner.key").chmod(0o644)
    save_key(key, folder / "owner.key", force=True)
    assert (folder / "owner.key").stat().st_mode & 0o777 == 0o600
