"""Any order of commands and steps, aborts at every moment: the books balance and every output equals a solo run's."""

from __future__ import annotations

from engine_driver import Driver, make_spec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.engine_config import EngineConfig
from engine.messages import Abort, Add, BlocksComputed, ComputeHere, Release, Reserve, TokensSampled
from engine.plan import StepPlan
from wire.ids import RequestId
from wire.sequence import SamplingParams, SequenceSpec

MAX_MODEL_LEN = 24
SAMPLING = st.sampled_from(
    [
        SamplingParams(seed=3, temperature=0.0),
        SamplingParams(seed=5, temperature=0.7, num_logprobs=1),
        SamplingParams(seed=7, temperature=0.7, repetition_penalty=1.1),
    ]
)
# Beginnings of two texts, sometimes with a token of their own: prefixes, and whole prompts, are often shared.
TOKENS = st.builds(
    lambda text, length, own: (*range(text, text + length), *own),
    st.sampled_from([0, 0, 0, 50]),
    st.integers(1, 12),
    st.sampled_from([(), (), (), (90,)]),
)


class Engine(RuleBasedStateMachine):
    """Requests by where they are: `live` ones may be aborted, `exported` ones released, `driver.reserved` ones filled."""

    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.integers(1, 3),
        budget=st.integers(1, 12),
        max_num_sequences=st.integers(1, 6),
        prefill_chunk=st.integers(1, 8),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks, block_size, budget, max_num_sequences, prefill_chunk, prefix_cache):
        self.config = EngineConfig(budget, max_num_sequences, prefill_chunk, prefix_cache)
        self.driver = Driver(num_blocks, block_size, MAX_MODEL_LEN, self.config)
        self.live: set[RequestId] = set()
        self.exports: set[RequestId] = set()
        self.exported: set[RequestId] = set()
        self.aborted: set[RequestId] = set()
        self.failed: set[RequestId] = set()
        self.in_flight: StepPlan | None = None
        self.num_specs = 0

    def spec(
        self, prompt: tuple[int, ...], max_tokens: int, resumed: int, salt: str, sampling: SamplingParams
    ) -> SequenceSpec:
        self.num_specs += 1
        return make_spec(
            f"r{self.num_specs}",
            prompt,
            max_tokens + resumed,
            resumed=range(resumed),
            salt=salt,
            sampling=sampling,
            eos_token_ids=(11, 12, 13, 14, 15, 16, 17, 18, 19, 20),
            min_tokens=2,
        )

    def live_id(self, data: st.DataObject) -> RequestId:
        return data.draw(st.sampled_from(sorted(self.live)))

    def settle(self) -> None:
        """Sort requests by the events that have come."""
        self.failed |= {one for one, event in self.driver.rejected.items() if not event.invalid}
        for request_id in list(self.live):
            if request_id in self.driver.rejected:
                self.live.discard(request_id)
            elif request_id in self.exports:
                if self.driver.tokens[request_id]:
                    self.exported.add(request_id)
            elif request_id in self.driver.finish:
                self.live.discard(request_id)
        self.exported &= self.live
        for request_id in set(self.driver.reserved) - self.live:
            del self.driver.reserved[request_id]

    # -- commands ---------------------------------------------------------------------------------------------------

    @rule(
        prompt=TOKENS,
        max_tokens=st.integers(1, 6),
        resumed=st.sampled_from([0, 0, 0, 2]),
        salt=st.sampled_from(["", "", "", "s"]),
        sampling=SAMPLING,
        kind=st.sampled_from(["add", "add", "export", "reserve", "reserve"]),
    )
    def submit(self, prompt, max_tokens, resumed, salt, sampling, kind):
        spec = self.spec(prompt, max_tokens, resumed, salt, sampling)
        self.live.add(spec.request_id)
        if kind == "export":
            self.exports.add(spec.request_id)
        self.driver.handle(Reserve(spec) if kind == "reserve" else Add(spec, export=kind == "export"))
        self.settle()

    @precondition(lambda self: self.driver.reserved)
    @rule(data=st.data())
    def fill(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.driver.reserved)))
        self.driver.fill(request_id)
        self.settle()

    @precondition(lambda self: self.driver.reserved)
    @rule(data=st.data())
    def compute_here(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.driver.reserved)))
        del self.driver.reserved[request_id]
        self.driver.handle(ComputeHere(request_id))
        self.settle()

    @precondition(lambda self: self.exported)
    @rule(data=st.data())
    def release(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.exported)))
        self.driver.handle(Release(request_id))
        self.live.discard(request_id)
        self.settle()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request_id = self.live_id(data)
        seen = len(self.driver.events)
        self.driver.handle(Abort(request_id))
        self.live.discard(request_id)
        self.aborted.add(request_id)
        assert all(event.request_id != request_id for event in self.driver.events[seen:])
        self.settle()

    # -- steps ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def begin_step(self):
        self.in_flight = self.driver.core.plan(self.driver.now)
        if self.in_flight is not None:
            assert self.in_flight.num_tokens <= self.config.max_batched_tokens
            for row in self.in_flight.sequences:
                assert 1 <= len(row.token_ids) <= self.config.prefill_chunk
                assert len(row.block_ids) == self.driver.layout.blocks_for(row.start + len(row.token_ids))

    @precondition(lambda self: self.in_flight is not None)
    @rule(fails=st.integers(0, 9).map(lambda roll: roll == 0))
    def end_step(self, fails):
        """The runner runs as late as it can: an aborted sequence's blocks must not have been reused until now."""
        plan, self.in_flight = self.in_flight, None
        self.driver.now += 1.0
        result = self.driver.runner.execute(plan)
        core, seen = self.driver.core, len(self.driver.events)
        if fails:
            self.driver.take(core.fail_step(plan, RuntimeError("the device is gone"), self.driver.now))
        else:
            self.driver.take(core.apply(plan, result, self.driver.now))
        assert all(event.request_id not in self.aborted for event in self.driver.events[seen:])
        self.settle()

    @precondition(lambda self: self.in_flight is None)
    @rule(count=st.integers(1, 6))
    def run_steps(self, count):
        for _ in range(count):
            self.begin_step()
            if self.in_flight is None:
                break
            self.end_step(False)

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self):
        if hasattr(self, "driver"):
            self.driver.core.check_conservation()

    @invariant()
    def outputs_equal_a_solo_run(self):
        if hasattr(self, "driver"):
            for request_id in self.driver.tokens:
                self.driver.assert_equals_solo_run(request_id, finished=False)

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        if self.in_flight is not None:
            self.end_step(False)
        for _ in range(500):
            progressed = self.driver.step() is not None
            self.settle()
            for request_id in sorted(self.driver.reserved):
                self.driver.fill(request_id)
                self.settle()
                progressed = True
            for request_id in sorted(self.exported):
                self.driver.handle(Release(request_id))
                self.live.discard(request_id)
                self.settle()
                progressed = True
            if not progressed:
                break
        assert not self.live, "someone waits for ever"
        self.driver.assert_empty()
        for request_id in self.driver.finish:
            if request_id not in self.exports:
                self.driver.assert_equals_solo_run(request_id)
        ended = self.aborted | self.driver.rejected.keys() | self.driver.finish.keys() | self.exports
        assert ended == self.driver.specs.keys()
        self.check_exports()

    def check_exports(self):
        """Blocks are announced before the token, in growing numbers, up to the whole prompt."""
        for request_id in self.exports - self.aborted - self.driver.rejected.keys():
            spec = self.driver.specs[request_id]
            mine = [event for event in self.driver.events if event.request_id == request_id]
            announced = [event.num_tokens for event in mine if isinstance(event, BlocksComputed)]
            assert announced == sorted(set(announced))
            assert announced[-1] == len(spec.tokens)
            assert isinstance(mine[-1], TokensSampled)
            assert len(self.driver.tokens[request_id]) == 1


Engine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestEngine = Engine.TestCase
