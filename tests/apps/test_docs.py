"""The pages say what is true: every command line in them exists, every link leads somewhere, the example runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from deepseal.apps.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def command_lines() -> list[str]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
            found += [line.partition("#")[0] for line in block.splitlines() if line.startswith("deepseal ")]
    return found


def test_there_are_command_lines():
    assert len(command_lines()) >= 8


@pytest.mark.parametrize("line", command_lines())
def test_command_line_exists(line):
    command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while hasattr(command, "commands"):
        assert words[0] in command.commands, line
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in getattr(parameter, "opts", [])}
    assert {word for word in words if re.match(r"--?[a-z]", word)} <= options, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_training_loops_run(tmp_path, monkeypatch, capsys):
    """The blocks of the page one after the other, in one namespace, as a reader would."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training-loops.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block, package in zip(blocks, ("torch", "lightning", "transformers"), strict=True):
            pytest.importorskip(package, reason=f"{package} is not installed: pip install 'deepseal[loops]'")
            exec(block, namespace)
            assert capsys.readouterr().out.splitlines()[-1] == "owned", package


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", "".join(page.read_text() for page in PAGES))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_example_runs(tmp_path):
    script = ROOT / "examples" / "protect_my_model.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("marked: owned, 0 of 256")
    assert lines[2].startswith("stolen: owned")
    assert lines[3].startswith("unmarked: not-owned")
