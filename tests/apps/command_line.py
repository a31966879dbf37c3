"""The command line, run in this process and in one of its own, and what its refusals look like."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

RECORD = {"schema", "kind", "status", "environment", "seed", "params", "results", "started", "seconds"}
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
