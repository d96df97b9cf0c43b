"""Families without layers of ours: the same tokens and probabilities as transformers, through its classes and our pool."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_steps import BLOCK, VOCAB, Sequence, check, load, mixed_story, prompt_of, step
from safetensors.torch import load_file, save_file
from tiny_models import OTHER_FAMILIES, REFUSED_FAMILIES, WINDOW, make_tiny_model

from engine.errors import ModelFilesError, UnsupportedModel
from engine.model_config import load_model_config


@pytest.fixture(scope="module", params=OTHER_FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param, VOCAB)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def test_chunks_prefixes_and_mixed_batches_match_transformers(directory: Path, reference: Any) -> None:
    for sequence in mixed_story(load(directory, "auto")):
        assert len(sequence.drawn) >= 4
        check(reference, sequence)


@pytest.mark.parametrize("length", [1, BLOCK, 3 * WINDOW])
def test_generate_gives_the_same_tokens(directory: Path, reference: Any, length: int) -> None:
    prompt = prompt_of(length)
    expected = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=None,
    )
    runner, sequence = load(directory, "auto"), Sequence("a", prompt, 0)
    for number in range(12):
        step(runner, number, [(sequence, sequence.next_part())])
    assert sequence.tokens == expected[0].tolist()


def test_bfloat16_runs_and_stays_close(directory: Path, reference: Any) -> None:
    """The comparison at the start has held it against transformers in the same dtype."""
    runner, sequence = load(directory, "auto", "bfloat16"), Sequence("a", prompt_of(20), 0)
    step(runner, 0, [(sequence, sequence.next_part(11))])
    step(runner, 1, [(sequence, sequence.next_part())])
    with torch.inference_mode():
        exact = torch.log_softmax(reference(torch.tensor([sequence.tokens[:20]])).logits[0, -1].float(), -1)
    token = sequence.drawn[0]
    assert token.logprob == pytest.approx(float(exact[token.token_id]), abs=0.5)


def test_it_says_so_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_tiny_model("opt", tmp_path, VOCAB)
    with caplog.at_level(logging.WARNING):
        load(directory, "auto")
    assert "family opt has no layers of its own here" in caplog.text


def test_windows_reach_the_kernel(tmp_path: Path) -> None:
    """A window is seen at the start, not read from config.json: a field of that name may mean nothing."""
    directory = make_tiny_model("starcoder2", tmp_path, VOCAB)
    assert {layer.window for layer in load_model_config(directory).layers} == {None}
    runner, sequence = load(directory, "auto"), Sequence("a", prompt_of(2 * WINDOW), 0)
    step(runner, 0, [(sequence, sequence.next_part())])
    # A changed token in front of the window of the last query changes nothing in one layer; this model has three.
    far = Sequence("b", prompt_of(4 * WINDOW), 24)
    other = Sequence("c", [*prompt_of(WINDOW - 3, seed=9), *far.tokens[WINDOW - 3 :]], 36)
    step(runner, 1, [(far, far.next_part()), (other, other.next_part())])
    assert far.drawn == other.drawn
    assert far.tokens[:5] != other.tokens[:5]


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_families_that_take_no_other_attention_are_refused_by_name(family: str, tmp_path: Path) -> None:
    directory = make_tiny_model(family, tmp_path, VOCAB)
    with pytest.raises(UnsupportedModel, match=f"'{family}'"):
        load(directory, "auto")


def test_a_model_whose_positions_are_its_own_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at the start catches what no flag of a class says."""
    directory = make_tiny_model("gpt_neox", tmp_path, VOCAB)
    rotary = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXRotaryEmbedding
    original = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda self, x, position_ids: original(self, x, torch.arange(x.shape[1]).unsqueeze(0))
    )
    with pytest.raises(UnsupportedModel, match="do not come from position_ids"):
        load(directory, "auto")


def test_weights_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    """transformers would draw them at random."""
    directory = make_tiny_model("opt", tmp_path, VOCAB)
    weights = load_file(directory / "model.safetensors")
    left_out = next(name for name in weights if name.endswith("fc1.weight"))
    save_file({name: value for name, value in weights.items() if name != left_out}, directory / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"1 weights are missing.*fc1\.weight"):
        load(directory, "auto")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "nobody_s_model"}, "transformers has no causal model"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"attention_chunk_size": 64}, "attention_chunk_size"),
        ({"is_encoder_decoder": True}, "encoder"),
    ],
)
def test_what_config_json_gives_away_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = make_tiny_model("opt", tmp_path, VOCAB)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | fields))
    with pytest.raises((UnsupportedModel, ModelFilesError), match=message):
        load(directory, "auto")


def test_a_small_pool_is_enough_for_the_trial_at_the_start(tmp_path: Path) -> None:
    directory = make_tiny_model("opt", tmp_path, VOCAB)
    runner, sequence = load(directory, "auto", num_blocks=2), Sequence("a", prompt_of(5), 0)
    sequence.blocks = sequence.blocks[:2]
    step(runner, 0, [(sequence, sequence.next_part())])
    assert len(sequence.drawn) == 1
