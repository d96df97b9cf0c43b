"""The results as a Markdown table: `python tests/chaos/chaos_table.py ROWS.jsonl…`; later rows replace earlier ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

TRANSPORTS = ("zmq", "zmq-ipc", "shm", "ucx")
NAMES = {"zmq": "zmq tcp", "zmq-ipc": "zmq ipc"}


def render(rows: Iterable[dict[str, object]]) -> str:
    """One line per fault, stage and target: the outcome (with the transports, where not all of them had it), and the slowest
    recovery of the line."""
    lines: dict[tuple[object, object, object], dict[object, dict[str, object]]] = {}
    for row in rows:
        lines.setdefault((row["fault"], row["stage"], row["target"]), {})[row["transport"]] = row
    order: dict[object, int] = {}
    for fault, _, _ in lines:
        order.setdefault(fault, len(order))
    table = ["| fault | stage | to whom | outcome | serving again, s |", "|---|---|---|---|---|"]
    for (fault, stage, target), found in sorted(lines.items(), key=lambda item: order[item[0][0]]):
        had: dict[str, list[str]] = {}
        for transport in TRANSPORTS:
            if transport in found:
                had.setdefault(str(found[transport]["outcome"]), []).append(NAMES.get(transport, transport))
        outcome = "; ".join(f"{text}: {', '.join(by)}" if len(by) < len(TRANSPORTS) else text for text, by in had.items())
        times = [row["recovered_s"] for row in found.values() if isinstance(row["recovered_s"], float)]
        slowest = f"{max(times):.1f}" if times else ""
        shown = f"{target}" if ":" not in str(target) else f"`{target}`"
        table.append(f"| {fault} | {stage} | {shown} | {outcome} | {slowest} |")
    return "\n".join(table)


def main(paths: Sequence[str]) -> None:
    print(render(json.loads(line) for path in paths for line in Path(path).read_text().splitlines()))


if __name__ == "__main__":
    main(sys.argv[1:])
