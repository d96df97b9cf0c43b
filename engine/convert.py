"""Turns a GGUF file, or a directory that transformers can load, into the directory that the model runner reads.

    source.gguf | HF directory ──transformers──▶ target/  config.json  generation_config.json  *.safetensors
                                                          tokenizer.json  tokenizer_config.json  chat_template.jinja
                                                          conversion.json (what it was made from)

This file and `engine/models/transformers_model.py` alone import transformers: nothing does on the path of a worker whose
model has layers here. The work happens in a sibling directory that is renamed at the end, under a lock: a killed conversion
leaves no half model, the next one removes what it left, and two at once do the work once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.errors import ModelFilesError, UnsupportedModel
from engine.model_config import load_model_config, parse_model_config

RECORD = "conversion.json"

Progress = Callable[[str, float], None]


def convert(source: Path, target: Path, on_progress: Progress) -> None:
    """Convert `source` into the directory `target`; returns at once when `target` was made from this source before.

    Args:
        source: a `.gguf` file, or a directory with config.json and weights in any format that transformers reads.
        target: must not exist, unless this function made it from the same source.
        on_progress: called with the stage's name and the fraction done, 0 to 1.

    Raises:
        ModelFilesError: the source is missing or unreadable, or `target` exists and is something else.
        UnsupportedModel: the engine has no such model family; nothing is written.
    """
    record = _describe_source(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / f".{target.name}.lock"):
        if target.exists():
            if _read_record(target) != record:
                raise ModelFilesError(
                    f"{target} exists and was not converted from {source}; choose another target or remove it"
                )
            on_progress("already converted", 1.0)
            return
        work = target.parent / f".{target.name}.converting"
        shutil.rmtree(work, ignore_errors=True)  # of a killed conversion: the lock says that nobody works in it
        work.mkdir()
        try:
            _convert_into(source, work, on_progress)
            (work / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            load_model_config(work)
            _sync(work)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    on_progress("converted", 1.0)


def _convert_into(source: Path, work: Path, on_progress: Progress) -> None:
    is_gguf = source.is_file()
    where, file_argument = (source.parent, {"gguf_file": source.name}) if is_gguf else (source, {})
    try:
        on_progress("reading the configuration", 0.0)
        config = transformers.AutoConfig.from_pretrained(where, local_files_only=True, **file_argument)
        parse_model_config(json.loads(config.to_json_string(use_diff=False)))  # refuse before the slow part
        on_progress("reading the tokenizer", 0.05)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True, **file_argument)
        tokenizer.save_pretrained(work)
        on_progress("reading the weights", 0.1)
        arguments: dict[str, Any] = dict(file_argument)
        if is_gguf:  # without it the weights stay packed and cannot be saved
            arguments |= {"dtype": torch.bfloat16, "quantization_config": transformers.GgufConfig(dequantize=True)}
        else:
            arguments |= {"dtype": "auto"}
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, found = load(where, local_files_only=True, output_loading_info=True, **arguments)
        if missing := sorted(found["missing_keys"]):  # transformers has filled them with random numbers
            raise ModelFilesError(f"{source} lacks {len(missing)} weights, such as {missing[0]}")
        on_progress("writing the weights", 0.8)
        _drop_quantization(model)
        model.save_pretrained(work)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelFilesError(f"{source} cannot be converted: {error}") from error
    if not (work / "tokenizer.json").is_file():
        raise ModelFilesError(f"{source} has no tokenizer that can be written as tokenizer.json")
    if not (work / "generation_config.json").is_file():
        transformers.GenerationConfig.from_model_config(model.config).save_pretrained(work)


def _drop_quantization(model: Any) -> None:
    """The weights are plain now; the configuration must not say otherwise."""
    if getattr(model.config, "quantization_config", None) is not None:
        if any(not parameter.is_floating_point() for parameter in model.parameters()):
            raise UnsupportedModel("the weights stay quantised after loading; only formats that dequantise can be converted")
        del model.config.quantization_config


def _describe_source(source: Path) -> dict[str, Any]:
    """Name and size of what is converted: enough to notice a target that was made from something else."""
    if source.is_file():
        with source.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFilesError(f"{source} is not a GGUF file")
        return {"source": source.name, "bytes": source.stat().st_size}
    if not (source / "config.json").is_file():
        raise ModelFilesError(f"{source} is neither a GGUF file nor a directory with a config.json")
    return {"source": source.name, "bytes": sum(file.stat().st_size for file in sorted(source.iterdir()) if file.is_file())}


def _read_record(target: Path) -> Any:
    try:
        return json.loads((target / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _sync(directory: Path) -> None:
    """Contents must be on disk before the name is; and whoever may enter the directory may read its files."""
    for path in directory.iterdir():
        path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
