"""The command line: the promised lines, exit codes, streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from command_line import deepseal, record_of, run

from deepseal.adapter import checkpoint
from deepseal.record import read_record
from deepseal.watermark import load_key, save_key


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
