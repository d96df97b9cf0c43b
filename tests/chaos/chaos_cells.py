"""The matrix: what is done to whom in which stage of a request, and what must come of it.

Every cell ends with the right text, or an error object where the cell allows one; then no fault is left, and within
`RECOVERY_S` the cluster serves a request that needs all of D's blocks, through a hand-off; and every pool is back.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from chaos_cluster import LEASE_S, ChaosCluster
from chaos_stages import STAGES, VICTIM_PROMPT, VICTIM_TOKENS, Outcome, Running, Staged, StageMissed, Stager

from coordinator.generation import GenerationError
from coordinator.life_state import State

DEADLINE_S = 40.0  # of the request, behind the fault: more than all deadlines that may follow one another
RECOVERY_S = 10.0
POOLS_S = 15.0  # a hand-off whose last word was lost is held until its lease is over
NOTICED_S = 10.0
TRIES = 3


@dataclass(frozen=True)
class Cell:
    fault: str
    stage: str
    target: str  # a role, a cable, or "role: rule"
    may_fail: bool = False  # an error object is as good as the text

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.stage}-{self.target.replace(': ', '-').replace(':', '-')}".replace(", ", "-").replace(
            " ", "-"
        )


@dataclass(frozen=True)
class Result:
    outcome: str
    recovered_s: float  # from the end of the fault until a hand-off was served


# -- the matrix -----------------------------------------------------------------------------------------------------

_HOLDERS = {  # roles that hold something of a request in this stage
    "queued": ("decode",),
    "reserved": ("prefill", "decode"),
    "prefilling": ("prefill", "decode"),
    "transferring": ("prefill", "decode"),
    "decoding": ("decode",),
}
_CABLES = {
    "queued": ("d-c",),
    "reserved": ("p-c", "d-c", "p-d"),
    "prefilling": ("p-c", "d-c", "p-d"),
    "transferring": ("p-c", "d-c", "p-d"),
    "decoding": ("d-c",),
}
_MESSAGES = {  # what passes in this stage
    "queued": ("decode: recv:link=control:header=reserve", "decode: send:link=control:header=ticket"),
    "reserved": (
        "prefill: recv:link=control:header=prefill",
        "prefill: send:header=handoff-open",
        "decode: send:header=handoff-opened",
    ),
    "prefilling": ("prefill: put", "prefill: send:header=blocks-placed"),
    "transferring": (
        "prefill: send:link=control:header=first-token",
        "prefill: send:header=handoff-complete",
        "decode: send:header=handoff-ack",
    ),
    "decoding": ("decode: send:link=control:header=token-batch",),
}
_MESSAGE_FAULTS = ("drop", "delay", "duplicate", "reorder", "corrupt", "cut")
_LAST_WORDS = {  # what an aborted request's workers say to each other, and what they are told
    "reserved": ("prefill: recv:link=control:header=cancel", "decode: recv:link=control:header=cancel"),
    "transferring": (
        "prefill: recv:link=control:header=cancel",
        "decode: recv:link=control:header=cancel",
        "prefill: send:header=handoff-abort",
        "decode: send:header=handoff-cancel",
    ),
}
_TIMEOUTS = {  # what makes this stage last longer than it may
    "queued": "the pool stays full",
    "reserved": "P stays busy",
    "prefilling": "prefill: drop:send:link=control:header=first-token:nth=1",
    "transferring": "prefill: delay:put:seconds=6",
    "decoding": "decode: drop:send:link=control:header=token-batch:for=5",
}


def _cells() -> list[Cell]:
    cells: list[Cell] = []
    for stage in STAGES:
        cells.append(Cell("abort", stage, "client", may_fail=True))
        cells += [Cell("abort, drop", stage, words, may_fail=True) for words in _LAST_WORDS.get(stage, ())]
        cells.append(Cell("timeout", stage, _TIMEOUTS[stage], may_fail=stage == "queued"))
        cells += [Cell(fault, stage, role) for fault in ("kill -9", "SIGTERM", "SIGSTOP") for role in _HOLDERS[stage]]
        cells.append(Cell("coordinator dies", stage, "coordinator", may_fail=True))
        cells += [Cell("partition", stage, cable) for cable in _CABLES[stage]]
        # A reservation that nobody answers ends by its deadline, as one that finds no room does.
        cells += [
            Cell(fault, stage, message, may_fail=fault == "drop" and stage == "queued")
            for fault in _MESSAGE_FAULTS
            for message in _MESSAGES[stage]
        ]
    return cells


CELLS = _cells()


# -- running one ----------------------------------------------------------------------------------------------------


class CannotHappen(Exception):
    """This fault does not exist here."""


async def run_cell(cluster: ChaosCluster, stager: Stager, cell: Cell, recovery_s: float = RECOVERY_S) -> Result:
    """
    Args:
        recovery_s: how long the cluster may take to serve again.

    Raises:
        AssertionError: what must hold did not.
        CannotHappen: not on this machine, or not over this transport.
    """
    for attempt in range(1, TRIES + 1):
        try:
            outcome = await _outcome(cluster, stager, cell)
            break
        except StageMissed:
            if attempt == TRIES:
                raise
        finally:
            cluster.disarm()
    ended = time.monotonic()
    assert outcome.is_right, f"wrong text: {outcome.tokens}, {outcome.error}\n{cluster.logs()}"
    assert cell.may_fail or outcome.error is None, f"{outcome.error.__dict__ if outcome.error else ''}\n{cluster.logs()}"
    if cell.fault.startswith("abort"):
        assert outcome.error is not None
        assert outcome.error.status == 499
    await _serves_again(cluster, stager, ended, recovery_s)
    recovered_s = time.monotonic() - ended
    await cluster.assert_empty(POOLS_S)
    return Result(str(outcome), recovered_s)


async def _outcome(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    injections: dict[str, Callable[[], Awaitable[Outcome]]] = {
        "abort": lambda: _abort(stager, cell),
        "abort, drop": lambda: _abort_unheard(cluster, stager, cell),
        "timeout": lambda: _timeout(cluster, stager, cell),
        "kill -9": lambda: _kill(cluster, stager, cell),
        "SIGTERM": lambda: _terminate(cluster, stager, cell),
        "SIGSTOP": lambda: _stop(cluster, stager, cell),
        "coordinator dies": lambda: _replace_coordinator(cluster, stager, cell),
        "partition": lambda: _partition(cluster, stager, cell),
    }
    return await injections.get(cell.fault, lambda: _message(cluster, stager, cell))()


async def _ended(running: Running) -> Outcome:
    async with asyncio.timeout(DEADLINE_S):
        return await running.task


async def _released(staged: Staged) -> Outcome:
    await staged.release()
    return await _ended(staged.victim)


async def _abort(stager: Stager, cell: Cell) -> Outcome:
    staged = await stager.bring(cell.stage)
    staged.victim.generation.cancel()
    return await _released(staged)


async def _abort_unheard(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    """One word of the abort is lost (it need not be said in every order of events)."""
    role, _, operation = cell.target.partition(": ")
    staged = await stager.bring(cell.stage)
    cluster.worker(role).arm(f"drop:{operation}:nth=1")
    staged.victim.generation.cancel()
    outcome = await _ended(staged.victim)
    await asyncio.sleep(LEASE_S)  # for the word to be said
    cluster.disarm()
    await staged.release()
    return outcome


async def _kill(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    staged = await stager.bring(cell.stage)
    cluster.worker(cell.target).kill()
    cluster.restart(cell.target)
    return await _released(staged)


async def _terminate(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    """The worker finishes what it has, leaves with 0, and is started again."""
    staged = await stager.bring(cell.stage)
    cluster.worker(cell.target).send_signal(signal.SIGTERM)
    await staged.release()
    outcome = asyncio.create_task(_ended(staged.victim))
    code = await asyncio.to_thread(cluster.worker(cell.target).wait, DEADLINE_S)
    cluster.restart(cell.target)
    assert code == 0, f"left with {code}\n{cluster.logs()}"
    return await outcome


async def _stop(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    """Stopped until it has been given up, and then some; it goes on where it stood, as a stranger."""
    staged = await stager.bring(cell.stage)
    worker = cluster.worker(cell.target)
    worker.send_signal(signal.SIGSTOP)
    try:
        await cluster.until(lambda: not cluster.is_there(cell.target), NOTICED_S, "the stopped worker is given up")
        await staged.release()
        await asyncio.sleep(LEASE_S / 2)
    finally:
        worker.send_signal(signal.SIGCONT)
    return await _ended(staged.victim)


async def _replace_coordinator(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    """Its clients are told, or see their connection break; nobody asks for their sequences any more."""
    staged = await stager.bring(cell.stage)
    await cluster.replace_coordinator()
    outcome = await _released(staged)
    assert outcome.error is not None
    assert outcome.error.status == 503
    return outcome


async def _partition(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    """The cable is out until both ends have noticed."""
    if cluster.network.reason:
        raise CannotHappen(cluster.network.reason)
    if cell.target == "p-d" and cluster.transport == "zmq-ipc":
        raise CannotHappen("a Unix socket has no cable")
    staged = await stager.bring(cell.stage)
    role = {"p-c": "prefill", "d-c": "decode"}.get(cell.target)
    cluster.network.pull(cell.target)
    try:
        gone: Callable[[], bool] = (lambda: not cluster.is_there(role)) if role else (lambda: not cluster.is_linked())
        await cluster.until(gone, NOTICED_S, "the partition is noticed")
        await staged.release()
        await asyncio.sleep(LEASE_S / 2)
    finally:
        cluster.network.plug(cell.target)
    return await _ended(staged.victim)


async def _timeout(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    """The stage lasts longer than its deadline; the worker beats on."""
    role, _, rule = cell.target.partition(": ")
    if cell.stage == "transferring":
        staged = await stager.bring(cell.stage, hold_transfer=rule)
    elif rule:
        return await _struck(cluster, stager, role, rule)
    else:
        staged = await stager.bring(cell.stage, prefill_holders=10)
    if cell.stage == "reserved":
        await cluster.until(lambda: staged.victim.state is not State.PREFILLING, DEADLINE_S, "the deadline")
        return await _released(staged)
    outcome = await _ended(staged.victim)
    await staged.release()
    return outcome


async def _message(cluster: ChaosCluster, stager: Stager, cell: Cell) -> Outcome:
    role, _, operation = cell.target.partition(": ")
    rule = f"{cell.fault}:{operation}:nth={3 if cell.stage == 'decoding' else 1}"
    if cell.fault == "delay":
        rule += ":seconds=1"
    if cell.stage != "queued":
        return await _struck(cluster, stager, role, rule)
    holder = await stager.start(100, 500, "never")
    await cluster.until(lambda: holder.state is State.DECODING, NOTICED_S, "the pool is held")
    return await _struck(cluster, stager, role, rule, holder)


async def _struck(cluster: ChaosCluster, stager: Stager, role: str, rule: str, holder: Running | None = None) -> Outcome:
    """A request that runs into this fault."""
    worker = cluster.worker(role)
    before = worker.strikes(rule)
    worker.arm(rule)
    victim = await stager.start(VICTIM_PROMPT, VICTIM_TOKENS)
    if holder is not None:
        struck = lambda: worker.strikes(rule) > before or cluster.seen("decode").waiting >= 1  # noqa: E731
        await cluster.until(struck, NOTICED_S, "it is queued, or never will be")
        holder.generation.cancel()
        assert (await holder.task).is_right
    outcome = await _ended(victim)
    if worker.strikes(rule) == before:
        raise AssertionError(f"{rule} never struck\n{cluster.logs()}")
    return outcome


async def _serves_again(cluster: ChaosCluster, stager: Stager, since: float, within_s: float) -> None:
    """A request that needs the whole pool goes through a hand-off and is right."""
    last: object = "nothing was tried"
    while time.monotonic() - since < within_s:
        try:
            probe = await stager.whole_pool()
        except GenerationError as error:
            last = error
            await asyncio.sleep(0.1)
            continue
        outcome = await _ended(probe)
        assert outcome.is_right, f"wrong text: {outcome.tokens}\n{cluster.logs()}"
        if outcome.error is None and outcome.fallback is None:
            break
        last = outcome
    else:
        raise AssertionError(f"not serving by hand-off {within_s:g} s after the fault: {last}\n{cluster.logs()}")
    took = time.monotonic() - since
    assert took <= within_s, f"served by hand-off only {took:.1f} s after the fault\n{cluster.logs()}"
