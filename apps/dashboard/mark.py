"""Mark a model, and verify a suspect."""

from __future__ import annotations

from typing import Any, cast

import streamlit as st

from deepseal.apps.dashboard import charts, forms, look, pick
from deepseal.apps.dashboard.jobs import Job, Step, busy, jobs, start
from deepseal.apps.dashboard.verify import suspect
from deepseal.apps.dashboard.workspace import Thing, Workspace
from deepseal.apps.report import words
from deepseal.errors import InputError
from deepseal.record import Record, read_record

KIND = "mark"
_ACCESS = {
    "deepsigns": "in what hidden layers do; read from the weights",
    "diction": "in what a hidden layer does; read from the weights",
    "uchida": "in the weights of a layer",
    "hash-bound": "in weights that a hash of the owner's name chooses",
    "blackmarks": "in answers to made-up inputs; read by asking, many bits",
    "deepsigns-blackbox": "in answers to rare inputs; read by asking",
    "adi": "in answers to abstract images; read by asking",
    "zhang": "in answers to images with a stamp; read by asking",
    "le-merrer": "in answers at the border of classes; read by asking",
    "ewe": "in answers, entangled with the task; read by asking",
}


def show(own: Workspace) -> None:
    """The page."""
    look.heading(
        "Mark and verify",
        "A **mark** is a message that is trained into a copy of your model. Whoever holds the **key** can find it "
        "again, in a stolen copy too, and can say how improbable it is that it is there by chance.",
    )
    what = st.segmented_control(
        "What would you like to do?",
        ["Mark my model", "Verify a suspect"],
        default="Mark my model",
        required=True,
        key="what",
    )
    if what == "Verify a suspect":
        suspect(own)
        return
    made = _model(own)
    if made is not None:
        _embed(own, *made)
    look.work(own, KIND, _live)
    _trained(own)
    _taken(own)


def _model(own: Workspace) -> tuple[Thing, str] | None:
    """The model to be marked, and its data."""
    with look.card("1. Your model"):
        source = st.segmented_control(
            "Where is it?", ["On my shelf", "Train a small one", "Upload"],
            key=f"mark-source-{len(own.things('models'))}",  # what has arrived is looked at
            default="On my shelf" if own.things("models") else "Train a small one", required=True,
        )  # fmt: skip
        if source == "Upload":
            pick.upload_model(own, "mark", pick.data(own, "mark-upload"))
            return None
        if source == "Train a small one":
            _train(own)
            return None
        model = pick.model(own, "mark", first=lambda thing: not thing.about.get("key"))
        if model is None:
            st.info("Nothing is on your shelf yet: train a small model, or upload one.")
            return None
        data = pick.data(own, f"mark-{model.name}", default=model.said("data"))
        return None if data is None else (model, data)


def _train(own: Workspace) -> None:
    data = pick.data(own, "train")
    with st.form("train", border=False):
        arch = pick.architecture("train", from_file=False)
        left, right = st.columns(2)
        epochs = left.number_input("Passes over the data (1 to 1,000)", 1, 1000, 10, key="epochs")
        name = right.text_input("Name of the model", own.free("models", "model"), max_chars=60)
        if st.form_submit_button("Train", type="primary", disabled=busy(own, KIND)) and data and arch:
            with look.said(own):
                train(own, data, arch, int(epochs), name)
                st.rerun()


def train(own: Workspace, data: str, arch: str, epochs: int, name: str) -> Job:
    """Start a training.

    Raises:
        InputError: a name that cannot be used, or too much is running.
    """
    model = own.place("models", name, {"data": data})
    words = ("model", "train", "--arch", arch, "--data", data, "--epochs", str(epochs), "--out", pick.word(model))
    step = Step(f"train {model.name}", words, own.record_word("model-train"))
    return start(own, KIND, f"Training {model.name}", [step], about={"model": model.name})


def _embed(own: Workspace, model: Thing, data: str) -> None:
    from deepseal.watermark import SCHEMES

    with look.card("2. Your key, and the mark"):
        names = [name for name in SCHEMES.names() if name != "plain"]
        scheme = forms.choose(
            "Scheme", names, format_func=lambda n: f"{n}: {_ACCESS.get(n, 'a scheme of this installation')}",
            key="scheme", help=look.HELP["scheme"],
        )  # fmt: skip
        assert scheme is not None  # noqa: S101
        with st.form("mark", border=False):
            owner = st.text_input("Owner", placeholder="Example Ltd", max_chars=200, help=look.HELP["owner"])
            secret = pick.passphrase("mark", new=True)
            left, right = st.columns(2)
            key_name = left.text_input("Name of the key", own.free("keys", "key"), max_chars=60)
            name = own.free("models", f"{model.name} marked")
            out_name = right.text_input("Name of the marked model", name, max_chars=60)
            with st.expander("Parameters of the scheme"):
                given = forms.parameters(cast("Any", SCHEMES.get(scheme)).table(), f"scheme-{scheme}")
            if st.form_submit_button("Make the key and mark a copy", type="primary", disabled=busy(own, KIND)):
                with look.said(own):
                    if not owner.strip():
                        raise InputError("the owner's name", found="none", do="type what the mark shall spell")
                    embed(own, model, data, scheme, owner.strip(), given, key_name, out_name, secret())
                    st.rerun()


