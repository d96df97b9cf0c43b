"""Compiling the kernels, and doing without them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from engine.errors import KernelsUnavailable
from engine.kernels import build as build_module
from engine.kernels.build import build, built_library
from engine.kernels.library import Isa, Kernels, load_kernels
from engine.model_config import load_model_config
from engine.model_runner import load_runner
from engine.plan import SampleRequest, ScheduledSequence, StepPlan
from wire.ids import BlockId, RequestId
from wire.sequence import SamplingParams

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its output file and a line for each call."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho call >> "$0.calls"\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    return compiler


def test_many_that_want_the_library_compile_it_once(fake_compiler: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(built_library())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(found)) == 1
    assert found[0].read_text() == "library\n"
    calls = (fake_compiler.parent / "c++.calls").read_text().splitlines()
    assert len(calls) == len(build_module._isa_flags()) + 2, "one for each instruction set, the dispatcher and the linker"
    # Nothing but the library and its lock is left, and what is no library is refused.
    assert sorted(path.name for path in found[0].parent.iterdir()) == [f".{found[0].name}.lock", found[0].name]
    with pytest.raises(KernelsUnavailable, match="cannot be loaded"):
        Kernels(found[0])


def test_other_flags_or_sources_are_another_library(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(tmp_path / "a")
    assert build(tmp_path / "a", ["-g"]) != first
    monkeypatch.setattr(build_module, "_SOURCES", tmp_path / "csrc")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "abi.h").write_text("// changed\n")
    assert build(tmp_path / "a").name != first.name


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no C\\+\\+ compiler"),
        ("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n", "error: no such thing"),
    ],
)
def test_without_a_compiler_torch_takes_over_and_one_line_says_so(
    script: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # 1. A machine with no compiler, or with one that fails.
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if script is not None:
        (tmp_path / "c++").write_text(script)
        (tmp_path / "c++").chmod(0o755)
    with pytest.raises(KernelsUnavailable, match=message):
        built_library()
    # 2. The model runs all the same.
    directory = make_tiny_model("llama", tmp_path / "llama")
    layout = load_model_config(directory).kv_layout(8, "float32")
    memory = memoryview(bytearray(2 * layout.block_bytes))
    caplog.clear()
    runner = load_runner(directory, dtype="float32", kv_memory=memory, num_blocks=2, block_size=8)
    (line,) = [record for record in caplog.records if "compiled kernels" in record.message]
    assert "times as long" in line.message
    request = SampleRequest(SamplingParams(seed=0, temperature=0.0), position=2)
    sequence = ScheduledSequence(RequestId("a"), (3, 4), 0, (BlockId(0),), request)
    assert set(runner.execute(StepPlan(0, (sequence,))).sampled) == {"a"}


def run_driver(library: Path, isa: Isa, models: list[Path], **environ: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE)))} | environ
    command = [sys.executable, str(HERE / "kernel_driver.py"), str(library), isa.name, *map(str, models)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == "all kernels agree\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("there is no C++ compiler")
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"]
    library = build(tmp_path, flags)
    runtimes = [
        subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    models = [make_tiny_model(name, tmp_path / name) for name in ("llama", "gemma2", "gpt2", "olmo2")]
    for isa in Isa:
        if isa <= kernels.best_isa:
            run_driver(
                library,
                isa,
                models,
                LD_PRELOAD=" ".join(runtimes),
                ASAN_OPTIONS="detect_leaks=0:detect_odr_violation=0",
            )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bfloat16_products_are_right_where_they_must_be_emulated(tmp_path: Path) -> None:
    kernels = load_kernels()
    if kernels is None or kernels.best_isa < Isa.AVX512:
        pytest.skip("needs a compiler and AVX-512")
    library = build(tmp_path, ["-DKVR_EMULATE_BF16_DOT"])
    run_driver(library, Isa.AVX512_BF16, [make_tiny_model("llama", tmp_path / "llama")])
