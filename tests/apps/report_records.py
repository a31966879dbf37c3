"""Records for tests of reports: a real demonstration's, small changes to them, and such that nobody should trust."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from deepseal.apps.report import story
from deepseal.record import Record

RECORDS = Path(__file__).resolve().parents[1] / "data" / "records"
HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7*7 }}{% raw %}[bold]x[/bold]\x1b[31m\x00\u202e\ud800"
)


def changed(record: Record, **fields: Any) -> Record:
    return record.model_copy(update=fields, deep=True)


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.kind == kind]


def poisoned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def hostile(records: Sequence[Record]) -> list[Record]:
    """The records with poison in every text, and one of an unknown kind."""
    bad = [
        changed(
            record,
            params=poisoned(record.params),
            results=poisoned(record.results),
            environment=poisoned(record.environment),
            notes=[HOSTILE],
            error=HOSTILE,
            started=HOSTILE,
            fingerprints={**record.fingerprints, HOSTILE: HOSTILE},
        )
        for record in records
    ]
    bad.append(changed(bad[0], kind=HOSTILE, results={HOSTILE: [{HOSTILE: HOSTILE}]}))
    return bad


ODD: list[Any] = [
    None,
    "",
    "text",
    True,
    -1,
    10**400,
    float("nan"),
    float("inf"),
    -0.0,
    5e-324,
    1e308,
    [],
    [1],
    {},
    {"n": {}},
]


def oddly(record: Record, odd: Any) -> Record:
    """The record with one odd value in every field but the attack's name."""
    return changed(
        record,
        params={**dict.fromkeys(record.params, odd), "attack": record.params.get("attack")},
        results=dict.fromkeys(record.results, odd),
        environment=dict.fromkeys(record.environment, odd),
    )


FIELDS = {"model", "attack", "attack_params", "sparsity", "accuracy", "accuracy_before", "accuracy_after", "file", "n"}
FIELDS |= {"bits", "bit_errors", "verdict", "p_value", "threshold", "tried", "max_false_positive", "warnings", "owner"}
FIELDS |= {"null", "null_models", "mean_bit_error_rate", "accuracy_interval", "cost", "updates"}
NAMES = sorted(FIELDS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["owned", "prune"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=20,
)
OBJECT = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=12)
PRINTS = st.dictionaries(st.sampled_from(["model", "marked", "attacked", "key"]), st.sampled_from(["a", "b", "c", ""]))
ANY = st.builds(
    Record,
    kind=st.sampled_from([*story.KNOWN_KINDS, "demo", ""]),
    status=st.sampled_from(["ok", "failed", "interrupted"]),
    environment=OBJECT,
    seed=st.none() | st.integers(),
    params=OBJECT,
    fingerprints=PRINTS,
    results=OBJECT,
    notes=st.lists(st.text(max_size=9), max_size=2),
    error=st.none() | st.text(max_size=9),
    started=st.text(max_size=9) | st.just("2026-01-01T00:00:00+00:00"),
    seconds=st.floats(),
)
