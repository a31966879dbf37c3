"""How good an alarm is: false alarms on ordinary inputs, a threshold to move, and attacks that are caught or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from deepseal.apps.dashboard import look, pick, tries
from deepseal.apps.dashboard.inputs import test_split
from deepseal.apps.dashboard.jobs import Job, Step, jobs, start
from deepseal.apps.dashboard.look import HELP
from deepseal.apps.dashboard.settings import BAD, PALETTE
from deepseal.apps.dashboard.workspace import Thing, Workspace
from deepseal.apps.report import words
from deepseal.errors import InputError
from deepseal.record import Record, read_record

KIND = "defend-evaluate"
_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
_MOST_SCORED = 2_000
_MOST_ATTACKS = 6


def show(own: Workspace, chosen: Thing, monitor: Any) -> None:
    """The cards: the threshold, and the evaluation against attacks."""
    with look.card("How good is the alarm?"):
        found = evaluation(own, chosen)
        _threshold(own, chosen, monitor, found)
    with look.card("Put it to the test"):
        _evaluate(own, chosen)
        look.work(own, KIND)
        if found is not None:
            _results(found, chosen)
        st.markdown(
            "**What no figure here promises.** The rate holds for ordinary inputs like those that were held out; when "
            "the traffic changes, set the threshold again. It says nothing about attacks: an attacker who knows the "
            "monitor looks for changes that raise no alarm, and with enough freedom finds them. Choose an *adaptive* "
            "attack to see how often."
        )


def evaluation(own: Workspace, chosen: Thing) -> Record | None:
    """The newest finished evaluation of a monitor."""
    for job in jobs(own, KIND):
        if job.state == "done" and job.about.get("monitor") == chosen.name and job.steps[0].get("record"):
            try:
                return read_record(own.root / str(job.steps[0]["record"]))
            except InputError:
                continue
    return None


@st.fragment
def _threshold(own: Workspace, chosen: Thing, monitor: Any, found: Record | None) -> None:
    with look.said(own):
        _moved(own, chosen, monitor, found)


def _moved(own: Workspace, chosen: Thing, monitor: Any, found: Record | None) -> None:
    from deepseal.defense.evaluation import false_positives_at, per_day

    clean = _clean(
        str(chosen.path), (chosen.path / "monitor.json").stat().st_mtime_ns, monitor,
        test_split(own, chosen.said("data")),
    )  # fmt: skip
    rates = [rate for rate in _RATES if _promised(monitor, rate)]
    known = monitor.calibrated_on().false_positive
    rates = sorted({*rates, known})
    left, right = st.columns([2, 1])
    nominal = left.select_slider(
        "Move the threshold: false alarms among ordinary inputs, at most", rates, value=known, key="nominal",
        format_func=lambda r: f"{100 * r:g} %", help=f"{HELP['threshold']} Only rates that can be promised are shown.",
    )  # fmt: skip
    traffic = right.number_input(
        "Ordinary inputs a day", 0, 10**12, 100_000, 1_000, key="traffic",
        help="How much the deployed model is asked, to say how many false alarms that means.",
    )  # fmt: skip
    row = false_positives_at(monitor, clean, float(nominal))
    realised, (low, high) = row["realised"], row["expected_interval"]
    st.markdown(
        f"**{realised['count']} of {realised['n']} ordinary test inputs raise the alarm.** The promise was at most "
        f"{100 * nominal:g} of 100."
    )
    first, second, third = st.columns(3)
    first.metric("Threshold", f"{row['threshold']:.4g}", help=HELP["score"])
    second.metric("False alarms found", words.percent(realised["value"]), help=HELP["false-positive rate"])
    third.metric("False alarms a day, at most", words.count(round(per_day(float(nominal), float(traffic)))))
    st.caption(
        f"The real rate lies between {words.percent(realised['low'])} and {words.percent(realised['high'])} (95 % "
        f"interval of {realised['count']} in {realised['n']}). From this threshold, tests of this size find between "
        f"{words.percent(low)} and {words.percent(high)}, 95 times in 100."
    )
    if realised["value"] > high:
        st.warning("That is more than chance explains: the test inputs are not like the ones that were held out.")
    attacked = [] if found is None else [row for row in _rows(found) if isinstance(row.get("scores"), Mapping)]
    for index, chart in enumerate(_charts(clean, float(row["threshold"]), attacked)):
        st.altair_chart(chart, key=f"scores-{index}")
    st.caption(
        "How many inputs have which score; the broken line is the threshold, and what lies right of it raises the "
        "alarm. " + ("" if attacked else "Put it to the test below, and the scores of attacked inputs appear here too.")
    )


@st.cache_resource(max_entries=8, show_spinner="scoring test inputs")
def _clean(path: str, modified: int, _monitor: Any, _test: Any) -> Any:
    import torch

    from deepseal.defense.evaluation import clean_scores

    with tries.alone(path):
        spread = torch.linspace(0, len(_test) - 1, min(len(_test), _MOST_SCORED)).round().long()
        return clean_scores(_monitor, _test.take(spread))


def _promised(monitor: Any, rate: float) -> bool:
    try:
        monitor.threshold(rate)
    except InputError:
        return False
    return True


def _charts(clean: Any, threshold: float, attacked: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Histograms one above the other, on one scale, each with the threshold."""
    import altair as alt
    import pandas as pd

    from deepseal.defense.evaluation import edges_of, histogram

    series = [("ordinary inputs", histogram(clean.scores, edges_of(clean.scores)), PALETTE[0])]
    series += [(f"fooled by {row['name']}", row["scores"], PALETTE[1]) for row in attacked]
    last = max(values["edges"][-1] for _, values, _ in series)
    across = alt.Scale(domain=[min(0.0, series[0][1]["edges"][0]), max(last, threshold)], nice=False)
    line = (
        alt.Chart(pd.DataFrame([{"score": threshold}]))
        .mark_rule(color=BAD, strokeWidth=2, strokeDash=[6, 4])
        .encode(x=alt.X("score:Q", scale=across), tooltip=[alt.Tooltip("score:Q", title="threshold", format=".4g")])
    )
    return [
        (_bars(values, colour, across) + line).properties(title=name, height=200) for name, values, colour in series
    ]


