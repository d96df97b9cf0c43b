"""`./scripts/serve` with the real default model, as on a user's first day (needs the model: fetched once, then cached)."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from http_cluster import ROOT, HttpCluster, kvrelay_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def cluster(run_dir: Path) -> Iterator[HttpCluster]:
    with kvrelay_up(run_dir, "--policy", "always", command=[str(ROOT / "scripts/serve")]) as running:
        yield running


def client_of(cluster: HttpCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120, _strict_response_validation=True)


def test_the_openai_client_gets_paris_streamed_and_the_same_unstreamed(cluster: HttpCluster) -> None:
    with client_of(cluster) as client:
        stream = client.chat.completions.create(
            model="smollm2-135m", messages=QUESTION, temperature=0, max_tokens=30, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        plain = client.chat.completions.create(model="smollm2-135m", messages=QUESTION, temperature=0, max_tokens=30)
    assert "Paris" in streamed
    assert plain.choices[0].message.content == streamed
    assert plain.choices[0].finish_reason == "stop"
    cluster.assert_empty()
    assert cluster.workers()["decode-0"]["load"]["prefill_tokens"] == 0
    assert cluster.workers()["decode-0"]["load"]["handoffs"] == 2


def test_split_and_colocated_give_the_same_text(cluster: HttpCluster) -> None:
    with client_of(cluster) as client:
        texts = [
            client.completions.create(
                model="smollm2-135m",
                prompt="Water boils at",
                temperature=0.7,
                seed=3,
                max_tokens=12,
                extra_headers={"X-Kvrelay-Policy": policy},
            )
            .choices[0]
            .text
            for policy in ("always", "never", "auto")
        ]
    assert len(set(texts)) == 1


def test_ctrl_c_leaves_nothing_and_a_second_start_is_quick(tmp_path: Path) -> None:
    """1. Start, serve, Ctrl-C. 2. No process, port, segment or file is left. 3. The second start is ready within 15 s."""
    segments_before = set(Path("/dev/shm").iterdir())
    started = time.monotonic()
    with kvrelay_up(tmp_path / "run", command=[str(ROOT / "scripts/serve")]) as running:
        ready_after_s = time.monotonic() - started
        assert httpx.get(f"{running.url}/ready").status_code == 200
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert len(children) >= 3
        port = int(running.url.rpartition(":")[2])
    assert not [child for child in children if child.is_running()]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert set(Path("/dev/shm").iterdir()) <= segments_before
    assert {path.name for path in (tmp_path / "run").rglob("*") if not path.is_dir()} <= {"up.log", "up.out"}
    # Measured, not required here: other work on this machine decides as well. The bound is far above the goal of 15 s.
    assert ready_after_s < 60
