"""The dashboard's pages without a browser: real models, real processes. With a browser: tests/browser."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("streamlit", reason="the dashboard's extra is not installed")

from pages import SECONDS, ended, page
from streamlit.testing.v1 import AppTest

from deepseal.apps.dashboard import jobs as work
from deepseal.apps.dashboard import mark, settings
from deepseal.apps.dashboard.attack import attack
from deepseal.apps.dashboard.library import filtered
from deepseal.apps.dashboard.verify import verify
from deepseal.apps.dashboard.workspace import Workspace
from deepseal.errors import InputError
from deepseal.record import Run, read_record, read_text

RECORDS = Path(__file__).parents[1] / "data" / "records"
COMPARED = Path(__file__).parents[2] / "benchmarks" / "watermark-compare" / "mnist-mlp.json"
PASSPHRASE = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSEAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DEEPSEAL_DASHBOARD", raising=False)
    monkeypatch.delenv("DEEPSEAL_PASSPHRASE", raising=False)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Workspace]:
    mine = Workspace(tmp_path / "mine")
    yield mine
    work.cancel_all(mine)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A model that was trained and marked through the pages' own functions."""
    own = Workspace(tmp_path_factory.mktemp("shelf") / "mine")
    trained = ended(own, mark.train(own, "digits", "deepseal.adapter.zoo:mlp", 10, "mine").id)
    assert trained.state == "done", trained.error
    model = own.thing("models", "mine")
    assert model is not None
    job = mark.embed(own, model, "digits", "deepsigns", "Example Ltd", ["-p", "bits=64"], "key", "marked", PASSPHRASE)
    done = ended(own, job.id)
    assert done.state == "done", done.error
    yield own
    work.cancel_all(own)


class TestMark:
    def test_the_copy_is_owned_and_what_it_learned_was_shown(self, shelf: Workspace) -> None:
        job = next(one for one in work.jobs(shelf, "mark") if one.about.get("key"))
        record = read_record(shelf.root / job.steps[-1]["record"])
        assert record.results["verdict"] == "owned"
        assert sum(keys for _, keys in record.results["null"]["wrong_bits"]) == record.results["null"]["n"] == 200
        readings = [reading for reading in job.readings() if "margins" in reading]
        assert readings and all(len(r["margins"]) == r["bits"] for r in readings)
        assert readings[0]["updates"] < readings[-1]["updates"]
        assert all(sum(m < 0 for m in r["margins"]) == r["bit_errors"] for r in readings)

    def test_the_page_says_so_in_words(self, shelf: Workspace) -> None:
        shown = page(mark.show, shelf)
        assert not shown.exception
        assert any("carries the mark" in message.value for message in shown.success)
        assert [metric.value for metric in shown.metric][0] == "0 of 64"

    def test_the_passphrase_is_nowhere(self, shelf: Workspace) -> None:
        for path in shelf.root.rglob("*"):
            if path.is_file():
                assert PASSPHRASE.encode() not in path.read_bytes(), path.name

    def test_records_name_no_folder_of_the_server(self, shelf: Workspace) -> None:
        for path in shelf.records.glob("*.json"):
            assert str(shelf.root) not in path.read_text()

    def test_files_are_the_owners_alone(self, shelf: Workspace) -> None:
        assert shelf.root.stat().st_mode & 0o077 == 0

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({}, "expected the owner's name"),
            ({0: "Example Ltd"}, "expected a passphrase"),
            ({0: "Example Ltd", 1: "a", 2: "b"}, "expected the same passphrase twice"),
        ],
    )
    def test_what_is_missing_is_said_in_one_line(self, shelf: Workspace, fields: dict[int, str], says: str) -> None:
        shown = page(mark.show, shelf)
        for index, text in fields.items():
            shown.text_input[index].input(text)
        button = next(b for b in shown.button if b.label == "Make the key and mark a copy")
        before = len(work.jobs(shelf))
        shown = button.click().run()
        assert [plain(error.value) for error in shown.error] and says in plain(shown.error[0].value)
        assert len(work.jobs(shelf)) == before


def plain(text: str) -> str:
    return text.replace("\\", "")


