"""What the cells of a comparison add up to: eight criteria for every scheme, data set and network.

The criteria are those of H. Chen, B. D. Rouhani, X. Fan, O. C. Kilinc, F. Koushanfar, "Performance comparison of
contemporary DNN watermarking techniques", 2018 (arXiv 1811.03713). Intervals of means are over nets (several payloads
of a net are averaged first, for they are not independent), those of shares are exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from deepseal.apps.compare.figures import (
    Found,
    by_attack,
    costs_of,
    is_owned,
    of_kind,
    over_nets,
    points,
    shares,
    symbol_errors,
)
from deepseal.apps.compare.jobs import jobs
from deepseal.apps.compare.nnw import modifications
from deepseal.apps.compare.plan import Plan
from deepseal.apps.compare.properties import inferred
from deepseal.apps.compare.subjects import Bench
from deepseal.rng import Rng
from deepseal.statistics import rate, student
from deepseal.watermark.integrity import counted

MOST_LOST = 5.0  # points of accuracy that a removal may cost (Lukas et al., "SoK", 2022)


def summarise(plan: Plan, benches: Sequence[Bench], refused: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The results of a comparison's record."""
    pairs = [_pair(bench) for bench in benches]
    return {
        "overview": [row for pair in pairs for row in _overview(pair)],
        "refused": [*refused, *(row for pair in pairs for row in pair.pop("refused"))],
        "pairs": pairs,
        "generalisability": generalisability(pairs) if len(pairs) > 1 else [],
    }


def _pair(bench: Bench) -> dict[str, Any]:
    listed = list(jobs(bench))
    cells = [(job, record) for job in listed if (record := job.record(bench)) is not None]
    nets = [record for job, record in cells if job.kind == "net"]
    names = [name for name, _ in bench.plan.schemes]
    by_scheme: dict[str, Found] = defaultdict(list)
    for job, record in cells:
        if job.kind != "net":
            by_scheme[job.identity["scheme"]].append((job, record))
    marked = {name: of_kind(by_scheme[name], "mark") for name in names}
    embedded = [name for name in names if any(r.results["status"] == "embedded" for _, r in marked[name])]
    reasons = {name: r.results["reason"] for name in names for _, r in marked[name] if "reason" in r.results}
    owned = [r for job, r in cells if job.kind == "net" and job.identity["net"] in bench.owned_nets()]
    schemes = [_scheme(bench, name, by_scheme[name]) for name in embedded]
    about = {"data": bench.source, "arch": bench.arch}
    return {
        "data": bench.source,
        "arch": bench.arch,
        "parameters": bench.parameters,
        "training_samples": len(bench.data.train),
        "recipe": bench.plan.recipe.as_dict(),
        "test_samples": len(bench.data.test),
        "cells": {"measured": len(cells), "planned": len([job for job in listed if job.needs()])},
        "nets": len(owned),
        "independent_nets": len(nets) - len(owned),
        "payloads": bench.plan.payloads,
        "accuracy": student([r.results["accuracy"]["value"] for r in owned]).as_dict() if owned else None,
        "training_seconds": student([r.results["training_seconds"] for r in owned]).as_dict() if owned else None,
        "schemes": schemes,
        "refused": [
            *({**about, "scheme": name, "reason": reasons[name]} for name in names if name in reasons),
            *({**about, "attack": title, "reason": reason} for title, reason in _refused_attacks(schemes)),
        ],
    }


