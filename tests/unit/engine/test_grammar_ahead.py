"""A slow grammar holds back its own sequence alone, and nothing of what follows it overtakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import llguidance
import pytest
from tiny_models import write_tiny_tokenizer

from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.engine_thread import EngineThread
from engine.fake_runner import FakeRunner, fake_layout
from engine.grammar_ahead import GrammarAhead
from engine.grammars import Grammars
from engine.messages import Abort, Add, ComputeHere, EngineCommand, EngineEvent, EngineStats, Reserve, TokensSampled
from wire.ids import RequestId
from wire.sequence import SamplingParams, SequenceSpec, StopRules

VOCAB = 320
LIMIT_S = 30.0


class Engine:
    def __init__(self) -> None:
        self.commands: list[EngineCommand] = []

    def submit(self, command: EngineCommand) -> None:
        self.commands.append(command)

    def stats(self) -> EngineStats:
        raise AssertionError("not asked for here")


class SlowGrammars:
    """Each is prepared when the test lets it."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def is_prepared(self, grammar: str) -> bool:
        return grammar in self.prepared

    def prepare(self, grammar: str) -> None:
        assert self.gates[grammar].wait(LIMIT_S)
        self.prepared.append(grammar)


def spec(name: str, grammar: str = "") -> SequenceSpec:
    return SequenceSpec(RequestId(name), (5, 6, 7), SamplingParams(seed=1), StopRules(max_tokens=3), grammar=grammar)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def grammars() -> SlowGrammars:
    return SlowGrammars()


@pytest.fixture
def ahead(engine: Engine, grammars: SlowGrammars) -> Iterator[GrammarAhead]:
    made = GrammarAhead(engine, grammars)
    yield made
    for gate in grammars.gates.values():
        gate.set()
    made.close()


async def test_others_go_on_and_its_own_commands_wait_in_order(
    engine: Engine, grammars: SlowGrammars, ahead: GrammarAhead
) -> None:
    grammars.gates["slow"] = threading.Event()
    # 1. A slow grammar, what follows it, and a neighbour without one.
    own = [Reserve(spec("a", "slow")), ComputeHere(RequestId("a")), Abort(RequestId("a"))]
    other = [Add(spec("b")), Abort(RequestId("b"))]
    for command in (own[0], other[0], own[1], other[1], own[2]):
        ahead.submit(command)
    assert engine.commands == other
    # 2. It is there: its commands follow in their order.
    grammars.gates["slow"].set()
    await until(lambda: len(engine.commands) == 5)
    assert engine.commands == other + own
    # 3. A prepared one, and what comes later, are not held at all.
    later = [Add(spec("c", "slow")), Abort(RequestId("a")), Abort(RequestId("c"))]
    for command in later:
        ahead.submit(command)
    assert engine.commands == other + own + later


async def test_choices_of_one_request_compile_once(engine: Engine, grammars: SlowGrammars, ahead: GrammarAhead) -> None:
    grammars.gates["slow"] = threading.Event()
    choices = [Add(spec(f"a{index}", "slow")) for index in range(8)]
    for command in choices:
        ahead.submit(command)
    assert engine.commands == []
    grammars.gates["slow"].set()
    await until(lambda: len(engine.commands) == 8)
    assert engine.commands == choices
    assert grammars.prepared == ["slow"]


async def test_what_is_held_when_the_engine_stops_is_dropped(
    engine: Engine, grammars: SlowGrammars, ahead: GrammarAhead
) -> None:
    grammars.gates["slow"] = threading.Event()
    ahead.submit(Add(spec("a", "slow")))
    ahead.close()
    grammars.gates["slow"].set()
    await until(lambda: grammars.prepared)
    await asyncio.sleep(0)
    assert engine.commands == []


async def test_the_engine_thread_compiles_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real library: 1. Three sequences of one schema run to their ends. 2. It was compiled once, and not by the
    engine's thread. 3. What one of them drew moved no other."""
    directory = tmp_path_factory.mktemp("ahead")
    write_tiny_tokenizer(directory, VOCAB)
    grammars = Grammars.load(directory, VOCAB)
    assert grammars is not None
    compiled_in: list[str] = []
    make = llguidance.LLMatcher

    def recording(*args: object, **options: object) -> llguidance.LLMatcher:
        compiled_in.append(threading.current_thread().name)
        return make(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(llguidance, "LLMatcher", recording)
    layout, events = fake_layout(16), list[EngineEvent]()
    memory = memoryview(bytearray(32 * layout.block_bytes))
    core = EngineCore(EngineConfig(256, 8, 64), layout, 32, 256, grammars)
    runner = FakeRunner(layout, memory, 32, VOCAB, 256)
    thread = EngineThread(core, runner, events.extend)
    ahead = GrammarAhead(thread, grammars)
    thread.start()
    try:
        regex = make.grammar_from_regex("[ab]{3}")
        for index in range(3):
            ahead.submit(Add(spec(f"r{index}", regex)))
        await until(lambda: sum(isinstance(e, TokensSampled) and e.finish is not None for e in events) == 3)
    finally:
        ahead.close()
        thread.stop(LIMIT_S)
    assert compiled_in == ["ThreadPoolExecutor-grammar_0"]
    drawn = {e.request_id: [] for e in events if isinstance(e, TokensSampled)}  # type: dict[RequestId, list[int]]
    for event in events:
        if isinstance(event, TokensSampled):
            drawn[event.request_id] += [token.token_id for token in event.tokens]
    assert len({tuple(tokens) for tokens in drawn.values()}) == 1  # one prompt, one seed
    core.check_conservation()
