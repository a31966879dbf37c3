"""What one cell of a comparison measures. Every model is read from its file, and judged by the scheme's own verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from deepseal.adapter import BlackBox, Classifier, Recipe
from deepseal.apps.compare.plan import Attack, size_parameter
from deepseal.apps.compare.properties import describe
from deepseal.apps.compare.subjects import Bench
from deepseal.errors import InputError, TrainingError
from deepseal.record import Record, Run
from deepseal.statistics import paired_change, rate
from deepseal.watermark import SCHEMES, Key, embedding_rounds, verify, verify_aligned
from deepseal.watermark.cost import embedding_cost
from deepseal.watermark.integrity import read_strangers, rejections

LEVELS = (1e-2, 1e-3)
_TIMED = 3
_PRESERVING = "largest_logit_difference"  # what attacks that keep the function prove


def mark(bench: Bench, net: str, scheme: str, payload: int, run: Run) -> None:
    """Draw a key, embed it, keep both files; then all that is said of the mark is read from the files."""
    base, identity = bench.net(net), bench.mark_identity(net, scheme, payload)
    rng = bench.rng("embed", scheme, net, payload)
    with _refusals(run) as refused:
        wall = time.perf_counter()
        key = bench.keygen(net, scheme, payload)
        keygen_seconds = time.perf_counter() - wall
        embedding = SCHEMES.build(key.scheme, key.params).embedding(base, bench.data.train, key, rng=rng)
        one_round = embedding_cost(base, bench.data.train, key, rng=rng.child("cost"), pairs=10)
        wall, cpu = time.perf_counter(), time.process_time()
        rounds = list(embedding_rounds(base, bench.data.train, key, rng=rng))
        seconds = {"embedding_seconds": time.perf_counter() - wall, "embedding_cpu_seconds": time.process_time() - cpu}
    if refused():
        return
    bench.cells.save("marked", identity, rounds[-1])
    bench.cells.save_key(identity, key)
    marked, key = bench.marked(net, scheme, payload)
    run.fingerprints.update(unmarked=base.fingerprint(), marked=marked.fingerprint(), key=key.fingerprint())
    run.results.update(
        status="embedded",
        access=key.public["access"],
        bits=key.bits,
        triggers=key.triggers,
        zero_bit=key.zero_bit,
        accuracy=bench.accuracy(marked),
        accuracy_unmarked=bench.accuracy(base),
        change=paired_change(bench.right(base), bench.right(marked)).as_dict(),
        reading=read(bench, marked, key),
        reading_unmarked=read(bench, base, key),
        cost={
            **seconds,
            **one_round.times(len(rounds)).as_dict(),
            "rounds": len(rounds),
            "keygen_seconds": keygen_seconds,
            "verify_seconds": _verify_seconds(bench, marked, key),
            "queries": _queries(marked, key),
        },
        further=embedding.recipe.as_dict(),
    )


def read(bench: Bench, model: BlackBox, key: Key) -> dict[str, Any]:
    """The verdict, and what it rests on."""
    result = verify(model, key, max_false_positive=bench.plan.false_positive).as_dict()
    names = ("verdict", "bits", "erasures", "bit_errors", "p_value", "threshold", "margin_mean", "margin_lowest")
    accepts = None if result["published"] is None else result["published"]["accepts"]
    return {**{name: result[name] for name in names}, "published_accepts": accepts}


def control(bench: Bench, net: str, scheme: str, payload: int, marked_cell: Record, run: Run) -> None:
    """The marked net beside an unmarked one that was trained on as long, and what a stranger sees of all three."""
    recipe, rounds = Recipe.from_mapping(marked_cell.results["further"]), marked_cell.results["cost"]["rounds"]
    other = bench.control(net, recipe, rounds)
    marked, _ = bench.marked(net, scheme, payload)
    base = bench.net(net)
    run.fingerprints.update(control=other.fingerprint(), marked=marked.fingerprint())
    run.results.update(
        accuracy=bench.accuracy(other),
        change=paired_change(bench.right(other), bench.right(marked)).as_dict(),
        properties={
            name: describe(model, bench.data.calibration)
            for name, model in (("unmarked", base), ("control", other), ("marked", marked))
        },
    )


def integrity(bench: Bench, net: str, scheme: str, payload: int, run: Run) -> None:
    """Strangers' keys on nets that know nothing of the owner's, and the owner's key on the same nets."""
    _, key = bench.marked(net, scheme, payload)
    names = bench.innocent(bench.scheme(scheme), net)
    levels = (*LEVELS, bench.plan.false_positive)
    models = [bench.net(name) for name in names]
    parts = np.array_split(np.arange(bench.plan.keys), len(models))
    strangers = [
        read_strangers(model, key, len(part), levels, first=int(part[0]))
        for model, part in zip(models, parts, strict=True)
        if len(part)
    ]
    own = [read(bench, model, key) for model in models]
    run.results.update(
        nets=names,
        strangers={f"{level:g}": rejections(strangers, level).as_dict() for level in levels} if strangers else {},
        lowest_p_value=min((float(one.p_values.min()) for one in strangers), default=None),
        owned=rate(sum(reading["verdict"] == "owned" for reading in own), len(own)).as_dict(),
        bit_errors=[reading["bit_errors"] for reading in own],
        bits=[reading["bits"] for reading in own],
    )


