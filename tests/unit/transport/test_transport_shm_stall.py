"""An owner that loses its core in the middle of a change of its window table: writers wait, they are not refused."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from transport import shm
from transport.base import ByteRange, Channel, Region, RemoteRegion, Write
from transport.errors import PlacementRefused
from transport.options import TransportOptions
from transport.shm import ShmTransport, decode_descriptor
from transport.shm_segment import map_segment
from transport.shm_windows import CONTROL_BYTES, SLOTS

SMALL, LARGE = 4096, 8 << 20  # copied on the loop, and in a thread


@dataclass
class Pair:
    region: Region
    remote: RemoteRegion
    table: mmap.mmap

    def begin_or_end_change(self) -> None:
        np.frombuffer(self.table, np.uint64, 3)[1] += np.uint64(1)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    near, far = ShmTransport(TransportOptions()), ShmTransport(TransportOptions())
    over = asyncio.Event()

    async def keep(channel: Channel) -> None:
        await over.wait()

    listener = await far.listen(f"ipc://{tmp_path}/owner.sock", keep)
    channel = await near.connect(listener.address, asyncio.get_running_loop().time() + 5)
    region = far.create_region(LARGE)
    region.open_window(1, [ByteRange(0, LARGE)])
    table = map_segment(decode_descriptor(region.descriptor()))
    yield Pair(region, await channel.open_region(region.descriptor()), table)
    table.close()
    over.set()
    await near.close()
    await far.close()


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_a_put_waits_until_the_owner_goes_on(pair: Pair, nbytes: int) -> None:
    pair.begin_or_end_change()
    put = asyncio.create_task(pair.remote.put(1, [Write(0, b"\x07" * nbytes)]))
    done, _ = await asyncio.wait([put], timeout=0.1)  # far longer than a look at the table takes
    assert not done
    assert not any(pair.region.memory[:nbytes])
    pair.begin_or_end_change()
    await asyncio.wait_for(put, 10)
    assert pair.region.memory[:nbytes] == b"\x07" * nbytes


async def test_a_window_that_this_change_closes(pair: Pair) -> None:
    pair.begin_or_end_change()
    put = asyncio.create_task(pair.remote.put(1, [Write(0, b"\x07")]))
    await asyncio.sleep(0)
    np.frombuffer(pair.table, np.uint64, 3 * SLOTS, CONTROL_BYTES - 3 * 8 * SLOTS)[2 * SLOTS :] = 0  # their sizes
    pair.begin_or_end_change()
    with pytest.raises(PlacementRefused, match="no window"):
        await asyncio.wait_for(put, 10)
    assert pair.region.memory[0] == 0


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
async def test_an_owner_that_never_goes_on(pair: Pair, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_PATIENCE_S", 0.05)
    pair.begin_or_end_change()
    with pytest.raises(PlacementRefused, match="rest"):
        await pair.remote.put(1, [Write(0, bytes(nbytes))])
    pair.begin_or_end_change()
    await pair.remote.put(1, [Write(0, b"\x07")])
    assert pair.region.memory[0] == 7