def _bars(values: Mapping[str, Sequence[float]], colour: str, across: Any) -> Any:
    import altair as alt
    import pandas as pd

    edges, counts = values["edges"], values["counts"]
    rows = [{"from": edges[i], "to": edges[i + 1], "inputs": count} for i, count in enumerate(counts)]
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(color=colour)
        .encode(
            x=alt.X("from:Q", bin="binned", title="score (last bar: and above)", scale=across),
            x2="to:Q",
            y=alt.Y("inputs:Q", title="inputs", axis=alt.Axis(tickMinStep=1, tickCount=4)),
            tooltip=[alt.Tooltip("from:Q", format=".3g"), alt.Tooltip("to:Q", format=".3g"), "inputs:Q"],
        )
    )


def _evaluate(own: Workspace, chosen: Thing) -> None:
    st.markdown("Attack test inputs that neither model nor monitor has seen, and count what is caught.")
    names = st.multiselect(
        "Attacks", tries.attacks(), default=["fgsm", "pgd"], format_func=tries.title, key="evaluated",
        max_selections=_MOST_ATTACKS, help=HELP["attack"],
    )  # fmt: skip
    left, right = st.columns(2)
    epsilon = left.slider(
        "Strength ε of these attacks", 0.01, 0.5, 0.15, 0.01, key="evaluated-epsilon", help=HELP["epsilon"]
    )
    limit = right.select_slider("Inputs to attack, at most", (20, 50, 100, 200, 500, 1_000), value=100, key="limit")
    if st.button("Attack and count", key="evaluate", disabled=not names):
        with look.said(own):
            evaluate(own, chosen, [attack_word(name, epsilon) for name in names], int(limit))
            st.rerun()


def attack_word(name: str, epsilon: float) -> str:
    """An attack as the command names it, with a strength where it has one."""
    values = {**({"epsilon": epsilon} if tries.has_strength(name) else {}), **tries.LIGHTER.get(name, {})}
    return ":".join([name, *([",".join(f"{key}={value:g}" for key, value in values.items())] if values else [])])


def evaluate(own: Workspace, chosen: Thing, attacks: Sequence[str], limit: int) -> Job:
    """Start an evaluation.

    Raises:
        InputError: too much is running.
    """
    line = ["defense", "evaluate", pick.word(chosen), "--data", chosen.said("data"), "--limit", str(limit)]
    for attack in attacks:
        line += ["--attack", attack]
    line += pick.arch_words(chosen)
    steps = [Step("attack test inputs and judge them", tuple(line), own.record_word("defense.evaluate"))]
    return start(own, KIND, f"The monitor {chosen.name} under attack", steps, about={"monitor": chosen.name})


def _rows(record: Record) -> list[Mapping[str, Any]]:
    rows = record.results.get("attacks")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _results(record: Record, chosen: Thing) -> None:
    rows = _rows(record)
    if not rows:
        return
    for row in rows:
        fooled = row.get("success") or {}
        percent = next((p for p in (5, 1) if row.get(f"tpr_at_{p}")), None)
        caught = row.get(f"tpr_at_{percent}")
        st.markdown(
            f"- {look.plain(words.clean(row.get('name')))}: fools the model on {words.count(fooled.get('count'))} of "
            f"{words.count(fooled.get('n'))} inputs"
            + (f"; at {percent} % false alarms {caught['count']} of these {caught['n']} are caught." if caught else ".")
        )
    st.dataframe(
        {
            "attack": [words.clean(row.get("name")) for row in rows],
            "fooled": [_share(row.get("success")) for row in rows],
            "caught at 1 %": [_share(row.get("tpr_at_1")) for row in rows],
            "caught at 5 %": [_share(row.get("tpr_at_5")) for row in rows],
            "silent errors at 1 %": [_share(row.get("silent_errors_at_1")) for row in rows],
            "silent errors at 5 %": [_share(row.get("silent_errors_at_5")) for row in rows],
            "told apart (AUROC)": [words.general(row.get("auroc")) for row in rows],
        },
        hide_index=True,
        key="evaluation",
    )
    st.caption(
        f"*Caught*: {HELP['detected']} *Silent errors*: {HELP['silent errors']} At 1 % and at 5 % false alarms; a dash "
        "where that rate cannot be promised from so few held-out inputs, or where nothing was fooled. *AUROC*: how "
        "often an attacked input scores higher than an ordinary one; one half is chance, 1 is always."
    )
    for note in record.notes:
        st.caption(look.plain(words.clean(note)))
    if record.started < _moment(chosen):
        st.warning("The threshold was set again after this test: repeat it.")


def _share(values: object) -> str:
    if not isinstance(values, Mapping):
        return "–"
    value, low, high = (words.percent(values.get(name)) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _moment(chosen: Thing) -> str:
    """When the monitor was last written, as records say it."""
    import datetime

    modified = (chosen.path / "monitor.json").stat().st_mtime
    return datetime.datetime.fromtimestamp(modified, datetime.timezone.utc).isoformat(timespec="seconds")
