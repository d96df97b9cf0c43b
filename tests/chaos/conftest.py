"""The cluster that the cells of one transport share, and the table of their results."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from chaos_shared import ROWS, Recorder, SharedCluster
from chaos_table import render


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedCluster]:
    cluster = SharedCluster(tmp_path_factory.mktemp("c"))
    yield cluster
    await cluster.close()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Recorder:
    return Recorder(request.config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("chaos")
        terminalreporter.write_line(render(rows))
