"""Pictures as numbers: what was recorded against the strength of an attack, placed on a canvas. The page draws them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from deepseal.apps.report import words
from deepseal.apps.report.story import Row
from deepseal.record import Record

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 366, 14, 206
_LARGEST = 1e12
_SMALLEST = 1e-12
_LOG_FROM = 50.0
_HEADROOM = 1.14  # room for a label above an accuracy of 100%
_MOST_SPOKEN = 40
_MOST_LABELS = 4
_DASH = 14


@dataclasses.dataclass(frozen=True)
class Point:
    """One model: its place on the canvas, its recorded values, and both in words."""

    x: float
    y: float
    strength: object
    value: object
    label: str


@dataclasses.dataclass(frozen=True)
class Series:
    """Points that differ in the strength only; ``style`` picks colour and shape."""

    style: int
    points: tuple[Point, ...]
    connected: bool

    @property
    def path(self) -> str:
        """The points as an SVG list of coordinates."""
        return " ".join(f"{point.x:g},{point.y:g}" for point in self.points)


@dataclasses.dataclass(frozen=True)
class Label:
    """A text on the canvas that starts, or ends, at a place."""

    x: float
    y: float
    ends: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Level:
    """A line across the plot, such as the decision threshold, or short dashes where it differs by point."""

    kind: str
    segments: tuple[tuple[float, float, float], ...]
    labels: tuple[Label, ...]


@dataclasses.dataclass(frozen=True)
class Plot:
    """One pair of axes."""

    title: str
    series: tuple[Series, ...]
    levels: tuple[Level, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_label: str
    description: str


@dataclasses.dataclass(frozen=True)
class Panel:
    """One attack: accuracy and wrong bits against its strength."""

    attack: str
    parameter: str
    constant: str
    legend: tuple[tuple[int, str], ...]
    accuracy: Plot | None
    bits: Plot | None


@dataclasses.dataclass(frozen=True)
class _Sample:
    x: float
    strength: object
    series: str
    row: Row


@dataclasses.dataclass(frozen=True)
class _Axis:
    name: str
    labels: tuple[str, ...]
    numeric: bool
    logarithmic: bool
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return round(LEFT + (RIGHT - LEFT) * (at - low) / (high - low), 2)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """One panel an attack, in the order of the rows. The null attack has no strength and no panel."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.attacks and row.failure is None:
            groups[words.text(row.attacks[-1].params.get("attack"))].append(row)
    return [_panel(name, members) for name, members in groups.items() if name not in ("none", words.MISSING)]


def _panel(name: str, rows: Sequence[Row]) -> Panel:
    strength = _strength([row.attacks[-1] for row in rows])
    origins = {"key": [row.key[:8] for row in rows], "start": [_start(row)[:8] for row in rows]}
    settings = [_settings(row.attacks[-1], strength) for row in rows]
    for origin, prints in origins.items():
        if len({known for known in prints if known}) > 1:
            settings = [{**setting, origin: known} for setting, known in zip(settings, prints, strict=True)]
    varying = [key for key in dict.fromkeys(k for s in settings for k in s) if len({s.get(key) for s in settings}) > 1]
    constant = {key: value for key, value in settings[0].items() if key not in varying}
    samples = []
    for index, (row, setting) in enumerate(zip(rows, settings, strict=True)):
        label = words.clean(", ".join(f"{key} {setting[key]}" for key in varying if key in setting), 160)
        given = _attack_params(row.attacks[-1]).get(strength) if strength else None
        value = words.number(given) if strength else float(index)
        if value is not None and (value == 0.0 or _SMALLEST <= abs(value) <= _LARGEST):
            samples.append(_Sample(value, given if strength else index + 1, label, row))
    samples.sort(key=lambda sample: sample.x)
    fixed = ", ".join(f"{key} {value}" for key, value in constant.items())
    if not samples:
        return Panel(name, "", fixed, (), None, None)
    axis = _axis(words.clean(strength, 30) if strength else "run", samples, numeric=strength is not None)
    legend = tuple(enumerate(axis.labels)) if len(axis.labels) > 1 else ()
    return Panel(name, axis.name, fixed, legend, _accuracy_plot(name, axis, samples), _bits_plot(name, axis, samples))


