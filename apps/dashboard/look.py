"""What all pages share: words before numbers, help for every term, errors in one line, work that goes on."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import streamlit as st

from deepseal.apps.dashboard.jobs import Job, cancel, job, jobs
from deepseal.apps.dashboard.workspace import Workspace
from deepseal.apps.report import words
from deepseal.errors import DeepSealError
from deepseal.record import Record

HELP = {
    "accuracy": "Share of the test inputs for which the model's answer is right.",
    "adversarial input": "An input changed so little that nobody notices, and yet so that the model's answer is wrong.",
    "alarm": "The monitor holds the input for changed on purpose: its score is above the threshold.",
    "attack": "How the input is changed. Some use the model's gradients, some only its answers, one is harmless noise.",
    "bits": "How many bits the mark has. More bits make a stronger proof and take more room in the model.",
    "confidence": "How sure the promise is: 95 % means that 95 of 100 calibrations keep it.",
    "detected": "Of the inputs that fool the model, the share that raises the alarm.",
    "detector": "One way to tell unusual inputs. A preset is a set of them; fast costs no further pass.",
    "epsilon": "The most that an attacker may change each value of the input, where values go from 0 to 1.",
    "false-positive rate": "How often an innocent would be accused: the probability that a model without this mark, "
    "or an input that nobody attacked, is taken for one. 1e-9 is one in a billion.",
    "key": "The owner's secret: where to look, and what to look for. Without it nobody can find the mark.",
    "margin": "How far a bit is on its right side, in standard deviations of strangers' keys; negative is wrong.",
    "null distribution": "What keys that nobody embedded read from the same model: how many wrong bits chance gives.",
    "owner": "A text that the mark spells, such as your company's name.",
    "p-value": "How probable a result at least this extreme is where there is nothing to be found.",
    "passphrase": "Encrypts the key's file. It is kept nowhere: without it the file is worthless, to you too.",
    "scheme": "The method of the mark: where it is put, and how it is read back.",
    "score": "How unusual the input is for all detectors together; higher is more unusual.",
    "semi-honest": "Both parties follow the protocol, and may try to learn more from what they see.",
    "silent errors": "Inputs that are answered wrongly and raise no alarm: the ones that do harm.",
    "threshold": "The border of the decision: on one side an alarm or a proof, on the other none.",
    "wrong bits": "Bits, or answers to the key's questions, that differ from what the key expects.",
}
_ICONS = {"done": "✓", "running": "…", "waiting": "·", "failed": "✗", "cancelled": "⊘"}
_MANY = 6  # steps that are listed without being asked for
_SAID = {"done": "done", "running": "running", "waiting": "waiting", "failed": "failed", "cancelled": "cancelled"}
_VERDICTS: dict[str, tuple[Callable[..., Any], str]] = {
    "owned": (st.success, "Owned: this model carries the mark of this key."),
    "not-owned": (st.info, "Not owned: the mark was not found. That is no proof of innocence."),
    "inconclusive": (st.warning, "Could not decide: the model does not show enough for the rate you asked for."),
}


def heading(title: str, lead: str) -> None:
    """The page's title and what it is for, in plain words."""
    st.title(title, anchor=False)
    st.markdown(lead)


@contextmanager
def card(title: str) -> Iterator[None]:
    """A frame with a heading."""
    with st.container(border=True):
        st.header(title, anchor=False)
        yield


@contextmanager
def said(own: Workspace | None = None) -> Iterator[None]:
    """What goes wrong on purpose inside is said in one line, without the path of the browser's folder."""
    try:
        yield
    except DeepSealError as error:
        text = str(error) if own is None else str(error).replace(f"{own.root}/", "")
        st.error(plain(text), icon=":material/error:")


def plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+-.!|$~:" else c for c in text)


def verdict(record: Record) -> None:
    """A verification: the verdict in words, then the figures that it rests on."""
    results = record.results
    kind, text = _VERDICTS.get(str(results.get("verdict")), (st.info, "No verdict was recorded."))
    kind(text)
    wrong, bits, most = results.get("bit_errors"), results.get("bits"), results.get("threshold")
    first, second, third = st.columns(3)
    first.metric("Wrong bits", f"{words.count(wrong)} of {words.count(bits)}", help=HELP["wrong bits"])
    second.metric("Allowed", "none" if most is None else words.count(most), help=HELP["threshold"])
    third.metric("p-value", words.scientific(results.get("p_value")), help=HELP["p-value"])
    by_chance = words.number(words.at(results, "null", "mean_bit_error_rate"))
    if by_chance is not None:
        st.caption(
            f"By chance about {words.percent(by_chance)} are wrong here: that is what strangers' keys read on average "
            "(half of bits; of answers to questions, more, since there are several answers)."
        )
    for warning in results.get("warnings") or []:
        st.warning(plain(words.clean(warning)))


def command(steps: Sequence[Sequence[str]]) -> None:
    """The same on the command line, for those who want to repeat it there."""
    st.markdown("The same on the command line:")
    st.code("\n".join(f"deepseal {shlex.join(step)}" for step in steps), language="bash", wrap_lines=True)


def work(own: Workspace, kind: str, live: Callable[[Job], None] | None = None) -> None:
    """The page's newest piece of work: how it goes on while it runs, how it ended afterwards.

    Args:
        own: whose work.
        kind: which page's.
        live: shows what the work lets see of itself; called again every second.
    """
    newest = next(iter(jobs(own, kind)), None)
    if newest is None:
        return
    if newest.running:
        _running(own, newest.id, live)
        return
    with st.container(border=True, key=f"work-{kind}"):
        if newest.state == "done" and not newest.error:
            st.markdown(f"✓ **{plain(newest.title)}**: done")
        elif newest.state == "done":
            st.warning(f"{plain(newest.title)}: done, but for a part. {plain(newest.first_error)}")
        elif newest.state == "cancelled":
            st.info(f"{plain(newest.title)}: cancelled. What was finished is kept.")
        else:
            st.error(f"{plain(newest.title)}: failed. {plain(newest.error)}", icon=":material/error:")
        with st.expander("Steps, and the same on the command line"):
            _steps(newest)
            command_of(newest)
    if live is not None:
        live(newest)


def command_of(work: Job) -> None:
    """The commands that a piece of work runs."""
    command([step["words"] for step in work.steps])


@st.fragment(run_every=1.0)
def _running(own: Workspace, name: str, live: Callable[[Job], None] | None) -> None:
    now = job(own, name)
    if now is None or not now.running:
        st.rerun(scope="app")
    with st.container(border=True, key=f"work-{now.kind}"):
        st.markdown(f"… **{plain(now.title)}**: running")
        done, total = int(now.progress.get("done", 0)), int(now.progress.get("total", 0))
        title = str(now.progress.get("title", "starting"))
        st.progress(done / total if total else 0.0, text=f"{title}: {done} of {total}" if total else title)
        if len(now.steps) > _MANY:
            with st.expander("Steps"):
                _steps(now)
        else:
            _steps(now)
        if st.button("Cancel", key=f"cancel-{name}", help="Ends the work. What is finished is kept."):
            cancel(own, name)
            st.toast("cancelling")
    if live is not None:
        live(now)


def _steps(now: Job) -> None:
    lines = []
    for step in now.steps:
        state = str(step["state"])
        seconds = f", {words.seconds(step['seconds'])}" if "seconds" in step else ""
        error = f": {plain(str(step['error']))}" if step.get("error") else ""
        lines.append(f"- {_ICONS[state]} {plain(str(step['title']))} ({_SAID[state]}{seconds}){error}")
    st.markdown("\n".join(lines))