def embed(
    own: Workspace,
    model: Thing,
    data: str,
    scheme: str,
    owner: str,
    given: list[str],
    key_name: str,
    out_name: str,
    secret: str,
) -> Job:
    """Start drawing a key and embedding it.

    Raises:
        InputError: names that cannot be used, or too much is running.
    """
    key = own.place("keys", key_name, {"scheme": scheme, "model": model.name, "data": data})
    marked = own.place("models", out_name, {**model.about, "data": data, "key": key.name, "original": model.name})
    common = ("--model", pick.word(model), *pick.arch_words(model), "--data", data)
    keygen = ("watermark", "keygen", *common, "--scheme", scheme, "--owner", owner, *given, "--out", pick.word(key))
    embedding = ("watermark", "embed", *common, "--key", pick.word(key), "--out", pick.word(marked))
    verify = ("watermark", "verify", "--model", pick.word(marked), *pick.arch_words(marked), "--key", pick.word(key))
    steps = [
        Step("draw the key", keygen, own.record_word("watermark-keygen")),
        Step(
            "embed the mark, and read it back from the file", embedding, own.record_word("watermark-embed"), tag="embed"
        ),
        Step("verify, beside strangers' keys", verify, own.record_word("watermark-verify"), verdict=True, tag="verify"),
    ]
    about = {"model": marked.name, "key": key.name}
    return start(own, KIND, f"Marking {model.name}", steps, passphrase=secret, about=about)


def _live(work: Job) -> None:
    readings = [reading for reading in work.readings() if "margins" in reading]
    if not readings:
        return
    with look.card("What the copy has learned"):
        last = readings[-1]
        charts.learning(readings)
        charts.margins(last["margins"], last["bit_errors"], last["bits"])


def _taken(own: Workspace) -> None:
    """The newest marked model: its verification, and the files to take away."""
    done = next((one for one in jobs(own, KIND) if one.state == "done" and one.about.get("key")), None)
    if done is None:
        return
    model, key = own.thing("models", done.about["model"]), own.thing("keys", done.about["key"])
    step = next(step for step in done.steps if step["tag"] == "verify")
    with look.card("3. The marked model"), look.said(own):
        record = read_record(own.root / step["record"])
        look.verdict(record)
        embedded = next(step for step in done.steps if step["tag"] == "embed")
        st.markdown(cost_in_words(read_record(own.root / str(embedded["record"]))))
        charts.null(record.results)
        columns = st.columns(2)
        if model is not None:
            columns[0].download_button(
                "Download the marked model", model.path.read_bytes, f"{model.name}.safetensors", key="take-model",
                on_click="ignore",
            )  # fmt: skip
        if key is not None:
            columns[1].download_button(
                "Download the key (encrypted)",
                key.path.read_bytes,
                f"{key.name}.key",
                key="take-key",
                on_click="ignore",
            )
        st.markdown(
            "**Keep the key and its passphrase safe.** Whoever has both can claim the model; without them nobody can, "
            "you neither. Deposit the key's fingerprint, which reveals nothing of it, with a third party before the "
            "model leaves your house:"
        )
        st.code(record.fingerprints.get("key", words.MISSING), language=None, wrap_lines=True)


def cost_in_words(embedded: Record) -> str:
    """What the mark cost the task, as the embedding recorded it."""
    results = embedded.results
    before, after = results.get("accuracy_before"), results.get("accuracy_after")
    if before is None or after is None:
        return "The record does not say what the mark cost the task."
    return (
        f"The copy answers **{words.percent(after)}** of {words.count(results.get('test_samples'))} test inputs right; "
        f"the model before it was marked answered {words.percent(before)}."
    )


def _trained(own: Workspace) -> None:
    """How good the newest trained model is."""
    newest = next(iter(jobs(own, KIND)), None)
    if newest is None or newest.state != "done" or newest.about.get("key"):
        return
    with look.said(own):
        record = read_record(own.root / str(newest.steps[0]["record"]))
        st.markdown(f"Accuracy of **{look.plain(str(newest.about.get('model')))}**: {words.accuracy(record.results)}.")
