"""Values of records as short English. A record can be foreign, so nothing here trusts a type, a size or a character."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepseal.record import Record

MISSING = "not recorded"
VERDICTS = {"owned": "owned", "not-owned": "not owned", "inconclusive": "could not decide"}

_LONGEST = 300
_MOST_ITEMS = 12
_MOST_ROWS = 400
_DEEPEST = 6
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Probability = Callable[..., str]


def at(source: object, *path: str) -> Any:
    """The value at a path through nested mappings; None where it ends early."""
    for name in path:
        source = source.get(name) if isinstance(source, Mapping) else None
    return source


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def clean(value: object, limit: int = _LONGEST) -> str:
    """Text on one line: clipped, and invisible or direction-changing characters spelled out."""
    text = value if isinstance(value, str) else _scalar(value)
    words = " ".join(text[: 4 * limit].split())
    shown = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in words[:limit])
    return shown if len(words) <= limit and len(text) <= 4 * limit else f"{shown}… ({len(text):,} characters)"


def text(value: object) -> str:
    """A text of a record, or that there is none."""
    return clean(value) if isinstance(value, str) and value.strip() else MISSING


def count(value: object) -> str:
    """A count with thousands separators."""
    known = number(value)
    return MISSING if known is None else f"{known:,.0f}" if known.is_integer() and known < 1e15 else f"{known:,.4g}"


def counted(value: object, one: str) -> str:
    """So many of something, ``one`` being the word for one of it."""
    return f"{count(value)} {one}{'' if value == 1 else 's'}"


def percent(value: object) -> str:
    """A share of one, in percent."""
    known = number(value)
    return MISSING if known is None else f"{100 * known:.2f}%" if abs(known) < 1e6 else f"{known:.3g}"


def points(value: object) -> str:
    """A change in percentage points, with its sign."""
    known = number(value)
    if known is None:
        return MISSING
    if abs(known) < 0.005:
        return "0.00 points"
    return (f"{known:+.2f}" if abs(known) < 1e6 else f"{known:+.3g}").replace("-", "−") + " points"


def seconds(value: object) -> str:
    """A time in seconds, to three digits."""
    known = number(value)
    if known is None:
        return MISSING
    return f"{known:,.0f} s" if 1000 <= known < 1e15 else f"{known:.3g} s"


def general(value: object) -> str:
    """A number of unknown meaning, to six digits; integers in full."""
    known = number(value)
    return MISSING if known is None else clean(value) if isinstance(value, int) else f"{known:.6g}"


def probability(value: object, limit: float | None = None) -> str:
    """A probability such as 9e-78, to one digit, or to as many as it takes to tell it from ``limit``."""
    known = number(value)
    if known is None:
        return MISSING
    if known == 0.0:
        return "<1e-300"
    shown = f"{known:.1g}" if known < 1e-3 else f"{known:.2g}"
    if limit is not None:
        for digits in range(1, 17):
            if (float(shown) <= limit) == (known <= limit):
                break
            shown = f"{known:.{digits}g}"
    mantissa, e, exponent = shown.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else shown


def scientific(value: object, limit: float | None = None) -> str:
    """A probability such as 9 × 10⁻⁷⁸, with spaces that do not break."""
    shown = probability(value, limit)
    mantissa, e, exponent = shown.partition("e-")
    return f"{mantissa}\u00a0×\u00a010{('-' + exponent).translate(_SUPERSCRIPT)}" if e else shown


def one_in(rate: object) -> str:
    """A rate as "1 in 1,000,000"."""
    known = number(rate)
    if known is None or not 0.0 < known <= 1.0:
        return MISSING
    return f"1 in {1 / known:,.0f}" if known > 1e-16 else f"a share of {scientific(known)}"


def yes_no(value: object) -> str:
    """A switch."""
    return clean(value) if isinstance(value, bool) else MISSING


def null(values: object) -> str:
    """What was read where there is no mark."""
    if not values:
        return "not asked for"
    mean, lowest = percent(at(values, "mean_bit_error_rate")), percent(at(values, "lowest_bit_error_rate"))
    owned = f"{count(at(values, 'owned'))} read as owned"
    return f"{count(at(values, 'n'))}: {mean} of the bits wrong on average, {lowest} at least; {owned}"


def published(values: object) -> str:
    """What the paper's own rule says."""
    if not values:
        return "none that the scheme knows of"
    matches = f"{count(at(values, 'matches'))} of {count(at(values, 'total'))} agree"
    accepts = at(values, "accepts")
    verdict = "accepts" if accepts is True else "rejects" if accepts is False else MISSING
    return f"{verdict}: {matches}, {count(at(values, 'needed'))} needed ({text(at(values, 'rule'))})"


