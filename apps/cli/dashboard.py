"""``deepseal dashboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli.common import remark


def dashboard(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder whose records are shown, with its subfolders.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port to listen on.", min=1, max=65535)] = 8501,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", help="An architecture of yours that uploads may name, package.module:factory."),
    ] = None,
    max_upload: Annotated[int, typer.Option("--max-upload", help="Largest upload, in MiB.", min=1, max=4096)] = 200,
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Allow an address that other machines reach: everybody may use it."),
    ] = False,
) -> None:
    """Pages to mark, verify, attack, watch and ask models, and to look at records, until Ctrl-C."""
    from deepseal.apps.dashboard.launch import launch

    launch(
        folder,
        host=host,
        port=port,
        archs=arch or [],
        upload_mib=max_upload,
        browser=not no_browser,
        allow_remote=allow_remote,
        ready=lambda url: remark(f"the dashboard is on {url}; Ctrl-C ends it"),
    )
