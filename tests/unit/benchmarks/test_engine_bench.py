"""The benchmark of engines, without any engine: its processes, figures and ratios, and the weights that llama.cpp gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import make_tiny_model

from benchmarks.bench_engine import Contender, Table
from benchmarks.bench_engine_process import EngineFailed, EngineProcess
from benchmarks.bench_engine_rows import Cost, Machine, make_row, ratio_lines
from benchmarks.bench_overhead import codec, engine, scheduler
from benchmarks.peers.gguf_file import why_not_gguf, write_gguf
from benchmarks.peers.protocol import Job, Options, prompt_tokens
from engine.model_config import load_model_config, parse_model_config

OPTIONS = Options("good", "float32", [0], 64, 8, 1024, 100)
MODULE = "tests.fake_bench_engine"
CONFIG = parse_model_config(
    {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def start(stack: ExitStack, folder: Path, name: str, model: str) -> EngineProcess:
    options = replace(OPTIONS, model=model)
    return stack.enter_context(EngineProcess.running(name, Path(sys.executable), MODULE, options, folder / f"{name}.log"))


def test_an_engine_s_process_answers_in_order_and_ends(tmp_path: Path) -> None:
    with EngineProcess.running("e", Path(sys.executable), MODULE, OPTIONS, tmp_path / "log") as process:
        assert process.hello(60) == {"engine": "fake", "version": "1", "dtype": "float32"}
        process.prepare(Job("decode", 4, 16, 2), 60)
        assert process.measure(3, 60) == [0.004] * 3
        process.release(60)
        assert process.first([40, 70], 60) == 10
        assert process.machine(60) == (1e10, 1e11)
        with pytest.raises(EngineFailed, match="AssertionError"):
            process.measure(1, 60)  # what was released is not prepared; the process lives on
        assert process.first([1], 60) == 1
    with pytest.raises(EngineFailed, match="is gone"):
        process.first([1], 5)
    assert "noise on stdout" in (tmp_path / "log").read_text()


def test_an_engine_that_ends_says_why_and_one_that_hangs_is_not_waited_for(stack: ExitStack, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="no such model here"):
        start(stack, tmp_path, "broken", "broken").hello(60)
    hanging = start(stack, tmp_path, "hangs", "hangs")
    hanging.hello(60)
    hanging.prepare(Job("decode", 1, 16, 1), 60)
    with pytest.raises(EngineFailed, match=r"did not answer within 0\.2 s"):
        hanging.measure(1, 0.2)
    hanging.stop()  # kills it where a polite word is not read
    hanging.stop()


def test_a_table_leaves_out_who_cannot_and_goes_on(stack: ExitStack, tmp_path: Path) -> None:
    """1. One peer does not start, one refuses prompts. 2. All others are in the table."""
    said: list[str] = []
    contenders = [Contender(name, Path(sys.executable), MODULE, Path(name)) for name in ("good", "broken", "refuses")]
    engines = [(contender, start(stack, tmp_path, contender.name, contender.name)) for contender in contenders]
    table = Table(engines, OPTIONS, Cost(CONFIG, CONFIG.kv_layout(16, "float32")), said.append)
    machine = table.greet()
    assert any("broken takes no part here" in line for line in said)
    decode = table.run(Job("decode", 2, 16, 4), machine, rounds=2)
    assert [(row.engine, row.value, row.unit) for row in decode] == [("good", 2.0, "ms/step"), ("refuses", 2.0, "ms/step")]
    prefill = table.run(Job("prefill", 8, 0, 2), machine, rounds=1)
    assert [(row.engine, row.value) for row in prefill] == [("good", pytest.approx(1000.0))]
    assert any("no prompts here" in line for line in said)
    (line,) = ratio_lines([*decode, *prefill], "good")
    assert "÷ refuses  1.00" in line


def test_floors_and_ratios() -> None:
    layout = CONFIG.kv_layout(16, "float32")
    cost, job = Cost(CONFIG, layout), Job("decode", 3, 100, 4)
    weights = 2 * (64 * 8 * (8 + 2 * 2 + 8) + 64 * 128 * 3) + 100 * 64
    slow_memory, slow_arithmetic = Machine(1e6, 1e15), Machine(1e15, 1e6)
    assert cost.floor_s(job, slow_memory) == pytest.approx((4 * weights + 300 * layout.bytes_per_token) / 1e6)
    assert cost.floor_s(job, slow_arithmetic) == pytest.approx((2 * 3 * weights + 4 * 8 * 8 * 2 * 300) / 1e6)
    row = make_row("kvrelay", "float32", 1, job, [0.002, 0.004, 0.003], 0.0015)
    assert (row.value, row.best, row.ratio) == (3.0, 2.0, 2.0)
    other = make_row("peer", "float32", 1, job, [0.006], 0.0015)
    assert "÷ peer  0.50 (best  0.33)" in ratio_lines([row, other], "kvrelay")[0]
    assert ratio_lines([row], "kvrelay") == []


def test_prompts_differ_and_a_longer_one_begins_with_the_shorter() -> None:
    assert prompt_tokens(7, 20, 100)[:5] == prompt_tokens(7, 5, 100)
    assert prompt_tokens(7, 20, 100) != prompt_tokens(8, 20, 100)


def test_a_gguf_file_holds_the_model_s_weights(tmp_path: Path) -> None:
    directory, target = make_tiny_model("llama", tmp_path / "model"), tmp_path / "model.gguf"
    assert why_not_gguf(load_model_config(directory)) is None
    write_gguf(directory, target, "float32")
    config, weights = load_model_config(directory), load_file(directory / "model.safetensors")
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(target).tensors}
    assert len(written) == len(weights)
    np.testing.assert_array_equal(written["blk.1.ffn_down.weight"], weights["model.layers.1.mlp.down_proj.weight"])
    # llama.cpp turns pairs of neighbours: row 2i of a head is row i here, row 2i + 1 is row i + half.
    ours, theirs = weights["model.layers.0.self_attn.q_proj.weight"], written["blk.0.attn_q.weight"]
    half, dim = config.head_dim // 2, config.head_dim
    for head in range(config.num_heads):
        np.testing.assert_array_equal(theirs[head * dim : (head + 1) * dim : 2], ours[head * dim : head * dim + half])
        np.testing.assert_array_equal(
            theirs[head * dim + 1 : (head + 1) * dim : 2], ours[head * dim + half : (head + 1) * dim]
        )


def test_models_that_gguf_is_not_written_for_say_why(tmp_path: Path) -> None:
    for family, why in (("gpt2", "gpt2"), ("llama-bias-llama3rope", "biases")):
        reason = why_not_gguf(load_model_config(make_tiny_model(family, tmp_path / family)))
        assert reason is not None
        assert why in reason


def test_overheads_are_rates_of_all_that_was_asked() -> None:
    for rows in (scheduler(3, 0.01), codec(3, 0.01)):
        per_message, per_token = rows[0], rows[1]
        assert per_token.value == pytest.approx(3 * per_message.value)
    assert all(row.value > 0 for row in engine(3, 0.01))
