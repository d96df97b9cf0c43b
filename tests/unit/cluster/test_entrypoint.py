"""The images' entrypoint, with a stand-in for `kvrelay` that says what it was started with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[3] / "deploy" / "docker" / "entrypoint.sh"

pytestmark = pytest.mark.skipif(not (shutil.which("flock") and shutil.which("hostname")), reason="needs flock and hostname")

STAND_IN = """#!/bin/sh
if [ "$1 $2" = "models fetch" ]; then echo "/models/of/$3"; exit 0; fi
exec python3 -S -c '
import json, os, sys
print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith(("KVRELAY_", "CUDA_"))}]), flush=True)
sys.stdin.read()
' "$@"
"""


class Box:
    """A folder that stands for a container's volumes, and the processes started in it."""

    def __init__(self, folder: Path) -> None:
        self.token = folder / "token"
        self.cache = folder / "cache"
        self.locks = folder / "locks"
        programs = folder / "bin"
        for made in (self.cache, self.locks, programs):
            made.mkdir()
        (programs / "kvrelay").write_text(STAND_IN)
        (programs / "kvrelay").chmod(0o755)
        self._path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
        self.running: list[subprocess.Popen[str]] = []

    def environ(self, **more: str) -> dict[str, str]:
        return {
            "PATH": self._path,
            "KVRELAY_CLUSTER_TOKEN_FILE": str(self.token),
            "KVRELAY_CACHE": str(self.cache),
            "KVRELAY_THREADS": "1",
            **more,
        }

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """To its end; the stand-in ends with its input."""
        return subprocess.run(
            ["sh", str(ENTRYPOINT), *arguments],
            env=self.environ(**more),
            input="",
            capture_output=True,
            text=True,
            timeout=30,
        )

    def start(self, *arguments: str, **more: str) -> tuple[list[str], dict[str, str]]:
        """Keeps running; what the stand-in got."""
        command = ["sh", str(ENTRYPOINT), *arguments]
        process = subprocess.Popen(
            command,
            env=self.environ(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.running.append(process)
        assert process.stdout is not None
        given, environ = json.loads(process.stdout.readline())
        return given, environ

    def end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate(timeout=10)
        self.running.remove(process)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    for process in list(box.running):
        box.end(process)


def test_init_makes_the_token_once_and_workers_read_it(box: Box) -> None:
    # 1. The first start makes it, for its user alone.
    assert box.run("init").returncode == 0
    token = box.token.read_text().strip()
    assert len(token) >= 32
    assert box.token.stat().st_mode & 0o077 == 0
    # 2. The second one keeps it, and leaves nothing else beside it.
    assert box.run("init").returncode == 0
    assert box.token.read_text().strip() == token
    assert list(box.token.parent.glob("token*")) == [box.token]
    # 3. A worker has it as a variable, and no variable that kvrelay would not know.
    given, environ = box.start("decode")
    assert given == ["decode"]
    assert environ == {
        "KVRELAY_CACHE": str(box.cache),
        "KVRELAY_THREADS": "1",
        "KVRELAY_CLUSTER_TOKEN": token,
        "KVRELAY_MODEL_DIR": "/models/of/smollm2-135m",
        "KVRELAY_SERVED_MODEL": "smollm2-135m",
        "KVRELAY_WORKER_ID": f"decode-{gethostname()}",
        "KVRELAY_ADVERTISE_HOST": gethostname(),
    }


def test_a_given_token_goes_before_the_file(box: Box) -> None:
    assert box.run("init", KVRELAY_CLUSTER_TOKEN="mine").returncode == 0
    assert not box.token.exists()
    assert box.start("prefill", KVRELAY_CLUSTER_TOKEN="mine")[1]["KVRELAY_CLUSTER_TOKEN"] == "mine"


def test_without_a_token_nothing_starts(box: Box) -> None:
    result = box.run("coordinator")
    assert result.returncode == 1
    assert "the service init makes it" in result.stderr
    box.token.write_text("\n")
    assert "is empty" in box.run("coordinator").stderr


@pytest.mark.parametrize(
    ("model", "served"), [("org/name", "org/name"), ("/model", "model"), ("/files/some.gguf", "some"), ("a-name", "a-name")]
)
def test_the_model_is_where_init_found_it(box: Box, model: str, served: str) -> None:
    box.run("init", KVRELAY_MODEL=model)
    environ = box.start("coordinator", KVRELAY_MODEL=model)[1]
    assert (environ["KVRELAY_MODEL_DIR"], environ["KVRELAY_SERVED_MODEL"]) == (f"/models/of/{model}", served)
    assert "KVRELAY_WORKER_ID" not in environ


def test_another_model_than_init_found_is_left_to_kvrelay(box: Box) -> None:
    box.run("init", KVRELAY_MODEL="org/name")
    assert "KVRELAY_MODEL_DIR" not in box.start("coordinator", KVRELAY_MODEL="org/other")[1]


def test_each_worker_has_a_gpu_of_its_own(box: Box) -> None:
    box.run("init")
    gpus = {"GPUS": "2", "GPU_LOCKS": str(box.locks)}
    # 1. Two GPUs for two workers, whatever their role.
    assert box.start("prefill", **gpus)[1]["CUDA_VISIBLE_DEVICES"] == "0"
    assert box.start("decode", **gpus)[1]["CUDA_VISIBLE_DEVICES"] == "1"
    # 2. A third one says so and ends.
    result = box.run("decode", **gpus)
    assert (result.returncode, "all 2 GPUs of this host are taken" in result.stderr) == (1, True)
    # 3. One is killed: its successor has its GPU.
    box.end(box.running[0])
    assert box.start("decode", **gpus)[1]["CUDA_VISIBLE_DEVICES"] == "0"


def test_any_other_command_runs_as_it_is(box: Box) -> None:
    assert box.run("echo", "hello").stdout == "hello\n"
    assert "say what to run" in box.run().stderr
