"""Drives a core with the fake runner in one thread, plays the service's part, and keeps what came out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.fake_runner import FakeRunner, fake_layout, reference_output
from engine.messages import EngineCommand, EngineEvent, Fill, Rejected, Reserved, TokensSampled
from engine.plan import SampleRequest, ScheduledSequence, StepPlan
from wire.ids import RequestId
from wire.sequence import FinishReason, SampledToken, SamplingParams, SequenceSpec, StopRules

VOCAB_SIZE = 97


def make_spec(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 4,
    *,
    resumed: Iterable[int] = (),
    salt: str = "",
    sampling: SamplingParams | None = None,
    **stop: object,
) -> SequenceSpec:
    return SequenceSpec(
        RequestId(request_id),
        tuple(prompt),
        sampling or SamplingParams(seed=1, temperature=0.0),
        StopRules(max_tokens=max_tokens, **stop),
        tuple(resumed),
        salt,
    )


class Driver:
    def __init__(
        self, num_blocks: int = 32, block_size: int = 4, max_model_len: int = 64, config: EngineConfig | None = None
    ) -> None:
        self.layout = fake_layout(block_size)
        self.max_model_len = max_model_len
        self.memory = memoryview(bytearray(num_blocks * self.layout.block_bytes))
        self.runner = FakeRunner(self.layout, self.memory, num_blocks, VOCAB_SIZE, max_model_len)
        self.core = EngineCore(config or EngineConfig(), self.layout, num_blocks, max_model_len)
        self.now = 0.0
        self.events: list[EngineEvent] = []
        self.specs: dict[RequestId, SequenceSpec] = {}
        self.reserved: dict[RequestId, Reserved] = {}
        self.rejected: dict[RequestId, Rejected] = {}
        self.tokens: defaultdict[RequestId, list[SampledToken]] = defaultdict(list)
        self.finish: dict[RequestId, FinishReason] = {}

    def handle(self, command: EngineCommand) -> list[EngineEvent]:
        spec = getattr(command, "spec", None)
        if spec is not None and spec.request_id not in self.specs:
            self.specs[spec.request_id] = spec
        return self.take(self.core.handle(command, self.now))

    def step(self) -> StepPlan | None:
        plan = self.core.plan(self.now)
        if plan is not None:
            self.now += 1.0
            self.take(self.core.apply(plan, self.runner.execute(plan), self.now))
        self.core.check_conservation()
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing can run; says how many steps that took."""
        for count in range(max_steps):
            if self.step() is None:
                return count
        raise AssertionError(f"still running after {max_steps} steps")

    def write_kv(self, request_id: str) -> SampledToken:
        """The prefill worker's part: fill what a reservation lacks, straight in memory, and draw the first token."""
        reservation, spec = self.reserved[RequestId(request_id)], self.specs[RequestId(request_id)]
        start = min(reservation.num_cached_tokens, len(spec.tokens) - 1)
        request = SampleRequest(
            spec.sampling,
            len(spec.tokens),
            spec.stop.end_token_ids if len(spec.resumed) < spec.stop.min_tokens else frozenset(),
            spec.prompt if spec.sampling.needs_history else (),
            spec.resumed if spec.sampling.needs_history else (),
        )
        row = ScheduledSequence(spec.request_id, spec.tokens[start:], start, reservation.block_ids, request)
        return self.runner.execute(StepPlan(0, (row,))).sampled[spec.request_id]

    def fill(self, request_id: str) -> list[EngineEvent]:
        """A whole hand-off: write, then tell the core. The first token counts as output here."""
        token = self.write_kv(request_id)
        self.tokens[RequestId(request_id)].append(token)
        del self.reserved[RequestId(request_id)]
        return self.handle(Fill(RequestId(request_id), token))

    def take(self, events: list[EngineEvent]) -> list[EngineEvent]:
        for event in events:
            self.events.append(event)
            if isinstance(event, Reserved):
                self.reserved[event.request_id] = event
            elif isinstance(event, Rejected):
                self.rejected[event.request_id] = event
            elif isinstance(event, TokensSampled):
                resumed = len(self.specs[event.request_id].resumed)
                assert event.first_index == resumed + len(self.tokens[event.request_id]), "a gap or a repetition"
                assert event.request_id not in self.finish, "tokens behind the end"
                self.tokens[event.request_id] += event.tokens
                if event.finish is not None:
                    self.finish[event.request_id] = event.finish
        return events

    def assert_equals_solo_run(self, request_id: str, *, finished: bool = True) -> None:
        spec = self.specs[RequestId(request_id)]
        expected = reference_output(spec, VOCAB_SIZE, self.max_model_len)
        drawn = tuple(self.tokens[spec.request_id])
        if finished:
            assert drawn == expected.tokens
            assert self.finish[spec.request_id] == expected.finish
        else:
            assert drawn == expected.tokens[: len(drawn)]

    def assert_empty(self) -> None:
        self.core.check_conservation()
        stats = self.core.stats()
        assert (stats.waiting, stats.running, stats.reserved, stats.exporting) == (0, 0, 0, 0)
        assert stats.waiting_tokens == 0
        assert stats.blocks_held == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
