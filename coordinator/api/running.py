"""One request's sequences while they run: accept all, follow each, end them all.

Whoever makes a `RunningRequest` must see to it that `cancel` is called in the end, whatever happens: it stops what still
runs everywhere, and is nothing for what has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from coordinator.api.answer import ChoiceResult, Timelines, Usage, timeline_entry
from coordinator.api.errors import ApiError, from_generation_error, internal_error
from coordinator.api.headers import placement_headers
from coordinator.api.request_builder import Plan, PlannedChoice
from coordinator.choice_stream import ChoiceStream, Delta
from coordinator.detokenizer import Detokenizer
from coordinator.generation import Generation, GenerationError, Generator, Policy, Timeline, Tokens
from coordinator.metrics import RequestMetrics
from coordinator.tokenizer import Tokenizer
from wire.sequence import FinishReason

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class RunningChoice:
    def __init__(
        self,
        planned: PlannedChoice,
        generation: Generation,
        text: ChoiceStream,
        metrics: RequestMetrics,
        clock: Callable[[], float],
        began: Callable[[], None],
    ) -> None:
        self.planned = planned
        self._began = began
        self.generation = generation
        self._text = text
        self._metrics = metrics
        self._clock = clock
        self._ended = False

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def mean_logprob(self) -> float:
        return self._text.sum_logprob / max(1, self._text.num_tokens)

    async def deltas(self, arrived_s: float) -> AsyncIterator[Delta]:
        """What the client is to see, empty deltas left out; the last one has `finish`.

        A completed stop string cancels the generation at once: tokens behind it are not waited for.

        Raises:
            ApiError: the generation failed.
        """
        last_s: float | None = None
        try:
            async for item in self.generation:
                now_s = self._clock()
                if last_s is None:
                    self._began()
                if item.tokens and last_s is None:
                    self._metrics.first_token(now_s - arrived_s)
                elif last_s is not None:
                    self._metrics.token_gap(now_s - last_s)
                last_s = now_s
                delta = self._text.push(item.tokens, item.finish)
                if item.prompt:
                    delta = dataclasses.replace(delta, prompt=item.prompt)
                if delta.finish is not None:
                    if item.finish is None:
                        self.generation.cancel()
                    self._end(delta.finish, now_s - arrived_s)
                if delta:
                    yield delta
                if delta.finish is not None:
                    return
            raise GenerationError(500, "server_error", "internal_error", "The sequence ended without a reason.")
        except GenerationError as error:
            self._end("error", 0.0)
            raise from_generation_error(error) from error
        except Exception as error:
            self._end("error", 0.0)
            _log.exception("generation failed unexpectedly")
            raise internal_error() from error

    def cancel(self) -> None:
        self.generation.cancel()
        self._end("cancelled", 0.0)

    def _end(self, outcome: str, e2e_s: float) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.sequence_finished(outcome, e2e_s, self.num_tokens)
            self._metrics.stages(self.generation.timeline)


class RunningRequest:
    """`choices` fills while `accept` runs and is sorted by index when it returns."""

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        clock: Callable[[], float],
        arrived_s: float,
        began: Callable[[], None],
    ) -> None:
        """`began` is called with the first token of every choice."""
        self.plan = plan
        self.choices: list[RunningChoice] = []
        self.arrived_s = arrived_s
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._began = began

    async def accept(self, generator: Generator, policy: Policy | None) -> None:
        """Place all sequences.

        Raises:
            ApiError: one was refused. Those accepted before run on until `cancel`.
        """
        try:
            await all_or_none([self._submit(planned, generator, policy) for planned in self.plan.choices])
        except GenerationError as error:
            raise from_generation_error(error) from error
        self.choices.sort(key=lambda choice: choice.planned.index)
        self._metrics.prompt_accepted(self.plan.num_prompt_tokens)

    async def collect(self) -> list[ChoiceResult]:
        """Every choice to its end.

        Raises:
            ApiError: one failed.
        """
        return await all_or_none([self._collect(choice) for choice in self.choices])

    def cancel(self) -> None:
        for choice in self.choices:
            choice.cancel()

    def usage(self) -> Usage:
        """Complete once every choice has ended. Cached tokens of a prompt are those that none of its choices computed."""
        cached: dict[int, int] = {}
        for choice in self.choices:
            index = choice.planned.prompt_index
            found = min(choice.generation.num_cached_tokens, len(self.plan.prompts[index].ids))
            cached[index] = min(cached.get(index, found), found)
        return Usage(
            prompt_tokens=self.plan.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(cached.values()),
        )

    def headers(self) -> dict[str, str]:
        return placement_headers(choice.generation.placement for choice in self.choices)

    def timelines(self) -> Timelines:
        return [timeline_entry(choice.planned.index, choice.generation) for choice in self.choices]

    async def _submit(self, planned: PlannedChoice, generator: Generator, policy: Policy | None) -> None:
        nothing_to_do = planned.spec.stop.max_tokens == 0 and planned.spec.prompt_logprobs is None
        generation: Generation = _Nothing() if nothing_to_do else await generator.submit(planned.spec, policy)
        hidden = self._tokenizer.special_ids - self.plan.shown_special_ids
        detokenizer = Detokenizer(self._tokenizer.token_bytes, hidden)
        plan = self.plan
        text = ChoiceStream(
            detokenizer, plan.stop_strings, plan.include_stop, plan.num_logprobs is not None, plan.end_logprobs
        )
        self.choices.append(RunningChoice(planned, generation, text, self._metrics, self._clock, self._began))

    async def _collect(self, choice: RunningChoice) -> ChoiceResult:
        result = ChoiceResult(choice.planned.index)
        async for delta in choice.deltas(self.arrived_s):
            result.add(delta)
        result.mean_logprob = choice.mean_logprob
        return result


async def all_or_none(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run side by side; the first failure ends the others and is raised. Nothing runs on behind it."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next(
            (task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None), None
        )
        if failed is not None:
            await failed
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Nothing:
    """The generation of a request that asks for no token (max_tokens 0 with echo)."""

    placement = None
    timeline = Timeline(0.0, None, None, None, None, None, None, None, 0.0)
    num_cached_tokens = 0

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        yield Tokens((), FinishReason.LENGTH)

    def cancel(self) -> None:
        """Nothing runs."""


def unexpected(error: BaseException) -> ApiError:
    """Any failure as what the client may see of it."""
    return error if isinstance(error, ApiError) else internal_error()
