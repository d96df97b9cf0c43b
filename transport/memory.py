"""Memory of regions: page-aligned, zeroed and anonymous, or lent by the application."""

from __future__ import annotations

import mmap


class AnonymousMemory:
    """Private pages that the kernel provides when they are first touched."""

    def __init__(self, nbytes: int) -> None:
        """
        Raises:
            ValueError: `nbytes` is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmaps, or lets the last view that is still alive unmap: ZeroMQ may hold a source for a moment longer."""
        self.view.release()
        close_when_unused(self._map)


class LentMemory:
    """Memory that stays the caller's."""

    def __init__(self, nbytes: int, memory: memoryview) -> None:
        """
        Raises:
            ValueError: `nbytes` is not positive or not the memory's size, or the memory cannot be written to.
        """
        if nbytes <= 0 or nbytes != memory.nbytes:
            raise ValueError(f"nbytes must be positive and the size of memory ({memory.nbytes}), not {nbytes}")
        if memory.readonly or not memory.c_contiguous:
            raise ValueError("memory must be writable and contiguous")
        self.view = memory.cast("B")

    def close(self) -> None:
        self.view.release()


def close_when_unused(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        return  # exported views keep the mapping alive; it is unmapped with the last of them