def alignment(record: Record) -> str:
    """To which original a suspect was aligned, and the share of its neurons that was found."""
    values = record.results.get("alignment")
    groups = at(values, "groups")
    shares = [number(at(group, "matched_share")) for group in groups[:_MOST_ROWS]] if isinstance(groups, list) else []
    numbers = [share for share in shares if share is not None]
    found = f"{percent(min(numbers))} to {percent(max(numbers))} of each layer's neurons found" if numbers else MISSING
    which = "marked" if at(values, "original_is_marked") else "unmarked"
    return f"{text(record.params.get('align'))} ({which}): {found}"


def moment(value: object) -> str:
    """A date and time, without the T."""
    try:
        time = datetime.datetime.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        return text(value)
    return time.strftime("%Y-%m-%d %H:%M:%S ") + (time.tzname() or "(no time zone)")


def suspect(params: Mapping[str, Any]) -> str | None:
    """Where the model that was asked is: its file, or the address that it answered at."""
    if isinstance(params.get("remote"), str):
        name = f"/v2/models/{params['name']}" if isinstance(params.get("name"), str) else ""
        return clean(params["remote"].rstrip("/") + name, 120)
    return file_name(params.get("model"))


def file_name(value: object) -> str | None:
    """The last part of a path, or None."""
    if not isinstance(value, str) or not value.strip():
        return None
    return clean(value.replace("\\", "/").rstrip("/").rpartition("/")[2])


def parameters(values: object) -> str:
    """The parameters that were set: ``sparsity 0.9, scope global``."""
    if not isinstance(values, Mapping):
        return ""
    shown = [f"{clean(name, 60)} {clean(value, 60)}" for name, value in values.items() if value not in (None, "", [])]
    return ", ".join(shown[:_MOST_ITEMS]) + (", …" if len(shown) > _MOST_ITEMS else "")


def attack(record: Record) -> str:
    """An attack and its parameters: ``prune: sparsity 0.9``."""
    name, given = record.params.get("attack"), parameters(record.params.get("attack_params"))
    if name == "none":
        return "none: a plain copy"
    return text(name) + (f": {given}" if given else "")


def accuracy(results: Mapping[str, Any]) -> str:
    """An accuracy with its interval and the number of samples it rests on."""
    shown = percent(results.get("accuracy"))
    interval, samples = results.get("accuracy_interval"), results.get("test_samples")
    if isinstance(interval, list) and len(interval) == 2:
        level = number(results.get("confidence"))
        between = f"{percent(interval[0])} to {percent(interval[1])}"
        shown += f" ({'' if level is None else f'{100 * level:.4g}% '}interval {between})"
    return shown if number(samples) is None else f"{shown} on {count(samples)} test samples"


def wrong_bits(results: Mapping[str, Any]) -> str:
    """``3 of 256``."""
    return f"{count(results.get('bit_errors'))} of {count(results.get('bits'))}"


def allowed(results: Mapping[str, Any]) -> str:
    """The greatest number of wrong bits for a positive verdict."""
    if results.get("threshold", 0) is None:
        return "no number of wrong bits"
    return count(results.get("threshold"))


