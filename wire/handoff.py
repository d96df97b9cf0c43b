"""Messages on the data channel from a prefill worker (which dials) to a decode worker.

    P                                   D
    Hello ─────────────────────────────▶   protocol, fingerprint, cluster token
      ◀───────────────────────── HelloAck   D's region, or HelloRefused
    HandoffOpen ───────────────────────▶   before the first byte: from here on D knows that a writer exists
      ◀──────────────────── HandoffOpened   or HandoffRefused: lease over, cancelled, unknown
    put(blocks…), BlocksPlaced ────────▶   as chunks complete, while the next one computes
    HandoffComplete ───────────────────▶   counts and the first token
      ◀─────────────────────── HandoffAck   checked: P unpins. Or HandoffMissing: these blocks again
    HandoffAbort ──────────────────────▶   instead of completing: P writes nothing more (a fence)
      ◀──────────────────── HandoffCancel   D gives up; P answers with HandoffAbort

A Hello of an incarnation that was linked before says that nothing of the former channel writes any more.
Every message of a hand-off names its id; a message for one that has ended is late, is counted, and changes nothing.
"""

from __future__ import annotations

import msgspec

from wire.ids import HandoffId, Incarnation, RequestId, WorkerId
from wire.kv_layout import Fingerprint
from wire.sequence import SampledToken


class ProcessMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which process writes, so that a D on the same host can see that it is gone (a pid alone is soon somebody else's).

    `life_name` is a shared-memory segment that the process holds a lock on while it lives: it is visible wherever shared
    memory is, in another container's pid namespace as well.
    """

    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat; 0: unknown
    pid_namespace: str  # "" : unknown
    boot_id: str
    life_name: str = ""  # "" : none
    life_inode: int = 0


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    protocol_version: int
    prefill: WorkerId
    incarnation: Incarnation
    expected_decode: Incarnation  # a successor at the same address refuses
    fingerprint: Fingerprint
    process: ProcessMark
    token: str = ""
    packing: str = ""  # how every block of this link is packed (`engine.kv_packing`); empty: as it lies in the pool


class HelloAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello-ack"):
    incarnation: Incarnation
    region: bytes  # the transport's own descriptor of D's KV pool
    probe_key: int  # window of a scratch range at the region's end, for the probe hand-off
    probe_offset: int
    probe_bytes: int


class HelloRefused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello-refused"):
    reason: str


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="probe"):
    """P has put `num_bytes` into the scratch range; D answers with their checksum."""

    num_bytes: int


class ProbeAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="probe-ack"):
    checksum: int


class HandoffOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handoff-open"):
    handoff_id: HandoffId
    request_id: RequestId
    window_key: int


class HandoffOpened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handoff-opened"):
    handoff_id: HandoffId


class HandoffRefused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handoff-refused"):
    handoff_id: HandoffId
    reason: str


class BlocksPlaced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="blocks-placed"):
    """Blocks `first` .. `first + len(checksums)` of the ticket's list lie in D's memory; sent behind their bytes."""

    handoff_id: HandoffId
    first: int
    checksums: tuple[int, ...]  # xxh3-64 of each whole block, as signed 64-bit integers' bit pattern (unsigned value)


class HandoffComplete(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handoff-complete"):
    handoff_id: HandoffId
    num_blocks: int  # of the ticket
    num_tokens: int  # tokens whose KV D now has, skipped ones included
    first_token: SampledToken


class HandoffAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handoff-ack"):
    handoff_id: HandoffId


class HandoffMissing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handoff-missing"):
    """Blocks (indices into the ticket's list) that did not arrive or whose checksum differs: send them again."""

    handoff_id: HandoffId
    blocks: tuple[int, ...]


class HandoffAbort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handoff-abort"):
    """P will write nothing more for this hand-off; D's blocks are safe to reuse."""

    handoff_id: HandoffId
    reason: str


class HandoffCancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handoff-cancel"):
    handoff_id: HandoffId
    reason: str


ToDecode = Hello | Probe | HandoffOpen | BlocksPlaced | HandoffComplete | HandoffAbort
ToPrefill = HelloAck | HelloRefused | ProbeAck | HandoffOpened | HandoffRefused | HandoffAck | HandoffMissing | HandoffCancel
