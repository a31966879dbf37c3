"""``deepseal watermark keygen | embed | verify | inspect | compare``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepseal.apps.cli import compare as compare_
from deepseal.apps.cli import remote as remote_
from deepseal.apps.cli.common import (
    PASSPHRASE,
    Arch,
    Data,
    Force,
    Json,
    KeyFile,
    ModelFile,
    Out,
    Params,
    PassphraseFile,
    Pickle,
    Rate,
    RecordFile,
    Seed,
    parameters,
    passphrase,
    progress,
    remark,
    running,
)
from deepseal.apps.cli.exits import VERDICT_EXIT
from deepseal.errors import InputError

if TYPE_CHECKING:
    from deepseal.adapter import BlackBox
    from deepseal.watermark import Key

app = typer.Typer(help="Mark models and decide whether a model carries a mark.", no_args_is_help=True)


@app.command()
def keygen(
    model: ModelFile,
    data: Data,
    out: Out,
    owner: Annotated[str, typer.Option("--owner", help="Text of the message, such as the owner's name.")],
    scheme: Annotated[str, typer.Option("--scheme", help="Watermarking scheme (see `deepseal info`).")] = "deepsigns",
    param: Params = None,
    independent: Annotated[
        list[Path] | None,
        typer.Option("--independent", help="Unmarked model of the same task and architecture; may be given again."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Only for experiments: a seeded key can be guessed.", min=0)
    ] = None,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Ask for a passphrase in the terminal.")] = False,
    passphrase_file: PassphraseFile = None,
    arch: Arch = None,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Draw the owner's key. Its secret comes from the operating system; the file is readable by its owner only."""
    with running(
        "watermark.keygen", json=json, record=record, force=force, seed=seed, out=out, inputs=(model, passphrase_file)
    ) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps.workflow import load_model, make_key

        secret = passphrase(passphrase_file, new=True, prompt=encrypt)
        if encrypt and secret is None:
            do = f"run in a terminal, use --passphrase-file or set {PASSPHRASE}"
            raise InputError("a passphrase for --encrypt", found="no terminal to ask in", do=do)
        if secret is None:
            remark(f"the key file is not encrypted; use --encrypt, --passphrase-file or {PASSPHRASE} to protect it")
        dataset = load_data(data)
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        others = [
            load_model(path, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
            for path in independent or ()
        ]
        make_key(
            run,
            model=loaded,
            independent=others,
            report=progress,
            dataset=dataset,
            scheme=scheme,
            params=parameters(param),
            owner=owner,
            seed=seed,
            out=out,
            passphrase=secret,
            force=force,
        )


@app.command()
def embed(
    model: ModelFile,
    data: Data,
    key: KeyFile,
    out: Out,
    arch: Arch = None,
    passphrase_file: PassphraseFile = None,
    max_false_positive: Rate = 1e-9,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Embed the key's mark into a copy, and read it back from the saved file in a fresh process."""
    with running(
        "watermark.embed",
        json=json,
        record=record,
        force=force,
        seed=seed,
        out=out,
        inputs=(model, key, passphrase_file),
    ) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps.workflow import embed_mark, load_model

        opened, secret = _open(key, passphrase_file)
        dataset = load_data(data)
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset, key=opened)
        run.params.update(model=str(model), key=str(key))
        embed_mark(
            run,
            model=loaded,
            dataset=dataset,
            key=opened,
            key_file=key,
            passphrase=secret,
            seed=seed,
            out=out,
            force=force,
            max_false_positive=max_false_positive,
            trust=["--arch", arch] if arch else [],
            report=progress,
        )
        for warning in run.results["warnings"] if json else ():
            remark(warning)


@app.command()
def verify(
    key: KeyFile,
    model: remote_.LocalModel = None,
    url: remote_.Url = None,
    name: remote_.Name = None,
    output: remote_.Answers = None,
    batch: remote_.Batch = 64,
    max_queries: remote_.MaxQueries = None,
    timeout: remote_.Timeout = 30.0,
    tls_ca: remote_.Authority = None,
    allow_plain: remote_.Plain = False,
    max_false_positive: Rate = 1e-9,
    null_keys: Annotated[int, typer.Option("--null-keys", help="Random keys for the empirical null.", min=0)] = 200,
    tried: Annotated[
        int, typer.Option("--tried", help="Keys or models among which this pair was chosen; divides the rate.", min=1)
    ] = 1,
    align: Annotated[
        Path | None,
        typer.Option("--align", help="Your original; a suspect whose neurons were moved, scaled or added is put back."),
    ] = None,
    arch: Arch = None,
    align_arch: Annotated[
        str | None, typer.Option("--align-arch", help="Architecture of --align, if its file names none and not --arch.")
    ] = None,
    passphrase_file: PassphraseFile = None,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Decide whether a model carries the key's mark. Exit code: 0 owned, 1 not owned, 3 inconclusive.

    A model at a server (--url) can be asked only with the key of a black-box scheme. With --align the rate is
    halved, and a suspect in which too few of the original's neurons are found is inconclusive; best align to the model
    as it was before it was marked.
    """
    inputs = (model, key, align)
    with running("watermark.verify", json=json, record=record, force=force, inputs=inputs) as (run, finished):
        from deepseal.apps.workflow import load_model, load_pair, verify_mark

        remote_.check_source(model, url, name)
        opened, _ = _open(key, passphrase_file)
        run.params.update(key=str(key))
        original = None
        if align is not None and model is not None:
            loaded, original = load_pair(
                model,
                align,
                arch=arch,
                original_arch=align_arch,
                insecure_allow_pickle=insecure_allow_pickle,
                key=opened,
            )
            run.params.update(model=str(model), align=str(align))
            suspect: AbstractContextManager[BlackBox] = nullcontext(loaded)
        elif align is not None or align_arch is not None:
            found = "--url" if model is None else "--align-arch alone"
            raise InputError("--align with the suspect's weights", found=found, do="give --model and --align")
        elif model is not None:
            loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, key=opened)
            run.params.update(model=str(model))
            suspect = nullcontext(loaded)
        else:
            suspect = remote_.asking(
                run,
                opened.spec,
                url=str(url),
                name=name,
                output=output,
                batch=batch,
                max_queries=max_queries,
                timeout=timeout,
                tls_ca=tls_ca,
                allow_plain=allow_plain,
            )
        with suspect as asked:
            verdict = verify_mark(
                run,
                model=asked,
                key=opened,
                max_false_positive=max_false_positive,
                null_keys=null_keys,
                tried=tried,
                original=original,
            )
        for warning in run.results["warnings"] if json else ():
            remark(warning)
        finished.code = VERDICT_EXIT[verdict]


@app.command()
def inspect(
    model: Annotated[Path | None, typer.Option("--model", help="Weights file: shows what each layer can hold.")] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Key file: shows what is not secret in it.")] = None,
    param: Params = None,
    arch: Arch = None,
    data: Annotated[str | None, typer.Option("--data", help="Gives the input spec to files without one.")] = None,
    passphrase_file: PassphraseFile = None,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Capacity of each layer before embedding (--model), or the public part of a key (--key)."""
    with running("watermark.inspect", json=json, record=record, force=force, inputs=(model, key)) as (run, _):
        if (model is None) == (key is None):
            raise InputError("either --model or --key", found="both" if model else "neither", do="give one of them")
        if key is not None:
            opened, _secret = _open(key, passphrase_file)
            run.params.update(key=str(key))
            run.fingerprints.update(key=opened.fingerprint())
            run.results.update(
                dict(opened.public),
                scheme=opened.scheme,
                owner=opened.owner,
                triggers=opened.triggers,
                reproducible=opened.reproducible,
                scheme_params=dict(opened.params),
                spec=opened.spec.as_dict(),
            )
            return
        import dataclasses

        from deepseal.adapter import load_data
        from deepseal.apps.workflow import load_model
        from deepseal.watermark import DeepSigns

        assert model is not None  # noqa: S101
        dataset = load_data(data) if data else None
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        layers = DeepSigns.from_mapping(parameters(param)).capacity(loaded)
        run.params.update(model=str(model))
        run.fingerprints.update(model=loaded.fingerprint())
        run.results.update(
            layers=[dataclasses.asdict(layer) for layer in layers],
            limit=sum(layer.limit for layer in layers),
            advised=sum(layer.advised for layer in layers),
        )


def _open(path: Path, passphrase_file: Path | None) -> tuple[Key, str | None]:
    from deepseal.watermark.keyfile import is_encrypted, load_key

    secret = passphrase(passphrase_file) if is_encrypted(path) else None
    return load_key(path, passphrase=secret), secret


app.command()(compare_.compare)
