"""The worlds of the contract suite, one per transport. After each test nothing is left: no descriptor, thread, file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transport_world import KINDS, SMALL_LIMIT, World, make_world, warm_up_pyzmq, warm_up_ucx

from transport.ucx import is_installed as ucx_is_installed


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    warm_up_pyzmq()
    if ucx_is_installed():
        asyncio.run(warm_up_ucx())


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async for made in make_world(request.param, tmp_path):
        yield made


@pytest.fixture(params=KINDS)
async def narrow(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Little may be on its way."""
    async for made in make_world(request.param, tmp_path, max_in_flight_bytes=SMALL_LIMIT, max_message_bytes=SMALL_LIMIT):
        yield made


@pytest.fixture(params=[kind for kind in KINDS if kind != "inproc"])
async def apart(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Transports that connect processes."""
    async for made in make_world(request.param, tmp_path, liveness_s=0.4):
        yield made
