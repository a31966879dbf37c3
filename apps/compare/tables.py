"""A comparison's record as tables: what Markdown and the page show, in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepseal.apps.report import words


@dataclasses.dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        name: short name of what it shows.
        title: heading.
        note: what a reader must know of it.
        head, rows: texts.
        group: tables of a group belong together, such as one a scheme.
    """

    name: str
    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    group: str = ""


def markdown(results: Mapping[str, Any], *, rate: float) -> str:
    """All tables of a comparison's results, for documents."""
    lines = [f"Every verdict at a false-positive rate of {rate:g}; intervals are 95 % unless they say otherwise.", ""]
    for pair in results["pairs"]:
        lines += [f"## {title(pair)}", "", about(pair), ""]
        for table in tables(pair):
            lines += [f"### {table.title}", "", *([table.note, ""] if table.note else []), *_grid(table)]
    for table in closing(results):
        lines += [f"## {table.title}", "", *_grid(table)]
    return "\n".join(lines)


def title(pair: Mapping[str, Any]) -> str:
    """``mlp on mnist``."""
    return f"{pair['arch'].rpartition(':')[2]} on {words.clean(pair['data'])}"


def about(pair: Mapping[str, Any]) -> str:
    """How many nets, of what size and how good."""
    payloads = f"{pair['payloads']} payload{'s' if pair['payloads'] > 1 else ''} a net and scheme"
    nets = "1 net is marked" if pair["nets"] == 1 else f"{pair['nets']} nets are marked"
    return (
        f"{nets}, {payloads} (accuracy {between(pair['accuracy'], '{:.2f}', 100)} % before,"
        f" {pair['parameters']:,} parameters, {pair['training_samples']:,} training samples{_trained(pair)},"
        f" {pair['test_samples']:,} test samples); {_further(pair['independent_nets'])}."
    )


def _further(nets: int) -> str:
    return "1 further net knows no key" if nets == 1 else f"{nets} further nets know no key"


def _trained(pair: Mapping[str, Any]) -> str:
    """How the owner trained; records of earlier versions do not say."""
    recipe = pair.get("recipe")
    if recipe is None:
        return ""
    epochs = "1 epoch" if recipe["epochs"] == 1 else f"{recipe['epochs']} epochs"
    steps = (
        f"step size {recipe['learning_rate']:g}, {words.clean(recipe['schedule'])}, batches of {recipe['batch_size']}"
    )
    return f" ({epochs} of {recipe['optimizer']}, {steps})"


