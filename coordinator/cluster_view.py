"""Who is in the cluster and who can serve: membership without I/O, time passed in.

    Register ─▶ refused (another protocol, token, model, KV layout) | a member
    a member  ─▶ draining (Leaving, or told to) ─▶ its goodbye: left
              ─▶ its channel ended, its successor registered, a goodbye without draining: lost, at once
              ─▶ silent for `lease_s`: lost

Load never means life, and a (P, D) pair is usable only while P's last report on D's incarnation says that the link is up.
The first worker fixes what the cluster serves; it stays so for the coordinator's life, since a sequence that is replayed
must meet the same model.
"""

from __future__ import annotations

import enum
import hmac
from collections import OrderedDict
from dataclasses import dataclass, field

from coordinator.placement_settings import PlacementSettings
from wire.control import DecodePeer, DecodePeers, LinkReport, Register, Role, WorkerInfo, WorkerLoad
from wire.ids import Incarnation, WorkerId
from wire.kv_layout import PROTOCOL_VERSION

_REMEMBERED = 64
_MAX_NAME = 100  # characters of what an unaccepted worker says about itself


class WorkerState(enum.Enum):
    STARTING = "starting"  # a prefill worker that has not proved any link yet
    READY = "ready"
    DRAINING = "draining"
    LEFT = "left"  # it drained and said goodbye
    LOST = "lost"
    REFUSED = "refused"


@dataclass(slots=True)
class Member:
    info: WorkerInfo
    lease_deadline: float
    load: WorkerLoad = field(default_factory=WorkerLoad)
    has_beaten: bool = False
    draining: bool = False
    was_linked: bool = False

    @property
    def state(self) -> WorkerState:
        if self.draining:
            return WorkerState.DRAINING
        if self.info.role is Role.PREFILL and not self.was_linked:
            return WorkerState.STARTING
        return WorkerState.READY


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class MemberGone:
    """Nothing comes from this incarnation any more: fail over what it had, abort its channel."""

    incarnation: Incarnation
    worker_id: WorkerId
    reason: str
    in_order: bool = False  # it drained and said goodbye


@dataclass(frozen=True, slots=True)
class SendPeers:
    """Tell these prefill workers which decode workers there are."""

    to: tuple[Incarnation, ...]
    peers: DecodePeers


ViewAction = MemberGone | SendPeers


@dataclass(frozen=True, slots=True)
class FormerWorker:
    """What is remembered of a worker that left, was lost or was refused."""

    worker_id: str
    incarnation: str
    role: Role
    state: WorkerState
    reason: str
    at: float


