"""Verify a suspect: from the shelf, an upload, or a server that answers for it."""

from __future__ import annotations

import streamlit as st

from deepseal.apps.dashboard import charts, look, pick
from deepseal.apps.dashboard.jobs import Job, Step, busy, jobs, start
from deepseal.apps.dashboard.workspace import Thing, Workspace
from deepseal.record import read_record

KIND = "verify"
_SHELF, _UPLOAD, _SERVER = "On my shelf", "Upload", "At a server"
_RATES = ("1e-3", "1e-6", "1e-9", "1e-12")


def suspect(own: Workspace) -> None:
    """The part of the page that verifies."""
    words = _suspect(own)
    key = _key(own)
    if words is not None and key is not None:
        _decide(own, words, key)
    look.work(own, KIND)
    _found(own)


def _suspect(own: Workspace) -> tuple[str, ...] | None:
    """The options that name the suspect."""
    with look.card("1. The suspect"):
        source = st.segmented_control(
            "Where is it?",
            [_SHELF, _UPLOAD, _SERVER],
            default=_SHELF,
            required=True,
            key=f"suspect-source-{len(own.things('models'))}",  # what has arrived is looked at
        )
        if source == _UPLOAD:
            pick.upload_model(own, "suspect")
            return None
        if source == _SERVER:
            st.markdown(
                "A server of the **Open Inference Protocol** (KServe v2) that answers for the suspect. Only keys whose "
                "mark is read by asking can be used, and the server's owner sees the questions."
            )
            url = st.text_input("Address", key="suspect-url", placeholder="http://127.0.0.1:8000/v2/models/suspect")
            return ("--url", url.strip()) if url.strip() else None
        model = pick.model(own, "suspect", label="Suspect")
        if model is None:
            st.info("Nothing is on your shelf: upload the suspect, or mark a model first.")
            return None
        return ("--model", pick.word(model), *pick.arch_words(model))


def _key(own: Workspace) -> Thing | None:
    with look.card("2. Your key"):
        key = pick.owner_key(own, "verify")
        if key is None:
            st.info("No key is on your shelf: upload yours, or make one.")
        with st.expander("Upload a key", expanded=key is None):
            pick.upload_key(own, "verify")
        return key


def _decide(own: Workspace, words: tuple[str, ...], key: Thing) -> None:
    with look.card("3. The decision"):
        original = _original(own) if "--model" in words else None
        with st.form("verify", border=False):
            secret = pick.passphrase("verify") if pick.is_encrypted(key) else None
            left, middle, right = st.columns(3)
            rate = left.select_slider("False-positive rate", _RATES, "1e-9", help=look.HELP["false-positive rate"])
            nulls = middle.number_input("Strangers' keys", 0, 10_000, 200, help=look.HELP["null distribution"])
            tried = right.number_input(
                "Pairs tried so far", 1, 1_000_000, 1,
                help="Pairs of a suspect and a key, this one included. The rate is divided by it, and holds for all.",
            )  # fmt: skip
            if st.form_submit_button("Verify", type="primary", disabled=busy(own, KIND)):
                with look.said(own):
                    typed = secret() if secret else None
                    verify(own, words, key, str(rate), int(nulls), int(tried), original, typed)
                    st.rerun()


def _original(own: Workspace) -> Thing | None:
    if not st.toggle(
        "The thief may have moved, scaled, added or cut neurons", key="align",
        help="The suspect's neurons are first put back into the places that they have in your original, best as it was "
        "before it was marked. The rate is halved for that.",
    ):  # fmt: skip
        return None
    return pick.model(own, "original", label="Your original, before it was marked")


def verify(
    own: Workspace,
    suspect_words: tuple[str, ...],
    key: Thing,
    rate: str,
    nulls: int,
    tried: int,
    original: Thing | None,
    secret: str | None,
) -> Job:
    """Start a verification.

    Raises:
        InputError: too much is running.
    """
    words = ["watermark", "verify", *suspect_words, "--key", pick.word(key), "--max-false-positive", rate]
    words += ["--null-keys", str(nulls), "--tried", str(tried)]
    if original is not None:
        words += ["--align", pick.word(original)]
        if original.said("arch"):
            words += ["--align-arch", original.said("arch")]
    step = Step(
        "read the mark, and decide", tuple(words), own.record_word("watermark-verify"), verdict=True, tag="verify"
    )
    return start(own, KIND, "Verifying the suspect", [step], passphrase=secret)


def _found(own: Workspace) -> None:
    done = next((one for one in jobs(own, KIND) if one.state == "done"), None)
    if done is None:
        return
    with look.card("What was found"), look.said(own):
        record = read_record(own.root / str(done.steps[0]["record"]))
        look.verdict(record)
        charts.null(record.results)
