"""Markdown tables of the private-inference benchmark, from its records alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from private_networks import NETWORKS

from deepseal.record import Record

Records = dict[tuple[str, str], Record]
_PEERS = {
    "spu": "SPU CHEETAH: two parties, semi-honest, fixed point with probabilistic truncation; inputs shared beforehand",
    "crypten": "CrypTen: **not** two-party security: a trusted first party makes the multiplication triples for both;"
    " what two parties would pay to make them is not in its figures",
}


_ALIKE = (
    "Batch 1, loopback, two processes, each pinned to a core of its own, the same networks and samples. The peers stop"
    " at the logits, DeepSeal at the label. The peers' bytes are those of the loopback device, with all headers."
)


def summary(records: list[Record]) -> str:
    by_cell = {(record.params["net"], record.params["cell"]): record for record in records}
    lines = ["# Private inference", "", "Made by `make benchmark-private` from the records in this folder.", ""]
    lines += [*_about(records), ""]
    for part in (_accuracy, _modes, _setup, _links, _beside, _memory, _failures):
        lines += part(by_cell)
    return "\n".join(lines).rstrip() + "\n"


def _about(records: list[Record]) -> Iterator[str]:
    if not records:
        yield "No records yet."
        return
    cpus = sorted({str(record.environment.get("cpus")) for record in records})
    days = sorted({record.started[:10] for record in records})
    loads = [record.results["load"]["before"][0] for record in records if "load" in record.results]
    yield (
        f"One machine with {', '.join(cpus)} CPUs, {' to '.join(dict.fromkeys((days[0], days[-1])))}; each party a"
        " process pinned to a core of its own; medians, with the lowest and highest in brackets. Bytes are those of"
        " frames with their headers, without what TLS and TCP add. Semi-honest parties."
    )
    codes = {record.params["code"] for record in records if "mode" in record.params}
    if len(codes) > 1:
        yield f"**The cells of the protocol were made by {len(codes)} versions of the code**: run them again."
    if loads:
        yield f"Load of the machine when a cell began: {min(loads):.1f} to {max(loads):.1f} (a quiet machine: below 1)."


def _accuracy(records: Records) -> Iterator[str]:
    yield from (
        "## Accuracy and equality",
        "",
        "Program against float network on the same test samples, in %; the difference in points with its 95 % interval."
        " Equal: answers of two processes that are the simulator's, of all asked (labels, and all logits of a program"
        " that permits them).",
        "",
        "| network | data | n | float | program | difference | same label | equal: labels | equal: logits |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    for net in NETWORKS.values():
        found, equal = (_results(records, net.name, cell) for cell in ("accuracy", "equality"))
        if not found and not equal:
            continue
        row = [net.title, _data(records, net.name)]
        if found:
            gap = found["difference"]
            row += [
                f"{found['accuracy']['n']:,}",
                f"{100 * found['float_accuracy']['value']:.2f}" if net.recipe else "(random weights)",
                f"{100 * found['accuracy']['value']:.2f}" if net.recipe else "",
                f"{100 * gap['value']:+.2f} ({100 * gap['low']:+.2f} to {100 * gap['high']:+.2f})"
                if net.recipe
                else "",
                f"{100 * found['agreement']['value']:.2f}",
            ]
        else:
            row += [""] * 5
        for permits in ("label", "logits"):
            row.append(f"{equal[permits]['equal']} of {equal[permits]['n']}" if equal else "")
        yield _row(row)
    yield ""


def _data(records: Records, net: str) -> str:
    for (name, _), record in records.items():
        for note in record.notes if name == net else ():
            if note.startswith("data: "):
                return note.removeprefix("data: ")
    return ""


def _modes(records: Records) -> Iterator[str]:
    yield from (
        "## Online, loopback",
        "",
        "From the question to the answer, without the set-up of the session; the extension of the correlated oblivious"
        " transfers is part of it and shown apart.",
        "",
        "| network | mode | n | milliseconds | a sample | sent, MB | received, MB | of it COT extension | ahead |"
        " estimated, ms (of measured) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    for net, cell, found in _timed(records, links=False):
        batch = found["batch"]
        cot, ahead = found.get("cot_extension"), found.get("prepared")
        yield _row(
            [
                net,
                cell,
                str(found["n"]),
                _spread(found["online_ms"]),
                _number(found["online_ms"]["median"] / batch),
                _megabytes(found["bytes_sent"]),
                _megabytes(found["bytes_received"]),
                f"{_number(cot['ms'])} ms, {cot['bytes'] / 1e6:.3f} MB" if cot else "",
                f"{_spread(ahead['ms'])} ms, {ahead['bytes'] / 1e6:.3f} MB" if ahead else "",
                _estimate(found),
            ]
        )
    yield ""


def _estimate(found: dict[str, Any]) -> str:
    said = found.get("estimate")
    return f"{_number(said['ms'])} ({said['ms_ratio']:.2f}; bytes {said['bytes_ratio']:.3f})" if said else ""


def _setup(records: Records) -> Iterator[str]:
    yield from (
        "## Set-up of a session",
        "",
        "| network | mode | n | milliseconds | handshake | base OT | bytes | first question, ms |",
        "|---|---|---|---|---|---|---|---|",
    )
    for net, cell, found in _timed(records, links=None):
        own = found["setup"]
        parts = [_spread(own.get(key)) for key in ("ms", "handshake_ms", "base_ot_ms")]
        yield _row([net, cell, str(own["n"]), *parts, f"{own['bytes']:,}", _spread(found["first_ms"])])
    yield ""


def _links(records: Records) -> Iterator[str]:
    rows = list(_timed(records, links=True))
    if not rows:
        return
    yield from (
        "## LAN and WAN",
        "",
        "Two network namespaces; `tbf` shapes the bandwidth of a veth pair, a userspace relay adds the latency (`netem`"
        " is not everywhere). The relay never narrows a window: slow start is not modelled. The relay and the network"
        " stack share the machine's cores with the parties.",
        "",
        "| network | cell | link as measured | n | milliseconds | MB | set-up, ms | estimated, ms (of measured) |",
        "|---|---|---|---|---|---|---|---|",
    )
    for net, cell, found in rows:
        link = found["link"]
        rates = (link["bits_per_second_to_server"] / 1e6, link["bits_per_second_to_client"] / 1e6)
        measured = f"{rates[0]:.0f} and {rates[1]:.0f} Mbit/s, {link['round_trip_ms']['median']:.2f} ms"
        total = max(found["bytes_sent"]) + max(found["bytes_received"])
        yield _row(
            [
                net,
                cell,
                measured,
                str(found["n"]),
                _spread(found["online_ms"]),
                f"{total / 1e6:.2f}",
                _spread(found["setup"]["ms"]),
                _estimate(found),
            ]
        )
    yield ""


def _beside(records: Records) -> Iterator[str]:
    seen = [name for name in _PEERS if any(cell == name for _, cell in records)]
    if not seen:
        return
    yield from ("## Beside the peers", "", _ALIKE, "")
    for name in seen:
        record = next(record for (_, cell), record in records.items() if cell == name)
        yield f"- {_PEERS[name]}. {record.results.get('version', '')}"
    yield from (
        "",
        "| network | system | later runs, ms | n | MB | first run, ms | same label as float | largest logit error |",
        "|---|---|---|---|---|---|---|---|",
    )
    for net in NETWORKS.values():
        own = _results(records, net.name, "mixed-1")
        if own:
            total = max(own["bytes_sent"]) + max(own["bytes_received"])
            agreed = _results(records, net.name, "accuracy")
            same = f"{100 * agreed['agreement']['value']:.2f} % of {agreed['agreement']['n']:,}" if agreed else ""
            yield _row([net.title, "DeepSeal mixed", _spread(own["online_ms"]), str(own["n"]), f"{total / 1e6:.2f}",
                        f"{_number(own['setup']['ms']['median'])} set-up + {_number(own['first_ms']['median'])}",
                        same, "label only"])  # fmt: skip
        for name in seen:
            its = _results(records, net.name, name)
            if not its:
                continue
            for label, run in its.get("runs", {}).items():
                title = f"{name}, {label}" + (" (trusted first party)" if name == "crypten" else "")
                if "error" in run:
                    yield _row([net.title, title, f"failed: {_cell(run['error'])}", "", "", "", "", ""])
                    continue
                yield _row([net.title, title, _spread(run["later_ms"]), str(run["later_n"]),
                            f"{run['bytes'] / 1e6:.2f}" if run["bytes"] else "not measured", _number(run["first_ms"]),
                            f"{run['same_label']} of {run['samples']}", f"{run['largest_error']:.2g}"])  # fmt: skip
    yield ""


def _memory(records: Records) -> Iterator[str]:
    yield from (
        "## Peak memory",
        "",
        "Resident, in MiB; in brackets what a process holds once program and weights are loaded, most of it PyTorch.",
        "",
        "| network | mode | server | client |",
        "|---|---|---|---|",
    )
    for net, cell, found in _timed(records, links=False):
        sides = [f"{found[side]['peak_kib'] / 1024:.0f} ({found[side]['loaded_kib'] / 1024:.0f})"
                 for side in ("server", "client")]  # fmt: skip
        yield _row([net, cell, *sides])
    yield ""


def _failures(records: Records) -> Iterator[str]:
    failed = [record for record in records.values() if record.status != "ok"]
    if failed:
        yield from ("## Failed cells", "")
        for record in failed:
            yield f"- {record.params['net']} {record.params['cell']}: {_cell(record.error or '')}"
        yield ""


def _timed(records: Records, *, links: bool | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for net in NETWORKS.values():
        for (name, cell), record in sorted(records.items(), key=lambda item: (item[0][1].count("-"), item[0])):
            timed = name == net.name and record.status == "ok" and "online_ms" in record.results
            if timed and links in (None, "link" in record.results):
                yield net.title, cell, record.results


def _results(records: Records, net: str, cell: str) -> dict[str, Any]:
    record = records.get((net, cell))
    return record.results if record is not None and record.status == "ok" else {}


def _row(values: list[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:200]


def _megabytes(values: list[int]) -> str:
    return " to ".join(f"{value / 1e6:.3f}" for value in dict.fromkeys((values[0], values[-1])))


def _spread(value: dict[str, float] | None) -> str:
    if not value:
        return ""
    return f"{_number(value['median'])} ({_number(value['lowest'])} to {_number(value['highest'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