def capacity(bench: Bench, net: str, scheme: str, factor: float, run: Run) -> None:
    """More or fewer bits, or triggers: what is read from the marked net, and what it costs; or the refusal."""
    built = bench.scheme(scheme)
    parameter = size_parameter(built)
    assert parameter is not None  # noqa: S101 - see ``sized``
    size = max(1, round(factor * getattr(built, parameter)))
    run.results.update(parameter=parameter, size=size, bits=size)
    base = bench.net(net)
    params = sized(bench, scheme, factor)
    with _refusals(run) as refused:
        key = bench.keygen(net, scheme, 0, params)
        rounds = list(embedding_rounds(base, bench.data.train, key, rng=bench.rng("capacity", scheme, net, size)))
    if refused():
        return
    marked = rounds[-1]
    run.results.update(
        status="embedded",
        bits=key.bits,
        reading=read(bench, marked, key),
        change=paired_change(bench.right(base), bench.right(marked)).as_dict(),
        rounds=len(rounds),
    )


def sized(bench: Bench, scheme: str, factor: float) -> dict[str, Any] | None:
    """A scheme's parameters for so many times its bits or triggers; None where it has no such parameter."""
    built = bench.scheme(scheme)
    parameter = size_parameter(built)
    if parameter is None:
        return None
    size = max(1, round(factor * getattr(built, parameter)))
    return {**dict(bench.plan.schemes)[scheme], parameter: size}


def attacked(bench: Bench, net: str, scheme: str, payload: int, attack: Attack, marked: bool, run: Run) -> None:
    """A net, marked or not, after an attack: the verdict, and what the attack cost it."""
    owned, key = bench.marked(net, scheme, payload)
    model = owned if marked else bench.net(net)
    if attack.on_queries:
        _asked(bench, net, model, key, attack, run)
        return
    wall = time.perf_counter()
    with _refusals(run) as refused:
        removed = bench.attacked(model, attack, scheme, net)
    if refused():
        return
    run.fingerprints.update(model=model.fingerprint(), attacked=removed.model.fingerprint())
    run.results.update(
        status="attacked",
        attack_seconds=time.perf_counter() - wall,
        relative_weight_change=removed.evidence["relative_weight_change"],
        accuracy=bench.accuracy(removed.model),
        change=paired_change(bench.right(model), bench.right(removed.model)).as_dict(),
    )
    with _refusals(run, "unreadable"):
        run.results["reading"] = read(bench, removed.model, key)
    if _PRESERVING in removed.evidence and key.public["access"] == "white-box":
        with _refusals(run, "aligned_refused"):
            rate = bench.plan.false_positive
            both = verify_aligned(removed.model, key, bench.net(net), max_false_positive=rate).verification
            found = {"verdict": both.verdict, "bits": both.bits, "bit_errors": both.bit_errors}
            run.results["aligned"] = found


def _asked(bench: Bench, net: str, model: Classifier, key: Key, attack: Attack, run: Run) -> None:
    """A net behind a server that answers with labels, and that changes the questions."""
    if key.public["access"] != "black-box":
        run.results.update(status="not applicable", reason=f"{key.scheme} is read from the model, and asks nothing")
        return
    with _refusals(run) as refused:
        asked = attack.build().wrap(model.oracle(output="labels"), rng=bench.rng("attack", net, attack.title))
    if refused():
        return
    run.fingerprints.update(model=model.fingerprint())
    run.results["reading"] = read(bench, asked, key)
    test = bench.data.test
    right = (asked.query(test.x) == test.y).numpy()
    run.results.update(
        status="attacked",
        attack_seconds=0.0,
        evidence=dict(asked.evidence),
        accuracy=rate(int(right.sum()), len(right)).as_dict(),
        change=paired_change(bench.right(model), right).as_dict(),
    )


class _refusals:  # noqa: N801 - used as a statement
    """What a scheme or an attack refuses is a result: its reason goes into the record, and the block ends."""

    def __init__(self, run: Run, name: str = "") -> None:
        self._run, self._name, self._refused = run, name, False

    def __enter__(self) -> Callable[[], bool]:
        return lambda: self._refused

    def __exit__(self, _kind: object, error: object, _trace: object) -> bool:
        if not isinstance(error, InputError | TrainingError):
            return False
        self._refused = True
        if self._name:
            self._run.results[self._name] = str(error)
        else:
            status = "refused" if isinstance(error, InputError) else "diverged"
            self._run.results.update(status=status, reason=str(error))
        return True


def _verify_seconds(bench: Bench, model: Classifier, key: Key) -> float:
    times = []
    for _ in range(_TIMED):
        wall = time.perf_counter()
        verify(model, key, max_false_positive=bench.plan.false_positive)
        times.append(time.perf_counter() - wall)
    return min(times)


def _queries(model: Classifier, key: Key) -> int | None:
    """Inputs that a server is asked in a verification; None for a key that reads weights or activations."""
    if key.public["access"] != "black-box":
        return None
    oracle = model.oracle(output="labels")
    verify(oracle, key)
    return oracle.queries
