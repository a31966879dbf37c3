"""What a run did and found, in one line: the first thing that a terminal, a page and the dashboard show of a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepseal.apps.report.words import (
    MISSING,
    Probability,
    accuracy,
    at,
    attack,
    clean,
    count,
    counted,
    percent,
    points,
    probability,
    reading,
    seconds,
    text,
    verdict,
    wrong_bits,
    yes_no,
)
from deepseal.record import Record


def sentence(record: Record, probability: Probability = probability) -> str:
    """The headline of a record; ``probability`` writes p-values."""
    if record.status != "ok":
        return f"{clean(record.kind, 60)} {record.status}: {clean(record.error or 'no reason recorded')}"
    if record.kind == "watermark.verify":
        return f"{verdict(record.results.get('verdict'))}: {reading(record, probability)}"
    if record.kind in _OF_RECORD:
        return _OF_RECORD[record.kind](record)
    if record.kind in _OF_RESULTS:
        return _OF_RESULTS[record.kind](record.results)
    return f"{clean(record.kind, 60)}: done"


def _key(record: Record) -> str:
    scheme, owner = text(record.params.get("scheme")), text(record.params.get("owner"))
    encrypted = f"encrypted: {yes_no(record.results.get('encrypted'))}"
    return f"key made: {count(record.results.get('bits'))} bits, scheme {scheme}, owner {owner}, {encrypted}"


def _trained(record: Record) -> str:
    what = f"{text(record.params.get('arch'))} on {text(record.params.get('data'))}"
    return f"trained {what}: accuracy {accuracy(record.results)}"


def _attacked(record: Record) -> str:
    return f"attack {attack(record)}; {_accuracy_change(record.results)}"


_OF_RECORD: Mapping[str, Callable[[Record], str]] = {
    "watermark.keygen": _key,
    "model.train": _trained,
    "attack.run": _attacked,
}


def _embedded(results: Mapping[str, Any]) -> str:
    cost = f"{count(at(results, 'cost', 'updates'))} updates in {seconds(at(results, 'cost', 'embedding_seconds'))}"
    return f"mark embedded: {wrong_bits(results)} bits wrong; {_accuracy_change(results)}; {cost}"


def _room(results: Mapping[str, Any]) -> str:
    if "scheme" in results:
        what = f"{text(results['scheme'])}, {count(results.get('bits'))} bits"
        return f"a key of {text(results.get('owner'))}: {what}"
    advised, limit = count(results.get("advised")), count(results.get("limit"))
    return f"room for {advised} bits that last, {limit} at most, in {_how_many(results, 'layers', 'layer')}"


def _compared(results: Mapping[str, Any]) -> str:
    if "estimated_seconds" in results:
        return f"{count(results.get('cells'))} cells to measure, about {seconds(results['estimated_seconds'])}"
    return f"compared on {_how_many(results, 'pairs', 'pair')} of data and network"


def _held(results: Mapping[str, Any]) -> str:
    return f"{text(results.get('architecture'))}, {count(results.get('parameters'))} parameters"


def _answered(results: Mapping[str, Any]) -> str:
    requests = f"{counted(results.get('requests'), 'request')}, {count(results.get('refused'))} refused"
    return f"answered {count(results.get('queries'))} queries in {requests}"


def _fitted(results: Mapping[str, Any]) -> str:
    members = results.get("members")
    named = [text(at(member, "title")) for member in members] if isinstance(members, list) else []
    return f"fitted {', '.join(named)} on {count(results.get('samples'))} samples; calibrate it next"


def _calibrated(results: Mapping[str, Any]) -> str:
    limit = f"threshold {count(results.get('threshold'))} from {count(results.get('n'))} clean samples"
    return f"{text(results.get('promise'))}: {limit}"


def _detected(results: Mapping[str, Any]) -> str:
    return f"{count(results.get('alarms'))} of {count(results.get('inputs'))} inputs raise the alarm"


def _evaluated(results: Mapping[str, Any]) -> str:
    rates = results.get("false_positives")
    known = [row for row in rates if at(row, "guaranteed") is True] if isinstance(rates, list) else []
    said = [f"{percent(at(row, 'realised', 'value'))} for {percent(at(row, 'nominal'))} promised" for row in known[:2]]
    return f"false alarms: {', '.join(said) or MISSING}"


def _served(results: Mapping[str, Any]) -> str:
    return f"served {', '.join(counted(results.get(f'{one}s'), one) for one in ('client', 'question', 'failure'))}"


def _written(results: Mapping[str, Any]) -> str:
    return f"wrote {text(results.get('file'))} from {counted(results.get('records'), 'record')}"


_OF_RESULTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "info": lambda results: f"runs here on {clean(results.get('devices'))}",
    "watermark.embed": _embedded,
    "watermark.inspect": _room,
    "watermark.compare": _compared,
    "model.evaluate": lambda results: f"accuracy {accuracy(results)}",
    "model.inspect": _held,
    "model.serve": _answered,
    "defense.fit": _fitted,
    "defense.calibrate": _calibrated,
    "defense.detect": _detected,
    "defense.serve": _detected,
    "defense.evaluate": _evaluated,
    "defense.list": lambda results: f"{_how_many(results, 'detectors', 'detector')} to choose from",
    "attack.list": lambda results: f"{_how_many(results, 'attacks', 'attack')} to choose from",
    "attack.show": lambda results: f"the attack {text(results.get('name'))} and its parameters",
    "private.serve": _served,
    "private.proxy": _served,
    "report.html": _written,
    "report.pdf": _written,
}


def _how_many(results: Mapping[str, Any], name: str, one: str) -> str:
    listed = results.get(name)
    return counted(len(listed) if isinstance(listed, list) else None, one)


def _accuracy_change(results: Mapping[str, Any]) -> str:
    if "output_change" in results:
        return f"its answers moved by {percent(results['output_change'])} of their size"
    before, after = percent(results.get("accuracy_before")), percent(results.get("accuracy_after"))
    return f"accuracy {before} before, {after} after ({points(results.get('accuracy_change_points'))})"