class TestVerify:
    def test_a_wrong_passphrase_is_said_in_one_line(self, shelf: Workspace) -> None:
        key = shelf.thing("keys", "key")
        assert key is not None
        job = verify(shelf, ("--model", "models/marked.safetensors"), key, "1e-6", 0, 1, None, "wrong")
        done = ended(shelf, job.id)
        assert done.state == "failed"
        assert "expected the right passphrase" in done.error and "\n" not in done.error

    def test_an_unmarked_model_is_not_owned_and_that_is_no_failure(self, shelf: Workspace) -> None:
        key = shelf.thing("keys", "key")
        assert key is not None
        job = verify(shelf, ("--model", "models/mine.safetensors"), key, "1e-6", 50, 1, None, PASSPHRASE)
        done = ended(shelf, job.id)
        assert done.state == "done" and not done.error
        assert read_record(shelf.root / done.steps[0]["record"]).results["verdict"] == "not-owned"

    def test_a_server_that_does_not_answer(self, shelf: Workspace) -> None:
        key = shelf.thing("keys", "key")
        assert key is not None
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/v2/models/suspect"
            done = ended(shelf, verify(shelf, ("--url", url), key, "1e-6", 0, 1, None, PASSPHRASE).id)
        assert done.state == "failed" and "expected" in done.error

    def test_a_suspect_at_a_server_is_asked(self, shelf: Workspace, own: Workspace) -> None:
        """A mark in answers, read through a real server."""
        mine = shelf.thing("models", "mine")
        assert mine is not None
        model = own.keep("models", "mine", mine.path.read_bytes(), mine.about)
        few = ["-p", "triggers=40", "-p", "steps=300"]
        made = ended(own, mark.embed(own, model, "digits", "adi", "Own", few, "asked", "asked marked", PASSPHRASE).id)
        assert made.state == "done", made.error
        key, file = own.thing("keys", "asked"), own.root / "models" / "asked marked.safetensors"
        assert key is not None
        command = [sys.executable, "-m", "deepseal", "model", "serve", "--model", str(file), "--name", "suspect"]
        with subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                line = next(line for line in server.stderr if "http://" in line)
                address = line[line.index("http://") :].split(";")[0].split()[0]
                url = f"{address}/v2/models/suspect"
                done = ended(own, verify(own, ("--url", url), key, "1e-6", 20, 1, None, PASSPHRASE).id)
            finally:
                server.terminate()
        assert done.state == "done", done.error
        record = read_record(own.root / done.steps[0]["record"])
        assert record.results["verdict"] == "owned" and record.results["queries"] == 40


class TestAttack:
    def test_each_attack_is_followed_by_a_verification(self, shelf: Workspace) -> None:
        model, key = shelf.thing("models", "marked"), shelf.thing("keys", "key")
        assert model is not None and key is not None
        plans = [("prune", ["-p", "sparsity=0.5"]), ("prune", ["-p", "sparsity=2"]), ("quantise", ["-p", "bits=8"])]
        done = ended(shelf, attack(shelf, model, key, "digits", plans, PASSPHRASE).id)
        assert done.state == "done"
        assert [step["state"] for step in done.steps] == ["done", "done", "failed", "failed", "done", "done"]
        assert "sparsity" in done.first_error and not done.steps[3].get("error")
        assert "sparsity" in next(str(step["error"]) for step in done.steps if step["state"] == "failed")
        from deepseal.apps.dashboard.attack import show

        shown = page(show, shelf)
        assert not shown.exception
        assert list(shown.dataframe[0].value["verdict"]) == ["owned", "failed", "owned"]

    def test_too_many_are_refused_before_anything_starts(self, shelf: Workspace) -> None:
        model, key = shelf.thing("models", "marked"), shelf.thing("keys", "key")
        assert model is not None and key is not None
        with pytest.raises(InputError, match="at most 40 attacks"):
            attack(shelf, model, key, "digits", [("prune", [])] * 41, PASSPHRASE)

    def test_free_texts_are_not_offered(self) -> None:
        """Some of them name code to run: a student network, another task."""
        from deepseal.apps.dashboard.forms import offered
        from deepseal.attacks import REMOVAL
        from deepseal.watermark import SCHEMES

        tables = [REMOVAL.get("distil"), REMOVAL.get("other-task"), REMOVAL.get("overwrite"), SCHEMES.get("zhang")]
        names = {row["name"] for table in tables for row in offered(table.table())}  # type: ignore[attr-defined]
        assert names and not names & {"student", "task", "options", "layers"}


