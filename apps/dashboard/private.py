"""The page Private inference: compile a model, ask it without showing the input, and see what each party saw."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import streamlit as st

from deepseal.apps.dashboard import forms, look, pick
from deepseal.apps.dashboard.answers import answer
from deepseal.apps.dashboard.background import ADDRESS
from deepseal.apps.dashboard.inputs import Chosen, choose, shown
from deepseal.apps.dashboard.jobs import Job, Step, busy, jobs, start
from deepseal.apps.dashboard.workspace import Thing, Workspace

KIND, ASK = "private", "private-ask"
_MOST_QUESTIONS = 20  # that are kept
TIMEOUT = 20  # seconds that either party waits for the other


def show(own: Workspace) -> None:
    """The page."""
    look.heading(
        "Ask without showing",
        "One party has a **model** and shows its weights to nobody; another has an **input** and shows it to nobody. "
        "Together they compute the answer, and only whoever asked learns it. Here both parties run on this machine, as "
        "two processes of their own; between two machines it works the same.",
    )
    look.work(own, KIND)
    programs = own.things("programs")
    if busy(own, KIND):
        return
    if not programs:
        _begin(own)
        if own.things("models"):
            with look.card("Or make a model of yours ready"):
                _make(own)
        return
    name = forms.choose(
        "Program", [thing.name for thing in programs], key="program",
        help="A model in whole numbers, made ready for the protocol. One half of it is public, the other stays secret.",
    )  # fmt: skip
    chosen = next((thing for thing in programs if thing.name == name), programs[0])
    with look.said(own):
        program = load(chosen)
        _public(program)
        _question(own, chosen, program)
        answer(own, chosen, program, _newest(own, chosen))
    with st.expander("Make another model ready"):
        if own.things("models"):
            _make(own)
        else:
            _begin(own)


def load(thing: Thing) -> Any:
    """The public half of a program (see ``compile.Program``), kept in memory until it changes.

    Raises:
        InputError: it cannot be used.
    """
    public = thing.path / "public" / "program.json"
    with st.spinner("reading the program"):
        return _load(str(thing.path), public.stat().st_mtime_ns if public.is_file() else 0)


@st.cache_resource(max_entries=8, show_spinner=False)
def _load(path: str, modified: int) -> Any:
    from pathlib import Path

    from deepseal.secure_inference.compile.program import Program

    return Program.load(Path(path))


def _begin(own: Workspace) -> None:
    with look.card("Start here"):
        st.markdown(
            "Train a small model on handwritten digits and make it ready for the protocol. That takes about half a "
            "minute; then draw a digit and ask what it is."
        )
        if st.button("Train a small model on the digits and make it ready", type="primary", key="begin-private"):
            with look.said(own):
                begin(own)
                st.rerun()


def begin(own: Workspace) -> Job:
    """Start the work that gives a newcomer a model and its program.

    Raises:
        InputError: too much is running.
    """
    model, train = pick.small_model(own)
    return compile_(own, model, own.free("programs", "digits"), "digits", before=(train,))


def compile_(
    own: Workspace, model: Thing, name: str, data: str, *, permits: str = "label", before: tuple[Step, ...] = ()
) -> Job:
    """Start compiling a model.

    Args:
        own: whose.
        model: what is compiled.
        name: of the program.
        data: the data set whose held-out part sets the number formats.
        permits: what a client learns: ``label`` or ``logits``.
        before: what is to be done first.

    Raises:
        InputError: a name that is taken, or too much is running.
    """
    arch = pick.arch_words(model)
    about = {"model": model.name, "data": data, "arch": arch[1] if arch else ""}
    program = own.place("programs", name, about)
    words = ["private", "compile", "--model", pick.word(model), "--data", data, "--permits", permits]
    words += ["--out", pick.word(program), *arch]
    step = Step("turn the model into whole numbers and circuits", tuple(words), own.record_word("private.compile"))
    return start(own, KIND, f"{model.name}, ready for private questions", [*before, step], about={"program": name})


def _make(own: Workspace) -> None:
    model = pick.model(own, "private", label="Model to make ready")
    if model is None:
        return
    data = pick.data(own, f"private-{model.name}", default=model.said("data"))
    permits = st.segmented_control(
        "What whoever asks may learn", ["label", "logits"], default="label", key="permits",
        format_func=lambda p: "only the answer" if p == "label" else "how sure it is of each answer",
        help="Whoever learns more of each question can copy the model with fewer of them.",
    )  # fmt: skip
    name = st.text_input(
        "Name of the program", own.free("programs", model.name), key=f"new-program-{model.name}", max_chars=60
    )
    if st.button("Make it ready", key="compile", disabled=not data) and data:
        with look.said(own):
            compile_(own, model, name, data, permits=permits or "label")
            st.rerun()


def _public(program: Any) -> None:
    with st.expander("What everybody may know of this model, and what nobody sees"):
        st.markdown("**Public** to whoever asks:")
        st.markdown("\n".join(f"- {look.plain(part)}" for part in program.disclosed))
        st.markdown(
            "**Secret**: the weights, which stay with the model's owner, and the input, which stays with whoever asks."
        )


def _question(own: Workspace, chosen: Thing, program: Any) -> None:
    with look.card("Your question"):
        left, right = st.columns([1, 1])
        bounds = (float(program.encoding.bounds[0]), float(program.encoding.bounds[1]))
        with left:
            given = choose(own, f"private-{chosen.name}", chosen.said("data"), program.sample_shape, bounds)
        if given is None:
            return
        with right:
            shown(given.x, bounds, f"the input: {given.said}")
        if st.button("Ask in private", type="primary", key="ask", disabled=busy(own, ASK)):
            with look.said(own):
                ask(own, chosen, given)
                st.rerun()


def ask(own: Workspace, chosen: Thing, given: Chosen) -> Job:
    """Start a server of the program and a client that asks it, two processes.

    Raises:
        InputError: too much is running.
    """
    content = io.BytesIO()
    np.save(content, given.x, allow_pickle=False)
    for old in own.things("inputs")[_MOST_QUESTIONS:]:
        own.remove(old)
    kept = own.keep("inputs", "question", content.getvalue(), {"said": given.said})
    return again(own, chosen, kept)


def again(own: Workspace, chosen: Thing, kept: Thing) -> Job:
    """Ask the same as before, with new processes.

    Raises:
        InputError: too much is running.
    """
    program, wait = pick.word(chosen), ("--timeout", str(TIMEOUT))
    once = ("--most-clients", "1", "--most-samples", "1")  # whatever else runs on this machine could ask, too
    serve = ("private", "serve", program, "--listen", "127.0.0.1:0", "--accept-public", *once, *wait)
    query = ("private", "query", f"{program}/public", "--connect", ADDRESS, "--input", pick.word(kept), *wait)
    steps = [
        Step("the owner's process: serve the model", serve, own.record_word("private.serve"), serves=True),
        Step("your process: ask it", query, own.record_word("private.query")),
    ]
    about = {"program": chosen.name, "input": kept.name}
    return start(own, ASK, f"A private question to {chosen.name}", steps, about=about)


def _newest(own: Workspace, chosen: Thing) -> Job | None:
    """The newest question to a program; after showing how it goes on, and a way to try again where it failed."""
    look.work(own, ASK)
    newest = next((job for job in jobs(own, ASK) if job.about.get("program") == chosen.name), None)
    if newest is None or newest.running or newest.state == "done":
        return newest
    ended = str(newest.steps[0].get("error") or "")
    if ended:
        st.warning(f"{look.plain(ended[0].upper() + ended[1:])}. Nothing was learned of your input.")
    kept = own.thing("inputs", str(newest.about.get("input", "")))
    if kept is not None and st.button("Try again", key="ask-again", help="Two new processes, the same input."):
        with look.said(own):
            again(own, chosen, kept)
            st.rerun()
    return newest
