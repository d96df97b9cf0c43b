"""Who is let in: queue bound, rate limits, key files, deadlines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from api_client import CH, C, Door, assert_error, until
from scripted_generator import ScriptedGenerator

from coordinator.api_keys import KeyRing
from coordinator.rate_limit import RateLimit

MakeDoor = Callable[..., Door]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_J3_what_waits_for_a_first_token_is_bounded(door: MakeDoor) -> None:
    """Queue limit 8, 60 at once: 52 are refused at once, with a reason; the 8 finish, and then there is room again."""
    gate = asyncio.Event()
    front = door(ScriptedGenerator(gate=lambda spec, index: gate), max_queued=8)
    asked = [asyncio.create_task(front.post(C, max_tokens=2, stream=bool(index % 2))) for index in range(60)]
    await until(lambda: sum(task.done() for task in asked) == 52)
    for task in asked:
        if task.done():
            assert_error(task.result(), 429, code="queue_full")
            assert int(task.result().headers["retry-after"]) >= 1
    gate.set()
    assert sorted(answer.status_code for answer in await asyncio.gather(*asked)) == [200] * 8 + [429] * 52
    assert (await front.post(C)).status_code == 200
    assert front.script.num_live == 0


async def test_J3_a_running_request_frees_its_place_in_the_queue(door: MakeDoor) -> None:
    gate = asyncio.Event()
    front = door(ScriptedGenerator(gate=lambda spec, index: gate if index == 1 else None), max_queued=1)
    first = asyncio.create_task(front.post(C, max_tokens=2))
    await until(lambda: any(generation.num_produced == 1 for generation in front.script.generations))
    second = asyncio.create_task(front.post(C, max_tokens=1))
    assert (await second).status_code == 200
    gate.set()
    assert (await first).status_code == 200


async def test_rate_limits_count_each_key_by_itself(door: MakeDoor) -> None:
    front = door(api_keys=("one", "two"), requests_per_minute=60, request_burst=2)
    headers = {"Authorization": "Bearer one"}
    assert [(await front.post(C, headers)).status_code for _ in range(2)] == [200, 200]
    refused = await front.post(CH, headers)
    assert_error(refused, 429, code="rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"
    assert (await front.post(C, {"Authorization": "Bearer two"})).status_code == 200
    assert (await front.client.get("/v1/models", headers=headers)).status_code == 200


async def test_bad_requests_cost_no_rate(door: MakeDoor) -> None:
    front = door(requests_per_minute=1, request_burst=1)
    assert_error(await front.post(C, n=0), 400, "n")
    assert (await front.post(C)).status_code == 200
    assert_error(await front.post(C), 429, code="rate_limit_exceeded")


def test_a_bucket_fills_up_again_and_no_further() -> None:
    limit = RateLimit(per_minute=30, burst=3)
    assert [limit.take("a", 0.0) for _ in range(3)] == [0.0] * 3
    assert limit.take("a", 0.0) == pytest.approx(2.0)
    assert limit.take("b", 0.0) == 0.0
    assert limit.take("a", 1.9) == pytest.approx(0.1)
    assert limit.take("a", 2.0) == 0.0
    assert [limit.take("a", 1000.0) == 0.0 for _ in range(4)] == [True, True, True, False]
    for client in range(10_000):
        limit.take(str(client), 2000.0 + client)
    assert len(limit._buckets) <= 4096 + 1
    assert RateLimit(0, 1).take("a", 0.0) == 0.0


def test_H7_keys_of_a_file_follow_the_file(tmp_path: Path) -> None:
    """1. Both sources count. 2. A change is seen within a second. 3. A broken or missing file changes nothing."""
    path, clock = tmp_path / "keys", Clock()
    path.write_text("# ours\nalpha\n\nbeta\n")
    ring = KeyRing(("fixed",), path, clock)
    names = {ring.identify(key) for key in (b"alpha", b"beta", b"fixed")}
    assert None not in names
    assert len(names) == 3
    assert ring.identify(b"# ours") is None
    assert ring.identify(b"") is None

    path.write_text("gamma\n")
    assert ring.identify(b"gamma") is None, "not looked at yet"
    clock.now += 1.0
    assert ring.identify(b"gamma") is not None
    assert ring.identify(b"alpha") is None
    assert ring.identify(b"fixed") is not None

    for broken in ("", "# nobody\n", "two words\n", "ü\n"):
        path.write_text(broken)
        clock.now += 1.0
        assert ring.identify(b"gamma") is not None, broken
    path.unlink()
    clock.now += 1.0
    assert ring.identify(b"gamma") is not None
    path.write_text("delta\n")
    os.utime(path, ns=(5, 5))
    clock.now += 1.0
    assert ring.identify(b"delta") is not None
    with pytest.raises(ValueError, match="no key"):
        KeyRing((), tmp_path / "keys2", clock) if (tmp_path / "keys2").write_text("#\n") else None
    with pytest.raises(OSError, match="keys3"):
        KeyRing((), tmp_path / "keys3", clock)


async def test_H7_a_key_file_guards_the_door(door: MakeDoor, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sesame\n")
    front = door(api_keys_file=tmp_path / "keys")
    assert_error(await front.post(C), 401)
    assert (await front.post(C, {"Authorization": "Bearer sesame"})).status_code == 200


@pytest.mark.parametrize("way", ["body", "header", "operator"])
async def test_J9_a_deadline_ends_what_still_waits(door: MakeDoor, way: str) -> None:
    """Whole or streamed, before the first byte: 408 as JSON. Nothing runs on."""
    front = door(
        ScriptedGenerator(gate=lambda spec, index: asyncio.Event()),
        request_timeout_s=0.1 if way == "operator" else 0.0,
        keepalive_s=None,
    )
    body = {"timeout": 0.1} if way == "body" else {"timeout": 50} if way == "operator" else {}
    headers = {"X-Kvrelay-Timeout": "0.1"} if way == "header" else {}
    for stream in (False, True):
        assert_error(await front.post(C, headers, stream=stream, **body), 408, code="deadline_exceeded")
    await until(lambda: front.script.num_live == 0)


async def test_C5_a_deadline_in_a_stream_is_an_error_frame(door: MakeDoor) -> None:
    front = door(ScriptedGenerator(gate=lambda spec, index: asyncio.Event() if index == 2 else None))
    answer = await front.post(C, stream=True, timeout=0.2)
    assert answer.status_code == 200
    blocks = answer.text.strip().split("\n\n")
    assert '"code":"deadline_exceeded"' in blocks[-1]
    assert all('"finish_reason":null' in block for block in blocks[:-1])
    await until(lambda: front.script.num_live == 0)


@pytest.mark.parametrize("given", ["0", "-1", "abc", "1e3", "inf", "", "999999"])
async def test_bad_deadlines_are_named(door: MakeDoor, given: str) -> None:
    front = door()
    assert_error(await front.post(C, {"X-Kvrelay-Timeout": given}), 400, "X-Kvrelay-Timeout")
    assert_error(await front.post(C, timeout=given), 400, "timeout")
    assert_error(await front.post(C, timeout=0), 400, "timeout")