def _refused_attacks(schemes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Attacks that could not be run on any marked net, with the reason: the network's, whatever the scheme."""
    found: dict[str, str] = {}
    for row in (row for scheme in schemes for row in scheme["robustness"]):
        if row["refused"]:
            found.setdefault(row["attack"], row["refused"])
    ran = {row["attack"] for scheme in schemes for row in scheme["robustness"] if row["n"]}
    return [(title, reason) for title, reason in found.items() if title not in ran]


def _scheme(bench: Bench, name: str, cells: Found) -> dict[str, Any]:
    marks = [(job, r) for job, r in of_kind(cells, "mark") if r.results["status"] == "embedded"]
    first = marks[0][1].results
    return {
        "scheme": name,
        "access": first["access"],
        "zero_bit": first["zero_bit"],
        "bits": first["bits"],
        "scheme_params": marks[0][0].identity["scheme_params"],
        "nets": len({job.identity["net"] for job, _ in marks}),
        "marked": len(marks),
        "fidelity": _fidelity(marks, of_kind(cells, "control")),
        "reliability": _reliability(marks),
        "integrity": _integrity(of_kind(cells, "integrity")),
        "robustness": _robustness(cells),
        "capacity": _capacity(marks, of_kind(cells, "capacity")),
        "efficiency": costs_of(marks),
        "security": _security(of_kind(cells, "control")),
        "nnw": modifications(cells),
    }


def _fidelity(marks: Found, controls: Found) -> dict[str, Any]:
    return {
        "accuracy_unmarked": over_nets(marks, lambda r: r["accuracy_unmarked"]["value"], least=0.0, most=1.0),
        "accuracy_marked": over_nets(marks, lambda r: r["accuracy"]["value"], least=0.0, most=1.0),
        "change_points": over_nets(marks, points),
        "accuracy_control": over_nets(controls, lambda r: r["accuracy"]["value"], least=0.0, most=1.0),
        "change_against_control_points": over_nets(controls, points),
        "paired": [{"net": job.identity["net"], **record.results["change"]} for job, record in marks],
        "paired_against_control": [{"net": job.identity["net"], **r.results["change"]} for job, r in controls],
    }


def _reliability(marks: Found) -> dict[str, Any]:
    return {
        "owned": shares(marks, is_owned),
        "symbol_error_rate": symbol_errors(marks),
        "bit_errors": [record.results["reading"]["bit_errors"] for _, record in marks],
        "threshold": [record.results["reading"]["threshold"] for _, record in marks],
        "margin_mean": over_nets(marks, lambda r: r["reading"]["margin_mean"] or 0.0),
        "margin_lowest": over_nets(marks, lambda r: r["reading"]["margin_lowest"] or 0.0),
        "unmarked_owned": shares(marks, lambda r: r["reading_unmarked"]["verdict"] == "owned"),
        "paper_accepts": shares(marks, lambda r: r["reading"]["published_accepts"] is True)
        if marks[0][1].results["reading"]["published_accepts"] is not None
        else None,
    }


def _integrity(cells: Found) -> dict[str, Any] | None:
    if not cells:
        return None
    found = [record.results for _, record in cells]
    levels = list(found[0]["strangers"])
    keys = {}
    for level in levels:
        own = [results["strangers"][level] for results in found]
        n = sum(one["n"] for one in own)
        attained = sum(one["attained"] * one["n"] for one in own) / n
        keys[level] = counted(float(level), sum(one["count"] for one in own), n, attained).as_dict()
    owned = [results["owned"] for results in found]
    return {
        "strangers": keys,
        "independent_models": rate(sum(one["count"] for one in owned), sum(one["n"] for one in owned)).as_dict(),
    }


def _robustness(cells: Found) -> list[dict[str, Any]]:
    rows = []
    for title, attacks in by_attack(cells, marked=True).items():
        done = [(job, r) for job, r in attacks if r.results.get("status") == "attacked"]
        aligned = [(job, r) for job, r in done if "aligned" in r.results]
        reasons = [(r.results["status"], r.results["reason"]) for _, r in attacks if "reason" in r.results]
        rows.append(
            {
                "attack": title,
                "n": len(done),
                "owned": shares(done, is_owned),
                "symbol_error_rate": symbol_errors(done),
                "bit_errors": [r.results.get("reading", {}).get("bit_errors") for _, r in done],
                "bits": [r.results.get("reading", {}).get("bits") for _, r in done],
                "margin_mean": over_nets(done, lambda r: (r.get("reading") or {}).get("margin_mean") or 0.0),
                "accuracy_lost_points": over_nets(done, lambda r: -points(r)),
                "removed": shares(done, lambda r: not is_owned(r) and -points(r) < MOST_LOST),
                "attack_seconds": over_nets(done, lambda r: r["attack_seconds"], least=0.0),
                "aligned_owned": shares(aligned, lambda r: r["aligned"]["verdict"] == "owned"),
                "unreadable": next((r.results["unreadable"] for _, r in done if "unreadable" in r.results), None),
                "refused": next((reason for status, reason in reasons if status != "not applicable"), None),
                "not_applicable": next((reason for status, reason in reasons if status == "not applicable"), None),
            }
        )
    return rows


def _capacity(marks: Found, cells: Found) -> list[dict[str, Any]]:
    sizes: dict[int, Found] = defaultdict(list)
    for job, record in [*marks, *cells]:
        sizes[record.results["bits"] if "reading" in record.results else record.results["size"]].append((job, record))
    rows = []
    for size, own in sorted(sizes.items()):
        done = [(job, r) for job, r in own if r.results["status"] == "embedded"]
        rows.append(
            {
                "bits": size,
                "n": len(done),
                "owned": shares(done, is_owned),
                "symbol_error_rate": symbol_errors(done),
                "change_points": over_nets(done, points),
                "refused": next((r.results["reason"] for _, r in own if "reason" in r.results), None),
            }
        )
    return rows


def _security(controls: Found) -> dict[str, Any]:
    found = {}
    for against in ("control", "unmarked"):
        by_net: dict[str, Found] = defaultdict(list)
        for job, record in controls:
            by_net[job.identity["net"]].append((job, record))
        nets = [
            (own[0][1].results["properties"][against], [r.results["properties"]["marked"] for _, r in own])
            for own in by_net.values()
        ]
        found[f"against_{against}"] = inferred(nets, Rng(0).child("compare", "relabel"))
    return found


def generalisability(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each scheme, its worst figures over all data sets and networks that it could mark."""
    rows = []
    for name in dict.fromkeys(scheme["scheme"] for pair in pairs for scheme in pair["schemes"]):
        own = [scheme for pair in pairs for scheme in pair["schemes"] if scheme["scheme"] == name]
        attacks = [row["owned"]["value"] for scheme in own for row in scheme["robustness"] if row["owned"]]
        rows.append(
            {
                "scheme": name,
                "models": f"{len(own)} of {len(pairs)}",
                "owned, least": min(scheme["reliability"]["owned"]["value"] for scheme in own),
                "change in points, worst": min(scheme["fidelity"]["change_points"]["mean"] for scheme in own),
                "owned after attacks, mean": sum(attacks) / len(attacks) if attacks else None,
            }
        )
    return rows


def _overview(pair: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for scheme in pair["schemes"]:
        attacks = [row["owned"] for row in scheme["robustness"] if row["owned"]]
        integrity = scheme["integrity"]
        rows.append(
            {
                "data": pair["data"],
                "network": pair["arch"].rpartition(":")[2],
                "scheme": scheme["scheme"],
                "owned": _count(scheme["reliability"]["owned"]),
                "change, points": scheme["fidelity"]["change_points"]["mean"],
                "innocents owned": _count(integrity["independent_models"]) if integrity else "",
                "owned after attacks": f"{sum(a['count'] for a in attacks)} of {sum(a['n'] for a in attacks)}",
                "share of training": (scheme["efficiency"]["share_of_training"] or {}).get("mean"),
            }
        )
    return rows


def _count(share: Mapping[str, Any] | None) -> str:
    return f"{share['count']} of {share['n']}" if share else ""
