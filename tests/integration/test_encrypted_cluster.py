"""Encryption by one setting: every process makes the cluster's key from the token, and nobody else gets in."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from cluster_harness import WorkerProcess, running_cluster
from fake_reference import fake_model_dir, reference

FAKE = {"KVRELAY_RUNNER": "fake", "KVRELAY_BLOCK_SIZE": "16", "KVRELAY_NUM_BLOCKS": "256"}
TOKEN = "not a secret, but as long as one"


async def test_encrypted_links_serve_and_keep_everybody_else_out(tmp_path: Path) -> None:
    """1. P and D register and hand over on encrypted TCP. 2. Three more workers try: without encryption, with another
    token, and with a token too short to be one. None joins. 3. The pair has not noticed."""
    prompt = [7, 5, 3] * 40
    model_dir = fake_model_dir(tmp_path / "model")
    async with running_cluster(model_dir, tmp_path / "logs", environ=FAKE, encrypted_by=TOKEN) as cluster:
        assert await cluster.generate(prompt, max_tokens=20) == reference(prompt, 20)
        await cluster.assert_empty()
        assert cluster.load("decode-0").handoffs == 1

        known = cluster.workers["decode-0"].environ
        strangers = {
            "decode-7": {"KVRELAY_ENCRYPT": "false"},
            "decode-8": {"KVRELAY_CLUSTER_TOKEN": "quite another, and long enough"},
            "decode-9": {"KVRELAY_CLUSTER_TOKEN": "short"},
        }
        outsiders = [WorkerProcess(*_named(name), known | changed, tmp_path / "logs") for name, changed in strangers.items()]
        try:
            for outsider in outsiders:
                outsider.start()
            plain, wrong, short = outsiders
            assert await asyncio.to_thread(short.wait) == 2, short.log()
            assert "cluster_token (encrypt): encryption needs a random secret of at least 16 characters" in short.log()
            for outsider in (plain, wrong):
                await _until_logged(outsider, "coordinator tcp://")
        finally:
            for outsider in outsiders:
                if outsider.process is not None and outsider.process.poll() is None:
                    outsider.kill()
        assert cluster.ready_workers() == {"prefill-0", "decode-0"}
        assert await cluster.generate(prompt, max_tokens=20) == reference(prompt, 20)
        await cluster.assert_empty()


def _named(name: str) -> tuple[str, int]:
    role, _, index = name.partition("-")
    return role, int(index)


async def _until_logged(worker: WorkerProcess, text: str) -> None:
    """A warning that the coordinator cannot be reached."""
    deadline = time.monotonic() + 60
    while text not in worker.log():
        assert time.monotonic() < deadline, worker.log()
        await asyncio.sleep(0.1)
