"""Runs every kernel of one library once over awkward sizes, in a process of its own: `kernel_driver.py LIBRARY ISA MODEL…`.

Exits with 1 when a result is wrong; a sanitizer built into the library ends the process by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from attention_reference import Shape, check_any_batch
from kernel_attention import CompiledAttention
from test_kernels import load_both, mixed_steps

from engine.kernels.library import Isa, Kernels
from engine.kv_pool import KvPool
from engine.models.packed_linear import PackedLinears


def check_linears(kernels: Kernels) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, num_in, num_out in ((1, 47, 33), (3, 64, 200), (15, 1, 1), (130, 801, 95), (230, 33, 64)):
            weight = torch.randn(num_out, num_in).to(dtype)
            x = torch.randn(rows, num_in).bfloat16().float()
            found = PackedLinears(kernels)(weight, torch.ones(num_out, dtype=dtype))(x)
            torch.testing.assert_close(found, x @ weight.float().t() + 1, rtol=1e-3, atol=1e-3)


def check_attention(kernels: Kernels) -> None:
    shapes = (
        Shape(kv_heads=2, group=3, dim=64, block_size=16, windows=(None, 20), softcap=None),
        Shape(kv_heads=1, group=17, dim=40, block_size=4, windows=(None,), softcap=3.0),
    )
    for shape in shapes:
        for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.02)):

            def kernel_of(config: object, pool: KvPool, shape: Shape = shape) -> CompiledAttention:
                return CompiledAttention(shape.config, pool, kernels, 2)

            check_any_batch(kernel_of, shape, [[70, 1, 1], [1, 9, 1], [300, 1, 2]], 1, dtype, tolerance=tolerance)


def check_model(kernels: Kernels, directory: Path) -> None:
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.4)):
        compiled, reference = load_both(directory, kernels, dtype)
        for step in mixed_steps():
            found, expected = compiled.run(step), reference.run(step)
            if found is not None and expected is not None:
                torch.testing.assert_close(found.values, expected.values.float(), rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    torch.set_num_threads(2)
    with torch.inference_mode():
        chosen = Kernels(Path(sys.argv[1]), Isa[sys.argv[2]])
        check_linears(chosen)
        check_attention(chosen)
        for path in sys.argv[3:]:
            check_model(chosen, Path(path))
    sys.stdout.write("all kernels agree\n")
