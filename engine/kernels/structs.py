"""The structs of csrc/abi.h, field by field. Sizes are compared with the library's when it is loaded."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from typing import Any, ClassVar

PANEL = 32  # outputs of a packed weight's panel, kPanel in csrc/abi.h

DTYPES = {"float32": 0, "bfloat16": 1}


class Linear(ctypes.Structure):
    _fields_: ClassVar[Any] = [("weight", c_void_p), ("bias", c_void_p), ("num_in", c_int32), ("num_out", c_int32)]


class Norm(ctypes.Structure):
    _fields_: ClassVar[Any] = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32)]


class Rope(ctypes.Structure):
    _fields_: ClassVar[Any] = [("frequencies", c_void_p), ("rotary_dim", c_int32), ("attention_factor", c_float)]


class Layer(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, Linear) for name in ("qkv", "attention_output", "gate", "up", "down")),
        *((name, Norm) for name in ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        ("rope", c_int32),
        ("window", c_int32),
    ]


class Model(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_void_p) for name in ("layers", "ropes", "embedding", "position_rows")),
        ("head", Linear),
        ("norm", Norm),
        *((name, c_int32) for name in ("dtype", "num_layers", "num_ropes", "hidden", "intermediate")),
        *((name, c_int32) for name in ("heads", "kv_heads", "dim", "vocab", "activation", "qk_norm")),
        *((name, c_float) for name in ("attention_scale", "attention_softcap", "logit_softcap")),
        *((name, c_float) for name in ("embedding_scale", "residual_scale", "logit_divisor")),
    ]


class Pool(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("blocks", c_void_p),
        *((name, c_int32) for name in ("num_layers", "block_size", "kv_heads", "dim")),
    ]


class Step(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_void_p) for name in ("token_ids", "positions", "sequences", "block_ids", "logit_rows")),
        *((name, c_void_p) for name in ("logits", "best", "workspace")),
        *((name, c_int32) for name in ("rows", "num_sequences", "num_logit_rows", "threads")),
    ]


class AttentionCall(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_void_p) for name in ("q", "k", "v", "output")),
        *((name, c_int32) for name in ("layer", "window", "heads")),
        ("scale", c_float),
        ("softcap", c_float),
    ]


ALL = (Linear, Norm, Rope, Layer, Model, Pool, Step, AttentionCall)
