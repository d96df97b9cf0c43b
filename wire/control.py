"""Messages on the control channel between the coordinator and one worker.

The worker dials the coordinator and registers; after `Welcome` both sides send at will. Tags are the protocol: renaming a
class changes nothing on the wire. Times are durations in seconds: two hosts share no clock.

                    worker → coordinator                      coordinator → worker
    membership      Register, Heartbeat, LinkReport,          Welcome, Refused, HeartbeatAck, DecodePeers, Drain
                    Leaving
    decode          Reserved, TokenBatch                      Reserve, Generate, Cancel
    prefill         FirstToken                                Prefill, Cancel
    both            RequestFailed
"""

from __future__ import annotations

import enum

import msgspec

from wire.ids import BlockId, HandoffId, Incarnation, RequestId, WorkerId
from wire.kv_layout import Fingerprint
from wire.sequence import FinishReason, SampledToken, SequenceSpec


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a decode worker takes hand-offs: `transport` is its scheme (`zmq`, `shm`, …), `address` what it listens on."""

    transport: str
    address: str


class WorkerInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker is; fixed for one incarnation."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    model: str  # the name under which the model is served
    fingerprint: Fingerprint
    block_size: int
    num_blocks: int
    max_model_len: int  # tokens
    vocab_size: int
    max_num_sequences: int
    endpoints: tuple[Endpoint, ...] = ()  # decode workers only
    host: str = ""
    pid: int = 0
    cpus: tuple[int, ...] = ()


class WorkerLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's state at one moment. Load never means life: a busy worker beats as well."""

    waiting: int = 0  # sequences that hold no blocks yet
    running: int = 0
    reserved: int = 0  # sequences on D whose KV is on its way
    exporting: int = 0  # sequences on P whose KV is not acked yet
    waiting_tokens: int = 0  # prompt tokens still to be computed
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0  # reusable, evicted on demand
    blocks_held: int = 0
    preemptions: int = 0  # this and all below: totals since start
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_prompt_tokens: int = 0
    handoffs: int = 0
    handoff_bytes: int = 0
    handoff_failures: int = 0
    tokens_per_s: float = 0.0
    draining: bool = False


class Register(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="register"):
    protocol_version: int
    worker: WorkerInfo
    token: str = ""  # the cluster token


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    coordinator: Incarnation
    heartbeat_interval_s: float
    lease_s: float  # silence that long, on either side, ends what the other holds for it


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """The coordinator will not take this worker; it stops, or tries again later if `retry`."""

    reason: str
    retry: bool


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat"):
    incarnation: Incarnation
    load: WorkerLoad


class HeartbeatAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="heartbeat-ack"):
    coordinator: Incarnation


class DecodePeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker_id: WorkerId
    incarnation: Incarnation
    endpoints: tuple[Endpoint, ...]


class DecodePeers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="decode-peers"):
    """All decode workers that a prefill worker must be able to reach; it links to new ones and drops the rest."""

    peers: tuple[DecodePeer, ...]


class LinkReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="link-report"):
    """A prefill worker proved, or lost, its link to one decode incarnation with a probe hand-off."""

    decode: WorkerId
    decode_incarnation: Incarnation
    up: bool
    transport: str = ""
    gb_per_s: float = 0.0
    reason: str = ""  # why not, or why not the preferred transport
    path: str = ""  # what the transport itself chose, such as UCX's tcp/eth0


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="drain"):
    """Take no new work, finish what runs, keep KV until it is fetched, then leave."""

    deadline_s: float


class Leaving(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="leaving"):
    """The worker drains (`finished` false: route nothing more here) or is about to close (true)."""

    incarnation: Incarnation
    finished: bool


class Reserve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reserve"):
    """Hold blocks on D for a prompt. D answers `Reserved`, later if its pool is full, or `RequestFailed`."""

    spec: SequenceSpec
    handoff_id: HandoffId
    lease_s: float


class HandoffTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """D's leave to write one sequence's KV into its pool; goes from D through the coordinator to P."""

    handoff_id: HandoffId
    decode: WorkerId
    decode_incarnation: Incarnation
    window_key: int
    block_ids: tuple[BlockId, ...]  # D's blocks behind `skip_tokens`, in the order of the sequence
    skip_tokens: int  # D has these already; a multiple of the block size
    lease_s: float


class Reserved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="reserved"):
    request_id: RequestId
    ticket: HandoffTicket


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="generate"):
    """Compute the prompt on D and decode. A reservation under the same request id is given up for it."""

    spec: SequenceSpec


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prefill"):
    """Compute a prompt on P, draw the first token, push the KV by the ticket (none when one token is all)."""

    spec: SequenceSpec
    ticket: HandoffTicket | None


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cancel"):
    """End a request wherever it is. Unknown ids are ignored: the request may just have ended."""

    request_id: RequestId


class PrefillStages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queue_s: float  # arrival at P until its first step began
    prefill_s: float  # first step's begin until the first token was drawn
    num_cached_tokens: int  # prompt tokens that P's prefix cache held


class FirstToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="first-token"):
    """`token` is None when nothing was to be drawn (max_tokens 0), and then `finish` is set."""

    request_id: RequestId
    token: SampledToken | None
    finish: FinishReason | None
    stages: PrefillStages
    prompt: tuple[SampledToken, ...] = ()  # the prompt's tokens and their log-probabilities, if they were asked for


class DecodeStages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one sequence on D; sent with its first tokens. Transfer is zero for a sequence that D computed itself."""

    transfer_s: float  # hand-off opened until verified
    queue_s: float  # verified (or arrived) until its first step began
    first_step_s: float  # that step, or the steps of the prompt where D computes it
    num_cached_tokens: int


class TokenDelta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New tokens of one sequence. `first_index` counts its output tokens (resumed ones included), so that the coordinator
    sees a gap or a repetition."""

    request_id: RequestId
    first_index: int
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None = None
    stages: DecodeStages | None = None
    prompt: tuple[SampledToken, ...] = ()  # as in `FirstToken`, of a prompt that D computed


class TokenBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="token-batch"):
    """All that one step of D drew."""

    deltas: tuple[TokenDelta, ...]


class FailureKind(enum.Enum):
    """What went wrong, as far as it decides what the coordinator does next."""

    INVALID = "invalid"  # the request itself: never retried (400)
    OVERLOADED = "overloaded"  # no room in time (503)
    TRANSFER = "transfer"  # the hand-off failed: recompute on D
    INTERNAL = "internal"  # the worker failed: another worker
    DRAINING = "draining"  # the worker takes nothing new: another worker


class RequestFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="request-failed"):
    """The worker has given up a request and holds nothing more for it."""

    request_id: RequestId
    kind: FailureKind
    message: str


WorkerMessage = Register | Heartbeat | LinkReport | Leaving | Reserved | FirstToken | TokenBatch | RequestFailed
CoordinatorMessage = Welcome | Refused | HeartbeatAck | DecodePeers | Drain | Reserve | Generate | Prefill | Cancel