def _strength(attacks: Sequence[Record]) -> str | None:
    """The numeric parameter with the most different values; the first one of equals."""
    values: dict[str, set[float]] = defaultdict(set)
    for record in attacks:
        for name, value in _attack_params(record).items():
            known = words.number(value)
            if known is not None:
                values[name].add(known)
    return max(values, key=lambda name: len(values[name]), default=None)


def _attack_params(record: Record) -> Mapping[str, object]:
    given = record.params.get("attack_params")
    return given if isinstance(given, Mapping) else {}


def _start(row: Row) -> str:
    return row.attacks[-1].fingerprints.get("model", "")


def _settings(attack: Record, strength: str | None) -> dict[str, str]:
    """Everything but the strength in which two runs of an attack may differ."""
    given = _attack_params(attack).items()
    return {
        words.clean(name, 40): words.clean(value, 40)
        for name, value in given
        if name != strength and value not in (None, "", [])
    }


def _accuracy_plot(name: str, axis: _Axis, samples: Sequence[_Sample]) -> Plot | None:
    known, before = [], []
    for sample in samples:
        value = words.number(sample.row.accuracy)
        start = words.number(sample.row.attacks[-1].results.get("accuracy_before"))
        if value is not None and 0.0 <= value <= 1.0:
            known.append((sample, value, f"accuracy {words.percent(value)}"))
            if start is not None and 0.0 <= start <= 1.0:
                before.append((sample, start))
    ticks = [(share, f"{100 * share:.0f}%") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    level = _level("before", "before the attack", before, axis, _HEADROOM, words.percent)
    return _plot(f"Accuracy after {name}", axis, _HEADROOM, ticks, known, [level])


def _bits_plot(name: str, axis: _Axis, samples: Sequence[_Sample]) -> Plot | None:
    known, thresholds, chances, rates, top = [], [], [], set(), 1.0
    for sample in samples:
        if sample.row.reading is None:
            continue
        results = sample.row.reading.results
        errors, bits = words.number(results.get("bit_errors")), words.number(results.get("bits"))
        if errors is None or bits is None or not 0.0 <= errors <= bits <= _LARGEST or bits == 0.0:
            continue
        known.append((sample, errors, f"{words.wrong_bits(results)} bits wrong, {sample.row.verdict_in_words}"))
        expected = words.number(results.get("expected_errors"))  # older records do not say; half of bits is chance
        chances.append((sample, expected if expected is not None and 0.0 <= expected <= bits else bits / 2))
        top = max(top, 0.62 * bits, 1.06 * errors, 1.06 * chances[-1][1])
        threshold = words.number(results.get("threshold"))
        if threshold is not None and 0.0 <= threshold <= bits:
            thresholds.append((sample, threshold))
            rates.add(words.scientific(words.rate(sample.row.reading)))
            top = max(top, 1.06 * threshold)
    rate = rates.pop() if len(rates) == 1 else "the rates in the table"
    levels = [
        _level("chance", "chance", chances, axis, top, lambda value: f"{round(value, 1):,g}"),
        _level("threshold", f"allowed at {rate}", thresholds, axis, top, lambda value: f"{value:,g}"),
    ]
    ticks = [(tick, f"{tick:,g}") for tick in nice(0.0, top)]
    return _plot(f"Wrong bits after {name}", axis, top, ticks, known, levels)


def _plot(
    title: str,
    axis: _Axis,
    top: float,
    ticks: Sequence[tuple[float, str]],
    known: Sequence[tuple[_Sample, float, str]],
    levels: Sequence[Level | None],
) -> Plot | None:
    if not known:
        return None
    series = []
    for style, label in enumerate(axis.labels):
        points = []
        for sample, value, says in known:
            if sample.series == label:
                place = f"{axis.name} {words.clean(sample.strength, 40)}" + (f", {label}" if label else "")
                points.append(
                    Point(axis.place(sample.x), _height(value, top), sample.strength, value, f"{place}: {says}")
                )
        if points:
            series.append(Series(style, tuple(points), axis.numeric))
    shown = tuple(level for level in levels if level is not None)
    spoken = [point.label for line in series for point in line.points]
    more = [f"and {len(spoken) - _MOST_SPOKEN} more points"] if len(spoken) > _MOST_SPOKEN else []
    return Plot(
        title=title,
        series=tuple(series),
        levels=shown,
        x_ticks=tuple((axis.place(value), text) for value, text in axis.ticks),
        y_ticks=tuple((_height(value, top), text) for value, text in ticks),
        x_label=axis.name,
        description=". ".join(
            [*(label.text for level in shown for label in level.labels), *spoken[:_MOST_SPOKEN], *more]
        )
        + ".",
    )


def _level(
    kind: str,
    name: str,
    values: Sequence[tuple[_Sample, float]],
    axis: _Axis,
    top: float,
    shown: Callable[[float], str],
) -> Level | None:
    """A line across when all samples agree on it, else a short dash at each sample."""
    different = {value for _, value in values}
    if not different:
        return None
    if len(different) == 1:
        value = different.pop()
        y = _height(value, top)
        below = kind == "threshold" and y < BOTTOM - 18
        ends = kind == "before"
        label = Label(RIGHT - 2 if ends else LEFT + 4, y + 15 if below else y - 6, ends, f"{name}: {shown(value)}")
        return Level(kind, ((LEFT, RIGHT, y),), (label,))
    segments: list[tuple[float, float, float]] = []
    labels: dict[float, Label] = {}
    for x, value in sorted({(axis.place(sample.x), value) for sample, value in values}):
        y, left, right = _height(value, top), max(LEFT, x - _DASH), min(RIGHT, x + _DASH)
        segments.append((left, right, y))
        ends = x > (LEFT + RIGHT) / 2
        labels.setdefault(value, Label(left - 4 if ends else right + 4, y + 4, ends, f"{name}: {shown(value)}"))
    placed = tuple(labels.values())
    if any(_overlap(a, b) for a, b in itertools.combinations(placed, 2)):
        first = placed[0]
        ranged = f"{name}: {shown(min(different))} to {shown(max(different))}"
        placed = (dataclasses.replace(first, text=ranged),)
    return Level(kind, tuple(segments), placed if len(placed) <= _MOST_LABELS else (placed[0], placed[-1]))


def _overlap(one: Label, other: Label) -> bool:
    """Whether two texts would lie on each other, at about 7 points a letter and 14 a line."""
    if abs(one.y - other.y) >= 14:
        return False
    (a, b), (c, d) = (
        (label.x - 7 * len(label.text), label.x) if label.ends else (label.x, label.x + 7 * len(label.text))
        for label in (one, other)
    )
    return a < d and c < b


def _height(value: float, top: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * value / top, 2)


def _axis(name: str, samples: Sequence[_Sample], numeric: bool) -> _Axis:
    values = [sample.x for sample in samples]
    labels = tuple(dict.fromkeys(sample.series for sample in samples))
    low, high = min(values), max(values)
    if not numeric:
        ticks = [(value, f"{value + 1:g}") for value in values] if len(values) <= 12 else []
        return _Axis(name, labels, False, False, low - 0.5, high + 0.5, tuple(ticks))
    if low > 0.0 and high / low >= _LOG_FROM:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        step = math.ceil(len(powers) / 7)
        ticks = [
            (10.0**power, f"{10.0**power:g}") for power in powers[::step] if low / 1.3 <= 10.0**power <= high * 1.3
        ]
        return _Axis(name, labels, True, True, low / 1.4, high * 1.4, tuple(ticks))
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        return _Axis(name, labels, True, False, low - 1.0, low + 1.0, ((low, f"{low:g}"),))
    pad = 0.08 * (high - low)
    ticks = [(tick, f"{tick:g}") for tick in nice(low - pad, high + pad)]
    return _Axis(name, labels, True, False, low - pad, high + pad, tuple(ticks))


def nice(low: float, high: float) -> list[float]:
    """About five round numbers in a range."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if (high - low) / (factor * power) <= 6)
    return [float(f"{index * step:.10g}") for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
