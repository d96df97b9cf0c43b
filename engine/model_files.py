"""Finds a model directory's weights and takes their fingerprint. Torch-free."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from engine.errors import ModelFilesError
from engine.model_config import ModelConfig, read_json
from wire.kv_layout import Fingerprint, KvLayout, layout_digest

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit

# Written by the tool that saved the file; they say nothing about what the model computes.
_VOLATILE_FIELDS = frozenset(
    {"transformers_version", "_name_or_path", "_model_name_or_path", "use_cache", "torch_dtype", "dtype"}
)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the model in `path`, in order.

    Raises:
        ModelFilesError: there are none, or one that the index names is missing.
    """
    index = path / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFilesError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise ModelFilesError(f"{index} names files outside its directory")
        files = [path / name for name in names]
    elif (path / _SINGLE).is_file():
        files = [path / _SINGLE]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelFilesError(f"{path} holds no *.safetensors files; convert the model first")
    for file in files:
        if not file.is_file():
            raise ModelFilesError(f"{index} names {file.name}, which is missing")
    return files


def fingerprint(path: Path, config: ModelConfig, layout: KvLayout) -> Fingerprint:
    """What two workers compare before one writes KV into the other's pool.

    The model's digest covers config.json in canonical form (sorted keys, without the fields that only name the tool that
    wrote it), how it was understood (`config`), and of each weights file: its size, its header (names, types, shapes and
    offsets of all tensors), and 64 samples of 4 KiB spread evenly over its data. A few milliseconds for any size; two
    fine-tunes of one model differ in nearly every sample. It is no protection against somebody who forges weights.

    Raises:
        ModelFilesError: see `weight_files`; or a file is truncated or no safetensors file.
    """
    values = {key: value for key, value in read_json(path / "config.json").items() if key not in _VOLATILE_FIELDS}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())
    digest.update(repr((config.family, config.num_layers, config.num_kv_heads, config.head_dim)).encode())
    for file in weight_files(path):
        _update_with_file(digest, file)
    return Fingerprint(model=digest.hexdigest(), layout=layout_digest(layout))


def _update_with_file(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
            raise ModelFilesError(f"{path} is not a safetensors file, or is truncated")
        digest.update(struct.pack("<QQ", size, header_bytes))
        digest.update(file.read(header_bytes))
        first, last = 8 + header_bytes, max(8 + header_bytes, size - _SAMPLE_BYTES)
        for sample in range(_SAMPLES_PER_FILE):
            file.seek(first + (last - first) * sample // (_SAMPLES_PER_FILE - 1))
            digest.update(file.read(_SAMPLE_BYTES))