class TestWork:
    def test_cancelling_keeps_what_is_finished_and_leaves_no_process(self, own: Workspace) -> None:
        train = ("model", "train", "--arch", "deepseal.adapter.zoo:mlp", "--data", "digits", "--out")
        quick = work.Step("quick", (*train, "models/a.safetensors", "--epochs", "1"), own.record_word("a"))
        long = work.Step("long", (*train, "models/b.safetensors", "--epochs", "1000"), own.record_word("b"))
        job = work.start(own, "mark", "Two trainings", [quick, long])
        end = time.monotonic() + SECONDS
        while (
            (now := work.job(own, job.id))
            and not (now.steps[1]["state"] == "running" and now.progress.get("total"))
            and time.monotonic() < end
        ):
            time.sleep(0.1)
        process = work._children[job.id][0]
        work.cancel(own, job.id)
        done = ended(own, job.id)
        assert done.state == "cancelled"
        assert [step["state"] for step in done.steps] == ["done", "cancelled"]
        assert (own.root / "models" / "a.safetensors").is_file()
        assert not (own.root / "models" / "b.safetensors").exists()
        assert read_record(own.root / str(long.record)).status == "interrupted"
        assert process.wait(10) is not None

    def test_a_killed_process_is_said_to_have_failed(self, own: Workspace) -> None:
        words = ("model", "train", "--arch", "deepseal.adapter.zoo:mlp", "--data", "digits", "--epochs", "1000")
        step = work.Step("train", (*words, "--out", "models/a.safetensors"))
        job = work.start(own, "mark", "A training", [step])
        os.killpg(work._children[job.id][0].pid, signal.SIGKILL)
        done = ended(own, job.id)
        assert done.state == "failed" and "killed" in done.error

    def test_there_is_room_for_so_many(self, own: Workspace) -> None:
        words = ("model", "train", "--arch", "deepseal.adapter.zoo:mlp", "--data", "digits", "--epochs", "1000")
        for index in range(work.MOST_OF_A_BROWSER):
            steps = [work.Step("train", (*words, "--out", f"models/{index}.safetensors"))]
            work.start(own, f"page {index}", "long", steps)
            with pytest.raises(InputError, match=r"one such work at a time|fewer pieces of work"):
                work.start(own, f"page {index}", "the same", steps)
        with pytest.raises(InputError, match="fewer pieces of work"):
            work.start(own, "mark", "one more", [work.Step("train", (*words, "--out", "models/x.safetensors"))])

    def test_work_ends_with_the_server(self, tmp_path: Path) -> None:
        """A server that is killed leaves no training behind."""
        script = (
            "import sys, time; from pathlib import Path\n"
            "from deepseal.apps.dashboard import jobs, workspace\n"
            "own = workspace.Workspace(Path(sys.argv[1]))\n"
            "words = ('model', 'train', '--arch', 'deepseal.adapter.zoo:mlp', '--data', 'digits', '--epochs')\n"
            "step = jobs.Step('train', (*words, '1000', '--out', 'models/a.safetensors'))\n"
            "job = jobs.start(own, 'mark', 'long', [step])\n"
            "print(jobs._children[job.id][0].pid, flush=True)\n"
            "time.sleep(600)\n"
        )
        server = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "w")], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        child = int(server.stdout.readline())
        time.sleep(1.0)
        server.kill()
        server.wait()
        end = time.monotonic() + 30
        while Path(f"/proc/{child}/stat").exists() and time.monotonic() < end:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.1)
        else:
            assert not Path(f"/proc/{child}").exists()


