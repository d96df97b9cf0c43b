"""`docker compose up` on a real Docker engine: real containers, networks, volumes and signals.

Two clusters take turns in one project: a real one, which serves the default model, for what a person sees first; and one of
fake runners, whose every token is known, for scaling, kills and start orders under load.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import openai
import pytest
from compose_project import (
    IDLE_FIELDS,
    ComposeProject,
    NoEngine,
    build_arguments,
    docker,
    inspect,
    is_healthy,
    wait_until,
)
from steady_load import Answer, SteadyLoad

from cluster.docker_backend import scale_project
from wire.control import Role

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

PROJECT = "kvrelay-e2e"
IMAGES = {"WORKER_IMAGE": "kvrelay-e2e-worker", "COORDINATOR_IMAGE": "kvrelay-e2e-coordinator"}
REAL = {"KVRELAY_KV_MEMORY": "256MiB", "KVRELAY_PREFILL_THREADS": "1", "KVRELAY_DECODE_THREADS": "1"}
FAKE = {
    "KVRELAY_RUNNER": "fake",
    "KVRELAY_KV_MEMORY": "4MiB",
    "KVRELAY_FAKE_STEP_S": "0.02",
    "KVRELAY_FAKE_TOKEN_S": "0.0005",
}
VOCAB_SIZE = 49152
UID = "10001"
ROGUE_LINK = Path(__file__).resolve().parents[1] / "docker_engine" / "rogue_link.py"


@pytest.fixture(scope="module")
def project() -> Iterator[ComposeProject]:
    """Images are built once; at the end nothing of the project is left but they."""
    try:
        project = ComposeProject(PROJECT, build_arguments() | IMAGES)
    except NoEngine as why:
        pytest.skip(f"no Docker engine: {why}")
    project.down(volumes=True)
    project.compose("build", timeout=1500)
    yield project
    project.down(volumes=True)
    assert project.leftovers() == {"containers": [], "networks": [], "volumes": []}


@pytest.fixture
def real(project: ComposeProject) -> ComposeProject:
    return bring_up(project, REAL)


@pytest.fixture
def fake(project: ComposeProject) -> ComposeProject:
    return bring_up(project, FAKE)


def bring_up(project: ComposeProject, variables: dict[str, str]) -> ComposeProject:
    """One prefill and one decode worker with these settings; fast where they run already."""
    if not variables.items() <= project.variables.items():
        project.down(volumes=False)  # a coordinator serves what its first worker has, for life
        for name in (*REAL, *FAKE):
            project.variables.pop(name, None)
        project.variables |= variables
    project.up()
    wait_until(project.is_ready, 60, "the coordinator is ready")
    return project


# -- 1: from nothing to an answer, and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("override", [None, "deploy/compose.shm.yaml", "deploy/compose.gpu.yaml"])
def test_config_warns_of_nothing(project: ComposeProject, override: str | None) -> None:
    files = ("compose.yaml", *([override] if override else []))
    result = ComposeProject(PROJECT, project.variables | {"GPUS": "2"}, files).compose("config", "--quiet")
    assert (result.stdout, result.stderr) == ("", "")


def test_from_nothing_to_a_streamed_answer(project: ComposeProject) -> None:
    project.down(volumes=True)
    cluster = bring_up(project, REAL)
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    routes = {}
    for policy in ("always", "never"):
        with client.chat.completions.with_streaming_response.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=20,
            stream=True,
            extra_headers={"X-Kvrelay-Policy": policy},
        ) as response:
            routes[policy] = response.headers["x-kvrelay-route"]
            chunks = list(response.parse())
        assert len(chunks) > 4
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
            "The capital of France is Paris."
        )
    (prefill,), (decode,) = cluster.workers("prefill"), cluster.workers("decode")
    assert routes == {"always": f"{prefill}>{decode}", "never": decode}
    (link,) = cluster.cluster()["links"]
    assert (link["prefill"], link["decode"], link["transport"], link["up"]) == (prefill, decode, "zmq", True)
    client.close()
    wait_until(cluster.is_idle, 10, "everything is empty")


# -- 5: what a container may do -------------------------------------------------------------------------------------------


def test_containers_are_not_root_and_cannot_write(real: ComposeProject) -> None:
    for service in ("coordinator", "prefill", "decode"):
        (container,) = real.containers(service)
        found = inspect(container)
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        assert docker("exec", container, "id", "-u") == UID
        assert docker("exec", container, "sh", "-c", "touch /app/x /opt/x 2>/dev/null; ls /app/x /opt/x", check=False) == ""
        assert docker("exec", container, "sh", "-c", "command -v cc gcc g++ clang", check=False) == ""
        published = {port for port, bindings in found["NetworkSettings"]["Ports"].items() if bindings}
        assert published == ({"8000/tcp"} if service == "coordinator" else set())
    (coordinator,) = real.containers("coordinator")
    assert docker("exec", coordinator, "sh", "-c", "python -c 'import torch' 2>&1 | tail -n 1").startswith(
        "ModuleNotFoundError"
    )


# -- 4: who may join -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ("KVRELAY_BLOCK_SIZE=32", "block_size"),
        ("KVRELAY_DTYPE=float32", "layout"),
        ("KVRELAY_RUNNER=fake", "model"),
        ("KVRELAY_CLUSTER_TOKEN=guessed", "token"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused(real: ComposeProject, variable: str, reason: str) -> None:
    container = real.compose("run", "--detach", "--no-deps", "--env", variable, "decode").stdout.split()[-1]
    try:
        wait_until(lambda: not inspect(container)["State"]["Running"], 60, "the refused worker ends")
        found = inspect(container)
        assert found["State"]["ExitCode"] == 3
        log = subprocess.run(["docker", "logs", container], capture_output=True, text=True).stderr
        assert "refuses this worker" in log
        name = f"decode-{found['Config']['Hostname']}"
        refused = {worker["id"]: worker["reason"] for worker in real.cluster()["refused"]}
        assert reason in refused[name]
        assert name not in real.ready_workers()
    finally:
        docker("rm", "--force", container)


def test_without_the_token_no_kv_can_be_pushed(real: ComposeProject) -> None:
    """The same program, with and without the token, so that nothing else can be what stops it."""
    decode = next(worker for worker in real.cluster()["workers"] if worker["role"] == "decode")
    (endpoint,) = decode["endpoints"]

    def push(token: str) -> str:
        volumes = ["--volume", f"{PROJECT}_models:/var/lib/kvrelay:ro", "--volume", f"{PROJECT}_token:/run/kvrelay:ro"]
        program = ["--volume", f"{ROGUE_LINK}:/rogue_link.py:ro", "--entrypoint", "python", IMAGES["WORKER_IMAGE"]]
        arguments = ["/rogue_link.py", endpoint["address"], decode["incarnation"], token, REAL["KVRELAY_KV_MEMORY"]]
        return docker("run", "--rm", "--network", f"{PROJECT}_cluster", *volumes, *program, *arguments)

    assert push("file:/run/kvrelay/token") == "linked"
    assert "token" in push("guessed").removeprefix("refused: ")
    assert "token" in push("").removeprefix("refused: ")


def test_outside_the_network_nobody_is_reached(real: ComposeProject) -> None:
    (coordinator,), (decode,) = real.containers("coordinator"), real.containers("decode")

    def connects(network: str, container: str, port: int) -> bool:
        address = inspect(container)["NetworkSettings"]["Networks"][f"{PROJECT}_cluster"]["IPAddress"]
        program = f"import socket; socket.create_connection(('{address}', {port}), 3)"
        command = ["run", "--rm", "--network", network, "--entrypoint", "python", IMAGES["COORDINATOR_IMAGE"], "-c", program]
        return subprocess.run(["docker", *command], capture_output=True).returncode == 0

    for container, port in ((coordinator, 8001), (decode, 7000)):
        assert connects(f"{PROJECT}_cluster", container, port)
        assert not connects("bridge", container, port)


def test_down_leaves_only_the_volumes_that_are_kept(project: ComposeProject) -> None:
    bring_up(project, FAKE)
    project.down(volumes=False)
    assert project.leftovers() == {
        "containers": [],
        "networks": [],
        "volumes": [f"{PROJECT}_models", f"{PROJECT}_token"],
    }


# -- 2: scaling under load ----------------------------------------------------------------------------------------------


def share(answers: list[Answer], worker: str) -> int:
    return sum(worker in answer.route.split(">") for answer in answers)


class Watch:
    """With which code each container of a project ends, and what the workers among some of them hold when they go."""

    def __init__(self, containers: Iterable[str]) -> None:
        filters = ["--filter", f"label=com.docker.compose.project={PROJECT}", "--filter", "event=die"]
        self._events = follow("events", *filters, "--format", "{{json .}}")
        self._logs = {container: follow("logs", "--follow", container) for container in containers}
        self.exit_codes: dict[str, str] = {}
        self.left: dict[str, dict[str, int]] = {}

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.terminate()
        deaths = [json.loads(line) for line in self._events.communicate(timeout=10)[0].splitlines()]
        self.exit_codes = {death["id"][:12]: death["Actor"]["Attributes"]["exitCode"] for death in deaths}
        for container, process in self._logs.items():
            lines = [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines() if line.startswith("{")]
            (drained,) = [line for line in lines if line["message"] == "drained"]
            self.left[container] = {name: drained[name] for name in IDLE_FIELDS}


def follow(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_scaling_under_load_loses_nothing(fake: ComposeProject) -> None:
    old = {role: set(fake.containers(role)) for role in ("prefill", "decode")}
    with SteadyLoad(fake.url, VOCAB_SIZE) as load:
        # 1. One and one.
        load.wait_for(8, 60)
        # 2. Up: within 10 s of being there, the new ones have their share.
        fake.up(scale={"prefill": 2, "decode": 3})
        grown = time.monotonic()
        time.sleep(10)
        answers = load.since(grown)
        for role, count in (("prefill", 2), ("decode", 3)):
            shares = {worker: share(answers, worker) for worker in fake.workers(role)}
            assert len(shares) == count
            assert min(shares.values()) >= len(answers) / count / 2, shares
        # 3. Down again: the new ones drain.
        extra = {role: [one for one in fake.containers(role) if one not in old[role]] for role in old}
        with Watch([one for containers in extra.values() for one in containers]) as watch:
            fake.up(scale={"prefill": 1, "decode": 1})
            assert {role: set(fake.containers(role)) for role in old} == old
        load.wait_for(8, 60)
    # 4. Every answer is whole and right.
    assert len(load.answers) > 30
    assert (load.errors, load.wrong()) == ([], [])
    # 5. Who left, left in order and with nothing in the pool.
    for role, containers in extra.items():
        for container in containers:
            assert watch.exit_codes[container] == "0"
            assert watch.left[container] == dict.fromkeys(IDLE_FIELDS, 0), role
    wait_until(fake.is_idle, 10, "everything is empty")


def test_the_docker_sdk_scales_what_compose_started(fake: ComposeProject) -> None:
    pytest.importorskip("docker", reason="the Docker SDK is not installed (extra [docker])")
    fake.up(scale={"prefill": 1, "decode": 1})
    reports: list[str] = []
    with SteadyLoad(fake.url, VOCAB_SIZE, num_streams=4) as load:
        assert scale_project(PROJECT, {Role.PREFILL: 2, Role.DECODE: 3}, 60, reports.append) == {
            Role.PREFILL: 2,
            Role.DECODE: 3,
        }
        wait_until(lambda: len(fake.ready_workers()) == 5, 10, "all five are ready")
        grown = time.monotonic()
        wait_until(lambda: all(share(load.since(grown), name) for name in fake.ready_workers()), 15, "all five take work")
        # Compose takes the copies for its own, and goes on from there.
        fake.up(scale={"prefill": 2, "decode": 2})
        assert len(fake.containers("decode")) == 2
        assert scale_project(PROJECT, {Role.PREFILL: 1, Role.DECODE: 1}, 60, reports.append) == {
            Role.PREFILL: 1,
            Role.DECODE: 1,
        }
    assert (load.errors, load.wrong()) == ([], [])
    assert f"{PROJECT}-decode-3: ready" in reports
    wait_until(fake.is_idle, 10, "everything is empty")


# -- 3: kills --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["docker kill", "crash"])
def test_a_killed_worker_costs_no_request(fake: ComposeProject, role: str, how: str) -> None:
    fake.up(scale={"prefill": 2, "decode": 2})
    victim = fake.containers(role)[0]
    name = f"{role}-{victim}"
    before = fake.ready_workers()
    assert name in before
    with SteadyLoad(fake.url, VOCAB_SIZE) as load:
        load.wait_for(8, 60)
        if how == "docker kill":  # as if a person had stopped it: it stays down until a person starts it
            docker("kill", victim)
            load.wait_for(8, 60)
            assert name not in fake.ready_workers()
            docker("start", victim)
        else:  # its process dies: the restart policy brings it back
            docker("exec", victim, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
            wait_until(lambda: inspect(victim)["RestartCount"] > 0, 30, "the container is restarted")
        wait_until(lambda: is_healthy(victim), 60, "the container is healthy again")
        again = time.monotonic()
        wait_until(lambda: share(load.since(again), name) > 0, 10, "it takes work again, under the same name")
    assert fake.ready_workers() == before
    assert load.wrong() == []
    assert load.errors == []
    wait_until(fake.is_idle, 15, "everything is empty")


def test_workers_register_again_with_a_restarted_coordinator(fake: ComposeProject) -> None:
    before, incarnation = fake.ready_workers(), fake.cluster()["coordinator"]
    fake.compose("restart", "coordinator")
    wait_until(lambda: fake.ready_workers() == before, 30, "the workers are back")
    assert fake.cluster()["coordinator"] != incarnation
    with SteadyLoad(fake.url, VOCAB_SIZE, num_streams=2) as load:
        load.wait_for(4, 30)
    assert (load.errors, load.wrong()) == ([], [])


# -- 4: start orders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["coordinator", "prefill", "decode"])), ids="-".join)
def test_services_start_in_any_order(fake: ComposeProject, order: tuple[str, ...]) -> None:
    fake.compose("rm", "--stop", "--force", *order)
    for service in order:
        fake.compose("up", "-d", "--no-deps", service)
        time.sleep(1.5)
    containers = [container for service in order for container in fake.containers(service)]
    wait_until(lambda: all(is_healthy(container) for container in containers), 60, "all three are healthy")
    with SteadyLoad(fake.url, VOCAB_SIZE, num_streams=2) as load:
        load.wait_for(2, 30)
    assert (load.errors, load.wrong()) == ([], [])
    routes = Counter(answer.route for answer in load.answers)
    assert set(routes) == {f"{fake.workers('prefill')[0]}>{fake.workers('decode')[0]}"}
