"""What this CPU multiplies quickly."""

from __future__ import annotations

import torch


def has_bfloat16_products() -> bool:
    """Whether bfloat16 matrix products run in hardware (AVX-512 BF16 or AMX).

    Elsewhere oneDNN emulates them: with more than a few rows they take 2 to 3 times as long as float32 ones (measured on
    AVX-512 with VNNI alone, 32 to 512 rows). A torch build that does not tell is taken to have them.
    """
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    known = [getattr(torch.cpu, name) for name in checks if hasattr(torch.cpu, name)]
    return not known or any(bool(check()) for check in known)
