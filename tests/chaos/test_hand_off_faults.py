"""Hand-offs that go wrong between real processes: the answer is right all the same, and nothing stays held.

The fake runner's tokens depend on every byte of KV, so a byte that got past the checksums would change the text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from chaos_cluster import BLOCK, ChaosCluster, chaos_cluster
from chaos_stages import Outcome, Running, Stager

from coordinator.generation import GenerationError
from coordinator.life_state import State
from prefill_service.decode_link import DecodeLink, LinkIdentity
from service_kit.process_mark import OwnMark
from transport.base import Write
from transport.errors import PlacementRefused
from transport.options import TransportOptions
from transport.registry import available_schemes, create_transport
from wire.control import DecodePeer, Role
from wire.handoff import BlocksPlaced, HandoffOpen, ToPrefill
from wire.ids import HandoffId, RequestId, WorkerId, new_incarnation

TRANSPORTS = (
    "zmq",
    "shm",
    pytest.param("zmq-ipc", marks=pytest.mark.slow),
    pytest.param(
        "ucx",
        marks=[pytest.mark.slow, pytest.mark.skipif("ucx" not in available_schemes(), reason="ucxx is not installed")],
    ),
)
END_S = 40.0
PROMPT, TOKENS = 300, 6


@pytest.fixture(params=TRANSPORTS)
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ChaosCluster]:
    async with chaos_cluster(tmp_path / "c", request.param) as running:
        yield running


async def end_of(running: Running) -> Outcome:
    async with asyncio.timeout(END_S):
        return await running.task


async def under(cluster: ChaosCluster, stager: Stager, role: str, rule: str) -> Outcome:
    """One request while this fault is armed; it has struck."""
    worker = cluster.worker(role)
    before = worker.strikes(rule)
    worker.arm(rule)
    outcome = await end_of(await stager.start(PROMPT, TOKENS))
    assert worker.strikes(rule) > before, f"{rule} never struck"
    worker.arm()
    assert outcome.is_right, f"{rule}: wrong text {outcome.tokens}"
    assert outcome.error is None, f"{rule}: {outcome.error.message}" if outcome.error else rule
    return outcome


async def test_L7_what_is_lost_or_damaged_on_the_way_is_never_in_the_answer(cluster: ChaosCluster) -> None:
    """1. A flipped bit, a lost block, a short write, a put whose halves change places: sent again, nobody notices.
    2. A connection that is reset in the middle: the prompt is computed anew. 3. KV that is damaged on every try: D computes
    it itself. 4. Everything empty, and a clean hand-off works."""
    stager = Stager(cluster)
    for rule in ("corrupt:put:nth=1", "drop:put:nth=2", "drop:put:nth=1:share=0.3", "reorder:put", "duplicate:put"):
        outcome = await under(cluster, stager, "prefill", rule)
        assert outcome.fallback is None, rule
    for rule in ("cut:put:nth=2", "corrupt:send:header=blocks-placed:nth=1"):
        await under(cluster, stager, "prefill", rule)
        await cluster.until(cluster.is_linked, END_S, "P is linked again")
    failures = cluster.seen("decode").handoff_failures
    outcome = await under(cluster, stager, "prefill", "corrupt:put")
    assert outcome.fallback == "transfer_failed"
    await cluster.until(lambda: cluster.seen("decode").handoff_failures > failures, END_S, "D counts the failure")
    assert "corrupt blocks" in cluster.worker("decode").log()
    await cluster.assert_empty(timeout_s=20.0)
    last = await end_of(await stager.whole_pool())
    assert last.is_right
    assert last.fallback is None
    await cluster.assert_empty()


class Rogue:
    """A prefill worker of the test's own, linked to the real decode worker, that says and writes what it likes."""

    def __init__(self) -> None:
        self.link: DecodeLink | None = None
        self.up = asyncio.Event()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_link_up(self, link: DecodeLink) -> None:
        self.link = link
        self.up.set()

    def on_link_lost(self, link: DecodeLink, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    def on_handoff_message(self, link: DecodeLink, message: ToPrefill) -> None:
        return


@asynccontextmanager
async def rogue_linked(cluster: ChaosCluster) -> AsyncIterator[Rogue]:
    (decode,) = (one.info for one in cluster.dispatcher.view.members.values() if one.info.role is Role.DECODE)
    mark = OwnMark()
    scheme = decode.endpoints[0].transport
    transport = create_transport(scheme, TransportOptions())
    identity = LinkIdentity(WorkerId("rogue"), new_incarnation(), decode.fingerprint, mark.mark, "chaos")
    rogue = Rogue()
    peer = DecodePeer(decode.worker_id, decode.incarnation, decode.endpoints)
    link = DecodeLink(peer, identity, {scheme: transport}, rogue, time.monotonic)
    linking = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(END_S):
            await rogue.up.wait()
        yield rogue
    finally:
        linking.cancel()
        with suppress(asyncio.CancelledError):
            await linking
        await transport.close()
        mark.close()


async def test_L7_a_writer_out_of_bounds_writes_nothing(tmp_path: Path) -> None:
    """1. A hand-off is under way. 2. A stranger with a link, but without its key, puts into D's pool, opens that hand-off
    and says that blocks of it, and of others, in and out of range, are there: refused. 3. The request's text is right."""
    async with chaos_cluster(tmp_path / "c", "shm") as cluster, rogue_linked(cluster) as rogue:
        link = rogue.link
        assert link is not None
        staged = await Stager(cluster).bring("transferring", hold_transfer="delay:put:seconds=2")
        attempt = staged.victim.generation._life.attempt  # type: ignore[attr-defined]
        for key in (0, 1, 2**63):
            with pytest.raises(PlacementRefused):
                await link.put(key, [Write(0, b"\xff" * BLOCK * 16)])
        link.post(HandoffOpen(attempt.handoff, attempt.request_id, 12345))
        link.post(BlocksPlaced(attempt.handoff, 0, (1, 2, 3)))
        link.post(BlocksPlaced(HandoffId("of nobody"), 10**6, (1,)))
        link.post(HandoffOpen(HandoffId("of nobody"), RequestId("r"), 1))
        outcome = await end_of(staged.victim)
        assert outcome.is_right
        assert outcome.fallback is None
        assert not rogue.lost.done(), "what is refused costs a link nothing"
        await cluster.assert_empty()


@pytest.mark.slow
@pytest.mark.allow_leaks("the worker is started again")
@pytest.mark.parametrize(
    ("role", "rule", "until"),
    [
        ("prefill", "delay:send:header=handoff-open:seconds=3", State.PREFILLING),
        ("prefill", "delay:put:seconds=3", State.HANDING_OVER),
        ("decode", "delay:send:header=handoff-ack:seconds=3", State.DECODING),
    ],
    ids=["before-the-handshake", "in-the-middle", "before-the-ack"],
)
async def test_L9_a_prefill_worker_that_dies_leaves_nobody_waiting(
    tmp_path: Path, role: str, rule: str, until: State
) -> None:
    """1. The hand-off stands still at this point. 2. `kill -9` P. 3. The text is right, D serves on, nothing is held."""
    async with chaos_cluster(tmp_path / "c", "shm") as cluster:
        stager = Stager(cluster)
        cluster.worker(role).arm(rule)
        victim = await stager.start(500, 30)
        await cluster.until(lambda: victim.state is until, END_S, f"the request is {until.value}")
        if until is State.PREFILLING:
            await cluster.until(lambda: cluster.worker(role).strikes(rule) > 0, END_S, "the word is late")
        cluster.worker("prefill").kill()
        cluster.disarm()
        cluster.restart("prefill")
        outcome = await end_of(victim)
        assert outcome.is_right
        assert outcome.error is None
        assert (outcome.fallback is None) == (until is State.DECODING)
        await cluster.wait_ready()
        await cluster.assert_empty(timeout_s=20.0)


@pytest.mark.slow
async def test_L5_cancels_while_every_put_is_slow(cluster: ChaosCluster) -> None:
    """1. 200 requests whose KV crawls, cancelled at every point of their hand-off. 2. Others beside them are right: no block
    is reused while a write may still land. 3. Everything empty; one that needs every block is served."""
    stager = Stager(cluster)
    cluster.worker("prefill").arm("delay:put:seconds=0.05")
    for start in range(0, 200, 8):
        batch = [await stager.start(PROMPT, TOKENS) for _ in range(8)]
        kept = await stager.start(PROMPT, TOKENS)
        for place, running in enumerate(batch):
            asyncio.get_running_loop().call_later(0.1 * (place + start % 5 / 5), running.generation.cancel)
        outcomes = [await end_of(running) for running in (*batch, kept)]
        assert all(outcome.is_right or outcome.error is None for outcome in outcomes[:-1])
        assert {outcome.error.status for outcome in outcomes if outcome.error is not None} <= {499}
        assert outcomes[-1].is_right
        assert outcomes[-1].error is None
    cluster.disarm()
    await cluster.assert_empty(timeout_s=20.0)
    last = await end_of(await stager.whole_pool())
    assert last.is_right
    assert last.fallback is None
    await cluster.assert_empty()


@pytest.mark.slow
async def test_L13_a_cancel_while_the_ack_is_awaited_ends_that_request_alone(tmp_path: Path) -> None:
    """1. D's acks are late. 2. One of three requests is cancelled meanwhile. 3. The others are right, by hand-off."""
    async with chaos_cluster(tmp_path / "c", "zmq") as cluster:
        stager = Stager(cluster)
        rule = "delay:send:header=handoff-ack:seconds=0.5"
        cluster.worker("decode").arm(rule)
        running = [await stager.start(PROMPT, 30) for _ in range(3)]
        await cluster.until(lambda: running[0].state is State.DECODING, END_S, "it decodes, not acked")
        running[0].generation.cancel()
        first, *others = [await end_of(one) for one in running]
        assert isinstance(first.error, GenerationError)
        assert first.error.status == 499
        for outcome in others:
            assert outcome.is_right
            assert outcome.error is None
            assert outcome.fallback is None
        cluster.disarm()
        await cluster.assert_empty(timeout_s=20.0)
