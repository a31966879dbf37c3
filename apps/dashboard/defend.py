"""The page Defend: fit a monitor beside a model, change an input, and see whether the alarm is raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from deepseal.apps.dashboard import alarm, forms, look, pick
from deepseal.apps.dashboard.jobs import Job, Step, busy, start
from deepseal.apps.dashboard.look import HELP
from deepseal.apps.dashboard.tries import try_one
from deepseal.apps.dashboard.workspace import Thing, Workspace

KIND = "defend"
_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_SAMPLES = (1_000, 5_000, 20_000, 0)
_MOST_DETECTORS = 12


def show(own: Workspace) -> None:
    """The page."""
    look.heading(
        "Watch a deployed model",
        "Somebody can change an input so little that nobody notices, and yet so that the model answers wrongly. A "
        "**monitor** stands beside the model, knows what ordinary inputs look like, and raises an **alarm** at others. "
        "The model itself stays as it is.",
    )
    look.work(own, KIND)
    monitors = own.things("monitors")
    if busy(own, KIND):
        return
    if not monitors:
        _begin(own)
        if own.things("models"):
            with look.card("Or fit a monitor to a model of yours"):
                _make(own)
        return
    names = [thing.name for thing in monitors]
    name = forms.choose("Monitor", names, key="monitor", help="A monitor that you fitted here, with its model.")
    chosen = next((thing for thing in monitors if thing.name == name), monitors[0])
    with look.said(own):
        monitor = load(own, chosen)
        if monitor.calibration is not None:
            _promise(monitor, chosen)
            try_one(own, chosen, monitor)
            alarm.show(own, chosen, monitor)
    with look.card("Change the promise"):
        _recalibrate(own, chosen)
    with st.expander("Fit another monitor"):
        if own.things("models"):
            _make(own)
        else:
            st.markdown(
                "There is no model of yours here yet. **Mark and verify** trains one or takes one that you have."
            )
            _begin(own)


def load(own: Workspace, thing: Thing) -> Any:
    """The monitor (see ``defense.monitor.Monitor``), kept in memory until its folder changes.

    Raises:
        InputError: it cannot be used.
    """
    with st.spinner("reading the monitor"):
        described = thing.path / "monitor.json"
        return _load(
            str(thing.path), described.stat().st_mtime_ns if described.is_file() else 0, thing.said("arch") or None
        )


@st.cache_resource(max_entries=6, show_spinner=False)
def _load(path: str, modified: int, arch: str | None) -> Any:
    from deepseal.defense.monitor_file import load_monitor

    return load_monitor(path, architecture=arch)


def _begin(own: Workspace) -> None:
    with look.card("Start here"):
        st.markdown(
            "Train a small model on handwritten digits, fit a monitor to it, and promise that at most 5 of 100 "
            "ordinary inputs raise the alarm. That takes about half a minute."
        )
        if st.button("Train a small model on the digits and fit a monitor", type="primary", key="begin-defend"):
            with look.said(own):
                begin(own)
                st.rerun()


def begin(own: Workspace) -> Job:
    """Start the work that gives a newcomer a model and a monitor.

    Raises:
        InputError: too much is running.
    """
    model, first = pick.small_model(own)
    return fit(own, model, own.free("monitors", "digits"), "digits", ["fast"], rate=0.05, before=(first,))


def fit(
    own: Workspace,
    model: Thing,
    name: str,
    data: str,
    detectors: list[str],
    *,
    rate: float,
    per_class: bool = False,
    samples: int = 0,
    before: tuple[Step, ...] = (),
) -> Job:
    """Start fitting and calibrating a monitor.

    Args:
        own: whose.
        model: what it watches.
        name: of the monitor.
        data: the data set that the model was trained on.
        detectors: presets, or detectors by name.
        rate: false-positive rate that is promised.
        per_class: also thresholds by predicted class.
        samples: most that it is fitted on; 0 for all.
        before: what is to be done first.

    Raises:
        InputError: a name that is taken, or too much is running.
    """
    arch = pick.arch_words(model)
    about = {"model": model.name, "data": data, "arch": arch[1] if arch else ""}
    monitor = own.place("monitors", name, about)
    words = ["defense", "fit", "--model", pick.word(model), "--data", data, "--out", pick.word(monitor), *arch]
    for detector in detectors:
        words += ["--detector", detector]
    if samples:
        words += ["--limit", str(samples)]
    steps = [
        *before,
        Step("fit the detectors on training data", tuple(words), own.record_word("defense.fit")),
        _calibration(own, monitor, rate, per_class=per_class),
    ]
    return start(own, KIND, f"A monitor for {model.name}", steps, about={"monitor": monitor.name})


def _calibration(own: Workspace, monitor: Thing, rate: float, *, per_class: bool) -> Step:
    words = [
        "defense",
        "calibrate",
        pick.word(monitor),
        "--data",
        monitor.said("data"),
        "--false-positive",
        f"{rate:g}",
    ]
    words += [*(["--per-class"] if per_class else []), *pick.arch_words(monitor)]
    title = "set the threshold on ordinary inputs that were held out"
    return Step(title, tuple(words), own.record_word("defense.calibrate"))


def _make(own: Workspace) -> None:
    model = pick.model(own, "defend", label="Model to watch")
    if model is None:
        return
    data = pick.data(own, f"defend-{model.name}", default=model.said("data"))
    from deepseal.defense.base import DETECTORS
    from deepseal.defense.presets import PRESETS

    presets = [name for name in PRESETS if name != "deepfense"]
    detectors = st.multiselect(
        "Detectors", [*presets, *DETECTORS.names()], default=["fast"], key="detectors", help=HELP["detector"],
        max_selections=_MOST_DETECTORS, format_func=lambda n: f"{n} (a set)" if n in presets else n,
    )  # fmt: skip
    _explained(detectors)
    rate, per_class = _promised("new")
    samples = st.select_slider(
        "Training inputs to fit on, at most", _SAMPLES, value=5_000, key="fit-samples",
        format_func=lambda n: f"{n:,}" if n else "all", help="More take longer and are remembered better.",
    )  # fmt: skip
    name = st.text_input("Name of the monitor", own.free("monitors", model.name), key=f"new-monitor-{model.name}")
    if st.button("Fit the monitor", key="fit-monitor", disabled=not (data and detectors)) and data:
        with look.said(own):
            fit(own, model, name, data, detectors, rate=rate, per_class=per_class, samples=samples)
            st.rerun()


def _recalibrate(own: Workspace, chosen: Thing) -> None:
    st.markdown(
        "Fewer false alarms mean that more attacks are missed. The threshold is set again on the same held-out inputs; "
        "nothing is trained."
    )
    rate, per_class = _promised("again")
    if st.button("Set the threshold again", key="recalibrate"):
        with look.said(own):
            recalibrate(own, chosen, rate, per_class=per_class)
            st.rerun()


def recalibrate(own: Workspace, chosen: Thing, rate: float, *, per_class: bool = False) -> Job:
    """Start setting a monitor's threshold again.

    Raises:
        InputError: too much is running.
    """
    steps = [_calibration(own, chosen, rate, per_class=per_class)]
    return start(own, KIND, f"A new threshold for {chosen.name}", steps, about={"monitor": chosen.name})


def _promised(key: str) -> tuple[float, bool]:
    from deepseal.defense.thresholds import samples_needed

    rate = st.select_slider(
        "False alarms among ordinary inputs, at most", _RATES, value=0.05, key=f"rate-{key}",
        format_func=lambda r: f"{100 * r:g} %", help=HELP["false-positive rate"],
    )  # fmt: skip
    st.caption(
        f"Promising {100 * rate:g} % takes at least {samples_needed(rate, 0.95):,} held-out inputs for the threshold, "
        "for which three in four of them are there; with fewer it is refused."
    )
    per_class = st.toggle(
        "Also for each answer by itself", key=f"per-class-{key}",
        help="A threshold for each class that the model answers, where there are enough held-out inputs of it.",
    )  # fmt: skip
    return float(rate), per_class


def _promise(monitor: Any, chosen: Thing) -> None:
    known, limit = monitor.calibrated_on(), monitor.threshold()
    members = ", ".join(member.title for member in monitor.members)
    st.markdown(
        f"Of ordinary inputs, **at most {100 * known.false_positive:g} of 100** raise the alarm, with "
        f"{100 * known.confidence:g} % confidence: {limit.exceeding} of {limit.n} held-out inputs lie above the "
        f"threshold of {limit.value:.3g}."
    )
    st.caption(
        f"Watches {look.plain(chosen.said('model', 'a model'))} with {look.plain(members)}; "
        + ("no further pass of the model is needed." if monitor.passes == 1 else f"{monitor.passes} passes in all.")
    )
    for note in monitor.notes:
        st.caption(look.plain(note))
    with st.expander("What these detectors look at"):
        _explained([member.detector.name for member in monitor.members])


def _explained(names: Sequence[str]) -> None:
    """A line a detector, and what a set consists of."""
    from deepseal.defense.base import DETECTORS
    from deepseal.defense.presets import PRESETS

    members = [member.partition("?")[0] for name in names for member in PRESETS.get(name, (name,))]
    for name in dict.fromkeys(members):
        says = (DETECTORS.get(name).__doc__ or "").partition("\n")[0]
        st.caption(f"**{look.plain(name)}**: {look.plain(says)}")