class TestWorkspace:
    @pytest.mark.parametrize("name", ["", "../../etc/passwd", "a/b", ".hidden", "x" * 61, "a\nb", "név", "a.json"])
    def test_names_that_are_no_file_names(self, own: Workspace, name: str) -> None:
        with pytest.raises(InputError, match="expected a name of letters"):
            own.place("models", name)

    def test_uploads_get_names_that_are_free_and_harmless(self, own: Workspace) -> None:
        first = own.keep("data", "../../../etc/passwd", b"1")
        second = own.keep("data", "../../../etc/passwd", b"2")
        assert first.path.parent == second.path.parent == own.root / "data"
        assert first.name != second.name
        assert {thing.path.read_bytes() for thing in own.things("data")} == {b"1", b"2"}

    def test_a_browser_has_its_share_of_the_disk(self, own: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("deepseal.apps.dashboard.workspace.MOST_BYTES", 2**30)
        with (own.root / "models" / "large.safetensors").open("wb") as sparse:
            sparse.truncate(2**30 + 1)
        with pytest.raises(InputError, match="at most 1 GiB"):
            own.keep("data", "more", b"1")
        with pytest.raises(InputError, match="at most 1 GiB"):
            work.start(own, "mark", "work", [])

    def test_an_archive_that_would_grow_is_not_unpacked(self) -> None:
        import io
        import zipfile

        from deepseal.apps.dashboard.pick import _check_unpacked

        bomb = io.BytesIO()
        with (
            zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("x.npy", "w", force_zip64=True) as member,
        ):
            for _ in range(260):
                member.write(bytes(2**23))
        assert len(bomb.getvalue()) < 2**23
        with pytest.raises(InputError, match="at most 2 GiB of arrays"):
            _check_unpacked(bomb.getvalue(), "bomb.npz")
        with pytest.raises(InputError, match=r"a \.npz file"):
            _check_unpacked(b"PK\x03\x04", "half.npz")

    def test_forgetting_leaves_nothing(self, own: Workspace) -> None:
        own.keep("keys", "key", b"secret")
        own.forget()
        assert not [path for path in own.root.rglob("*") if path.is_file()]

    def test_two_browsers_have_two_folders_and_a_name_opens_neither(self, tmp_path: Path) -> None:
        script = (
            "import streamlit as st\n"
            "from deepseal.apps.dashboard.workspace import workspace\n"
            "st.write(str(workspace().root.name))\n"
        )
        names = [AppTest.from_string(script).run().markdown[0].value for _ in range(2)]
        assert names[0] != names[1] and all(len(name) == 32 for name in names)


class TestCookie:
    def cookie(self, path: str, given: str = "") -> str:
        """What the middleware sets, around an application that answers nothing."""
        from deepseal.apps.dashboard.launch import _Browser

        sent: list[dict[str, object]] = []

        async def app(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        headers = [(b"host", b"127.0.0.1:8501"), *([(b"cookie", given.encode())] if given else [])]
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "headers": headers,
            "query_string": b"",
            "scheme": "http",
        }
        asyncio.run(_Browser(app, hosts=("127.0.0.1",))(scope, None, send))
        assert sent[0]["status"] == 200
        return dict(sent[0]["headers"]).get(b"set-cookie", b"").decode()  # type: ignore[call-overload, no-any-return]

    def test_a_browser_without_a_name_gets_one_that_only_we_can_read(self) -> None:
        first, second = self.cookie("/"), self.cookie("/")
        assert first != second
        for attribute in ("HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=604800"):
            assert attribute in first

    def test_a_visit_keeps_the_name_and_makes_it_last(self) -> None:
        name = self.cookie("/").partition(";")[0]
        assert self.cookie("/static/x.js", name) == ""
        assert self.cookie("/_stcore/health", name).startswith(f"{name};")

    @pytest.mark.parametrize("given", ["deepseal_browser=short", "deepseal_browser=" + "a" * 44, "other=1"])
    def test_what_is_no_name_of_ours_is_replaced(self, given: str) -> None:
        assert self.cookie("/", given).startswith("deepseal_browser=")
        assert given not in self.cookie("/", given)


class TestOverview:
    def overview(self, own: Workspace) -> AppTest:
        from deepseal.apps.dashboard.overview import show

        return page(show, own)

    def test_the_folder_given_at_the_start(self, own: Workspace) -> None:
        settings.Settings(str(RECORDS)).publish()
        try:
            shown = self.overview(own)
            assert not shown.exception
            table = shown.dataframe[0].value
            assert len(table) == len(list(RECORDS.glob("*.json")))
            assert list(table["when"]) == sorted(table["when"], reverse=True)
            shown = shown.text_input(key="find").input("overwrite owned").run()
            assert 0 < len(shown.dataframe[0].value) < len(table)
        finally:
            os.environ.pop("DEEPSEAL_DASHBOARD")

    def test_an_empty_folder_leads_on(self, own: Workspace) -> None:
        assert "Mark and verify" in self.overview(own).info[0].value

    def test_other_files_and_links_are_left_alone(self, own: Workspace, tmp_path: Path) -> None:
        folder = tmp_path / "records"
        folder.mkdir()
        (folder / "other.json").write_text('{"a": 1}')
        (folder / "half.json").write_text('{"schema": 1, "kind"')
        (folder / "deep.json").write_text("[" * 100_000)
        (folder / "link.json").symlink_to(RECORDS / "01-train-base.json")
        (folder / "good.json").write_text((RECORDS / "01-train-base.json").read_text())
        settings.Settings(str(folder)).publish()
        try:
            shown = self.overview(own)
            assert not shown.exception and list(shown.dataframe[0].value["file"]) == ["good.json"]
        finally:
            os.environ.pop("DEEPSEAL_DASHBOARD")

    def test_a_hostile_record_is_text(self, own: Workspace) -> None:
        run = Run("watermark.<script>alert(1)</script>")
        run.results.update({"verdict": "[x](javascript:alert(1))", "bits": "many", "warnings": ["<b>"]})
        run.record().write(own.root / own.record_word("x"))
        assert not self.overview(own).exception

    def test_filters(self) -> None:
        from deepseal.apps.dashboard.library import Entry

        found = [Entry(path.name, "folder", read_record(path)) for path in sorted(RECORDS.glob("*.json"))]
        assert len(filtered(found, "", [], [])) == len(found)
        owned = filtered(found, "", ["watermark.verify"], ["owned"])
        assert owned and all(entry.record.results["verdict"] == "owned" for entry in owned)
        assert filtered(found, "no such word", [], []) == []


class TestCommand:
    def deepseal(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deepseal", "dashboard", "--no-browser", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["/no/such/folder"], "expected a folder of records"),
            (["--host", "0.0.0.0"], "expected an address of this machine alone"),
            (["--port", "0"], "greater than or equal to 1"),
            (["--host", "256.0.0.1", "--allow-remote"], "expected to listen on"),
        ],
    )
    def test_what_cannot_be_served(self, words: list[str], says: str) -> None:
        ran = self.deepseal(*words)
        assert ran.returncode == 2 and ran.stdout == ""
        assert ran.stderr.count("\n") == 1 and says in ran.stderr

    def test_a_port_that_is_taken(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ran = self.deepseal("--port", str(taken.getsockname()[1]))
        assert ran.returncode == 2 and "expected to listen on" in ran.stderr


def test_records_of_an_upload_are_checked_like_files() -> None:
    with pytest.raises(InputError, match="DeepSeal record"):
        read_text(b"[]", "upload.json")
    content = json.loads((RECORDS / "01-train-base.json").read_text())
    assert read_text(json.dumps(content).encode(), "upload.json").kind == "model.train"


class TestMosaic:
    def test_colours_go_from_light_to_dark_and_what_is_unknown_is_grey(self) -> None:
        from deepseal.apps.dashboard.mosaic import picture

        drawn = picture(np.array([[0.0, 0.5, 1.0], [np.nan, 0.25, 2.0]]))
        size = drawn.shape[0] // 2
        assert drawn.shape == (2 * size, 3 * size, 3) and drawn.dtype == np.uint8
        squares = drawn[::size, ::size].astype(int)
        assert squares[0, 0].sum() > squares[1, 1].sum() > squares[0, 1].sum() > squares[0, 2].sum()
        assert (squares[1, 0] == 205).all() and (squares[1, 2] == squares[0, 2]).all()
        assert (drawn[:size, :size] == drawn[0, 0]).all()

    def test_a_large_comparison_is_one_picture_and_each_square_can_be_read(self, own: Workspace) -> None:
        content = json.loads((COMPARED).read_text())
        pair = content["results"]["pairs"][0]
        rows = [row for scheme in pair["schemes"] for row in scheme["robustness"] if row["n"]]
        robust = [{**rows[i % len(rows)], "attack": f"attack {i}"} for i in range(100)]
        named = [{**pair["schemes"][0], "scheme": f"scheme {i}", "robustness": robust} for i in range(20)]
        pair["schemes"] = named
        (own.root / own.record_word("compare")).write_text(json.dumps(content))
        from deepseal.apps.dashboard.matrix import show

        shown = page(show, own)
        assert not shown.exception
        assert any("2000 squares" in element.value for element in shown.get("html"))
        says = next(m.value for m in shown.markdown if "attack 0" in m.value)
        assert f"owned {rows[0]['owned']['count']} of {rows[0]['owned']['n']}" in says.replace("\\", "")
        shown = shown.text_input(key="matrix-find").input("attack 99").run()
        assert not shown.exception and not any("squares" in element.value for element in shown.get("html"))


def test_errors_on_a_page_name_no_folder_of_the_server(shelf: Workspace) -> None:
    """A record that is gone: the page says so, without where it lay."""
    job = next(one for one in work.jobs(shelf, "mark") if one.about.get("key"))
    record = shelf.root / str(job.steps[-1]["record"])
    content = record.read_bytes()
    record.unlink()
    try:
        shown = page(mark.show, shelf)
    finally:
        record.write_bytes(content)
    assert not shown.exception
    said = [plain(error.value) for error in shown.error]
    assert said and all(str(shelf.root) not in text and "records/" in text for text in said)
