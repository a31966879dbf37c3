"""Which tensor of a file belongs to which tensor of a module: every one of both, or a refusal that lists the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor, nn

from deepseal.adapter.parametrised import Rule, rule_for
from deepseal.errors import InputError

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
PARALLEL = "module"  # nn.DataParallel's; a layer may be called so too
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 8


class MismatchError(InputError):
    """A file that does not fit a module.

    Args:
        path: the file, as shown.
        architecture: the module, as shown.
        missing: names that the module has and the file has not.
        unexpected: names that the file has and the module has not.
        wrong: what is wrong with tensors that both have, a phrase each.
    """

    def __init__(
        self,
        path: str,
        architecture: str,
        missing: Collection[str],
        unexpected: Collection[str],
        wrong: Collection[str],
    ) -> None:
        self.missing, self.unexpected, self.wrong = tuple(missing), tuple(unexpected), tuple(wrong)
        parts = (("missing", self.missing), ("unexpected", self.unexpected), ("of another kind", self.wrong))
        problems = [f"{len(names)} {what} ({_listed(names)})" for what, names in parts if names]
        hint = " or that has these parametrisations" if any("parametrizations." in n for n in unexpected) else ""
        super().__init__(
            f"{path} to fit {architecture} exactly",
            found="tensors " + "; ".join(problems),
            do=f"name the architecture that these weights were trained with{hint}",
        )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """For each tensor of the module, in plain names: where it comes from, and what does not fit."""

    wanted: Mapping[str, str]
    given: Mapping[str, str]
    sources: Mapping[str, str | Rule]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def fitted(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
    path: str,
    architecture: str,
) -> dict[str, Tensor]:
    """The file's tensors under the module's names.

    Names may differ in the prefixes of parallel and compiled training, on either side, in any order and at any depth.
    A tensor that the file has under one of the names that the module ties is taken for all of them. Pruned and
    normalised weights are worked out if the module has the plain weight (see ``parametrised``).

    Args:
        module: what is to be filled; may be on the meta device; not changed.
        tensors: by the file's names.
        aliases: further names in the file of a tensor that it has, used where the module wants one.
        path: the file, for the error.
        architecture: what built the module, for the error.

    Raises:
        MismatchError: a tensor is missing, left over, of another shape or type, or tied in the module only.
    """
    wanted = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    groups = _tied(module)
    extended = {**tensors, **{alias: tensors[name] for alias, name in aliases.items() if name in tensors}}
    fixed = {name: b for name, b in module.named_buffers() if name not in wanted}  # not part of a state dict
    plans = [
        _plan(ours, theirs, groups, fixed)
        for given in ((tensors, extended) if len(extended) > len(tensors) else (tensors,))
        for theirs, ours in product(spellings(given), spellings(wanted))
    ]
    best = min(plans, key=lambda plan: len(plan.missing) + len(plan.unexpected))
    lost = best.missing or best.unexpected
    state = {
        best.wanted[name]: _made(module, best.wanted[name], source, best.given, extended)
        for name, source in best.sources.items()
        if isinstance(source, str) or not lost
    }
    wrong = [*_unlike(wanted, state), *_torn(groups, state), *_altered(fixed, best, extended)]
    if lost or wrong:
        raise MismatchError(path, architecture, best.missing, best.unexpected, wrong)
    return state


def spellings(names: Collection[str]) -> list[dict[str, str]]:
    """Ways of reading names without prefixes, each from plain name to name; only those that keep names apart.

    First as they are; then without what can only be a wrapper (``_orig_mod``); then without one leading ``module.``
    after the other that all names share; last without any ``module``, as in ``features.module.0``.
    """
    plain = {name: tuple(part for part in name.split(".") if part not in WRAPPERS) for name in names}
    found = [{name: name for name in names}, {".".join(parts): name for name, parts in plain.items()}]
    while plain and all(len(parts) > 1 and parts[0] == PARALLEL for parts in plain.values()):
        plain = {name: parts[1:] for name, parts in plain.items()}
        found.append({".".join(parts): name for name, parts in plain.items()})
    found.append({".".join(part for part in parts if part != PARALLEL): name for name, parts in plain.items()})
    apart: list[dict[str, str]] = []
    for spelling in found:
        if len(spelling) == len(names) and spelling not in apart:
            apart.append(spelling)
    return apart


def _plan(
    wanted: Mapping[str, str], given: Mapping[str, str], groups: Collection[Collection[str]], fixed: Collection[str]
) -> _Plan:
    plain = {name: short for short, name in wanted.items()}
    sources: dict[str, str | Rule] = {name: name for name in wanted if name in given}
    left = given.keys() - sources.keys()
    for name in wanted.keys() - sources.keys():
        rule = rule_for(name, left)
        if rule is not None:
            sources[name] = rule
    left -= {part for source in sources.values() if isinstance(source, Rule) for part in source.parts}
    for group in groups:
        members = [plain[name] for name in group if name in plain]
        source = next((sources[name] for name in members if name in sources), None)
        if source is not None:
            sources.update({name: source for name in members if name not in sources})
    missing = tuple(sorted(wanted.keys() - sources.keys()))
    return _Plan(wanted, given, sources, missing, tuple(sorted(left - set(fixed))))


def _made(
    module: nn.Module, name: str, source: str | Rule, given: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> Tensor:
    if isinstance(source, str):
        return tensors[given[source]]
    parts = [tensors[given[part]].detach() for part in source.parts]
    try:
        return source.apply(module.get_submodule(name.rpartition(".")[0]), *parts)
    except InputError as error:
        raise InputError(f"{error.expected} for {name}", found=error.found, do=error.do) from error


def _tied(module: nn.Module) -> list[list[str]]:
    """Groups of names that stand for one and the same tensor."""
    groups: dict[int, list[str]] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _unlike(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Tensors of another shape, or of a type that is not the module's or another floating one."""
    wrong = []
    for name in sorted(wanted.keys() & state.keys()):
        here, there = wanted[name], state[name]
        if there.shape != here.shape:
            wrong.append(f"{name} {tuple(there.shape)} instead of {tuple(here.shape)}")
        elif there.dtype != here.dtype and not (there.dtype in FLOATING and here.dtype in FLOATING):
            wrong.append(f"{name} {there.dtype} instead of {here.dtype}")
    return wrong


def _torn(groups: Collection[list[str]], state: Mapping[str, Tensor]) -> list[str]:
    """Names that are one tensor in the module and different ones in the file."""
    wrong = []
    for group in groups:
        first, *rest = [name for name in group if name in state] or [""]
        for name in rest:
            one, other = state[first], state[name]
            if one is not other and (one.dtype != other.dtype or not torch.equal(one, other)):
                wrong.append(f"{name} differs from {first}, to which the module ties it")
    return wrong


def _altered(fixed: Mapping[str, Tensor], plan: _Plan, tensors: Mapping[str, Tensor]) -> list[str]:
    """Buffers that the module makes itself, and that are not the same in the file (which need not have them)."""
    wrong = []
    for name, buffer in fixed.items():
        there = tensors[plan.given[name]] if name in plan.given else None
        if there is None or buffer.is_meta:
            continue
        if there.shape != buffer.shape or not torch.equal(buffer.detach().cpu().to(there.dtype), there):
            wrong.append(f"{name} is not what the module makes itself")
    return wrong


def _listed(names: Collection[str]) -> str:
    shown = [name if len(name) <= 160 else f"{name[:160]}…" for name in list(names)[:_SHOWN]]
    return ", ".join(shown) + (", …" if len(names) > _SHOWN else "")
