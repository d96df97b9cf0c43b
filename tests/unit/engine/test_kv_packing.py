from __future__ import annotations

import pytest
import torch

from engine.kv_packing import PACKINGS, packed_bytes, packers_for
from engine.kv_pool import TORCH_DTYPES
from wire.kv_layout import KvLayout

WORST = {
    "int8": 0.5 / 127,
    "fp8": 2**-4,
}  # of a vector's largest number: half a step; half of fp8's 2^-3 between its powers of two


def layout(dtype: str) -> KvLayout:
    return KvLayout(num_layers=3, num_kv_heads=2, head_dim=32, block_size=16, dtype=dtype)


def block_of(numbers: torch.Tensor) -> memoryview:
    return numbers.contiguous().view(torch.uint8).flatten().numpy().data


def numbers_of(block: memoryview, of: KvLayout) -> torch.Tensor:
    return torch.frombuffer(bytearray(block), dtype=TORCH_DTYPES[of.dtype]).view(of.shape).float()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", PACKINGS)
def test_a_block_comes_back_nearly(name: str, dtype: str) -> None:
    """1. Vectors of very different size. 2. Packed: a byte a number, and the scales. 3. Back: each within its bound."""
    of = layout(dtype)
    generator = torch.Generator().manual_seed(5)
    sizes = torch.logspace(-3, 3, of.shape[2])[None, None, :, None, None]
    numbers = (torch.randn(of.shape, generator=generator) * sizes).to(TORCH_DTYPES[dtype])
    packer = packers_for(of)[name]

    packed = packer.pack(block_of(numbers))
    assert packed.nbytes == packer.packed_bytes == packed_bytes(of)
    assert packed.nbytes < of.block_bytes * (0.57 if dtype != "float32" else 0.29)

    back = numbers_of(packer.unpack(packed), of)
    largest = numbers.float().abs().amax(-1, keepdim=True)
    rounding = 2**-8  # of the cache's own type
    assert ((back - numbers.float()).abs() <= largest * (WORST[name] + rounding)).all()
    assert (back - numbers.float()).abs().max() > 0


@pytest.mark.parametrize("name", PACKINGS)
def test_what_another_sequence_left_behind_does_not_count(name: str) -> None:
    """The last block's tail may hold anything, NaN and infinity too; the tokens before it are what they would be without."""
    of = layout("bfloat16")
    numbers = torch.randn(of.shape, generator=torch.Generator().manual_seed(6)).bfloat16()
    packer = packers_for(of)[name]
    clean = numbers_of(packer.unpack(packer.pack(block_of(numbers))), of)
    dirty = numbers.clone()
    dirty[:, :, 10], dirty[:, :, 11], dirty[:, :, 12:] = float("nan"), float("inf"), 1e30
    found = numbers_of(packer.unpack(packer.pack(block_of(dirty))), of)
    assert torch.equal(found[:, :, :10], clean[:, :, :10])


@pytest.mark.parametrize("name", PACKINGS)
def test_zeros_stay_zeros(name: str) -> None:
    of = layout("float16")
    packer = packers_for(of)[name]
    assert not any(packer.unpack(packer.pack(block_of(torch.zeros(of.shape, dtype=torch.float16)))))


def test_bytes_that_are_no_numbers_cannot_be_packed() -> None:
    assert not packers_for(layout("uint8"))
