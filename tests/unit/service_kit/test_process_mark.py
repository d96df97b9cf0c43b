"""A process that another one watches: alive, stopped, dead, and one that cannot be seen."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass

import msgspec
import pytest

from service_kit.process_mark import OwnMark, ProcessWatch
from transport.shm_segment import unlink_orphans
from wire.handoff import ProcessMark

CHILD = """
import sys
from msgspec import json
from service_kit.process_mark import OwnMark
own = OwnMark()
sys.stdout.write(json.encode(own.mark).decode() + "\\n")
sys.stdout.flush()
sys.stdin.read()
own.close()
"""


@dataclass
class Child:
    process: subprocess.Popen[str]
    mark: ProcessMark


@pytest.fixture
def child() -> Child:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    made = Child(process, msgspec.json.decode(process.stdout.readline(), type=ProcessMark))
    yield made
    process.kill()
    process.communicate()
    unlink_orphans()


def blind_to(mark: ProcessMark, *, pids: bool = False, shared_memory: bool = False) -> ProcessMark:
    if pids:
        mark = msgspec.structs.replace(mark, pid_namespace="pid:[another container's]")
    return msgspec.structs.replace(mark, life_name="") if shared_memory else mark


@pytest.mark.parametrize(
    ("blind", "seen"),
    [({}, True), ({"pids": True}, True), ({"shared_memory": True}, True), ({"pids": True, "shared_memory": True}, False)],
)
def test_a_death_is_seen_by_either_way_and_a_stop_is_no_death(child: Child, blind: dict[str, bool], seen: bool) -> None:
    watch = ProcessWatch(blind_to(child.mark, **blind))
    assert not watch.is_gone()
    child.process.send_signal(signal.SIGSTOP)
    assert not watch.is_gone()
    child.process.kill()
    child.process.wait()
    assert watch.is_gone() is seen
    unlink_orphans()
    assert watch.is_gone() is seen


def test_a_process_is_not_gone_to_itself_and_closing_leaves_no_segment() -> None:
    own = OwnMark()
    watch = ProcessWatch(own.mark)
    assert not watch.is_gone()
    own.close()
    own.close()
    assert ProcessWatch(blind_to(own.mark, pids=True)).is_gone() is False, (
        "what was never seen alive is not known to be dead"
    )
