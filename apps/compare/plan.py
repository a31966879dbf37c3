"""What a comparison is to measure: models, schemes, attacks and numbers, checked before the work starts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from deepseal.adapter import Recipe
from deepseal.adapter.targets import split_target
from deepseal.attacks import QUERY, REMOVAL
from deepseal.errors import InputError, UnknownNameError
from deepseal.parameters import pairs
from deepseal.watermark import SCHEMES, Scheme

Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Attack:
    """An attack at one strength, on the model or on the questions it is asked; ``title`` is what tables show."""

    name: str
    params: Settings

    @property
    def title(self) -> str:
        """``prune sparsity=0.8``."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.params.items())])

    @property
    def on_queries(self) -> bool:
        """Whether it leaves the model as it is and stands between it and whoever asks."""
        return self.name in QUERY.names()

    def build(self, params: Settings | None = None) -> Any:
        """The attack itself; ``params`` replaces its own."""
        return (QUERY if self.on_queries else REMOVAL).build(self.name, self.params if params is None else params)

    def against(self, scheme: str, options: Settings) -> Settings:
        """Its parameters against a scheme: a thief who overwrites runs the owner's scheme, with the owner's options.

        Models that only calibrate the owner's decision are not trained for a thief.
        """
        if self.name != "overwrite" or "scheme" in self.params:
            return self.params
        thief = {**options, **({"models": 0} if asks_for(SCHEMES.build(scheme, options)) else {})}
        stated = ";".join(f"{name}={_text(value)}" for name, value in thief.items())
        return {**self.params, "scheme": scheme, **({"options": [stated]} if stated else {})}


def _at(name: str, **strengths: Sequence[Any]) -> list[Attack]:
    ((parameter, values),) = strengths.items()
    return [Attack(name, {parameter: value}) for value in values]


QUICK = (
    *_at("prune", sparsity=(0.8,)),
    *_at("quantise", bits=(8,)),
    *_at("fine-tune", epochs=(1,)),
    Attack("permute", {}),
)
STANDARD = (
    *_at("prune", sparsity=(0.5, 0.8, 0.9)),
    *_at("quantise", bits=(8, 4)),
    *_at("fine-tune", epochs=(1, 5)),
    Attack("fine-tune", {"mode": "rtal", "epochs": 5}),
    *_at("overwrite", strength=(1.0, 10.0)),
    Attack("other-task", {"epochs": 3, "epochs_back": 3}),
    *_at("distil", epochs=(10,)),
    *(Attack(name, {}) for name in ("permute", "rescale", "dummy", "rotate")),
    *_at("query-noise", deviation=(0.1,)),
)
FULL = (
    *_at("prune", sparsity=(0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)),
    *_at("quantise", bits=(8, 6, 4, 3, 2)),
    *(Attack("quantise", {"format": name}) for name in ("float16", "bfloat16")),
    *_at("fine-tune", epochs=(1, 5, 20, 50)),
    *(Attack("fine-tune", {"mode": mode, "epochs": 5}) for mode in ("ftll", "rtll", "rtal")),
    *_at("overwrite", strength=(1.0, 10.0, 100.0)),
    *_at("other-task", epochs=(5, 10)),
    *_at("distil", epochs=(10, 20)),
    *(Attack(name, {}) for name in ("permute", "rescale", "dummy", "rotate")),
    *_at("query-noise", deviation=(0.1, 0.2)),
)
SETS: dict[str, tuple[Attack, ...]] = {"quick": QUICK, "standard": STANDARD, "full": FULL, "none": ()}

