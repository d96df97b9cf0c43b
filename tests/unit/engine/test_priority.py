"""Priorities in the engine's queue: earlier, but never for ever."""

from __future__ import annotations

import msgspec
from engine_driver import Driver, make_spec

from engine.engine_config import EngineConfig
from engine.messages import Add, ComputeHere, Reserve
from wire.ids import RequestId
from wire.sequence import SequenceSpec


def spec_of(name: str, priority: int = 0) -> SequenceSpec:
    return msgspec.structs.replace(make_spec(name, [1, 2, 3], 2), priority=priority)


def one_at_a_time() -> Driver:
    return Driver(config=EngineConfig(max_num_sequences=1))


def order_of(driver: Driver) -> list[str]:
    driver.run()
    driver.assert_empty()
    return [str(request_id) for request_id in driver.finish]


def test_equal_priorities_keep_their_order() -> None:
    driver = one_at_a_time()
    for index in range(6):
        driver.handle(Add(spec_of(str(index), priority=3)))
    assert order_of(driver) == list("012345")


def test_a_lower_number_goes_first_among_those_of_one_moment() -> None:
    driver = one_at_a_time()
    for name, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 0), ("e", -5), ("f", 5)):
        driver.handle(Add(spec_of(name, priority)))
    assert order_of(driver) == list("ceadbf")


def test_waiting_makes_up_for_priority() -> None:
    """One step of priority is a second: what came 11 s earlier goes before what is 10 steps more urgent, 9 s earlier not."""
    driver = one_at_a_time()
    driver.handle(Add(spec_of("old", priority=10)))
    driver.now = 9.0
    driver.handle(Add(spec_of("urgent")))
    driver.now = 11.0
    driver.handle(Add(spec_of("late")))
    assert order_of(driver) == ["urgent", "old", "late"]


def test_who_was_here_before_is_not_overtaken() -> None:
    """A reservation that is computed here after all goes to the front, whatever comes."""
    driver = one_at_a_time()
    driver.handle(Reserve(spec_of("back")))
    driver.handle(Add(spec_of("other")))
    driver.handle(ComputeHere(RequestId("back")))
    driver.handle(Add(spec_of("urgent", priority=-100)))
    driver.reserved.clear()
    assert order_of(driver) == ["back", "urgent", "other"]
