"""Every fault in every stage over every transport: `./scripts/test -m chaos`. What the cells are: `chaos_cells.py`."""

from __future__ import annotations

import pytest
from chaos_cells import CELLS, CannotHappen, Cell, run_cell
from chaos_shared import Recorder, SharedCluster
from chaos_table import TRANSPORTS

from transport.registry import available_schemes

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
    pytest.mark.allow_leaks("the cells share a cluster, whose workers are started again"),
]


@pytest.mark.parametrize(
    ("transport", "cell"),
    [pytest.param(transport, cell, id=f"{transport}-{cell.name}") for transport in TRANSPORTS for cell in CELLS],
)
async def test_chaos(transport: str, cell: Cell, shared: SharedCluster, record: Recorder) -> None:
    if transport.partition("-")[0] not in available_schemes():
        pytest.skip(f"{transport} is not installed")
    cluster, stager = await shared.use(transport)
    try:
        record(cell, transport, await run_cell(cluster, stager, cell))
    except CannotHappen as reason:
        record(cell, transport, "–")
        pytest.skip(str(reason))
    except BaseException as error:
        record(cell, transport, "**failed**")
        await shared.discard(error)
        raise
