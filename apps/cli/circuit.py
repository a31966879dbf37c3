"""``deepseal private circuit run | info``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepseal.apps.cli.common import Json, RecordFile, remark, running
from deepseal.errors import InputError

if TYPE_CHECKING:
    from deepseal.secure_inference.transport import Channel, Tls

app = typer.Typer(help="Boolean circuits in Bristol Fashion.", no_args_is_help=True)

ENGINES = ("native", "emp")
Circuit = Annotated[Path, typer.Argument(help="Circuit file (Bristol Fashion).", show_default=False)]


@app.command()
def run(
    circuit: Circuit,
    role: Annotated[str, typer.Option("--role", help="garbler or evaluator.", show_default=False)],
    listen: Annotated[str | None, typer.Option("--listen", help="Wait for the other party on HOST:PORT.")] = None,
    connect: Annotated[str | None, typer.Option("--connect", help="Go to the other party on HOST:PORT.")] = None,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", help="Our input value in hexadecimal (others on this machine can see it); repeatable."),
    ] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input-file", help="File with our input values, one a line; keeps them private.")
    ] = None,
    owner: Annotated[
        list[str] | None,
        typer.Option("--owner", help="Who has each input value, in order. [default: garbler, then evaluator]"),
    ] = None,
    reader: Annotated[str, typer.Option("--reader", help="Who reads the output: both, garbler or evaluator.")] = "both",
    engine: Annotated[str, typer.Option("--engine", help="native, or emp where it is installed.")] = "native",
    ot_k: Annotated[int, typer.Option("--ot-k", help="SoftSpoken: 128/k bits are sent an OT.", min=1, max=8)] = 2,
    check_ot: Annotated[
        bool, typer.Option("--check-ot", help="Catch an evaluator that deviates in the OT extension.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Our certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")] = None,
    tls_ca: Annotated[Path | None, typer.Option("--tls-ca", help="The CA of both certificates (PEM).")] = None,
    allow_plain: Annotated[
        bool, typer.Option("--allow-plain", help="Allow no encryption also beyond this machine.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest wait for the other party, in seconds.")] = 60.0,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Compute a circuit with another party; neither sees the other's input. Both parties must be semi-honest."""
    with running("private.circuit", json=json, record=record, inputs=(circuit, input_file)) as (made, _):
        from deepseal.secure_inference.netlist import read_bristol
        from deepseal.secure_inference.protocol.circuit import (
            check_emp,
            check_readers,
            own_bits,
            owners_of,
            run_circuit,
            run_circuit_on_emp,
        )
        from deepseal.secure_inference.protocol.extension import TransferSettings
        from deepseal.secure_inference.protocol.parties import Settings

        netlist = read_bristol(circuit)
        if engine not in ENGINES:
            raise InputError(f"the engine {' or '.join(ENGINES)}", found=repr(engine), do="choose one of them")
        if role not in ("garbler", "evaluator"):
            raise InputError("the role garbler or evaluator", found=repr(role), do="choose one of them")
        if (listen is None) == (connect is None):
            found = "both" if listen else "neither"
            do = "let one party --listen and the other --connect to it"
            raise InputError("one of --listen and --connect", found=found, do=do)
        owners = owners_of(netlist, owner)
        values = _values(input or [], input_file)
        own_bits(netlist, owners, role, values)
        check_readers(reader)
        if engine == "emp":
            check_emp(reader)
        tls = tls_of(tls_cert, tls_key, tls_ca)
        made.params.update(
            circuit=circuit.name, role=role, owners=list(owners), reader=reader, engine=engine, tls=tls is not None
        )
        made.fingerprints.update(circuit=netlist.digest())
        with _meet(listen, connect, tls=tls, timeout=timeout, allow_plain=allow_plain) as channel:
            if engine == "native":
                transfer = TransferSettings(k=ot_k, checks=check_ot)
                settings = Settings(transfer)
                result = run_circuit(channel, role, netlist, values, owners=owners, readers=reader, settings=settings)
            else:
                result = run_circuit_on_emp(channel, role, netlist, values, owners=owners, readers=reader)
        shown = None if result.output is None else _hexadecimal(result.output, netlist.outputs)
        made.results.update(
            output=None if shown is None else " ".join(shown),
            outputs=shown,
            **result.as_dict(),
        )


@app.command()
def info(circuit: Circuit, json: Json = False, record: RecordFile = None) -> None:
    """Count the gates of a circuit."""
    with running("private.circuit.info", json=json, record=record, inputs=(circuit,)) as (made, _):
        from deepseal.secure_inference.netlist import read_bristol

        netlist = read_bristol(circuit)
        made.params.update(circuit=circuit.name)
        made.fingerprints.update(circuit=netlist.digest())
        made.results.update(
            inputs=list(netlist.inputs),
            outputs=list(netlist.outputs),
            gates=netlist.gates,
            and_gates=netlist.and_gates,
            xor_gates=netlist.xor_gates,
            not_gates=netlist.not_gates,
            depth=netlist.depth,
            table_bytes=32 * netlist.and_gates,
        )


def _meet(listen: str | None, connect: str | None, *, tls: Tls | None, timeout: float, allow_plain: bool) -> Channel:
    from deepseal.secure_inference import transport

    if connect is None:
        with transport.listen(listen or "", tls=tls, timeout=timeout, allow_plain=allow_plain) as listener:
            remark(f"waiting for the other party on {listener.address}")
            return listener.accept()
    return transport.connect(connect, tls=tls, timeout=timeout, retry_for=timeout, allow_plain=allow_plain)


def tls_of(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """The files of a TLS party; None where none is given.

    Raises:
        InputError: some of them but not all.
    """
    from deepseal.secure_inference.transport import Tls

    given = [path is not None for path in (certificate, key, ca)]
    if any(given) and not all(given):
        do = "give all three, or none of them"
        raise InputError("--tls-cert, --tls-key and --tls-ca", found=f"{sum(given)} of them", do=do)
    if certificate is None or key is None or ca is None:
        return None
    return Tls(certificate, key, ca)


def _values(texts: list[str], file: Path | None) -> list[int]:
    from deepseal.files import read_bytes

    if file is not None:
        if texts:
            raise InputError("--input or --input-file", found="both", do="use one of them")
        text = read_bytes(file, "a file of input values", limit=1 << 26).decode("ascii", "replace")
        texts = text.split()
    for text in texts:
        if not re.fullmatch(r"(0x)?[0-9a-fA-F]+", text):
            # The value may be a secret: it is not shown.
            do = "write big-endian hexadecimal digits, such as 0x00ff"
            raise InputError("an input value in hexadecimal", found=f"{len(text)} other characters", do=do)
    return [int(text, 16) for text in texts]


def _hexadecimal(values: tuple[int, ...], widths: tuple[int, ...]) -> list[str]:
    return [f"0x{value:0{-(-width // 4)}x}" for value, width in zip(values, widths, strict=True)]
