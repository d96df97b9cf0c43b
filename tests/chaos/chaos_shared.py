"""What the cells of one run share: a cluster, and the place where their results go."""

from __future__ import annotations

import json
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from chaos_cells import Cell, Result
from chaos_cluster import ChaosCluster, chaos_cluster
from chaos_stages import Stager

ROWS_VARIABLE = "CHAOS_ROWS"
"""Environment variable: a file that the results are appended to, one JSON object a line, for `chaos_table.py`."""
ROWS = pytest.StashKey[list[dict[str, object]]]()


class SharedCluster:
    """A cluster for many cells; one that a failed cell left in an unknown state is replaced."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack: AsyncExitStack | None = None
        self._started = 0
        self._transport = ""
        self._cluster: ChaosCluster | None = None
        self._stager: Stager | None = None

    async def use(self, transport: str) -> tuple[ChaosCluster, Stager]:
        if self._cluster is None or self._transport != transport:
            await self.close()
            self._started += 1
            self._stack = AsyncExitStack()
            directory = self._directory / f"{transport}-{self._started}"
            self._cluster = await self._stack.enter_async_context(chaos_cluster(directory, transport, cables=True))
            self._transport, self._stager = transport, Stager(self._cluster)
        assert self._stager is not None
        return self._cluster, self._stager

    async def discard(self, error: BaseException) -> None:
        """A cell failed: its cluster need not end well."""
        stack, self._stack, self._cluster = self._stack, None, None
        if stack is not None:
            try:
                raise error
            except BaseException as raised:
                await stack.__aexit__(type(raised), raised, raised.__traceback__)

    async def close(self) -> None:
        stack, self._stack, self._cluster = self._stack, None, None
        if stack is not None:
            await stack.aclose()


class Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._rows = config.stash.setdefault(ROWS, [])

    def __call__(self, cell: Cell, transport: str, result: Result | str) -> None:
        row: dict[str, object] = {"fault": cell.fault, "stage": cell.stage, "target": cell.target, "transport": transport}
        if isinstance(result, Result):
            row |= {"outcome": result.outcome, "recovered_s": round(result.recovered_s, 2)}
        else:
            row |= {"outcome": result, "recovered_s": None}
        self._rows.append(row)
        if path := os.environ.get(ROWS_VARIABLE):
            with Path(path).open("a") as file:
                file.write(json.dumps(row) + "\n")
