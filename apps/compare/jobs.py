"""The list of cells of a comparison, in the order in which they are measured, with what each should take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial

from deepseal.adapter import initialise
from deepseal.adapter.training import Training
from deepseal.apps.compare import measure
from deepseal.apps.compare.cells import Identity
from deepseal.apps.compare.plan import Attack
from deepseal.apps.compare.subjects import Bench
from deepseal.record import Record, Run
from deepseal.rng import Rng
from deepseal.watermark import Scheme

_EMBEDDING = 4.0  # plain updates that an update of an embedding takes, further rounds included
_DEFAULT_STEPS = 500
_READING = 30  # plain updates that loading, verifying and judging a model take together


@dataclasses.dataclass(frozen=True)
class Job:
    """One cell.

    Attributes:
        kind, identity: where the cell is found.
        title: for people.
        updates: estimated work, in updates of plain training.
        measure: fills the cell.
        attack: title of the attack, if it is of one.
        needs: whether there is anything to measure, once the cells before it are there.
    """

    kind: str
    identity: Identity
    title: str
    seed: int
    updates: float
    measure: Callable[[Run], None]
    needs: Callable[[], bool] = lambda: True
    attack: str = ""

    def record(self, bench: Bench) -> Record | None:
        """The cell, if it was measured."""
        return bench.cells.get(self.kind, self.identity)


def jobs(bench: Bench) -> Iterator[Job]:
    """All cells of a bench: nets first, then net by net its marks and what is measured on them, attacks last."""
    steps = bench.plan.recipe.total_steps(len(bench.data.train))
    for name in (*bench.other_nets(), *bench.owned_nets()):
        yield _job(bench, "net", bench.net_identity(name), f"net {name}: train", steps, partial(bench.train_net, name))
    for net in bench.owned_nets():
        for scheme, payload in marks(bench):
            yield from _marking(bench, net, scheme, payload)
        for attack in bench.plan.attacks:
            for scheme, payload in marks(bench):
                yield from _attacking(bench, net, scheme, payload, attack)


def marks(bench: Bench) -> list[tuple[str, int]]:
    """Schemes and payloads; the null scheme first, since its attacked nets are the unmarked ones."""
    names = sorted((name for name, _ in bench.plan.schemes), key=lambda name: name != "plain")
    return [(name, payload) for name in names for payload in range(bench.plan.payloads)]


def _marking(bench: Bench, net: str, scheme: str, payload: int) -> Iterator[Job]:
    own, title = bench.mark_identity(net, scheme, payload), f"net {net}, {scheme}"
    title += f", payload {payload}" if bench.plan.payloads > 1 else ""
    effort = embedding_updates(bench.scheme(scheme))
    arguments, needed = (bench, net, scheme, payload), partial(_embedded, bench, own)
    yield _job(bench, "mark", own, f"{title}: embed", effort + 8 * _READING, partial(measure.mark, *arguments))

    def beside(run: Run) -> None:
        cell = bench.cells.get("mark", own)
        assert cell is not None  # noqa: S101 - what this job needs
        measure.control(*arguments, cell, run)

    yield _job(bench, "control", own, f"{title}: beside a control", effort / _EMBEDDING, beside, needed)
    nets = [*bench.innocent(bench.scheme(scheme), net)]
    keys = {**own, "keys": bench.plan.keys, "nets": nets}
    yield _job(
        bench,
        "integrity",
        keys,
        f"{title}: strangers' keys",
        bench.plan.keys / 2,
        partial(measure.integrity, *arguments),
        needed,
    )
    for factor in bench.plan.sizes if payload == 0 else ():
        params = measure.sized(bench, scheme, factor)
        if params is not None:
            yield _job(
                bench,
                "capacity",
                bench.mark_identity(net, scheme, 0, params),
                f"{title}: {factor:g} times the size",
                effort,
                partial(measure.capacity, bench, net, scheme, factor),
                needed,
            )


def _attacking(bench: Bench, net: str, scheme: str, payload: int, attack: Attack) -> Iterator[Job]:
    own = bench.mark_identity(net, scheme, payload)
    effort = attack_updates(bench, attack, scheme)
    for marked in (False, True):
        identity = {**bench.attack_identity(own, attack, scheme), "marked": marked}
        shared = (not marked and attack.name != "overwrite" and (scheme, payload) != marks(bench)[0]) or (
            marked and scheme == "plain"
        )
        which = "" if marked else "unmarked net, read by "
        yield _job(
            bench,
            "attack",
            identity,
            f"net {net}, {which}{scheme}: {attack.title}",
            _READING + (0 if shared else effort),
            partial(measure.attacked, bench, net, scheme, payload, attack, marked),
            partial(_embedded, bench, own),
            attack.title,
        )


def _embedded(bench: Bench, marked: Identity) -> bool:
    cell = bench.cells.get("mark", marked)
    return cell is not None and cell.results["status"] == "embedded"


def embedding_updates(scheme: Scheme) -> float:
    """Plain updates that an embedding should take; a guess where the scheme does not say how long it trains."""
    steps = getattr(scheme, "steps", 0)
    return _EMBEDDING * (_DEFAULT_STEPS if steps is None else steps)


def attack_updates(bench: Bench, attack: Attack, scheme: str) -> float:
    """Plain updates that an attack should take."""
    epoch = bench.plan.recipe.total_steps(len(bench.data.train)) / max(1, bench.plan.epochs)
    if attack.name == "overwrite":
        return embedding_updates(bench.scheme(scheme))
    built = attack.build()
    return epoch * (1.5 * getattr(built, "epochs", 0) + getattr(built, "epochs_back", 0))


def seconds_per_update(bench: Bench) -> float:
    """What a plain update takes on this machine: the best of a few."""
    start = initialise(bench.arch, bench.data.spec, Rng(0))
    training = Training(start, bench.data.train, recipe=bench.plan.recipe, rng=Rng(0))
    times = []
    for _ in range(6):
        wall = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - wall)
    return min(times)


def _job(
    bench: Bench,
    kind: str,
    identity: Identity,
    title: str,
    updates: float,
    fill: Callable[[Run], None],
    needs: Callable[[], bool] = lambda: True,
    attack: str = "",
) -> Job:
    net = str(identity["net"])
    return Job(kind, identity, title, int(net) if net.isdigit() else 0, updates, fill, needs, attack)
