from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from transport.errors import TransportError
from transport.shm import decode_descriptor, encode_descriptor
from transport.shm_segment import Segment, SegmentName, map_segment, unlink_orphans

ROOT = Path(__file__).parents[3]
FOLDER = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    fds = psutil.Process().num_fds()
    yield
    assert not list(FOLDER.glob(f"kvrelay-{os.getpid()}-*"))
    assert psutil.Process().num_fds() == fds


def test_a_peer_maps_the_same_bytes() -> None:
    segment = Segment.create(8192)
    peer = map_segment(segment.name)
    peer[100] = 5
    assert segment.map[100] == 5
    assert (FOLDER / segment.name.name).stat().st_mode & 0o777 == 0o600
    segment.close()
    assert peer[100] == 5  # the peer's own mapping stays valid
    peer.close()


def test_what_cannot_be_mapped() -> None:
    segment = Segment.create(8192)
    name = segment.name
    for wrong in (
        SegmentName(name.name, name.inode + 1, name.nbytes),
        SegmentName(name.name, name.inode, name.nbytes + 1),
        SegmentName("../../etc/passwd", name.inode, name.nbytes),
        SegmentName("kvrelay-1-" + "0" * 32, name.inode, name.nbytes),
    ):
        with pytest.raises(TransportError):
            map_segment(wrong)
    link = FOLDER / f"kvrelay-{os.getpid()}-{'a' * 32}"
    link.symlink_to(FOLDER / name.name)
    with pytest.raises(TransportError):
        map_segment(SegmentName(link.name, name.inode, name.nbytes))
    link.unlink()
    segment.close()


def test_the_janitor_takes_what_dead_owners_left_and_nothing_else() -> None:
    # 1. A process creates a segment and dies without a word.
    code = (
        "import os; from transport.shm_segment import Segment\n"
        "segment = Segment.create(4096); print(segment.name.name, flush=True); os._exit(9)"
    )
    died = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    orphan = died.stdout.strip()
    assert (FOLDER / orphan).exists()
    # 2. A living segment, a file with another name.
    alive = Segment.create(4096)
    foreign = FOLDER / f"kvrelay-{os.getpid()}-not-ours"
    foreign.touch()
    # 3. Only the orphan goes.
    assert orphan in unlink_orphans()
    assert not (FOLDER / orphan).exists()
    assert alive.name.name not in unlink_orphans()
    assert (FOLDER / alive.name.name).exists()
    assert foreign.exists()
    foreign.unlink()
    alive.close()


def test_no_room() -> None:
    with pytest.raises(TransportError, match="shm-size"):
        Segment.create(1 << 60)


def test_descriptors() -> None:
    name = SegmentName("kvrelay-1-" + "0" * 32, 77, 1 << 20)
    good = encode_descriptor(name)
    assert decode_descriptor(good) == name
    for bad in (b"", good[:20], good + b"x", b"x" + good[1:], good[:-1] + b"\xff"):
        with pytest.raises(TransportError):
            decode_descriptor(bad)
