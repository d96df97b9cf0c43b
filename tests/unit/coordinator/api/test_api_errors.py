from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest
from api_client import CH, C, Door, assert_error, events
from scripted_generator import ScriptedGenerator

from coordinator.generation import GenerationError

MakeDoor = Callable[..., Door]
Serve = Callable[[Door], AbstractAsyncContextManager[str]]
JSON = {"content-type": "application/json"}
GOOD = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1})


@pytest.mark.parametrize(
    "body",
    [
        b"{not json", b"", b'{"model":', b"\xff\xfe", GOOD.encode("utf-16"), b"[" * 100_000, b'{"a":' * 100_000,
        b'{"model":"tiny","model":"tiny","prompt":"x"}', (GOOD + "x").encode(), b"[1]", b'"x"', b"null", b"5",
        b'{"model":"tiny","prompt":"x","temperature":NaN}', b'{"model":"tiny","prompt":"x","seed":' + b"9" * 5000 + b"}",
        b'{"model":"tiny","prompt":"\\ud83d"}', b'{"model":"\\udc00","prompt":"x"}',
        b'{"model":"tiny","prompt":"x","stop":"\\uD800"}',
        b'{"model":"tiny","prompt":"x","temperature":1e999}', b"\xef\xbb\xbf" + GOOD.encode(),
    ],
)  # fmt: skip
async def test_H1_malformed_bodies_are_400(door: MakeDoor, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    front = door()
    with caplog.at_level(logging.INFO, logger="coordinator"):
        assert_error(await front.client.post(C, content=body, headers=JSON), 400)
    assert caplog.records == []
    # The server keeps serving.
    assert (await front.client.post(C, content=GOOD, headers=JSON)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=latin-1"}, {**JSON, "content-encoding": "gzip"}, {"content-type": ";;;"},
    ],
)  # fmt: skip
async def test_H1_other_content_types_are_415(door: MakeDoor, headers: dict[str, str]) -> None:
    front = door()
    assert_error(await front.client.post(C, content=GOOD.encode(), headers=headers), 415, code="unsupported_media_type")
    assert_error(await front.client.post(C, content=gzip.compress(GOOD.encode()), headers=headers), 415)


async def test_H1_json_with_utf8_charset_is_fine(door: MakeDoor) -> None:
    headers = {"content-type": "application/json; charset=UTF-8"}
    assert (await door().client.post(C, content=GOOD, headers=headers)).status_code == 200


async def test_H1_large_bodies_are_413_whether_or_not_they_say_so(door: MakeDoor) -> None:
    front = door(max_body_bytes=1000)
    assert_error(await front.client.post(C, content=b"x" * 1001, headers=JSON), 413, code="request_too_large")

    async def unannounced() -> Any:
        for _ in range(11):
            yield b"x" * 100

    assert_error(await front.client.post(C, content=unannounced(), headers=JSON), 413)
    padded = GOOD.encode() + b" " * (1000 - len(GOOD))
    assert (await front.client.post(C, content=padded, headers=JSON)).status_code == 200


@pytest.mark.parametrize("path", [C, CH])
@pytest.mark.parametrize("stream", [False, True])
async def test_H3_unknown_model_is_404_json(door: MakeDoor, path: str, stream: bool) -> None:
    front = door()
    for model in ("nope", "", "TINY", "tiny "):
        error = assert_error(await front.post(path, model=model, stream=stream), 404, "model", "model_not_found")
        assert error["type"] == "invalid_request_error"
    for model in (None, 5, ["tiny"]):
        assert_error(await front.post(path, model=model, stream=stream), 400, "model")


async def test_H3_models_route(door: MakeDoor) -> None:
    front = door(served_model_name="org/tiny-1")
    listed = (await front.client.get("/v1/models")).json()
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert {"id", "object", "created", "owned_by"} <= set(model)
    assert (model["id"], model["object"]) == ("org/tiny-1", "model")
    assert (await front.client.get("/v1/models/org/tiny-1")).json() == model
    assert_error(await front.client.get("/v1/models/nope"), 404, "model", "model_not_found")
    assert (await front.post(C, model="org/tiny-1")).json()["model"] == "org/tiny-1"


