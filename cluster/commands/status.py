"""`kvrelay status`: a live table of a cluster's workers."""

from __future__ import annotations

import os
import time
from typing import Annotated

import httpx
import msgspec
import typer
from rich.live import Live

from cluster.console import result_console
from cluster.errors import ClusterError
from cluster.run_directory import find_cluster
from cluster.status import fetch_report, render_report
from service_kit.settings import API_KEY_VARIABLE


def status(
    url: Annotated[str | None, typer.Option(help="the coordinator; default: the local cluster that runs")] = None,
    port: Annotated[int | None, typer.Option(help="the local cluster's port, where several run")] = None,
    once: Annotated[bool, typer.Option("--once", help="print the table once and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the coordinator's report as JSON, once")] = False,
    interval: Annotated[float, typer.Option(help="seconds between updates", min=0.1)] = 1.0,
    api_key: Annotated[str, typer.Option(help="where the coordinator wants one", envvar=API_KEY_VARIABLE)] = "",
) -> None:
    """Show the workers: state, queue, running sequences, free blocks, tokens per second."""
    base = (url or find_cluster(port, os.environ).url).rstrip("/")
    console = result_console()
    with httpx.Client(trust_env=url is not None) as client:
        if as_json:
            console.print(msgspec.json.format(msgspec.json.encode(fetch_report(client, base, api_key)), indent=2).decode())
        elif once or not console.is_terminal:
            console.print(render_report(fetch_report(client, base, api_key), base))
        else:
            _show_live(client, base, api_key, interval)


def _show_live(client: httpx.Client, url: str, api_key: str, interval_s: float) -> None:
    """Until Ctrl-C, or until the coordinator stops answering."""
    try:
        with Live(
            render_report(fetch_report(client, url, api_key), url), console=result_console(), auto_refresh=False
        ) as live:
            while True:
                time.sleep(interval_s)
                live.update(render_report(fetch_report(client, url, api_key), url), refresh=True)
    except KeyboardInterrupt:
        return
    except ClusterError as error:
        raise ClusterError(f"the cluster is gone: {error}") from error
