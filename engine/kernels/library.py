"""The compiled kernels as Python calls them: one call runs a whole step, and ctypes lets go of the interpreter meanwhile."""

from __future__ import annotations

import ctypes
import enum
import logging
from ctypes import POINTER, c_int32, c_int64, c_void_p
from pathlib import Path

from engine.errors import KernelsUnavailable
from engine.kernels import structs
from engine.kernels.build import built_library

logger = logging.getLogger(__name__)


class Isa(enum.IntEnum):
    """Instruction sets, as csrc/dispatch.cpp numbers them: each holds what those before it have."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3


class Kernels:
    """The library, and the instruction set it is to run with."""

    def __init__(self, path: Path, isa: Isa | None = None) -> None:
        """
        Args:
            isa: this CPU must have it; None: its best.

        Raises:
            KernelsUnavailable: the file is no library of ours, or cannot be loaded here.
        """
        try:
            library = ctypes.CDLL(str(path))
            self.best_isa = Isa(library.kvr_best_isa())
            self._forward = library.kvr_forward
            self._workspace_bytes = library.kvr_workspace_bytes
            self._attention = library.kvr_attention
            self._linear = library.kvr_linear
            self._linear_scratch_bytes = library.kvr_linear_scratch_bytes
            self._pack = library.kvr_pack
            sizes = (c_int32 * len(structs.ALL))()
            library.kvr_struct_sizes(sizes)
        except (OSError, AttributeError, ValueError) as error:
            raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
        if list(sizes) != [ctypes.sizeof(each) for each in structs.ALL]:
            raise KernelsUnavailable(f"{path} has other structs than this version")
        self.isa = self.best_isa if isa is None else isa
        model, pool, step, linear = (POINTER(each) for each in (structs.Model, structs.Pool, structs.Step, structs.Linear))
        self._forward.argtypes, self._forward.restype = [c_int32, model, pool, step], None
        self._workspace_bytes.argtypes, self._workspace_bytes.restype = [c_int32, model, step], c_int64
        self._attention.argtypes = [c_int32, pool, step, POINTER(structs.AttentionCall), c_int32]
        self._attention.restype = None
        self._linear.argtypes = [c_int32, linear, c_int32, c_void_p, c_void_p, c_int32, c_void_p]
        self._linear.restype = None
        self._linear_scratch_bytes.argtypes, self._linear_scratch_bytes.restype = [c_int32, linear, c_int32], c_int64
        self._pack.argtypes, self._pack.restype = [c_void_p, c_void_p, c_int32, c_int32, c_int32], None

    def forward(self, model: structs.Model, pool: structs.Pool, step: structs.Step) -> None:
        self._forward(self.isa, model, pool, step)

    def workspace_bytes(self, model: structs.Model, step: structs.Step) -> int:
        """What `step.workspace` must hold; the field itself is not read."""
        return int(self._workspace_bytes(self.isa, model, step))

    def attention(self, pool: structs.Pool, step: structs.Step, call: structs.AttentionCall, dtype: str) -> None:
        """One layer's write and attention alone; `step.workspace` as for a model of this layer's shape."""
        self._attention(self.isa, pool, step, call, structs.DTYPES[dtype])

    def linear(self, linear: structs.Linear, dtype: str, x: int, out: int, rows: int, scratch: int) -> None:
        """x [rows, in] -> out [rows, out], float32, on this thread; scratch of `linear_scratch_bytes`."""
        self._linear(self.isa, linear, structs.DTYPES[dtype], x, out, rows, scratch)

    def linear_scratch_bytes(self, linear: structs.Linear, rows: int) -> int:
        return int(self._linear_scratch_bytes(self.isa, linear, rows))

    def pack(self, weight: int, packed: int, num_out: int, num_in: int, dtype: str) -> None:
        """weight [out, in] -> panels, into zeroed memory."""
        self._pack(weight, packed, num_out, num_in, structs.DTYPES[dtype])


def load_kernels() -> Kernels | None:
    """The kernels for this CPU, compiled now if they are not yet. None, with one line that says so: torch must do."""
    try:
        kernels = Kernels(built_library())
    except KernelsUnavailable as error:
        logger.warning(
            "running without compiled kernels (%s): decode steps take 2 to 4 times as long, prompts about 1.5 times", error
        )
        return None
    logger.info("compiled kernels run with %s", kernels.isa.name)
    return kernels
