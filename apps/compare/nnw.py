"""The report of MPAI-NNW: how a mark and its detector behave on modified nets, marked and not.

Source: MPAI, "Neural Network Watermarking" (MPAI-NNW) V1.0, 2023: of M unmarked nets and D payloads M x (D + 1) nets
are made, all of them are modified in every way at every strength, and the detector is run on each; what is reported are
the ratios of false positives and of false negatives, the symbol error rate of the payload, and what mark and
modification cost the task.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def modifications(cells: Found) -> dict[str, Any]:
    """One row a modification and strength, the first without any.

    A false positive is an unmarked net, modified, on which a payload's key is accepted; a false negative is a marked
    one on which it is not, for whatever reason. Imperceptibility is the change of accuracy by the mark; beside it
    stands what the modification costs a marked net.
    """
    marks = [(job, r) for job, r in of_kind(cells, "mark") if r.results["status"] == "embedded"]
    unmarked, marked = (by_attack(cells, marked=which) for which in (False, True))
    rows = [
        {
            "modification": "none",
            "false_positive": shares(marks, lambda r: r["reading_unmarked"]["verdict"] == "owned"),
            "false_negative": shares(marks, lambda r: not is_owned(r)),
            "symbol_error_rate": symbol_errors(marks),
            "symbol_error_rate_unmarked": over_nets(marks, _unmarked_errors, least=0.0, most=1.0),
            "change_points": over_nets(marks, points),
        }
    ]
    for title, own in marked.items():
        done, others = _modified(own), _modified(unmarked.get(title, []))
        if done or others:
            rows.append(
                {
                    "modification": title,
                    "false_positive": shares(others, is_owned),
                    "false_negative": shares(done, lambda r: not is_owned(r)),
                    "symbol_error_rate": symbol_errors(done),
                    "symbol_error_rate_unmarked": symbol_errors(others),
                    "change_points": over_nets(done, points),
                }
            )
    nets = len({job.identity["net"] for job, _ in marks})
    payloads = len({job.identity["payload"] for job, _ in marks})
    return {
        "M": nets,
        "D": payloads,
        "nets": nets * (payloads + 1),
        "imperceptibility_points": over_nets(marks, points),
        "cost": costs_of(marks),
        "rows": rows,
    }


def _modified(cells: Found) -> Found:
    return [(job, record) for job, record in cells if record.results.get("status") == "attacked"]


def _unmarked_errors(results: Mapping[str, Any]) -> float:
    reading = results["reading_unmarked"]
    return float(reading["bit_errors"] / reading["bits"]) if reading["bits"] else 1.0
