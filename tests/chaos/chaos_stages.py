"""Brings one request into a stage of its life, on purpose, and says how it ended.

queued         its reservation waits in D's queue: another request holds the pool
reserved       its blocks are held on D; P has not begun: it computes another prompt
prefilling     P computes it, chunk by chunk
transferring   P has drawn the first token; KV is on its way (a put stands still in the middle of its bytes)
decoding       D has drawn tokens for it
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from chaos_cluster import BLOCK, CHUNK, DECODE_BLOCKS, ChaosCluster
from fake_reference import reference

from coordinator.generation import Generation, GenerationError
from coordinator.life_state import State
from coordinator.token_stream import TokenStream

STAGES = ("queued", "reserved", "prefilling", "transferring", "decoding")
STAGE_S = 20.0
VICTIM_PROMPT = 880  # tokens: 55 of D's 64 blocks, 14 chunks
VICTIM_TOKENS = 40
HOLD_TRANSFER = "delay:put:seconds=1.5"


class StageMissed(Exception):
    """The request went through the stage before anybody looked; try again."""


@dataclass(frozen=True)
class Outcome:
    """How a request ended: all tokens, or an error object."""

    prompt: tuple[int, ...]
    max_tokens: int
    tokens: tuple[int, ...]
    error: GenerationError | None
    fallback: str | None

    @property
    def is_right(self) -> bool:
        """The whole text, or an error object behind a text that is right as far as it goes."""
        expected = reference(self.prompt, self.max_tokens)
        return list(self.tokens) == (expected if self.error is None else expected[: len(self.tokens)])

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.error.status} {self.error.code}"
        return "text" if self.fallback is None else f"text ({self.fallback})"


@dataclass
class Running:
    """One request and the task that reads it."""

    generation: Generation
    prompt: tuple[int, ...]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    task: asyncio.Task[Outcome] = field(init=False)

    def __post_init__(self) -> None:
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> Outcome:
        error = None
        try:
            async for batch in self.generation:
                self.tokens += [token.token_id for token in batch.tokens]
        except GenerationError as failure:
            error = failure
        placement = self.generation.placement
        fallback = None if placement is None else placement.fallback
        return Outcome(self.prompt, self.max_tokens, tuple(self.tokens), error, fallback)

    @property
    def state(self) -> State:
        assert isinstance(self.generation, TokenStream)
        return self.generation._life.state


async def start(cluster: ChaosCluster, prompt_tokens: int, max_tokens: int, seed: object, policy: str = "always") -> Running:
    rng = random.Random(f"{prompt_tokens} {seed}")
    prompt = tuple(rng.randrange(256) for _ in range(prompt_tokens))
    generation = await cluster.submit(prompt, max_tokens=max_tokens, policy=policy)  # type: ignore[arg-type]
    return Running(generation, prompt, max_tokens)


@dataclass
class Staged:
    """A request that stands in its stage, and whatever holds it there."""

    victim: Running
    holders: list[Running]

    async def release(self) -> None:
        """Nothing holds it any more."""
        for holder in self.holders:
            holder.generation.cancel()
        for holder in self.holders:
            assert (await holder.task).is_right

    async def end(self) -> None:
        """Whatever still runs, is not wanted any more."""
        for running in (self.victim, *self.holders):
            running.generation.cancel()
            with suppress(GenerationError):
                await running.task


class Stager:
    """Every prompt differs from all before, so that no cache shortens a stage."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self._cluster = cluster
        self._seed = 0

    async def bring(self, stage: str, *, prefill_holders: int = 2, hold_transfer: str = HOLD_TRANSFER) -> Staged:
        """
        Raises:
            StageMissed
        """
        cluster = self._cluster
        holders: list[Running] = []
        if stage == "queued":
            holders.append(await self.start(CHUNK * 6, 500, "never"))
            await self._reach(holders[0], lambda: holders[0].state is State.DECODING)
        elif stage == "reserved":
            holders += [await self.start(1000, 1) for _ in range(prefill_holders)]
            await self._reach(holders[0], lambda: cluster.seen("prefill").running >= 1)
        elif stage == "transferring":
            cluster.worker("prefill").arm(hold_transfer)
        computed = cluster.seen("prefill").prefill_tokens
        victim = await self.start(VICTIM_PROMPT, VICTIM_TOKENS)
        conditions: dict[str, Callable[[], bool]] = {
            "queued": lambda: victim.state is State.RESERVING and cluster.seen("decode").waiting >= 1,
            "reserved": lambda: (
                victim.state is State.PREFILLING
                and cluster.seen("prefill").waiting >= 1
                and cluster.seen("decode").reserved >= 1
            ),
            "prefilling": lambda: (
                victim.state is State.PREFILLING
                and cluster.seen("prefill").running >= 1
                and cluster.seen("prefill").prefill_tokens - computed >= 2 * CHUNK
            ),
            "transferring": lambda: (
                victim.state is State.HANDING_OVER
                and cluster.seen("prefill").exporting >= 1
                and cluster.seen("decode").reserved >= 1
            ),
            "decoding": lambda: victim.state is State.DECODING and len(victim.tokens) >= 3,
        }
        staged = Staged(victim, holders)
        try:
            await self._reach(victim, conditions[stage])
        except BaseException:
            await staged.end()
            raise
        if stage == "transferring":
            cluster.disarm()  # for all puts but the one that stands still
        return staged

    async def start(self, prompt_tokens: int, max_tokens: int, policy: str = "always") -> Running:
        self._seed += 1
        return await start(self._cluster, prompt_tokens, max_tokens, self._seed, policy)

    async def whole_pool(self) -> Running:
        """A request that needs all of D's blocks."""
        return await self.start((DECODE_BLOCKS - 1) * BLOCK, 8)

    async def _reach(self, running: Running, condition: Callable[[], bool]) -> None:
        def over() -> bool:
            return condition() or running.task.done()

        await self._cluster.until(over, STAGE_S, "the stage")
        if running.task.done():
            raise StageMissed(str(await running.task))
