"""One input, an attack on it, and what the monitor says of both."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from deepseal.apps.dashboard import forms, look
from deepseal.apps.dashboard.inputs import Chosen, choose, difference, show_picture, shown
from deepseal.apps.dashboard.look import HELP
from deepseal.apps.dashboard.settings import PALETTE
from deepseal.apps.dashboard.workspace import Thing, Workspace
from deepseal.apps.report import words

_NAMES = {
    "noise": "harmless noise (no attack)",
    "fgsm": "FGSM: one step",
    "bim": "BIM: small steps",
    "mi-fgsm": "MI-FGSM: small steps with momentum",
    "pgd": "PGD: many small steps",
    "apgd": "APGD: steps that adapt",
    "jsma": "JSMA: few values, changed much",
    "deepfool": "DeepFool: to the nearest border",
    "fab": "FAB: the smallest change",
    "cw": "Carlini and Wagner: the smallest change",
    "square": "Square: squares, without gradients",
    "hop-skip-jump": "HopSkipJump: only asks for answers",
    "adaptive-pgd": "adaptive PGD: knows the monitor too",
    "adaptive-cw": "adaptive Carlini and Wagner: knows the monitor too",
}
_LEFT_OUT = ("auto",)  # several of the others
_ORDER = ("fgsm", "pgd", "adaptive-pgd", "noise")
# For one input in front of somebody who waits.
LIGHTER: dict[str, dict[str, Any]] = {
    "adaptive-pgd": {"restarts": 1},
    "adaptive-cw": {"steps": 60, "searches": 4},
    "hop-skip-jump": {"iterations": 8},
}


@st.fragment
def try_one(own: Workspace, chosen: Thing, monitor: Any) -> None:
    """The card: an input, an attack, a strength, and the outcome in words, pictures and numbers."""
    spec = monitor.model.spec
    with look.card("Try it"):
        left, right = st.columns([1, 1])
        with left:
            given = choose(own, f"defend-{chosen.name}", chosen.said("data"), spec.shape, spec.bounds)
        with right:
            name = forms.choose("Attack", attacks(), format_func=title, key="attack", help=HELP["attack"])
            epsilon = None
            if name is not None and has_strength(name):
                epsilon = st.slider("Strength ε", 0.0, 0.5, 0.15, 0.01, key="epsilon", help=_strength(spec.bounds))
            else:
                st.caption("This attack has no strength to set: it looks for the smallest change that it needs.")
        if given is None or name is None:
            return
        with look.said(own):
            found = _trial(
                str(chosen.path), (chosen.path / "monitor.json").stat().st_mtime_ns, given.x.tobytes(), spec.shape,
                name, epsilon, monitor,
            )  # fmt: skip
            _outcome(found, given, name)
            _pictures(found, spec.bounds)
            _numbers(found)


def _strength(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"The most that each value may change, as a share of the range of the values, here from {low:g} to {high:g}."


def attacks() -> list[str]:
    """Evasion attacks that can be tried on one input, the most telling first."""
    from deepseal.attacks.base import EVASION

    names = [name for name in EVASION.names() if name not in _LEFT_OUT]
    return [*_ORDER, *(name for name in names if name not in _ORDER)]


def title(name: str) -> str:
    """What an attack is called on the page."""
    return _NAMES.get(name, name)


def has_strength(name: str) -> bool:
    """Whether one says how far an attack may go."""
    from deepseal.attacks.base import EVASION

    return any(field.name == "epsilon" for field in dataclasses.fields(EVASION.get(name)))  # type: ignore[arg-type]


@st.cache_resource(max_entries=64, show_spinner="attacking the input")
def _trial(
    path: str, modified: int, content: bytes, shape: tuple[int, ...], name: str, epsilon: float | None, _monitor: Any
) -> Any:
    import torch

    from deepseal.attacks.base import EVASION
    from deepseal.defense.trial import trial
    from deepseal.rng import Rng

    x = torch.from_numpy(np.frombuffer(content, dtype=np.float32).reshape(shape).copy())
    method = EVASION.build(name, {**LIGHTER.get(name, {}), **({} if epsilon is None else {"epsilon": epsilon})})
    with alone(path):
        return trial(_monitor, x, method, rng=Rng(0).child("dashboard"))


@st.cache_resource(max_entries=256, show_spinner=False)
def alone(path: str) -> threading.Lock:
    """Held by whoever asks a monitor: two pages of one browser share it, and its model is hooked while it works."""
    return threading.Lock()


def _outcome(found: Any, given: Chosen, name: str) -> None:
    before, after = found.before, found.after
    if given.label is not None and given.label != before.predicted:
        st.warning(
            f"Without any attack the model takes this input, labelled {given.label}, for a {before.predicted}: it is "
            "one of those that it gets wrong."
        )
    if before.alarm:
        st.warning("Already the input as it is raises the alarm: a false alarm, if nobody changed it.")
    doing = "The noise" if name == "noise" else "The attack"
    if before.predicted != after.predicted and after.alarm:
        st.success(
            f"**Caught.** {doing} turned the answer from {before.predicted} into {after.predicted}, and the monitor "
            "raises the alarm.", icon=":material/notifications_active:",
        )  # fmt: skip
    elif before.predicted != after.predicted and given.label is None:
        st.error(
            f"**Unnoticed.** {doing} turned the answer from {before.predicted} into {after.predicted} (which of "
            "them is right nobody has told this page), and the monitor says nothing.",
            icon=":material/notifications_off:",
        )
    elif before.predicted != after.predicted:
        st.error(
            f"**Missed.** {doing} turned the answer from {before.predicted} into {after.predicted}, and the monitor "
            "says nothing.", icon=":material/notifications_off:",
        )  # fmt: skip
    elif after.alarm:
        st.info(
            f"**Alarm.** The answer is still {after.predicted}, but the monitor finds the changed input unusual.",
            icon=":material/notifications_active:",
        )
    else:
        st.info(f"**Nothing happened.** The answer is still {after.predicted}, and there is no alarm.")


def _pictures(found: Any, bounds: tuple[float, float]) -> None:
    x, changed = _array(found.x), _array(found.changed)
    first, second, third = st.columns(3)
    with first:
        shown(x, bounds, f"as it is: the model answers {found.before.predicted}")
    with second:
        shown(changed, bounds, f"after the attack: the model answers {found.after.predicted}")
    with third:
        change = difference(x, changed, found.largest)
        moved = f"the difference: {found.moved} of {x.size} values changed, by at most {found.largest:.3g}"
        if change is None:
            st.markdown(moved)
        else:
            show_picture(change, f"{moved}; blue is brighter, orange darker, strongest at that most")


def _numbers(found: Any) -> None:
    rows = st.columns(2)
    for column, name, one in zip(rows, ("As it is", "After the attack"), (found.before, found.after), strict=True):
        with column:
            st.markdown(f"**{name}**: {sentence(one)}")
            left, middle, right = st.columns(3)
            left.metric("Answer", one.predicted)
            middle.metric("p-value", words.probability(one.p_value), help=HELP["p-value"])
            right.metric("Score", f"{one.score:.2f}", help=f"{HELP['score']} The threshold is {one.limit:.3g}.")
    st.altair_chart(_chart(found), key="probabilities")
    before, after = (one.probabilities for one in (found.before, found.after))
    st.caption(
        f"How sure the model is of each answer. As it is: {words.percent(float(before.max()))} for "
        f"{found.before.predicted}. After the attack: {words.percent(float(after.max()))} for {found.after.predicted}."
    )


def sentence(one: Any) -> str:
    """What the monitor says of an input, in words."""
    said = f"its score of {one.score:.3g} is {'above' if one.alarm else 'not above'} the threshold of {one.limit:.3g}"
    rare = f"{words.percent(one.p_value)} of ordinary inputs look at least as unusual"
    return f"{'alarm' if one.alarm else 'no alarm'}, {said}; {rare}."


def _chart(found: Any) -> Any:
    import altair as alt
    import pandas as pd

    names = ("as it is", "after the attack")
    rows = [
        {"answer": str(label), "probability": float(value), "input": name}
        for name, one in zip(names, (found.before, found.after), strict=True)
        for label, value in enumerate(one.probabilities)
    ]
    if len(found.before.probabilities) > 12:  # the likeliest ones
        kept = {str(int(i)) for one in (found.before, found.after) for i in one.probabilities.topk(6).indices}
        rows = [row for row in rows if row["answer"] in kept]
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar()
        .encode(
            x=alt.X("answer:N", title="answer", axis=alt.Axis(labelAngle=0), sort=None),
            y=alt.Y("probability:Q", title="probability", scale=alt.Scale(domain=[0, 1])),
            xOffset=alt.XOffset("input:N", sort=list(names)),
            color=alt.Color(
                "input:N", sort=list(names), legend=alt.Legend(orient="top", title=None),
                scale=alt.Scale(domain=list(names), range=list(PALETTE[:2])),
            ),
            tooltip=["input:N", "answer:N", alt.Tooltip("probability:Q", format=".3f")],
        )
        .properties(height=260, description="Probabilities of the answers before and after the attack")
    )  # fmt: skip


def _array(x: Any) -> NDArray[np.float32]:
    return np.asarray(x.numpy(), dtype=np.float32)