def tables(pair: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of one data set and network."""
    schemes = pair["schemes"]
    if not schemes:
        return
    yield Table(
        "marks",
        "Fidelity, reliability, efficiency",
        "Read from the saved files. The control is the unmarked net, trained on for as many updates without a mark.",
        ["scheme", "bits", "owned", "wrong, %", "change, points", "against control, points", "embedding, CPU s"]
        + ["% of training", "verifying, ms", "queries"],
        [_first(scheme) for scheme in schemes],
    )
    levels = list(dict.fromkeys(level for s in schemes if s["integrity"] for level in s["integrity"]["strangers"]))
    if levels:
        yield Table(
            "integrity",
            "Integrity",
            "Strangers' keys that reach a level on nets that know no key, and beside it the 99 % interval of their"
            " number at the level that a discrete p-value attains; below it, the rule is stricter than it says.",
            ["scheme", "keys", *(f"at {level}" for level in levels), "innocent nets owned"],
            [_integrity(scheme, levels) for scheme in schemes if scheme["integrity"]],
        )
    titles = list(dict.fromkeys(row["attack"] for scheme in schemes for row in scheme["robustness"]))
    if titles:
        yield Table(
            "robustness",
            "Robustness",
            "Owned of n; wrong symbols; change of accuracy by the attack; where the attack only moves neurons and the"
            " mark is a white-box one, owned after alignment to the unmarked net.",
            ["attack", *(scheme["scheme"] for scheme in schemes)],
            [[name, *(_attacked(_row(scheme, name)) for scheme in schemes)] for name in titles],
        )
    lost = [_removal(pair, scheme, row) for scheme in schemes for row in _removals(scheme)]
    if lost:
        yield Table(
            "removal",
            "What removes a mark, and what it costs the thief",
            "Attacks after which a mark was not owned on some net. Removed: at a loss of less than 5 points. The time"
            " is the thief's, who has the owner's training data, as a share of the owner's training.",
            ["scheme", "attack", "not owned", "removed", "aligned, owned", "accuracy lost, points", "time, %"],
            lost,
        )
    if any(len(scheme["capacity"]) > 1 for scheme in schemes):
        yield Table(
            "capacity",
            "Capacity",
            "The default size, a fraction of it and multiples, until the scheme refuses.",
            ["scheme", "bits", "n", "owned", "wrong, %", "change, points", "refused"],
            [_capacity(scheme, row) for scheme in schemes for row in scheme["capacity"]],
        )
    yield Table(
        "security",
        "Security",
        "Property inference on weights and activations: a discriminant learns from all nets but one, and judges that."
        " Models told apart, the p-value of a permutation test, and the least one that so few nets can give.",
        ["scheme", "from a control", "p", "least p", "from the unmarked net", "p, unmarked", "least p, unmarked"],
        [_security(scheme) for scheme in schemes],
    )
    for scheme in schemes:
        yield _nnw(scheme)


def closing(results: Mapping[str, Any]) -> Iterator[Table]:
    """The tables over all data sets and networks."""
    rows = results["generalisability"]
    if rows:
        shown = [[_cell(value) for value in row.values()] for row in rows]
        yield Table("generalisability", "Generalisability", "", list(rows[0]), shown)
    if results["refused"]:
        names = ("data", "arch", "scheme", "attack", "reason")
        shown = [[words.clean(row.get(name, "")) for name in names] for row in results["refused"]]
        yield Table("refused", "Refused", "", names, shown)


def _grid(table: Table) -> list[str]:
    rows = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table.rows)
    return [f"| {' | '.join(table.head)} |", "|---" * len(table.head) + "|", *rows, ""]


def between(value: Mapping[str, Any] | None, shown: str = "{:.2f}", scale: float = 1.0) -> str:
    """A mean and its interval."""
    if value is None:
        return ""
    mean = shown.format(scale * value["mean"])
    if value["low"] is None:
        return mean
    return f"{mean} ({shown.format(scale * value['low'])} to {shown.format(scale * value['high'])})"


def share(value: Mapping[str, Any] | None) -> str:
    """A count of a number."""
    return f"{value['count']}/{value['n']}" if value else ""


def ratio(value: Mapping[str, Any] | None) -> str:
    """A count of a number with its exact interval."""
    return f"{share(value)} ({value['low']:.2f} to {value['high']:.2f})" if value else ""


def _first(scheme: Mapping[str, Any]) -> list[str]:
    fidelity, reliability, cost = scheme["fidelity"], scheme["reliability"], scheme["efficiency"]
    return [
        scheme["scheme"],
        str(scheme["bits"]),
        share(reliability["owned"]),
        between(reliability["symbol_error_rate"], "{:.1f}", 100),
        change(fidelity["change_points"], fidelity["paired"]),
        change(fidelity["change_against_control_points"], fidelity["paired_against_control"]),
        between(cost["embedding_cpu_seconds"], "{:.1f}"),
        between(cost["share_of_training"], "{:.0f}", 100),
        between(cost["verify_seconds"], "{:.0f}", 1000),
        f"{cost['queries']['mean']:.0f}" if cost["queries"] else "white box",
    ]


def change(over_nets: Mapping[str, Any] | None, paired: Sequence[Mapping[str, Any]]) -> str:
    """A change in points with its interval over nets; of a single net, with that over its test samples."""
    return between(paired[0], "{:+.2f}", 100) if len(paired) == 1 else between(over_nets, "{:+.2f}")


def _integrity(scheme: Mapping[str, Any], levels: Sequence[str]) -> list[str]:
    found = scheme["integrity"]
    shown = []
    for level in levels:
        one = found["strangers"].get(level)
        shown.append(f"{one['count']} ({one['low']:.0f} to {one['high']:.0f}), {one['place']}" if one else "")
    n = max((one["n"] for one in found["strangers"].values()), default=0)
    return [scheme["scheme"], f"{n:,}", *shown, ratio(found["independent_models"])]


def _row(scheme: Mapping[str, Any], attack: str) -> Mapping[str, Any] | None:
    return next((row for row in scheme["robustness"] if row["attack"] == attack), None)


def _attacked(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if not row["n"]:
        return absent(row)
    lost = row["accuracy_lost_points"]
    wrong = f"{100 * row['symbol_error_rate']['mean']:.0f} %" if row["symbol_error_rate"] else "unreadable"
    text = f"{share(row['owned'])}; {wrong}; {-lost['mean'] + 0.0:+.1f} points"
    return f"{text}; aligned {share(row['aligned_owned'])}" if row["aligned_owned"] else text


def _removals(scheme: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = [] if scheme["scheme"] == "plain" else scheme["robustness"]
    return [row for row in rows if row["n"] and row["owned"]["count"] < row["n"]]


def _removal(pair: Mapping[str, Any], scheme: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    training = (pair["training_seconds"] or {}).get("mean")
    return [
        scheme["scheme"],
        row["attack"],
        f"{row['n'] - row['owned']['count']}/{row['n']}",
        share(row["removed"]),
        share(row["aligned_owned"]),
        between(row["accuracy_lost_points"], "{:.1f}"),
        f"{100 * row['attack_seconds']['mean'] / training:.0f}" if training else "",
    ]


def absent(row: Mapping[str, Any]) -> str:
    """Why there is no figure of an attack."""
    return "refused" if row["refused"] or not row.get("not_applicable") else "not applicable"


def _capacity(scheme: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    return [
        scheme["scheme"],
        str(row["bits"]),
        str(row["n"]),
        share(row["owned"]),
        between(row["symbol_error_rate"], "{:.1f}", 100),
        between(row["change_points"], "{:+.2f}"),
        words.clean(row["refused"]) if row["refused"] else "",
    ]


def _security(scheme: Mapping[str, Any]) -> list[str]:
    shown = [scheme["scheme"]]
    for against in ("control", "unmarked"):
        found = scheme["security"][f"against_{against}"]
        if "p_value" not in found:
            shown += ["too few nets", "", ""]
        else:
            shown += [ratio(found["told_apart"]), f"{found['p_value']:.3f}", f"{found['lowest_p_value']:.3f}"]
    return shown


def _nnw(scheme: Mapping[str, Any]) -> Table:
    nnw = scheme["nnw"]
    rows = [
        [
            row["modification"],
            ratio(row["false_positive"]),
            ratio(row["false_negative"]),
            between(row["symbol_error_rate"], "{:.1f}", 100),
            between(row["symbol_error_rate_unmarked"], "{:.1f}", 100),
            between(row["change_points"], "{:+.2f}"),
        ]
        for row in nnw["rows"]
    ]
    return Table(
        "nnw",
        f"MPAI-NNW: {scheme['scheme']}",
        f"M = {nnw['M']}, D = {nnw['D']}: {nnw['nets']} nets. {_cost(nnw)}",
        ["modification", "false positives", "false negatives", "symbol errors, %", "unmarked, %", "change, points"],
        rows,
        "nnw",
    )


def _cost(nnw: Mapping[str, Any]) -> str:
    embedding, verifying = (nnw["cost"][name] for name in ("embedding_cpu_seconds", "verify_seconds"))
    change = f"Imperceptibility: {between(nnw['imperceptibility_points'], '{:+.2f}')} points of accuracy"
    cost = f"{between(embedding, '{:.1f}')} CPU s to embed, {between(verifying, '{:.0f}', 1000)} ms to verify"
    return f"{change}. Cost: {cost}."


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