OWNER = "owner"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A comparison.

    Attributes:
        data, archs: sources of data, and architectures; all pairs are compared.
        schemes: name and parameters of each scheme.
        attacks: removal and query attacks, each at one strength.
        seeds: unmarked nets (M), each trained with a seed of its own and marked by every scheme.
        first_seed: seed of the first of them; the others follow.
        payloads: keys a net and scheme (D).
        nets: further unmarked nets that know nothing of any key.
        keys: strangers' keys a scheme, net and payload, for the empirical null.
        sizes: factors of each scheme's number of bits or triggers, for its capacity.
        epochs, limit: the owner's training: passes, and the most samples used (None for all).
        owner: further parameters of the owner's training, as of `model train`.
        false_positive: rate at which every verdict is given.
    """

    data: tuple[str, ...]
    archs: tuple[str, ...]
    schemes: tuple[tuple[str, Settings], ...]
    attacks: tuple[Attack, ...] = STANDARD
    seeds: int = 3
    first_seed: int = 0
    payloads: int = 1
    nets: int = 6
    keys: int = 1000
    sizes: tuple[float, ...] = (0.25, 2.0, 8.0)
    epochs: int = 10
    owner: Settings = dataclasses.field(default_factory=dict)
    limit: int | None = None
    false_positive: float = 1e-6

    def __post_init__(self) -> None:
        if not 0.0 < self.false_positive < 1.0:
            do = "use for instance 1e-6"
            raise InputError("a false-positive rate between 0 and 1", found=str(self.false_positive), do=do)
        for what, values in (("data set", self.data), ("architecture", self.archs)):
            if not values:
                raise InputError(f"at least one {what}", found="none", do="name one")
            if len(set(values)) < len(values):
                raise InputError(f"each {what} once", found=str(list(values)), do="name it once")
        if any(factor <= 0 for factor in self.sizes):
            raise InputError("sizes above 0", found=str(list(self.sizes)), do="use for instance 0.25,2,8")

    @property
    def recipe(self) -> Recipe:
        """How the owner trains."""
        return Recipe.from_mapping({"epochs": self.epochs, **self.owner})

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            **dataclasses.asdict(self),
            "owner": dict(self.owner),
            "schemes": {name: dict(params) for name, params in self.schemes},
            "attacks": [{"attack": a.name, "attack_params": dict(a.params)} for a in self.attacks],
            "recipe": self.recipe.as_dict(),
        }


def parse_schemes(text: str, params: Sequence[str]) -> tuple[tuple[str, Settings], ...]:
    """``all`` or names with commas, and parameters as ``scheme.name=value``.

    Raises:
        UnknownNameError: no such scheme.
        InputError: parameters that it does not have, or of a scheme that is not compared.
    """
    names = SCHEMES.names() if text == "all" else _words(text, "scheme")
    for name in names:
        SCHEMES.get(name)
    stated = _by_subject(params, [*names, OWNER])
    return tuple((name, _stated(SCHEMES.build(name, stated[name]), stated[name])) for name in names)


def parse_owner(params: Sequence[str], schemes: Sequence[str]) -> Settings:
    """Parameters of the owner's training, given as ``owner.name=value`` among those of the schemes.

    Raises:
        InputError: a parameter that training does not have, a value that it refuses, or its length, which has an
            option of its own.
    """
    given = _by_subject(params, [*schemes, OWNER])[OWNER]
    if fixed := {"epochs", "steps"} & set(given):
        raise InputError("the owner's passes as --epochs", found=f"owner.{min(fixed)}", do="give --epochs instead")
    known = [name for name in Recipe().as_dict() if name not in ("epochs", "steps")]
    if unknown := next((name for name in given if name not in known), None):
        found = f"{OWNER}.{unknown}"
        raise InputError(f"a parameter of training ({', '.join(known)})", found=found, do="correct it")
    return _stated(Recipe.from_mapping(given), given)


def _by_subject(params: Sequence[str], subjects: Sequence[str]) -> dict[str, dict[str, str]]:
    stated: dict[str, dict[str, str]] = {name: {} for name in subjects}
    for full, value in pairs(params).items():
        subject, dot, name = full.partition(".")
        if not dot or subject not in stated:
            wanted = f"a parameter as subject.name=value, of one of {', '.join(subjects)}"
            raise InputError(wanted, found=repr(full), do="correct it, or compare that scheme too")
        stated[subject][name] = value
    return stated


def parse_attacks(text: str) -> tuple[Attack, ...]:
    """A named set, or attacks with commas, each ``name`` or ``name?param=value&param=value``.

    Raises:
        UnknownNameError: neither a set nor an attack.
        InputError: parameters that the attack does not have.
    """
    found: list[Attack] = []
    for word in _words(text, "attack"):
        if word in SETS:
            found += SETS[word]
            continue
        name, options = split_target(word)
        if name not in (*REMOVAL.names(), *QUERY.names()):
            known = list(dict.fromkeys([*SETS, *REMOVAL.names(), *QUERY.names()]))
            raise UnknownNameError("removal or query attack, or set of them", name, known)
        found.append(Attack(name, _stated(Attack(name, options).build(), options)))
    return tuple({attack.title: attack for attack in found}.values())


def parse_sizes(text: str) -> tuple[float, ...]:
    """Factors with commas; ``none`` for none.

    Raises:
        InputError: something else.
    """
    try:
        return () if text == "none" else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError("sizes as numbers with commas", found=repr(text), do="use for instance 0.25,2,8") from error


def size_parameter(scheme: Scheme) -> str | None:
    """The parameter that says how much a scheme holds: bits, patterns or triggers; None where it has none of them."""
    return next((name for name in ("bits", "groups", "triggers", "keys") if hasattr(scheme, name)), None)


def asks_for(scheme: Scheme) -> int:
    """How many independent models the scheme's key generation would train if it were given none."""
    takes = "independent" in inspect.signature(scheme.keygen).parameters
    return int(getattr(scheme, "models", 0)) if takes else 0


def _stated(built: Any, given: Mapping[str, str]) -> Settings:
    values = built.as_dict()
    return {name: values[name] for name in given}


def _words(text: str, what: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InputError(f"at least one {what}", found=repr(text), do=f"name one, or leave out --{what}s")
    return list(dict.fromkeys(words))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
