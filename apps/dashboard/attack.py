"""Attack a marked model as a thief would, and watch the mark; and comparisons that the command line made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import streamlit as st

from deepseal.apps.dashboard import charts, forms, look, matrix, pick
from deepseal.apps.dashboard.jobs import Job, Step, busy, start
from deepseal.apps.dashboard.workspace import Thing, Workspace
from deepseal.apps.report import words
from deepseal.errors import InputError
from deepseal.parameters import pairs
from deepseal.record import Record, read_record

KIND = "attack"
_MOST = 40
# What is varied if nothing else is said: parameter and strengths.
_STRENGTHS: Mapping[str, tuple[str, str]] = {
    "prune": ("sparsity", "0.5, 0.8, 0.9, 0.95"),
    "quantise": ("bits", "8, 4, 3, 2"),
    "fine-tune": ("epochs", "1, 5"),
    "overwrite": ("strength", "1, 10"),
    "distil": ("epochs", "10"),
    "other-task": ("epochs", "2"),
    "rescale": ("factor", "4"),
    "dummy": ("share", "0.2"),
}
_USUAL = ("prune", "quantise", "fine-tune")


def show(own: Workspace) -> None:
    """The page."""
    look.heading(
        "Attack",
        "A thief who has your model will try to wash the mark out: cut weights, round them, train on. Here you do so "
        "yourself, to a copy, and see **what it costs the thief** and **whether the mark is still found**.",
    )
    what = st.segmented_control(
        "What would you like to do?", ["Attack a marked model", "Look at a comparison"], key="attack-what",
        default="Attack a marked model", required=True,
    )  # fmt: skip
    if what == "Look at a comparison":
        matrix.show(own)
        return
    chosen = _marked(own)
    if chosen is not None:
        _attacks(own, *chosen)
    look.work(own, KIND, lambda work: _found(own, work))


def _marked(own: Workspace) -> tuple[Thing, Thing, str] | None:
    with look.card("1. The marked model"):
        model = pick.model(own, "attack", first=lambda thing: thing.about.get("key"))
        key = pick.owner_key(own, "attack")
        if model is None or key is None:
            st.info("First make a mark, or upload a marked model and its key, on the page [Mark and verify](mark).")
            return None
        data = pick.data(own, f"attack-{model.name}", default=model.said("data"))
        return None if data is None else (model, key, data)


def _attacks(own: Workspace, model: Thing, key: Thing, data: str) -> None:
    from deepseal.attacks import REMOVAL

    with look.card("2. The attacks"):
        names = [name for name in REMOVAL.names() if name != "none"]
        chosen = st.multiselect(
            "Attacks", names, [name for name in _USUAL if name in names], key="attacks",
            help="What a thief may do with a copy of the weights and data of the same kind, without your key.",
        )  # fmt: skip
        plans: list[tuple[str, list[str]]] = []
        wrong = []
        for name in chosen:
            try:
                plans += _strengths(name, cast("Any", REMOVAL.get(name)))
            except InputError as error:
                wrong.append(error)
                st.error(look.plain(str(error)))
        with st.form("attack", border=False):
            secret = pick.passphrase("attack") if pick.is_encrypted(key) else None
            many = "1 attack" if len(plans) == 1 else f"{len(plans)} attacks, each"
            st.caption(f"{many} followed by a verification at a false-positive rate of 1e-9.")
            if st.form_submit_button("Attack copies of it", type="primary", disabled=busy(own, KIND)):
                with look.said(own):
                    if wrong:
                        raise InputError("strengths that can be used", found="the above", do="correct them first")
                    if not plans:
                        raise InputError("an attack", found="none", do="choose one above")
                    attack(own, model, key, data, plans, secret() if secret else None)
                    st.rerun()


def _strengths(name: str, attack_: Any) -> list[tuple[str, list[str]]]:
    """(attack, its -p words) for each strength.

    Raises:
        InputError: strengths that are no numbers.
    """
    table = attack_.table()
    numbers = [row["name"] for row in table if row["type"] in ("int", "float")]
    what = (attack_.__doc__ or "").partition("\n")[0]
    with st.expander(f"{name}: {what}", expanded=False):
        varied, values = _STRENGTHS.get(name, (numbers[0] if numbers else "", ""))
        if not numbers:
            st.markdown("It has no strength.")
            return [(name, forms.parameters(table, f"attack-{name}"))]
        left, right = st.columns(2)
        with left:
            at = numbers.index(varied) if varied in numbers else 0
            parameter = forms.choose("What is varied", numbers, index=at, key=f"varied-{name}") or varied
        row = next(row for row in table if row["name"] == parameter)
        text = right.text_input(
            "Strengths", values if parameter == varied else str(row["default"] or ""), key=f"values-{name}-{parameter}",
            max_chars=200, help=f"{row['help']} ({row['allowed']}); several with commas between them",
        )  # fmt: skip
        rest = forms.parameters(table, f"attack-{name}", without=[parameter])
    given = [part.strip() for part in text.split(",") if part.strip()]
    if not given:
        raise InputError(f"a strength of {name}", found="none", do=f"type {parameter}, or take {name} off the list")
    plans = [(name, ["-p", f"{parameter}={part}", *rest]) for part in given]
    for (_, words_), part in zip(plans, given, strict=True):
        _check_number(name, parameter, part)
        attack_.from_mapping(pairs(words_[1::2]))
    return plans


def _check_number(name: str, parameter: str, text: str) -> None:
    try:
        float(text)
    except ValueError as error:
        expected = f"numbers with commas between them for {parameter} of {name}"
        raise InputError(expected, found=repr(text[:40]), do="write for instance 0.5, 0.9") from error


def attack(
    own: Workspace,
    model: Thing,
    key: Thing,
    data: str,
    plans: Sequence[tuple[str, list[str]]],
    secret: str | None,
) -> Job:
    """Start attacks on copies of a model; each is followed by a verification.

    Raises:
        InputError: too many of them, or too much is running.
    """
    if len(plans) > _MOST:
        raise InputError(f"at most {_MOST} attacks at a time", found=str(len(plans)), do="leave some out")
    arch = pick.arch_words(model)
    steps = []
    for name, given in plans:
        says = ", ".join(given[1::2])
        varied = given[1].partition("=")[0] if given else ""
        made = own.place("models", own.free("models", f"{model.name} {name} {says}"), {**model.about, "attack": name})
        run = ("attack", "run", name, "--model", pick.word(model), *arch, "--data", data, *given)
        verify = ("watermark", "verify", "--model", pick.word(made), *arch, "--key", pick.word(key), "--null-keys", "0")
        run = (*run, "--out", pick.word(made))
        steps.append(Step(f"{name} {says}", run, own.record_word("attack-run"), tag=varied))
        check = Step(
            f"verify after {name} {says}", verify, own.record_word("watermark-verify"), verdict=True, after=True
        )
        steps.append(check)
    about = {"model": model.name, "key": key.name}
    return start(own, KIND, f"Attacking {model.name}", steps, passphrase=secret, about=about, go_on=True)


def _found(own: Workspace, work: Job) -> None:
    """What the attacks that are through have done."""
    records = _records(own, work)
    rows = [_row(run, attacked, read) for run, attacked, read in records]
    if not rows:
        return
    with look.card("3. What is left of the mark"):
        charts.verdicts(rows)
        st.markdown(_in_words(rows, records))
        charts.curves([row for row in rows if row["strength"] is not None and row["accuracy"] is not None])
        st.dataframe(
            {
                "attack": [row["attack"] for row in rows],
                "strength": [row["setting"] for row in rows],
                "accuracy": [words.percent(row["accuracy"]) for row in rows],
                "wrong bits": [row["wrong"] for row in rows],
                "p-value": [row["p"] for row in rows],
                "verdict": [row["verdict"] for row in rows],
                "seconds": [row["seconds"] for row in rows],
            },
            hide_index=True,
        )
        every = [record for _, *pair in records for record in pair if isinstance(record, Record)]
        st.download_button(
            "Report (HTML)",
            lambda: _page(every),
            "attacks.html",
            "text/html",
            on_click="ignore",
            key=f"report-{work.id}",
        )


def _in_words(
    rows: Sequence[Mapping[str, Any]], records: Sequence[tuple[Mapping[str, Any], Record, Record | None]]
) -> str:
    """What the attacks cost, beside the accuracy before them."""
    before = next((record.results.get("accuracy_before") for _, record, _ in records), None)
    text = f"Before any attack the marked model is right in **{words.percent(before)}** of the test inputs."
    lost = [row["accuracy"] for row in rows if row["verdict"] == "not owned" and row["accuracy"] is not None]
    if lost:
        text += (
            f" The mark was lost only where accuracy had fallen to {words.percent(max(lost))} or less: such a copy is "
            "worth that much to a thief."
        )
    return text


def _records(own: Workspace, work: Job) -> list[tuple[Mapping[str, Any], Record, Record | None]]:
    """Of each attack that has ended: its step, its record, that of the verification after it."""
    pairs: list[tuple[Mapping[str, Any], Record, Record | None]] = []
    for run, check in zip(work.steps[::2], work.steps[1::2], strict=False):
        made = _record(own, run) if run["state"] in ("done", "failed") else None
        if made is not None and (made.status == "failed" or check["state"] in ("done", "failed")):
            pairs.append((run, made, _record(own, check) if check["state"] == "done" else None))
    return pairs


def _record(own: Workspace, step: Mapping[str, Any]) -> Record | None:
    try:
        return read_record(own.root / str(step["record"]))
    except InputError:
        return None


def _row(run: Mapping[str, Any], attacked: Record, read: Record | None) -> dict[str, Any]:
    params = attacked.params.get("attack_params") or {}
    name, varied, results = str(run["words"][2]), str(run["tag"]), read.results if read else {}
    setting = ", ".join(f"{key} {words.clean(value, 20)}" for key, value in params.items() if key == varied)
    return {
        "attack": name,
        "parameter": varied,
        "strength": words.number(params.get(varied)),
        "setting": setting or str(run["title"]).removeprefix(name).strip() or "as usual",
        "short": words.clean(params.get(varied), 12) if varied in params else "",
        "accuracy": words.number(attacked.results.get("accuracy_after")),
        "wrong bits": words.number(results.get("bit_error_rate")),
        "wrong": words.wrong_bits(results) if read else "–",
        "p": words.probability(results.get("p_value")) if read else "–",
        "verdict": words.verdict(results.get("verdict")) if read else "failed",
        "seconds": words.seconds(attacked.seconds),
    }


def _page(records: Sequence[Record]) -> str:
    from deepseal.apps.report.html import render

    return render(list(records))
