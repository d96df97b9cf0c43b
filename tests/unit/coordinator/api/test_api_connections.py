"""Over a real server, where connections can break."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import openai
import pytest
from api_client import CH, C, Door, assert_error, until
from scripted_generator import ScriptedGenerator, says

from coordinator.generation import GenerationError
from coordinator.text_model import TextModel

MakeDoor = Callable[..., Door]
Served = Callable[[Door], AbstractAsyncContextManager[str]]
ENDLESS = {"model": "tiny", "prompt": "the fox", "max_tokens": 200, "ignore_eos": True}


async def open_request(
    base_url: str, body: dict[str, Any], path: str = C
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()
    return reader, writer


async def close(writer: asyncio.StreamWriter, reset: bool) -> None:
    if reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_J1_a_client_that_leaves_ends_all_of_its_choices(
    door: MakeDoor, served: Served, stream: bool, reset: bool
) -> None:
    front = door(ScriptedGenerator(pause_s=0.01))
    async with served(front) as base_url:
        # 1. Two choices run; the client has seen some of it.
        reader, writer = await open_request(base_url, {**ENDLESS, "n": 2, "stream": stream})
        if stream:
            await reader.readuntil(b"data: ")
        await until(lambda: front.script.num_live == 2)
        # 2. It leaves: both end at once, far from their limit.
        await close(writer, reset)
        await until(lambda: front.script.num_live == 0, timeout_s=1.0)
        assert all(generation.cancelled and generation.num_produced < 100 for generation in front.script.generations)
        await until(lambda: front.metric("kvrelay_http_requests_in_flight") == 0)
        assert front.metric("kvrelay_sequences_total", outcome="cancelled") == 2
        if not stream:
            assert front.metric("kvrelay_http_requests_total", route=C, status="499") == 1
        # 3. Others are served as before.
        async with httpx.AsyncClient() as client:
            assert (await client.post(base_url + C, json={**ENDLESS, "max_tokens": 1})).status_code == 200
    assert front.script.num_live == 0


async def test_J1_leaving_while_a_place_is_waited_for(door: MakeDoor, served: Served) -> None:
    front = door(ScriptedGenerator(submit_gate=asyncio.Event()))
    async with served(front) as base_url:
        _, writer = await open_request(base_url, {**ENDLESS, "stream": True, "n": 2})
        await until(lambda: len(front.script.specs) == 2)
        await close(writer, reset=False)
        await until(lambda: front.metric("kvrelay_http_requests_in_flight") == 0)
        assert front.script.generations == []


async def test_J1_many_quick_departures_leave_nothing(door: MakeDoor, served: Served) -> None:
    front = door(ScriptedGenerator(pause_s=0.005), max_in_flight=40)
    async with served(front) as base_url:
        for number in range(30):
            reader, writer = await open_request(base_url, {**ENDLESS, "stream": True})
            await reader.readuntil(b"data: ")
            await close(writer, reset=number % 2 == 0)
        await until(lambda: front.script.num_live == 0)
        await until(lambda: front.metric("kvrelay_http_requests_in_flight") == 0)
    assert front.metric("kvrelay_sequences_total", outcome="cancelled") == 30


async def test_J3_more_than_the_limit_is_refused_promptly(door: MakeDoor, served: Served) -> None:
    gate = asyncio.Event()
    front = door(ScriptedGenerator(gate=lambda spec, index: gate), max_in_flight=4, retry_after_s=7)
    async with served(front) as base_url, httpx.AsyncClient(timeout=10) as client:
        held = [asyncio.create_task(client.post(base_url + C, json={**ENDLESS, "max_tokens": 2})) for _ in range(4)]
        await until(lambda: front.script.num_live == 4)
        for stream in (False, True):
            response = await client.post(base_url + C, json={**ENDLESS, "stream": stream})
            assert_error(response, 429, code="server_busy")
            assert response.headers["retry-after"] == "7"
        assert (await client.get(base_url + "/health")).status_code == 200
        gate.set()
        assert [response.status_code for response in await asyncio.gather(*held)] == [200] * 4
        assert (await client.post(base_url + C, json={**ENDLESS, "max_tokens": 2})).status_code == 200
    assert front.script.num_live == 0


async def test_J9_silence_is_filled_with_comments_between_events(door: MakeDoor, served: Served) -> None:
    gate = asyncio.Event()
    front = door(ScriptedGenerator(source=says(100), gate=lambda spec, index: gate), keepalive_s=0.02)
    async with served(front) as base_url:
        client = openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0)
        reader, writer = await open_request(base_url, {**ENDLESS, "stream": True, "max_tokens": 3})
        await reader.readuntil(b": keep-alive\n\n")
        stream = await client.completions.create(model="tiny", prompt="the fox", max_tokens=3, stream=True)
        gate.set()
        assert len([chunk async for chunk in stream]) == 3
        rest = await reader.readuntil(b"data: [DONE]\n\n")
        assert rest.count(b"data: ") == 4
        writer.close()
        await client.close()


async def test_J9_without_keepalive_nothing_is_sent_before_the_first_token(door: MakeDoor, served: Served) -> None:
    gate = asyncio.Event()
    front = door(ScriptedGenerator(gate=lambda spec, index: gate, fail_at=0), keepalive_s=None)
    async with served(front) as base_url, httpx.AsyncClient() as client:
        task = asyncio.create_task(client.post(base_url + C, json={**ENDLESS, "stream": True}))
        await until(lambda: front.script.num_live == 1)
        gate.set()
        assert_error(await task, 502, code="worker_lost")


async def test_the_body_has_a_deadline(door: MakeDoor, served: Served) -> None:
    front = door(body_timeout_s=0.05)
    async with served(front) as base_url:
        host, port = base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 3)
        assert head.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_client_that_never_reads_is_given_up(door: MakeDoor) -> None:
    front = door(ScriptedGenerator(pause_s=0.001), write_timeout_s=0.05, max_in_flight=1)
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    forever = asyncio.Event()
    written = []

    async def receive() -> Any:
        if not messages:
            await forever.wait()
        return messages.pop()

    async def send(message: Any) -> None:
        written.append(message["type"])
        if len(written) == 3:  # the connection's buffers are full
            await forever.wait()

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": C,
        "raw_path": C.encode(), "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await asyncio.wait_for(front.app(scope, receive, send), 3)
    assert len(written) == 3
    assert front.script.num_live == 0
    assert front.script.generations[0].num_produced < 199
    assert front.metric("kvrelay_sequences_total", outcome="cancelled") == 1
    # Its place is free again.
    assert (await front.post(C, max_tokens=1)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_H3_openai_client_understands_answers_and_errors(door: MakeDoor, served: Served, stream: bool) -> None:
    front = door(api_keys=("key",))
    async with served(front) as base_url:
        client = openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="key", max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages, stream=stream)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=messages, stream=stream, temperature=3)
        assert caught.value.param == "temperature"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        answer = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, stream=stream, seed=1, extra_headers={"X-Kvrelay-Timeline": "1"}
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            assert chunks[-1].choices[0].finish_reason == "length"
            assert chunks[-1].kvrelay_timeline[0]["total_ms"] == 40.0
        else:
            assert answer.usage.completion_tokens == 4
        stranger = openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        await client.close()
        await stranger.close()


async def test_C5_openai_client_raises_on_an_error_frame(door: MakeDoor, served: Served) -> None:
    failure = GenerationError(502, "server_error", "worker_lost", "decode-0 died")
    front = door(ScriptedGenerator(fail_at=2, failure=failure, pause_s=0.01))
    async with served(front) as base_url:
        client = openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0)
        stream = await client.completions.create(model="tiny", prompt="the fox", stream=True)
        with pytest.raises(openai.APIError, match="decode-0 died"):
            async for _ in stream:
                pass
        await client.close()


async def test_A5_many_streams_at_once_keep_their_own_text(door: MakeDoor, served: Served) -> None:
    front = door(ScriptedGenerator(pause_s=0.001))
    async with served(front) as base_url, httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=64)) as client:

        async def both(number: int) -> tuple[str, str, str]:
            body = {"model": "tiny", "prompt": [100 + number, 100], "max_tokens": 40, "seed": number, "ignore_eos": True}
            whole = (await client.post(base_url + C, json=body)).json()["choices"][0]["text"]
            text, ids = "", set()
            async with client.stream("POST", base_url + C, json={**body, "stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        ids.add(chunk["id"])
                        text += chunk["choices"][0]["text"]
            (answer_id,) = ids
            return whole, text, answer_id

        results = await asyncio.gather(*(both(number) for number in range(24)))
    assert all(whole == text and text for whole, text, _ in results)
    assert len({answer_id for *_, answer_id in results}) == 24
    assert front.script.num_live == 0


async def test_J11_long_prompts_do_not_stop_the_loop(door: MakeDoor, served: Served, text: TextModel) -> None:
    roomy = dataclasses.replace(text, max_model_len=60_000)
    front = door(model=roomy)
    async with served(front) as base_url, httpx.AsyncClient(timeout=30) as client:
        # 1. A prompt that must be tokenised to see that it is too long: others are served meanwhile.
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the fox " * 40_000}]}
        task = asyncio.create_task(client.post(base_url + CH, json=body))
        served_meanwhile = 0
        while not task.done():
            assert (await client.get(base_url + "/health")).status_code == 200
            served_meanwhile += 1
        assert_error(await task, 400, code="context_length_exceeded")
        assert served_meanwhile > 2
        # 2. One that is beyond hope is not even tokenised.
        error = assert_error(
            await client.post(base_url + C, json={"model": "tiny", "prompt": "a" * 1_000_000}), 400, "prompt"
        )
        assert "1000000 characters" in error["message"]