class ClusterView:
    def __init__(self, settings: PlacementSettings, now: float) -> None:
        self._settings = settings
        self._last_tick = now
        self.identity: WorkerInfo | None = None  # the first worker's: model, fingerprint, block size
        self.members: dict[Incarnation, Member] = {}
        self.links: dict[tuple[Incarnation, Incarnation], LinkReport] = {}  # (prefill, decode)
        self.former: OrderedDict[str, FormerWorker] = OrderedDict()  # left or lost
        self.refused: OrderedDict[str, FormerWorker] = OrderedDict()

    # -- events -----------------------------------------------------------------------------------------------------

    def check(self, message: Register, now: float) -> Refusal | None:
        """May this worker join? A refused one is remembered."""
        refusal = self._difference(message)
        if refusal is not None:
            info = message.worker
            name = info.worker_id[:_MAX_NAME]
            incarnation = info.incarnation[:_MAX_NAME]
            _remember(self.refused, FormerWorker(name, incarnation, info.role, WorkerState.REFUSED, refusal.reason, now))
        return refusal

    def evict_predecessors(self, info: WorkerInfo, now: float) -> list[ViewAction]:
        """A worker that `check` had nothing against is about to join: whoever had its name, or its incarnation on a channel
        that is still open, is gone at once. To be carried out before `join`."""
        actions: list[ViewAction] = []
        for incarnation, member in list(self.members.items()):
            if member.info.worker_id == info.worker_id or incarnation == info.incarnation:
                actions += self.gone(incarnation, "replaced by its successor", now)
        return actions

    def join(self, info: WorkerInfo, now: float) -> list[ViewAction]:
        """Take in a worker; its channel must be ready for messages."""
        if self.identity is None:
            self.identity = info
        self.members[info.incarnation] = Member(info, now + self._settings.lease_s)
        self.former.pop(info.worker_id, None)
        self.refused.pop(info.worker_id, None)
        if info.role is Role.DECODE:
            return self._tell_prefill()
        return [SendPeers((info.incarnation,), self.decode_peers())]

    def heard(self, incarnation: Incarnation, now: float) -> None:
        """Any message proves life."""
        member = self.members.get(incarnation)
        if member is not None:
            member.lease_deadline = now + self._settings.lease_s

    def heartbeat(self, incarnation: Incarnation, load: WorkerLoad) -> None:
        member = self.members.get(incarnation)
        if member is not None:
            member.load = load
            member.has_beaten = True
            member.draining = member.draining or load.draining

    def link_report(self, prefill: Incarnation, report: LinkReport) -> None:
        """Reports on incarnations that are gone are late and change nothing."""
        member, peer = self.members.get(prefill), self.members.get(report.decode_incarnation)
        if member is None or peer is None or member.info.role is not Role.PREFILL or peer.info.role is not Role.DECODE:
            return
        self.links[prefill, report.decode_incarnation] = report
        member.was_linked = member.was_linked or report.up

    def draining(self, incarnation: Incarnation) -> None:
        member = self.members.get(incarnation)
        if member is not None:
            member.draining = True

    def said_goodbye(self, incarnation: Incarnation, now: float) -> list[ViewAction]:
        """The worker closes its channel. One that did not drain before had to: its engine died."""
        member = self.members.get(incarnation)
        if member is not None and member.draining:
            return self.gone(incarnation, "drained", now, WorkerState.LEFT)
        return self.gone(incarnation, "it ended without draining: its log says why", now)

    def gone(
        self, incarnation: Incarnation, reason: str, now: float, state: WorkerState = WorkerState.LOST
    ) -> list[ViewAction]:
        """Nothing comes from this worker any more; unknown ones are ignored."""
        member = self.members.pop(incarnation, None)
        if member is None:
            return []
        info = member.info
        _remember(self.former, FormerWorker(info.worker_id, incarnation, info.role, state, reason, now))
        self.links = {pair: report for pair, report in self.links.items() if incarnation not in pair}
        actions: list[ViewAction] = [MemberGone(incarnation, info.worker_id, reason, state is WorkerState.LEFT)]
        if info.role is Role.DECODE:
            actions += self._tell_prefill()
        return actions

    def tick(self, now: float) -> list[ViewAction]:
        """End leases. Time in which this process itself stood still (suspended, or a blocked loop) is no worker's silence:
        their messages lie unread."""
        stalled = now - self._last_tick
        self._last_tick = now
        if stalled > self._settings.lease_s / 2:
            for member in self.members.values():
                member.lease_deadline = max(member.lease_deadline, now + self._settings.lease_s / 2)
        actions: list[ViewAction] = []
        for incarnation, member in list(self.members.items()):
            if now >= member.lease_deadline:
                actions += self.gone(incarnation, f"silent for {self._settings.lease_s:g} s", now)
        return actions

    # -- questions --------------------------------------------------------------------------------------------------

    def serving(self, role: Role) -> list[Member]:
        """Members that take new work."""
        return [m for m in self.members.values() if m.info.role is role and not m.draining]

    def usable_pairs(self) -> frozenset[tuple[Incarnation, Incarnation]]:
        return frozenset(
            pair
            for pair, report in self.links.items()
            if report.up and not self.members[pair[0]].draining and not self.members[pair[1]].draining
        )

    @property
    def max_model_len(self) -> int | None:
        """The smallest of all members: any of them may get any sequence."""
        return min((member.info.max_model_len for member in self.members.values()), default=None)

    def find(self, worker_id: WorkerId) -> Incarnation | None:
        return next((i for i, member in self.members.items() if member.info.worker_id == worker_id), None)

    def decode_peers(self) -> DecodePeers:
        """Draining decode workers are among them: hand-offs to them may still be on their way."""
        return DecodePeers(
            tuple(
                DecodePeer(m.info.worker_id, m.info.incarnation, m.info.endpoints)
                for m in self.members.values()
                if m.info.role is Role.DECODE
            )
        )

    # -- inside -----------------------------------------------------------------------------------------------------

    def _tell_prefill(self) -> list[ViewAction]:
        to = tuple(i for i, member in self.members.items() if member.info.role is Role.PREFILL)
        return [SendPeers(to, self.decode_peers())] if to else []

    def _difference(self, message: Register) -> Refusal | None:
        info, ours = message.worker, self.identity
        if message.protocol_version != PROTOCOL_VERSION:
            return Refusal(f"protocol version {message.protocol_version}, the coordinator speaks {PROTOCOL_VERSION}")
        if not hmac.compare_digest(message.token.encode(), self._settings.cluster_token.encode()):
            return Refusal("cluster token differs")
        if not info.worker_id or len(info.worker_id) > _MAX_NAME:
            return Refusal(f"worker_id: not between 1 and {_MAX_NAME} characters")
        for key in ("block_size", "num_blocks", "max_model_len"):
            if getattr(info, key) < 1:
                return Refusal(f"{key}: {getattr(info, key)} is less than 1")
        if info.role is Role.DECODE and not info.endpoints and self._settings.policy == "always":
            return Refusal("endpoints: a decode worker without one can take no hand-off, and the policy is always")
        if self._settings.model is not None and info.model != self._settings.model:
            return Refusal(f"model: {info.model[:_MAX_NAME]!r}, the coordinator serves {self._settings.model!r}")
        if ours is None:
            return None
        if info.model != ours.model:
            return Refusal(f"model: {info.model[:_MAX_NAME]!r}, the cluster serves {ours.model!r}")
        if info.block_size != ours.block_size:
            return Refusal(f"block_size: {info.block_size}, the cluster's is {ours.block_size}")
        if differing := info.fingerprint.differences(ours.fingerprint):
            return Refusal(f"fingerprint: {', '.join(differing)} differs from the cluster's")
        if info.vocab_size != ours.vocab_size:
            return Refusal(f"vocab_size: {info.vocab_size}, the cluster's is {ours.vocab_size}")
        return None


def _remember(book: OrderedDict[str, FormerWorker], worker: FormerWorker) -> None:
    book.pop(worker.worker_id, None)
    book[worker.worker_id] = worker
    while len(book) > _REMEMBERED:
        book.popitem(last=False)