async def test_404_and_405_have_the_error_object(door: MakeDoor) -> None:
    front = door()
    assert_error(await front.client.get("/nowhere"), 404, code="not_found")
    assert_error(await front.client.get("/v1/completions/"), 404)
    response = await front.client.get(C)
    assert_error(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_head_is_taken_where_get_is(door: MakeDoor, served: Serve) -> None:
    """As load balancers ask; behind a real server, whose answer has no body."""
    front = door()
    async with served(front) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/health", "/ready", "/v1/models", "/v1/models/tiny"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path
            assert answer.headers["content-length"] == (await client.get(path)).headers["content-length"]
        assert (await client.head("/nowhere")).status_code == 404
        assert (await client.head(C)).status_code == 405


async def test_H5_request_ids_are_echoed_and_never_used_inside(door: MakeDoor) -> None:
    front = door()
    for given in ("abc-1", "x" * 128):
        responses = [await front.post(CH, max_tokens=1, headers={"X-Request-Id": given}) for _ in range(2)]
        assert {response.headers["x-request-id"] for response in responses} == {given}
    assert len({spec.request_id for spec in front.script.specs}) == 4
    assert not any("abc" in spec.request_id for spec in front.script.specs)
    for bad in ("", "x" * 129, "a b", "<script>"):
        echoed = (await front.post(CH, max_tokens=1, headers={"X-Request-Id": bad})).headers["x-request-id"]
        assert echoed != bad
        assert len(echoed) == 32
    # Errors have one too.
    assert (await front.client.get("/nowhere", headers={"X-Request-Id": "e-1"})).headers["x-request-id"] == "e-1"


async def test_H7_every_path_needs_the_key_but_the_open_ones(door: MakeDoor) -> None:
    front = door(api_keys=("secret", "other"))
    paths = {route.path.replace("{model_id:path}", "tiny") for route in front.app.routes if hasattr(route, "path")}
    assert {C, CH, "/metrics", "/cluster", "/tokenize", "/openapi.json", "/v1/models/tiny"} <= paths
    odd = {"//v1/completions", "/V1/completions", "/v1/completions/", "/health/", "/nowhere", "/v1/../v1/models", "/docs"}
    for path in sorted(paths | odd):
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
            response = await front.client.request(method, path)
            if path in ("/health", "/ready"):
                assert response.status_code in (200, 405)
            else:
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
    for header in ("", "secret", "Basic secret", "Bearer", "Bearer wrong", "Bearer secretx", "Bearer sécret"):
        assert (await front.client.get("/v1/models", headers={"Authorization": header.encode()})).status_code == 401
    for header in ("Bearer secret", "bearer other"):
        assert (await front.client.get("/v1/models", headers={"Authorization": header})).status_code == 200
    assert front.script.specs == []
    open_metrics = door(api_keys=("secret",), metrics_need_key=False)
    assert (await open_metrics.client.get("/metrics")).status_code == 200


async def test_H9_refusals_before_the_first_token_are_json_for_streams_too(door: MakeDoor) -> None:
    def busy(spec: object, number: int) -> Exception | None:
        return (
            GenerationError(503, "server_error", "no_capacity", "every worker is full", retry_after_s=3)
            if number >= 1
            else None
        )

    for stream in (False, True):
        front = door(ScriptedGenerator(refuse=busy))
        response = await front.post(C, n=3, stream=stream)
        error = assert_error(response, 503, code="no_capacity")
        assert error["type"] == "server_error"
        assert response.headers["retry-after"] == "3"
        # Of the three, the one that had been accepted is not left running.
        assert front.script.num_live == 0


async def test_H9_failure_before_the_first_token_is_an_http_error(door: MakeDoor) -> None:
    for stream in (False, True):
        front = door(ScriptedGenerator(fail_at=0))
        assert_error(await front.post(C, stream=stream), 502, code="worker_lost")
        assert front.script.num_live == 0


@pytest.mark.parametrize("path", [C, CH])
async def test_C5_failure_in_a_stream_is_one_error_frame_and_the_end(door: MakeDoor, path: str) -> None:
    front = door(ScriptedGenerator(fail_at=3, pause_s=0.002))
    response = await front.post(path, stream=True, n=2, max_tokens=9, stream_options={"include_usage": True})
    assert response.status_code == 200
    blocks = response.content.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    last = json.loads(blocks.pop().removeprefix("data: "))
    assert last == {"error": {"message": "decode-0 died", "type": "server_error", "param": None, "code": "worker_lost"}}
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
    assert chunks
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert front.script.num_live == 0
    assert front.metric("kvrelay_sequences_total", outcome="error") >= 1
    whole = await front.post(path, n=2, max_tokens=9)
    assert_error(whole, 502, code="worker_lost")
    assert front.script.num_live == 0


async def test_C5_bad_requests_never_become_streams(door: MakeDoor) -> None:
    assert_error(await door().post(C, stream=True, n=0), 400, "n")


async def test_unexpected_failures_leak_nothing(door: MakeDoor, caplog: pytest.LogCaptureFixture) -> None:
    secret = RuntimeError("/home/me/secret.py")
    for stream in (False, True):
        front = door(ScriptedGenerator(fail_at=0, failure=secret))
        error = assert_error(await front.post(C, stream=stream), 500, code="internal_error")
        assert "secret" not in json.dumps(error)
        front = door(ScriptedGenerator(refuse=lambda spec, number: secret))
        response = await front.post(C, stream=stream)
        assert "secret" not in json.dumps(assert_error(response, 500, code="internal_error"))
        assert response.headers["x-request-id"]
    assert any("secret" in (record.exc_text or "") for record in caplog.records), "the log has it"
    mid = door(ScriptedGenerator(fail_at=2, failure=secret, pause_s=0.002))
    response = await mid.post(C, stream=True)
    assert response.status_code == 200
    assert b"secret" not in response.content
    assert b"[DONE]" not in response.content


async def test_a_generation_that_ends_without_a_reason_is_an_error(door: MakeDoor) -> None:
    front = door(ScriptedGenerator())
    submit = front.script.submit

    async def ends_at_once(spec: Any, policy: Any) -> Any:
        generation = await submit(spec, policy)
        generation.cancel()
        return generation

    front.script.submit = ends_at_once  # type: ignore[method-assign]
    assert_error(await front.post(C), 500, code="internal_error")


async def test_policy_header_only_where_allowed(door: MakeDoor) -> None:
    front = door()
    assert_error(await front.post(C, headers={"X-Kvrelay-Policy": "never"}), 403, code="policy_header_not_allowed")
    assert front.script.specs == []
    front = door(allow_policy_header=True)
    response = await front.post(C, headers={"X-Kvrelay-Policy": "Never"})
    assert front.script.policies == ["never"]
    assert response.headers["x-kvrelay-route"] == "prefill-0>decode-0"
    assert response.headers["x-kvrelay-policy"] == "always"
    await front.post(C)
    assert front.script.policies == ["never", None]
    assert_error(await front.post(C, headers={"X-Kvrelay-Policy": "sometimes"}), 400, "X-Kvrelay-Policy")
    assert_error(await front.post(C, headers={"X-Kvrelay-Timeline": "yes"}), 400, "X-Kvrelay-Timeline")


@pytest.mark.parametrize("path", [C, CH])
async def test_timeline_comes_with_every_choice_when_asked(door: MakeDoor, path: str) -> None:
    front = door()
    asked = {"X-Kvrelay-Timeline": "1"}
    whole = (await front.post(path, n=2, max_tokens=3, headers=asked)).json()
    chunks = events(await front.post(path, n=2, max_tokens=3, stream=True, headers=asked))
    streamed = [entry for chunk in chunks for entry in chunk.get("kvrelay_timeline", [])]
    assert sorted(streamed, key=lambda entry: entry["index"]) == whole["kvrelay_timeline"]
    assert [entry["index"] for entry in whole["kvrelay_timeline"]] == [0, 1]
    assert whole["kvrelay_timeline"][0]["prefill_ms"] == 12.0
    assert whole["kvrelay_timeline"][0]["route"] == "prefill-0>decode-0"
    assert "kvrelay_timeline" not in (await front.post(path, max_tokens=3)).json()


async def test_health_ready_cluster(door: MakeDoor) -> None:
    front = door()
    assert (await front.client.get("/health")).json() == {"status": "ok", "ready": True}
    assert (await front.client.get("/ready")).status_code == 200
    assert (await front.client.get("/cluster")).json() == {"workers": []}
    front.script.is_ready = False
    response = await front.client.get("/ready")
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert (await front.client.get("/health")).json() == {"status": "ok", "ready": False}


async def test_J7_series_are_bounded_whatever_clients_send(door: MakeDoor) -> None:
    front = door()
    await front.post(C, max_tokens=4)
    await front.client.get("/nowhere")
    await front.post(C, model="nope")
    before = (await front.client.get("/metrics")).text
    for number in range(60):
        await front.client.get(f"/random/{number}")
        await front.client.get(f"/v1/models/m{number}")
        await front.post(C, model=f"m{number}", user=f"u{number}", headers={"X-Request-Id": f"r{number}"})
    after = (await front.client.get("/metrics")).text
    new = {line.split(" ")[0] for line in after.splitlines()} - {line.split(" ")[0] for line in before.splitlines()}
    assert {'route="/v1/models/{model_id:path}"' in series or 'route="/metrics"' in series for series in new} == {True}
    assert front.metric("kvrelay_http_requests_total", route="unmatched", status="404") == 61
    assert front.metric("kvrelay_http_requests_total", route="/v1/completions", status="404") == 61
    assert front.metric("kvrelay_completion_tokens_total") == 4
    assert front.metric("kvrelay_time_to_first_token_seconds_count") == 1
    assert front.metric("kvrelay_inter_token_latency_seconds_count") == 3
    assert front.metric("kvrelay_sequences_total", outcome="length") == 1
    assert front.metric("kvrelay_http_requests_in_flight") == 0
