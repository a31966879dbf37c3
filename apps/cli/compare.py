"""``deepseal watermark compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli.common import Json, Params, RecordFile, Seed, remark, running
from deepseal.apps.cli.exits import Exit

ATTACKS = "quick, standard, full or none; or attacks with commas, such as prune?sparsity=0.8,fine-tune?epochs=5."


def compare(
    data: Annotated[
        list[str], typer.Option("--data", help="Data as in `model train`; repeatable.", show_default=False)
    ],
    arch: Annotated[
        list[str], typer.Option("--arch", help="Architecture as in `model train`; repeatable.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of cells, models and reports.", show_default=False)],
    schemes: Annotated[str, typer.Option("--schemes", help="all, or names with commas.")] = "all",
    attacks: Annotated[str, typer.Option("--attacks", help=ATTACKS)] = "standard",
    seeds: Annotated[int, typer.Option("--seeds", help="Nets to mark (M), a seed each.", min=1)] = 3,
    payloads: Annotated[int, typer.Option("--payloads", help="Keys a net and scheme (D).", min=1)] = 1,
    nets: Annotated[int, typer.Option("--nets", help="Further nets that know nothing of any key.", min=0)] = 6,
    keys: Annotated[int, typer.Option("--keys", help="Strangers' keys a mark, for the null.", min=0)] = 1000,
    sizes: Annotated[
        str, typer.Option("--sizes", help="Capacity: factors of each scheme's size; or none.")
    ] = "0.25,2,8",
    epochs: Annotated[int, typer.Option("--epochs", help="Passes of the owner's training.", min=1)] = 10,
    limit: Annotated[int | None, typer.Option("--limit", help="Most training samples used.", min=100)] = None,
    false_positive: Annotated[float, typer.Option("--false-positive", help="Rate of every verdict.")] = 1e-6,
    param: Params = None,
    seed: Seed = 0,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what it would take.")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Measure nothing; report what is there.")] = False,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Compare schemes by eight criteria and by MPAI-NNW, on every pair of data and architecture.

    All verdicts are the schemes' own at the stated rate. The folder keeps a small file for every cell: an interrupted
    comparison goes on when the same command is given again. It ends with record.json, report.html and tables.md there.
    Parameters of a scheme are given as -p scheme.name=value, those of the owner's training as -p owner.name=value.
    Exit code: 3 where no scheme could be embedded anywhere.
    """
    own = tuple(out / name for name in ("record.json", "report.html", "tables.md"))
    with running("watermark.compare", json=json, record=record, force=True, seed=seed, inputs=own) as (run, finished):
        from deepseal.apps.compare.plan import Plan, parse_attacks, parse_owner, parse_schemes, parse_sizes
        from deepseal.apps.compare.run import Mode
        from deepseal.apps.compare.run import compare as run_comparison

        compared = parse_schemes(schemes, param or [])
        plan = Plan(
            data=tuple(data),
            archs=tuple(arch),
            schemes=compared,
            attacks=parse_attacks(attacks),
            seeds=seeds,
            first_seed=seed,
            payloads=payloads,
            nets=nets,
            keys=keys,
            sizes=parse_sizes(sizes),
            epochs=epochs,
            owner=parse_owner(param or [], [name for name, _ in compared]),
            limit=limit,
            false_positive=false_positive,
        )
        mode: Mode = "estimate" if estimate else "report" if report_only else "all"
        run_comparison(run, plan, out, say=remark, mode=mode)
        if not estimate and not any(pair["schemes"] for pair in run.results["pairs"]):
            remark("no mark could be embedded: see `refused`")
            finished.code = Exit.UNDECIDED
