"""The worst that users type at the command line."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from command_line import deepseal, refused, run
from report_records import RECORDS

from deepseal.record import read_record


def give_capabilities_away() -> None:
    """Of this process: capset(2) with three empty sets, in the third version of its structures."""
    empty = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, empty):
        raise OSError(ctypes.get_errno(), "capset")


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
            (f"{KEYGEN} -p bits=99999", ["at most 5120 bits in layer fc1", "of 99999"]),
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
