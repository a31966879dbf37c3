"""The models of one data set and architecture: unmarked nets, marked ones, and controls, made once and read from files.

Every identity says all that a model is made of, so that equal identities give equal models.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepseal.adapter import Classifier, Dataset, Recipe, Split, initialise, train
from deepseal.adapter.targets import split_target
from deepseal.apps.compare.cells import Cells, Identity
from deepseal.apps.compare.plan import Attack, Plan, Settings, asks_for
from deepseal.apps.compare.sources import digest
from deepseal.attacks.base import Removed
from deepseal.errors import InputError
from deepseal.record import Run
from deepseal.rng import Rng
from deepseal.statistics import rate
from deepseal.watermark import SCHEMES, Key, Scheme

_SHARED = tuple(f"deepseal.apps.compare.{name}" for name in ("subjects", "measure", "properties"))

_KEPT = 16


class Bench:
    """One data set and architecture of a plan.

    Raises:
        InputError: no such architecture, or one that does not fit the data.
    """

    def __init__(self, plan: Plan, cells: Cells, source: str, data: Dataset, arch: str) -> None:
        self.plan, self.cells, self.source, self.arch = plan, cells, source, arch
        index = Rng(0).child("compare", "limit").numpy().permutation(len(data.train))[: plan.limit]
        train: Split = data.train if plan.limit is None else data.train.take(torch.from_numpy(np.sort(index)))
        self.data = dataclasses.replace(data, train=train)
        self.prints = self.data.fingerprints()
        built = initialise(arch, data.spec, Rng(0))
        built.spec.require_classes()
        built.logits(data.spec.probe(2))
        self.parameters = sum(p.numel() for p in built.module.parameters())
        self._attacked: dict[tuple[str, str], Removed] = {}
        self._around: tuple[str, str] | None = None
        self._right: dict[str, NDArray[np.bool_]] = {}

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """What all models of this bench share."""
        return {
            "data": self.source,
            "arch": self.arch,
            "data_digest": self.prints["data.train"][:16] + self.prints["data.test"][:16],
            "recipe": self.plan.recipe.as_dict(),
        }

    def net_identity(self, net: str) -> Identity:
        """Of an unmarked net: ``0``, ``1``, … are seeds of those that are marked, ``i0``, ``i1``, … know no key."""
        module = split_target(self.arch)[0].partition(":")[0]
        return {**self.about, "net": net, "code": digest("deepseal.adapter.training", module)}

    def owned_nets(self) -> list[str]:
        """Names of the nets that are marked."""
        return [str(self.plan.first_seed + index) for index in range(self.plan.seeds)]

    def other_nets(self) -> list[str]:
        """Names of the nets that know nothing of any key."""
        return [f"i{index}" for index in range(self.plan.nets)]

    @functools.lru_cache(maxsize=16)  # noqa: B019 - a bench lives as long as its comparison
    def net(self, name: str) -> Classifier:
        """An unmarked net, from its file."""
        return self.cells.model("net", self.net_identity(name), lambda: self._trained(name))

    def train_net(self, name: str, run: Run) -> None:
        """Train an unmarked net, keep it, and say what it is worth and what it took."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.cells.save("net", self.net_identity(name), self._trained(name))
        seconds = {"training_seconds": time.perf_counter() - wall, "training_cpu_seconds": time.process_time() - cpu}
        model = self.net(name)
        run.fingerprints.update(model=model.fingerprint(), **self.prints)
        run.results.update(accuracy=self.accuracy(model), **seconds)

    def scheme(self, name: str) -> Scheme:
        """A scheme of the plan."""
        return SCHEMES.build(name, dict(self.plan.schemes)[name])

    def independent(self, scheme: Scheme) -> list[str]:
        """The unmarked nets that a scheme is given for its keys, instead of training its own; none if too few."""
        asked, nets = asks_for(scheme), self.other_nets()
        return nets[:asked] if len(nets) >= asked else []

    def innocent(self, scheme: Scheme, net: str) -> list[str]:
        """The nets that know nothing of a key made on ``net``, nor it of them; the net itself where there is none."""
        others = self.other_nets()[len(self.independent(scheme)) :]
        return [*others, *(name for name in self.owned_nets() if name != net)] or [net]

    def mark_identity(self, net: str, scheme: str, payload: int, params: Settings | None = None) -> Identity:
        """Of a marked net and its key; ``params`` replaces the plan's."""
        stated = dict(dict(self.plan.schemes)[scheme] if params is None else params)
        built = SCHEMES.build(scheme, stated)
        code = digest(type(built).__module__, "deepseal.watermark.verify", *_SHARED)
        asked = [self.net_identity(name)["net"] for name in self.independent(built)]
        own = {"scheme": scheme, "scheme_params": built.as_dict(), "payload": payload, "independent": asked}
        rate = {"false_positive": self.plan.false_positive}
        return {**self.net_identity(net), **own, **rate, "scheme_code": code}

    def rng(self, *path: str | int) -> Rng:
        """Randomness of a part; the same in every run, whatever else the plan holds."""
        return Rng(0).child("compare", self.arch, *path)

    def keygen(self, net: str, scheme: str, payload: int, params: Settings | None = None) -> Key:
        """The key of a payload.

        Raises:
            InputError: a scheme that cannot mark this net.
        """
        built = self.scheme(scheme) if params is None else SCHEMES.build(scheme, params)
        models = [self.net(name) for name in self.independent(built)]
        given: dict[str, Any] = {"independent": models} if models else {}
        rng = self.rng("key", scheme, net, payload)
        return built.keygen(self.net(net), self.data.train, owner="Example Ltd", rng=rng, **given)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def marked(self, net: str, scheme: str, payload: int) -> tuple[Classifier, Key]:
        """A marked net and its key, from their files.

        Raises:
            InputError: they were never made, or are gone.
        """
        identity = self.mark_identity(net, scheme, payload)

        def absent() -> Classifier:
            found, do = f"none for {scheme} on net {net}", "delete the folder's cells and run it again"
            raise InputError("the file of a marked model", found=found, do=do)

        return self.cells.model("marked", identity, absent), self.cells.key(identity)

    def control_identity(self, net: str, recipe: Recipe, rounds: int) -> Identity:
        """Of an unmarked net that was trained on for as long as a mark was embedded."""
        return {**self.net_identity(net), "further": recipe.as_dict(), "rounds": rounds}

    def control(self, net: str, recipe: Recipe, rounds: int) -> Classifier:
        """An unmarked net, trained on with the embedding's recipe and the task's loss alone."""
        identity = self.control_identity(net, recipe, rounds)

        def make() -> Classifier:
            model = self.net(net)
            for index in range(rounds):
                model = train(model, self.data.train, recipe=recipe, rng=self.rng("control", net, index))
            return model

        return self.cells.model("control", identity, make)

    def attack_identity(self, identity: Identity, attack: Attack, scheme: str) -> Identity:
        """Of a net, marked or not, after an attack."""
        params = attack.against(scheme, dict(self.plan.schemes)[scheme])
        built = attack.build(params)
        thief = type(SCHEMES.build(params["scheme"], {})).__module__ if "scheme" in params else "deepseal.attacks.base"
        code = digest(type(built).__module__, thief, "deepseal.watermark.verify_aligned", *_SHARED)
        return {**identity, "attack": attack.name, "attack_params": built.as_dict(), "attack_code": code}

    def attacked(self, model: Classifier, attack: Attack, scheme: str, net: str) -> Removed:
        """A model after an attack, kept while the same attack on the same net goes on.

        Raises:
            InputError: an attack that cannot be run on it.
        """
        params = attack.against(scheme, dict(self.plan.schemes)[scheme])
        if self._around != (net, attack.title):
            self._around, self._attacked = (net, attack.title), {}
        place = (model.fingerprint(), repr(sorted(params.items())))
        if place not in self._attacked:
            built, rng = attack.build(params), self.rng("attack", net, attack.title)
            removed: Removed = built.remove(model, self.data.train, rng=rng)
            if model.fingerprint() != self.net(net).fingerprint():
                return removed
            self._attacked[place] = removed  # the unmarked net's, which every scheme's key is read from
        return self._attacked[place]

    def right(self, model: Classifier) -> NDArray[np.bool_]:
        """Which of the test samples a model gets right; kept for the last few models."""
        place = model.fingerprint()
        if place not in self._right:
            while len(self._right) >= _KEPT:
                self._right.pop(next(iter(self._right)))
            self._right[place] = (model.predict(self.data.test.x) == self.data.test.y).numpy()
        return self._right[place]

    def accuracy(self, model: Classifier) -> dict[str, Any]:
        """Share of the test samples that a model gets right, with its interval."""
        right = self.right(model)
        return rate(int(right.sum()), len(right)).as_dict()

    def _trained(self, name: str) -> Classifier:
        recipe, rng = self.plan.recipe, self.rng("net", name)
        start = initialise(self.arch, self.data.spec, rng.child("weights"))
        model = train(start, self.data.train, recipe=recipe, rng=rng.child("train"))
        updates = recipe.total_steps(len(self.data.train))
        return model.copy(metadata={"training": {"recipe": recipe.as_dict(), "updates": updates, "data": self.source}})
