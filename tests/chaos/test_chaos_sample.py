"""A sample of the fault matrix for every CI run, and a short soak. The whole of it: `./scripts/test -m chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_cells import CELLS, CannotHappen, Cell, run_cell
from chaos_shared import Recorder, SharedCluster
from soak import Options, failures, soak

SAMPLE = {
    "shm": (
        ("abort", "transferring", "client"),
        ("abort, drop", "transferring", "prefill: send:header=handoff-abort"),
        ("kill -9", "prefilling", "prefill"),
        ("kill -9", "transferring", "decode"),
        ("SIGTERM", "transferring", "prefill"),
        ("SIGSTOP", "transferring", "prefill"),
        ("partition", "transferring", "p-d"),
        ("corrupt", "prefilling", "prefill: put"),
    ),
    "zmq": (
        ("abort", "queued", "client"),
        ("kill -9", "decoding", "decode"),
        ("SIGTERM", "decoding", "decode"),
        ("delay", "prefilling", "prefill: send:header=blocks-placed"),
        ("duplicate", "transferring", "prefill: send:header=handoff-complete"),
        ("corrupt", "reserved", "prefill: recv:link=control:header=prefill"),
        ("cut", "reserved", "prefill: send:header=handoff-open"),
        ("drop", "decoding", "decode: send:link=control:header=token-batch"),
    ),
}
BY_NAME = {(cell.fault, cell.stage, cell.target): cell for cell in CELLS}
CHOSEN = [(transport, BY_NAME[name]) for transport, names in SAMPLE.items() for name in names]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.allow_leaks("the cells share a cluster, whose workers are started again"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("transport", "cell"), [pytest.param(transport, cell, id=f"{transport}-{cell.name}") for transport, cell in CHOSEN]
)
async def test_chaos_sample(transport: str, cell: Cell, shared: SharedCluster, record: Recorder) -> None:
    cluster, stager = await shared.use(transport)
    try:
        record(cell, transport, await run_cell(cluster, stager, cell, recovery_s=30.0))
    except CannotHappen as reason:
        pytest.skip(str(reason))
    except BaseException as error:
        await shared.discard(error)
        raise


async def test_a_short_soak(tmp_path: Path) -> None:
    """Cancels and two kills; memory is not judged in so short a time."""
    report = await soak(tmp_path, Options(requests=400, at_once=16, cancel_within_s=0.1, kill_every_s=2.0, transport="zmq"))
    print(report.summary())
    report.memory.clear()
    assert failures(report) == []
    assert report.ends["text"] > 200, report.ends
    assert report.ends["cancelled"] > 20, report.ends
