"""The outcome of a private question: the answer, what each party saw, and what each layer cost."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st

from deepseal.apps.dashboard import look
from deepseal.apps.dashboard.inputs import shown
from deepseal.apps.dashboard.jobs import Job
from deepseal.apps.dashboard.look import HELP
from deepseal.apps.dashboard.settings import PALETTE
from deepseal.apps.dashboard.workspace import Thing, Workspace
from deepseal.apps.report import words
from deepseal.errors import InputError
from deepseal.record import Record, read_record

_LAYER = re.compile(r"\d+ ")
_PHASES = {
    "handshake": "greet each other and compare what they run",
    "base-ot": "agree on keys, once a session",
    "inputs": "the input enters, hidden, and values come back from the linear layers",
    "tables": "garbled circuits, and weights that are hidden in random numbers",
    "layers": "all layers together, each of them below",
    "outputs": "open the answer to whoever asked",
}
_NETWORKS = {
    "this machine": (100e9, 0.00001),
    "two machines in one room (1 Gbit/s, 1 ms)": (1e9, 0.001),
    "a home connection (100 Mbit/s, 20 ms)": (1e8, 0.02),
    "another continent (50 Mbit/s, 150 ms)": (5e7, 0.15),
}


def answer(own: Workspace, chosen: Thing, program: Any, asked: Job | None) -> None:
    """The cards of the newest question, once it is answered; of none, what a question costs."""
    if asked is not None and asked.state == "done":
        record = read_record(own.root / str(asked.steps[1]["record"]))
        kept = own.thing("inputs", str(asked.about.get("input", "")))
        with look.card("The answer"):
            _answered(chosen, program, record, kept)
        with look.card("What each party saw"):
            _seen(own, asked, record)
        with look.card("What each layer cost"):
            _layers(record)
    with look.card("Over a real network"):
        _estimate(chosen, program)


def _answered(chosen: Thing, program: Any, record: Record, kept: Thing | None) -> None:
    results = record.results
    label = results.get("label")
    if label is None:
        label = int(np.argmax(np.asarray(results.get("logits"), dtype=np.float64)))
    left, right = st.columns([1, 2])
    x = None
    if kept is not None:
        x = np.load(io.BytesIO(kept.path.read_bytes()), allow_pickle=False)
        with left:
            shown(x, program.encoding.bounds, kept.said("said"))
    with right:
        st.metric("The model's answer", str(label))
        if x is not None:
            clear = _in_the_clear(
                str(chosen.path), (chosen.path / "public" / "program.json").stat().st_mtime_ns, x.tobytes(), x.shape,
                chosen.said("arch") or None,
            )  # fmt: skip
            _equal(results, label, clear)
        st.markdown(
            f"It took {words.seconds(results.get('seconds_online'))} from the question to the answer, after "
            f"{words.seconds(results.get('seconds_setup'))} to set the session up."
        )
        if results.get("clamped"):
            st.caption(
                f"{words.count(results['clamped'])} values were outside the range and became the nearest inside."
            )


@st.cache_resource(max_entries=64, show_spinner="computing the same without the protocol")
def _in_the_clear(path: str, modified: int, content: bytes, shape: tuple[int, ...], arch: str | None) -> Any:
    from deepseal.apps.private_models import in_the_clear

    return in_the_clear(Path(path), np.frombuffer(content, dtype=np.float32).reshape(shape).copy(), arch=arch)


def _equal(results: Mapping[str, Any], label: int, clear: Any) -> None:
    asked = results.get("label") if "label" in results else results.get("logits")
    if asked == clear.program:
        st.success("The same, bit for bit, as the program gives in the clear.", icon=":material/check_circle:")
    else:
        st.error("The program in the clear gives something else: this must not happen.", icon=":material/error:")
    if clear.model is None:
        return
    if clear.model == label:
        st.success("The same as the model's own answer.", icon=":material/check_circle:")
    else:
        st.warning(
            f"The model itself answers {clear.model}: rounding to whole numbers has changed the answer to this input. "
            "How rarely that happens is in the record of the compilation."
        )


def _seen(own: Workspace, asked: Job, record: Record) -> None:
    results = record.results
    left, right = st.columns(2)
    with left:
        st.markdown("**You, who asked**")
        st.markdown(
            f"- sent {_bytes(results.get('bytes_sent'))} and received {_bytes(results.get('bytes_received'))}, and "
            f"{_bytes(results.get('setup_bytes_sent'))} and {_bytes(results.get('setup_bytes_received'))} before\n"
            "- learned the answer\n"
            "- saw nothing of the weights: they came hidden in random numbers"
        )
    with right:
        st.markdown("**The model's owner**")
        served = _served(own, asked)
        traffic = "sent what you received, and received what you sent"
        if served is not None:
            sent, received = (_bytes(served.results.get(name)) for name in ("bytes_sent", "bytes_received"))
            traffic = f"sent {sent} and received {received} in all"
        st.markdown(
            f"- {traffic}\n"
            "- learned that somebody asked, and when\n"
            "- saw nothing of the input or the answer: what came looks like random bits"
        )
    phases = {name: values for name, values in _phases(record).items() if not _LAYER.match(name)}
    layers = [values for name, values in _phases(record).items() if _LAYER.match(name)]
    phases["layers"] = {
        name: sum(values.get(name, 0) for values in layers) for name in ("bytes_sent", "bytes_received", "seconds")
    }
    st.dataframe(
        {
            "part": [name for name in phases],
            "what happens": [_PHASES.get(name, "") for name in phases],
            "you sent": [_bytes(values.get("bytes_sent")) for values in phases.values()],
            "you received": [_bytes(values.get("bytes_received")) for values in phases.values()],
            "time": [_time(values.get("seconds")) for values in phases.values()],
        },
        hide_index=True,
        key="phases",
    )
    processes = asked.steps[0].get("pid")
    if processes:
        st.caption(f"The owner's process had the number {processes}; it has ended, and yours too.")
    st.info(
        f"**How safe is this?** Safe against parties that are semi-honest: {HELP['semi-honest'][0].lower()}"
        f"{HELP['semi-honest'][1:]} In the protocol's own words: {look.plain(words.clean(results.get('security')))}."
    )


def _served(own: Workspace, asked: Job) -> Record | None:
    try:
        return read_record(own.root / str(asked.steps[0]["record"]))
    except InputError:
        return None


def _layers(record: Record) -> None:
    layers = {name: values for name, values in _phases(record).items() if _LAYER.match(name)}
    if not layers:
        return
    slowest = max(layers, key=lambda name: layers[name].get("seconds", 0.0))
    largest = max(layers, key=lambda name: layers[name].get("bytes_received", 0))
    left, right = st.columns(2)
    left.altair_chart(_times(layers), key="layer-times")
    left.caption(f"Most time: {look.plain(slowest)}, {words.seconds(layers[slowest].get('seconds'))}.")
    right.altair_chart(_traffic(layers), key="layer-bytes")
    right.caption(f"Most received: {look.plain(largest)}, {_bytes(layers[largest].get('bytes_received'))}.")


def _times(layers: Mapping[str, Mapping[str, Any]]) -> Any:
    import altair as alt
    import pandas as pd

    rows = [{"layer": name, "milliseconds": 1000.0 * values["seconds"]} for name, values in layers.items()]
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar(color=PALETTE[0])
        .encode(
            x=alt.X("milliseconds:Q", title="milliseconds"),
            y=alt.Y("layer:N", sort=None, title=None, axis=alt.Axis(labelOverlap=False, minExtent=60)),
            tooltip=["layer", alt.Tooltip("milliseconds:Q", format=".3g")],
        )
        .properties(height=110 + 40 * len(layers), title="time")
    )


def _traffic(layers: Mapping[str, Mapping[str, Any]]) -> Any:
    import altair as alt
    import pandas as pd

    ways = {"you received": "bytes_received", "you sent": "bytes_sent"}
    rows = [
        {"layer": name, "way": way, "kB": values[entry] / 1000.0}
        for name, values in layers.items()
        for way, entry in ways.items()
    ]
    return (
        alt.Chart(pd.DataFrame(rows))
        .mark_bar()
        .encode(
            x=alt.X("kB:Q", title="kilobytes"),
            y=alt.Y("layer:N", sort=None, title=None, axis=alt.Axis(labelOverlap=False, minExtent=60)),
            yOffset=alt.YOffset("way:N", sort=list(ways)),
            color=alt.Color(
                "way:N", sort=list(ways), legend=alt.Legend(orient="top", title=None),
                scale=alt.Scale(domain=list(ways), range=list(PALETTE[:2])),
            ),
            tooltip=["layer", "way", alt.Tooltip("kB:Q", format=",.1f")],
        )
        .properties(height=110 + 40 * len(layers), title="bytes")
    )  # fmt: skip


def _estimate(chosen: Thing, program: Any) -> None:
    network = st.selectbox(
        "Between the two parties lies", list(_NETWORKS), index=1, key="network",
        help="How many bits a second go each way, and how long a round trip takes.",
    )  # fmt: skip
    public = chosen.path / "public" / "program.json"
    found = _cost(str(chosen.path), public.stat().st_mtime_ns, program, *_NETWORKS[str(network)])
    first, second, third = st.columns(3)
    first.metric("Time of a question, about", words.seconds(found.seconds))
    second.metric("Bytes", _bytes(found.bytes_sent + found.bytes_received))
    third.metric("Rounds", words.count(found.rounds), help="How often one party must wait for the other's word.")
    st.caption(
        "Bytes and rounds are exact; the time is from how fast this machine computes, standing for both parties."
    )


@st.cache_resource(max_entries=64, show_spinner="measuring this machine")
def _cost(path: str, modified: int, _program: Any, bandwidth: float, latency: float) -> Any:
    from deepseal.secure_inference.roles.estimate import estimate
    from deepseal.secure_inference.roles.modes import client_ready

    return estimate(client_ready(_program, "mixed"), bandwidth=bandwidth, latency=latency, rates=_rates())


@st.cache_resource(show_spinner=False)
def _rates() -> Any:
    from deepseal.secure_inference.roles.rates import measure

    return measure()


def _phases(record: Record) -> dict[str, Mapping[str, Any]]:
    found = record.results.get("layers")
    return {str(k): v for k, v in found.items() if isinstance(v, Mapping)} if isinstance(found, Mapping) else {}


def _time(value: object) -> str:
    known = words.number(value)
    return "under 1 ms" if known is not None and known < 0.001 else words.seconds(value)


def _bytes(value: object) -> str:
    """A number of bytes, for people."""
    known = words.number(value)
    if known is None:
        return words.MISSING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if known >= size:
            return f"{known / size:.3g} {unit}"
    return f"{known:.0f} bytes"
