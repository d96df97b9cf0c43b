"""The runner's own rules: what a plan may say, where it writes, and what loading refuses."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from engine import attention
from engine import convert as convert_module
from engine.convert import convert
from engine.errors import ModelFilesError, UnsupportedModel
from engine.model_config import load_model_config
from engine.model_files import fingerprint, weight_files
from engine.model_runner import ModelRunner, load_runner
from engine.models import linear
from engine.plan import SampleRequest, ScheduledSequence, StepPlan
from engine.runner import Runner
from wire.ids import BlockId, RequestId
from wire.sequence import SamplingParams

BLOCK, NUM_BLOCKS = 8, 10
NAME = RequestId("a")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("runner") / "llama")


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """With the compiled kernels, where this machine has a compiler, and without."""
    return str(request.param)


def load(directory: Path, memory: bytearray | None = None, **arguments: Any) -> ModelRunner:
    arguments = {"dtype": "float32"} | arguments
    layout = load_model_config(directory).kv_layout(BLOCK, arguments["dtype"])
    memory = memory if memory is not None else bytearray(NUM_BLOCKS * layout.block_bytes)
    return load_runner(directory, kv_memory=memoryview(memory), num_blocks=NUM_BLOCKS, block_size=BLOCK, **arguments)


def scheduled(
    tokens: tuple[int, ...] = (5, 6, 7), start: int = 0, blocks: tuple[int, ...] = (3,), **params: Any
) -> ScheduledSequence:
    request = SampleRequest(SamplingParams(**({"seed": 1, "temperature": 0.0} | params)), position=start + len(tokens))
    return ScheduledSequence(NAME, tokens, start, tuple(BlockId(block) for block in blocks), request)


def test_a_step_writes_into_its_own_blocks_alone(directory: Path, kernels: str) -> None:
    layout = load_model_config(directory).kv_layout(BLOCK, "float32")
    memory = bytearray(NUM_BLOCKS * layout.block_bytes)
    runner: Runner = load(directory, memory, kernels=kernels)
    assert (runner.layout, runner.vocab_size, runner.max_model_len) == (layout, 320, 256)

    def touched() -> set[int]:
        size = layout.block_bytes
        return {block for block in range(NUM_BLOCKS) if any(memory[block * size : (block + 1) * size])}

    # 1. A chunk that is not the last draws nothing; it fills block 3 and one slot of block 7.
    chunk = msgspec.structs.replace(scheduled(tuple(range(10, 19)), blocks=(3, 7)), sample=None)
    assert runner.execute(StepPlan(4, (chunk,))).sampled == {}
    assert touched() == {3, 7}
    # 2. Its KV moves to other blocks, byte by byte, as a hand-off does: the next token is the same.
    here = runner.execute(StepPlan(5, (scheduled((20,), 9, (3, 7)),)))
    for source, target in ((3, 1), (7, 2)):
        memory[target * layout.block_bytes : (target + 1) * layout.block_bytes] = memory[
            source * layout.block_bytes : (source + 1) * layout.block_bytes
        ]
    there = runner.execute(StepPlan(6, (scheduled((20,), 9, (1, 2)),)))
    assert here.sampled == there.sampled
    assert (here.step, there.step) == (5, 6)
    # 3. An empty plan is no step at all.
    assert runner.execute(StepPlan(7, ())).sampled == {}
    assert touched() == {1, 2, 3, 7}


def test_warm_up_leaves_all_but_block_0_alone(directory: Path, kernels: str) -> None:
    memory = bytearray(NUM_BLOCKS * load_model_config(directory).kv_layout(BLOCK, "bfloat16").block_bytes)
    load(directory, memory, dtype="bfloat16", kernels=kernels).warm_up()
    assert any(memory)
    assert not any(memory[len(memory) // NUM_BLOCKS :])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (scheduled(()), "do not fit"),
        (scheduled((1,), start=256, blocks=tuple(range(9))), "do not fit a context of 256"),
        (scheduled((1,), start=-1), "do not fit"),
        (scheduled((320,)), "vocabulary of 320"),
        (scheduled((-1,)), "vocabulary"),
        (scheduled(tuple(range(9))), "1 blocks do not cover 9"),
        (scheduled(blocks=(10,)), "pool of 10"),
        (scheduled(blocks=(-1,)), "pool of 10"),
    ],
)
def test_a_plan_that_would_touch_foreign_memory_is_refused(directory: Path, part: ScheduledSequence, message: str) -> None:
    memory = bytearray(NUM_BLOCKS * load_model_config(directory).kv_layout(BLOCK, "float32").block_bytes)
    runner = load(directory, memory)
    with pytest.raises(ValueError, match=message):
        runner.execute(StepPlan(0, (scheduled(), part)))
    assert not any(memory), "nothing ran"


def test_seeded_draws_do_not_depend_on_the_step_they_happen_in(directory: Path, kernels: str) -> None:
    runner = load(directory, kernels=kernels)
    mine = scheduled(tuple(range(20, 33)), blocks=(0, 1), temperature=1.0, seed=11)
    alone = runner.execute(StepPlan(0, (mine,))).sampled[NAME]
    mate = msgspec.structs.replace(scheduled((4, 5), blocks=(5,), temperature=1.0), request_id=RequestId("b"))
    assert runner.execute(StepPlan(9, (mate, mine))).sampled[NAME] == alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cuda"}, "device 'cuda'"),
        ({"kernels": "fast"}, "kernels 'fast'"),
        ({"max_model_len": 257}, "context of 256"),
        ({"max_model_len": 0}, "context of 256"),
    ],
)
def test_loading_refuses_arguments_that_do_not_fit(directory: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(directory, **arguments)
    with pytest.raises(ValueError, match="dtype 'int8'"):
        load_runner(directory, dtype="int8", kv_memory=memoryview(bytearray(8)), num_blocks=1, block_size=8)


def test_a_shorter_context_is_kept(directory: Path) -> None:
    runner = load(directory, max_model_len=16)
    assert runner.max_model_len == 16
    with pytest.raises(ValueError, match="context of 16"):
        runner.execute(StepPlan(0, (scheduled((1,), start=16, blocks=(0, 1, 2)),)))


def test_weights_that_do_not_belong_are_refused_by_name(directory: Path, tmp_path: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    for change, error, message in (
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, UnsupportedModel, r"q_proj\.bias"),
        ({"model.norm.weight": torch.zeros(3)}, ModelFilesError, r"model\.norm\.weight.*\(3,\)"),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}, UnsupportedModel, "quantised"),
        ({"model.norm.weight": None}, ModelFilesError, r"model\.norm\.weight.*missing"),
    ):
        broken = tmp_path / "broken"
        shutil.copytree(directory, broken, dirs_exist_ok=True)
        save_file(
            {name: tensor for name, tensor in (weights | change).items() if tensor is not None}, broken / "model.safetensors"
        )
        with pytest.raises(error, match=message):
            load(broken)


def test_sharded_weights_load_and_a_missing_shard_is_named(directory: Path, tmp_path: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match="no \\*\\.safetensors"):
        load(tmp_path)
    shards: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(weights.items()):
        shards[sorted(shards)[index % 2]][name] = tensor
    for file, part in shards.items():
        save_file(part, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected = load(directory).execute(StepPlan(0, (scheduled(),)))
    assert load(tmp_path).execute(StepPlan(0, (scheduled(),))) == expected
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"b\.safetensors, which is missing"):
        load(tmp_path)


def test_the_fingerprint_sees_weights_configuration_and_layout(directory: Path, tmp_path: Path) -> None:
    config = load_model_config(directory)
    first = fingerprint(directory, config, config.kv_layout(8, "float32"))
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    assert fingerprint(tmp_path, config, config.kv_layout(8, "float32")) == first
    assert fingerprint(tmp_path, config, config.kv_layout(16, "float32")).differences(first) == ["layout"]
    # 1. Written by another version of the tool: the same model.
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"transformers_version": "0"}))
    assert fingerprint(tmp_path, config, config.kv_layout(8, "float32")) == first
    # 2. One weight differs, or one setting.
    (tmp_path / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 0.5}))
    assert fingerprint(tmp_path, config, config.kv_layout(8, "float32")).differences(first) == ["model"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    (file,) = weight_files(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert fingerprint(tmp_path, config, config.kv_layout(8, "float32")).differences(first) == ["model"]
    # 3. A truncated file is noticed.
    file.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(ModelFilesError, match="truncated"):
        fingerprint(tmp_path, config, config.kv_layout(8, "float32"))


def test_linear_layers_fall_back_when_the_packed_ones_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert linear.choose_linear(torch.float32) is linear.plain_linear

    def missing(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
        raise AttributeError("no such operator")

    for replacement, message in ((missing, "not available"), (lambda w, b: linear.plain_linear(w * 2, b), "wrong results")):
        monkeypatch.setattr(linear, "packed_linear", replacement)
        assert linear.choose_linear(torch.bfloat16) is linear.plain_linear
        assert message in caplog.text


@pytest.mark.parametrize("in_hardware", [True, False])
def test_bfloat16_gives_the_same_with_and_without_hardware_products(
    directory: Path, monkeypatch: pytest.MonkeyPatch, in_hardware: bool
) -> None:
    exact = load(directory).execute(StepPlan(0, (scheduled(tuple(range(9, 42)), blocks=(0, 1, 2, 3, 4), num_logprobs=3),)))
    for module in (linear, attention):
        monkeypatch.setattr(module, "has_bfloat16_products", lambda: in_hardware)
    assert linear.choose_linear(torch.bfloat16) is (linear.packed_linear if in_hardware else linear.widening_linear)
    runner = load(directory, dtype="bfloat16", kernels="torch")
    for size in (33, 5):  # 33 rows in one step, and the last few of them again: many rows and few
        part = scheduled(tuple(range(42 - size, 42)), 33 - size, (0, 1, 2, 3, 4), num_logprobs=20)
        close = dict(runner.execute(StepPlan(0, (part,))).sampled[NAME].top)
        for token_id, logprob in exact.sampled[NAME].top:
            assert close[token_id] == pytest.approx(logprob, abs=0.35)


def test_conversion_keeps_the_model_and_survives_being_killed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, stages = tmp_path / "models" / "tiny", []
    # 1. A conversion dies in the middle; what it left is no model.
    leftover = tmp_path / "models" / ".tiny.converting"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{}")
    # 2. The next one works, and reports ever larger fractions.
    convert(directory, target, lambda stage, fraction: stages.append((stage, fraction)))
    assert [fraction for _, fraction in stages] == sorted(fraction for _, fraction in stages)
    assert stages[-1] == ("converted", 1.0)
    assert not leftover.exists()
    assert load(target).execute(StepPlan(0, (scheduled(),))) == load(directory).execute(StepPlan(0, (scheduled(),)))
    assert load_model_config(target).eos_token_ids == (2,)
    assert (target / "tokenizer.json").is_file()
    # 3. Once more is no work.
    monkeypatch.setattr(convert_module, "_convert_into", lambda *_: pytest.fail("converted twice"))
    convert(directory, target, lambda stage, fraction: stages.append((stage, fraction)))
    assert stages[-1] == ("already converted", 1.0)
    # 4. Another model does not silently stand for this one.
    (target / "conversion.json").unlink()
    with pytest.raises(ModelFilesError, match="exists"):
        convert(directory, target, lambda stage, fraction: None)


def test_conversion_refuses_what_it_cannot_read(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "not.gguf").write_bytes(b"PK\x03\x04")
    unknown = tmp_path / "unknown"
    shutil.copytree(directory, unknown)
    values = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(values | {"model_type": "mamba"}))
    incomplete = tmp_path / "incomplete"
    shutil.copytree(directory, incomplete)
    (weights,) = weight_files(incomplete)
    tensors = load_file(weights)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    for source, error, message in (
        (incomplete, ModelFilesError, r"lacks 1 weights, such as model\.layers\.0\.mlp\.up_proj\.weight"),
        (tmp_path / "not.gguf", ModelFilesError, "not a GGUF"),
        (tmp_path / "nowhere", ModelFilesError, "neither"),
        (unknown, UnsupportedModel, "'mamba'"),
    ):
        with pytest.raises(error, match=message):
            convert(source, target, lambda stage, fraction: None)
        assert not target.exists()
    assert not (tmp_path / ".target.converting").exists()
