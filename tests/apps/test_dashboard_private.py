"""The dashboard's page Private inference, without a browser: two real processes, and what happens when one is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("streamlit", reason="the dashboard's extra is not installed")

from pages import ended, fresh, page, said, until

from deepseal.adapter import load_data
from deepseal.apps.dashboard import jobs as work
from deepseal.apps.dashboard import private
from deepseal.apps.dashboard.inputs import Chosen
from deepseal.apps.dashboard.workspace import Thing, Workspace
from deepseal.apps.private_models import in_the_clear
from deepseal.record import read_record


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSEAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DEEPSEAL_DASHBOARD", raising=False)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """What a newcomer's one button makes."""
    own = fresh(tmp_path_factory.mktemp("shelf"))
    made = ended(own, private.begin(own).id)
    assert made.state == "done", made.error
    yield own
    work.cancel_all(own)


@pytest.fixture
def program(shelf: Workspace) -> Iterator[Thing]:
    found = shelf.thing("programs", "digits")
    assert found is not None
    yield found
    work.cancel_all(shelf)


@pytest.fixture(scope="module")
def given() -> Chosen:
    return Chosen(load_data("digits").test.tensor[5].numpy(), "test input 5", 5)


def alive(pid: int) -> bool:
    """Whether a process goes on; one that ended and that nobody has asked about yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and alive(pid):
        time.sleep(0.05)
    return not alive(pid)


def serving(own: Workspace, job: work.Job) -> int:
    """The server's process, once it serves."""
    return int(until(own, job.id, lambda now: "pid" in now.steps[0]).steps[0]["pid"])


def test_a_newcomer_is_led(tmp_path: Path) -> None:
    shown = page(private.show, fresh(tmp_path))
    assert not shown.exception
    assert [button.label for button in shown.button] == ["Train a small model on the digits and make it ready"]


def test_a_question_is_answered(shelf: Workspace, program: Thing, given: Chosen) -> None:
    job = private.ask(shelf, program, given)
    server = serving(shelf, job)
    done = ended(shelf, job.id)
    assert done.state == "done" and not done.error
    assert gone(server)
    asked = read_record(shelf.root / str(done.steps[1]["record"])).results
    served = read_record(shelf.root / str(done.steps[0]["record"])).results
    clear = in_the_clear(program.path, given.x)
    assert asked["label"] == clear.program == clear.label == clear.model
    assert (served["clients"], served["questions"], served["failures"]) == (1, 1, 0)
    assert served["bytes_sent"] == asked["bytes_received"] + asked["setup_bytes_received"]
    goodbye = served["bytes_received"] - asked["bytes_sent"] - asked["setup_bytes_sent"]
    assert 16 <= goodbye <= 64  # one frame, after the client has stopped counting
    shown = page(private.show, shelf)
    assert not shown.exception
    text = said(shown)
    assert "bit for bit" in text and "The same as the model's own answer" in text and "semi-honest" in text
    assert shown.metric[0].value == str(clear.label)
    assert str(shelf.root) not in text


def test_what_is_public_is_said_and_weights_stay_in_a_folder_of_their_own(shelf: Workspace, program: Thing) -> None:
    shown = page(private.show, shelf)
    assert "the architecture (6 steps)" in said(shown)
    assert (program.path / "secret").stat().st_mode & 0o077 == 0
    assert not (program.path / "public" / "weights.npz").exists()


def test_a_killed_server_is_said_and_the_question_can_be_asked_again(
    shelf: Workspace, program: Thing, given: Chosen
) -> None:
    job = private.ask(shelf, program, given)
    server = serving(shelf, job)
    os.kill(server, signal.SIGSTOP)  # so that it is in the middle, however fast the machine is
    until(shelf, job.id, lambda now: now.progress.get("title") == "layers")
    time.sleep(0.5)
    os.kill(server, signal.SIGKILL)
    clock = time.monotonic()
    failed = ended(shelf, job.id)
    assert time.monotonic() - clock < private.TIMEOUT
    assert failed.state == "failed" and failed.error and "\n" not in failed.error
    assert "ended in the middle" in failed.steps[0]["error"]
    shown = page(private.show, shelf)
    assert not shown.exception
    assert "failed" in shown.error[0].value and "ended in the middle" in shown.warning[0].value
    shown.button(key="ask-again").click().run()
    assert not shown.exception
    assert ended(shelf, next(iter(work.jobs(shelf, private.ASK))).id).state == "done"


def test_a_server_that_says_nothing_is_not_waited_for(
    shelf: Workspace, program: Thing, given: Chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "TIMEOUT", 2)
    job = private.ask(shelf, program, given)
    server = serving(shelf, job)
    os.kill(server, signal.SIGSTOP)
    failed = ended(shelf, job.id)
    assert failed.state == "failed" and "\n" not in failed.error
    assert gone(server)


def test_cancelling_ends_both(shelf: Workspace, program: Thing, given: Chosen) -> None:
    job = private.ask(shelf, program, given)
    server = serving(shelf, job)
    work.cancel(shelf, job.id)
    stopped = ended(shelf, job.id)
    assert stopped.state == "cancelled" and not stopped.error
    assert gone(server)


def test_the_server_ends_with_whoever_started_it(shelf: Workspace, program: Thing, given: Chosen) -> None:
    job = private.ask(shelf, program, given)
    server = serving(shelf, job)
    work._children[job.id][0].kill()
    assert gone(server)
    assert ended(shelf, job.id).state == "failed"


def test_it_ends_with_the_dashboard(shelf: Workspace, program: Thing, given: Chosen) -> None:
    job = private.ask(shelf, program, given)
    server = serving(shelf, job)
    work._children[job.id][1].close()  # what the end of the dashboard does
    assert gone(server)
    assert not ended(shelf, job.id).running


def test_a_program_that_cannot_be_served_is_said(shelf: Workspace, given: Chosen, tmp_path: Path) -> None:
    own = fresh(tmp_path)
    thing = own.place("programs", "broken", {"data": "digits"})
    (thing.path / "public").mkdir(parents=True)
    (thing.path / "public" / "program.json").write_text("{}")
    shown = page(private.show, own)
    assert not shown.exception
    assert "program" in shown.error[0].value and str(own.root) not in shown.error[0].value.replace("\\", "")
    failed = ended(own, private.ask(own, thing, given).id)
    assert failed.state == "failed" and "program" in failed.error and "\n" not in failed.error


def test_logits_are_equal_too(shelf: Workspace, given: Chosen) -> None:
    model = shelf.thing("models", "digits")
    assert model is not None
    made = ended(shelf, private.compile_(shelf, model, "logits", "digits", permits="logits").id)
    assert made.state == "done", made.error
    program = shelf.thing("programs", "logits")
    assert program is not None
    done = ended(shelf, private.ask(shelf, program, given).id)
    assert done.state == "done", done.error
    found = read_record(shelf.root / str(done.steps[1]["record"])).results["logits"]
    clear = in_the_clear(program.path, given.x)
    assert found == clear.program and int(np.argmax(found)) == clear.label
    shown = page(private.show, shelf)
    shown.selectbox(key="program").set_value("logits").run()
    assert not shown.exception
    assert "bit for bit" in said(shown)
