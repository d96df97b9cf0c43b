from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.cli import main
from cluster.commands.process import prepare_process
from cluster.commands.scale import parse_counts
from cluster.commands.up import curl_line, local_url
from cluster.process_kinds import PROCESS_KINDS
from cluster.process_specs import ProcessSpecs
from cluster.up_settings import UpSettings
from coordinator.settings import CoordinatorSettings
from decode_service.settings import DecodeSettings
from service_kit.errors import SettingsError
from service_kit.settings import load_settings
from wire.control import Role, WorkerLoad


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    for name, text in [("config.json", '{"model_type": "llama"}'), ("tokenizer.json", "{}"), ("model.safetensors", "")]:
        (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope"], "--nope"),
        (["upp"], "upp"),
        (["up", "--nope"], "--nope"),
        (["up", "--port"], "--port"),
        (["up", "--port", "x"], "port (command line, --port)"),
        (["up", "--decode", "0"], "decode (command line, --decode)"),
        (["up", "--policy", "maybe"], "policy"),
        (["up", "--transport", "pigeon"], "transport (command line, --transport)"),
        (["up", "--decode-cpus", "0;;1"], "decode_cpus"),
        (["up", "--coordinator-cpus", "0;1"], "coordinator_cpus"),
        (["decode", "--block-size", "0"], "block_size"),
        (["decode", "--kv-memory", "much"], "kv_memory"),
        (["prefill", "--cluster-token", "secret"], "--cluster-token"),
        (["coordinator", "--block-size", "1"], "--block-size"),
        (["scale"], "argument"),
        (["scale", "decode"], "prefill=2"),
        (["scale", "decode=-1"], "prefill=2"),
        (["scale", "router=1"], "prefill=2"),
        (["scale", "decode=1", "decode=2"], "twice"),
        (["scale", "--backend", "podman", "decode=1"], "podman"),
        (["scale", "--backend", "docker", "--port", "1", "decode=1"], "--project"),
        (["status", "--interval", "0"], "interval"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvrelay: ")
    assert words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scale", "decode=2"], "no local cluster runs"),
        (["status", "--port", "1"], "no local cluster runs on port 1"),
        (["status", "--url", "http://127.0.0.1:9", "--once"], "does not answer"),
        (["status", "--url", "nonsense", "--once"], "does not answer"),
        (["models", "fetch", "nothing-like-this"], "no known name (smollm2-135m)"),
        (["models", "convert", "org/name", "/tmp/x"], "neither"),
        (["up", "--host", "203.0.113.1", "--port", "0"], "cannot listen on 203.0.113.1"),
        (["decode", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_what_fails_is_one_line_and_code_1(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_wrong_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVRELAY_BLOCKSIZE", "1")
    assert main(["up"]) == 2
    assert "did you mean KVRELAY_BLOCK_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["decode", "--help"], ["models", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "Usage" in text
    if arguments[0] == "up":
        for option in ("--prefill", "--decode", "--model", "--dtype", "--transport", "--policy", "--port", "--prefill-cpus"):
            assert option in text


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "not fetched yet: kvrelay models fetch smollm2-135m" in capsys.readouterr().out


def test_counts() -> None:
    assert parse_counts(["decode=3", "prefill=0"]) == {Role.DECODE: 3, Role.PREFILL: 0}


# -- what processes are started with -----------------------------------------------------------------------------------


def test_one_process_on_its_own_becomes_its_module(model: Path) -> None:
    environ = {
        "KVRELAY_DTYPE": "float32",
        "KVRELAY_MAX_OUTSTANDING": "9",
        "KVRELAY_DECODE_CLUSTER_TOKEN": "t",
        "PATH": "/bin",
    }
    given: dict[str, object] = {"model": str(model), "cpus": "0", "transport": "zmq"}
    command, child = prepare_process(PROCESS_KINDS["decode"], given, environ)
    assert command[-1] == "decode_service"
    assert command[command.index("--cpus") + 1] == "0"
    assert "t" not in command
    settings = load_settings(DecodeSettings, "decode", overrides={}, environ=child)
    assert settings.engine.dtype == "float32"
    assert settings.worker.model_dir == model
    assert settings.worker.served_model == "tiny"
    assert settings.worker.transport_order == ("zmq",)
    assert settings.worker.cluster_token == "t"
    assert child["PATH"] == "/bin"


def specs(environ: dict[str, str], tmp_path: Path, up: UpSettings, **shared: object) -> ProcessSpecs:
    return ProcessSpecs(up, directory=tmp_path, environ=environ, shared=shared, cluster_token="secret-token")


def test_a_cluster_gives_every_process_its_settings(tmp_path: Path) -> None:
    environ = {"KVRELAY_DECODE_BLOCK_SIZE": "32", "KVRELAY_API_KEYS": "k", "KVRELAY_DECODE_CPUS": "0;0", "KVRELAY_PORT": "1"}
    up = UpSettings(decode=2, decode_cpus="0;0")
    make = specs(environ, tmp_path, up, dtype="float32", port=8123, policy="always", model_dir="/m")
    # 1. The coordinator: its own settings, and nothing of the workers.
    _, settings, _ = make.settings_of("coordinator")
    assert isinstance(settings, CoordinatorSettings)
    assert (settings.port, settings.policy, settings.api_keys) == (8123, "always", ("k",))
    # 2. Workers reach it where it listens, with the same token.
    for name, block_size in [("decode-1", 32), ("prefill-0", 64)]:
        kind, worker, _ = make.settings_of(name)
        assert kind.section == name[:-2]
        assert worker.worker.worker_id == name
        assert worker.worker.coordinator == settings.control
        assert worker.worker.cluster_token == settings.cluster_token == "secret-token"
        assert (worker.engine.dtype, worker.engine.block_size) == ("float32", block_size)
    # 3. CPUs by list, threads by CPUs.
    assert make.settings_of("decode-0")[2].cpus == (0,)
    assert make.settings_of("prefill-0")[2].cpus == ()
    assert make.settings_of("prefill-0")[1].process.threads >= 1
    # 4. The environment brings all of it over, and no secret is on the command line.
    spec = make("decode-1")
    assert load_settings(DecodeSettings, "decode", overrides={}, environ=spec.environ) == make.settings_of("decode-1")[1]
    assert not any("secret-token" in part for part in spec.command)
    assert "KVRELAY_API_KEYS" not in spec.environ


def test_threads_that_were_asked_for_stand(tmp_path: Path) -> None:
    make = specs({"KVRELAY_DECODE_THREADS": "7"}, tmp_path, UpSettings())
    assert make.settings_of("decode-0")[2].threads == 7


def test_a_setting_that_a_worker_would_refuse_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="block_size"):
        specs({}, tmp_path, UpSettings(), block_size="x")("decode-0")


def test_what_is_printed_when_ready() -> None:
    line = curl_line("http://h:1", CoordinatorSettings(served_model="it's", api_keys=("k",)))
    assert "http://h:1/v1/chat/completions" in line
    assert "Authorization" in line
    assert "secret" not in line
    assert local_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert local_url("::", 2) == "http://[::1]:2"
    assert local_url("example.org", 3) == "http://example.org:3"


# -- status --------------------------------------------------------------------------------------------------------------

REPORT: dict[str, Any] = {
    "coordinator": "c0",
    "policy": "auto",
    "model": "tiny",
    "workers": [
        {
            "id": "decode-0",
            "incarnation": "i",
            "role": "decode",
            "state": "ready",
            "load": msgspec.to_builtins(WorkerLoad(running=5, blocks_total=90, blocks_free=17)),
            "outstanding": {"sequences": 1},
        },
        {"id": "prefill-0", "role": "prefill", "state": "lost", "reason": "silent for 3 s"},
        {"id": "prefill-1", "role": "prefill", "state": "left", "reason": "drained"},
    ],
    "links": [{"prefill": "prefill-0", "decode": "decode-0", "up": False, "reason": "other fingerprint"}],
}


@pytest.fixture
def coordinator() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("Authorization") == "Bearer key"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(json.dumps(REPORT).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_status_shows_workers_and_broken_links(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", coordinator, "--once", "--api-key", "key"]) == 0
    text = capsys.readouterr().out
    assert "model tiny" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith(("decode", "prefill"))}
    assert "17/90" in rows["decode-0"]
    assert "silent for 3 s" in rows["prefill-0"]
    assert rows["prefill-1"].split()[2:4] == ["left", "drained"]
    assert "no link prefill-0 → decode-0: other fingerprint" in text


def test_status_as_json_is_what_the_coordinator_said(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", coordinator, "--json", "--api-key", "key"]) == 0
    assert json.loads(capsys.readouterr().out) == REPORT


def test_status_without_a_key(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", coordinator, "--once"]) == 1
    assert "--api-key" in capsys.readouterr().err