def reading(record: Record, probability: Probability = probability) -> str:
    """What a verification read from a model, and what that means."""
    results, tries = record.results, number(record.results.get("tried"))
    shared = f" shared by {count(tries)} tries" if tries is not None and tries > 1 else ""
    chance = probability(results.get("p_value"), limit(record))
    return (
        f"{wrong_bits(results)} bits wrong; a model without this mark would do as well with probability {chance}; "
        f"allowed at {probability(rate(record))}{shared}: {allowed(results)}"
    )


def rate(record: Record) -> float | None:
    """The stated false-positive rate of a check."""
    return number(record.results.get("max_false_positive", record.params.get("max_false_positive")))


def limit(record: Record) -> float | None:
    """The greatest p-value of a positive verdict: the rate shared among what was tried."""
    known, tries = rate(record), number(record.results.get("tried"))
    return None if known is None else known / max(1.0, tries or 1.0)


def cell(name: str, value: object) -> str:
    """A value of a table, shown as its column's name suggests."""
    if number(value) is None:
        return clean(value)
    return percent(value) if name == "accuracy" else probability(value) if name == "p_value" else general(value)


def verdict(value: object) -> str:
    """A verdict in plain words."""
    return VERDICTS.get(value, clean(value, 60)) if isinstance(value, str) and value else MISSING


def requests(log: object) -> str | None:
    """What a log of requests adds up to; None for anything else. The log itself is for the record."""
    if not isinstance(log, list) or not log or not all(isinstance(row, Mapping) for row in log):
        return None
    inputs, spent = (sum(number(row.get(name)) or 0.0 for row in log) for name in ("inputs", "milliseconds"))
    failed = sum(row.get("error") is not None for row in log)
    rest = f"{failed} failed" if failed else "all answered"
    asked = f"{counted(len(log), 'request')}, {count(inputs)} inputs, {seconds(spent / 1000)}, {rest}"
    return f"{asked}; each is in the record (--json)"


def flat(value: object, path: str = "") -> list[tuple[str, str]]:
    """Nested values as rows of (dotted name, text); lists of mappings with their positions. Exact, but clipped."""
    rows: list[tuple[str, str]] = []
    for row in _flat(value, path, 0):
        if len(rows) == _MOST_ROWS:
            return [*rows, ("…", "more, not shown here")]
        rows.append(row)
    return rows


def grid(value: object) -> tuple[list[str], list[list[Any]]] | None:
    """A list of mappings as (column names, rows), if it is one."""
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        return None
    every = list(dict.fromkeys(name for item in value[:_MOST_ROWS] for name in item))
    names = every[:_MOST_ITEMS]
    rows = [[item.get(name) for name in names] for item in value[:_MOST_ROWS]]
    left = [f"{len(every) - len(names)} more columns"] * (len(every) > len(names))
    left += [f"{len(value) - len(rows)} more rows"] * (len(value) > len(rows))
    return names, [*rows, [f"… {', '.join(left)}", *[""] * (len(names) - 1)]] if left and names else rows


def _flat(value: object, path: str, depth: int) -> Iterator[tuple[str, str]]:
    nested = isinstance(value, Mapping)
    nested = nested or (isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value))
    if not nested:
        yield path, clean(value)
    elif not value:
        yield path, "none"
    elif depth == _DEEPEST:
        yield path, "nested deeper than is shown here"
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{path}.{clean(name, 60)}" if path else clean(name, 60), depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}[{index}]", depth + 1)


def _scalar(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, list):
        shown = ", ".join("…" if isinstance(item, Mapping | list) else clean(item, 60) for item in value[:_MOST_ITEMS])
        return f"{shown}, … ({len(value):,} values)" if len(value) > _MOST_ITEMS else shown or "none"
    if isinstance(value, Mapping):
        return f"{len(value):,} values"
    return str(value)
