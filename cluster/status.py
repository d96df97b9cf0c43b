"""The workers of a cluster as a table, from the coordinator's `GET /cluster`."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.errors import ClusterError
from cluster.supervisor import natural_order

ANSWER_S = 5.0
STATE_STYLES = {"ready": "green", "lost": "red", "refused": "red", "draining": "yellow", "left": "dim"}


class Load(msgspec.Struct, frozen=True):
    """What is shown of a worker's load; the coordinator sends more."""

    waiting: int = 0
    running: int = 0
    reserved: int = 0
    exporting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    tokens_per_s: float = 0.0


class Worker(msgspec.Struct, frozen=True):
    id: str
    role: str
    state: str
    load: Load | None = None  # None: of a worker that is gone
    reason: str = ""


class Link(msgspec.Struct, frozen=True):
    prefill: str
    decode: str
    up: bool
    transport: str = ""
    path: str = ""
    gb_per_s: float = 0.0
    reason: str = ""


class ClusterReport(msgspec.Struct, frozen=True):
    workers: list[Worker]
    links: list[Link] = []
    model: str | None = None
    policy: str = ""


def fetch_report(client: httpx.Client, url: str, api_key: str) -> Any:
    """The report as the coordinator sent it.

    Raises:
        ClusterError: it does not answer, or refuses.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = client.get(f"{url}/cluster", headers=headers, timeout=ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ClusterError(f"{url} does not answer: {error}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ClusterError(f"{url} wants an API key: give --api-key")
    if answer.status_code != httpx.codes.OK:
        raise ClusterError(f"{url}/cluster answers {answer.status_code}")
    try:
        return msgspec.json.decode(answer.content)
    except msgspec.DecodeError as error:
        raise ClusterError(f"{url}/cluster answers something else than JSON: is it a kvrelay coordinator?") from error


def render_report(raw: Any, url: str) -> RenderableType:
    """
    Raises:
        ClusterError: the report has another form.
    """
    try:
        report = msgspec.convert(raw, ClusterReport)
    except msgspec.ValidationError as error:
        raise ClusterError(f"{url}/cluster has an unknown form: {error}") from error
    title = f"{url}   model {report.model or 'none yet'}   policy {report.policy or 'unknown'}"
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "role", "state"):
        table.add_column(name)
    for name in ("queue", "running", "hand-offs", "free blocks", "cached", "tokens/s"):
        table.add_column(name, justify="right")
    for worker in sorted(report.workers, key=lambda worker: (worker.role, *natural_order(worker.id))):
        state = Text(worker.state, style=STATE_STYLES.get(worker.state, ""))
        figures = _figures(worker.load) if worker.load else (worker.reason, "", "", "", "", "")
        table.add_row(worker.id, worker.role, state, *figures)
    if not report.workers:
        table.add_row("no worker has registered yet", *[""] * 8)
    broken = [
        Text(f"no link {link.prefill} → {link.decode}: {link.reason or 'unknown reason'}", style="red")
        for link in report.links
        if not link.up
    ]
    return Group(Text(title, style="bold"), table, *broken)


def _figures(load: Load) -> tuple[str, ...]:
    return (
        str(load.waiting),
        str(load.running),
        str(load.reserved + load.exporting),
        f"{load.blocks_free}/{load.blocks_total}",
        str(load.blocks_cached),
        f"{load.tokens_per_s:.1f}",
    )
