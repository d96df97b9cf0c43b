"""Two clusters for all end-to-end cases: the fake runner for speed, a tiny float32 model where logits matter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_reference import VOCAB_SIZE, fake_model_dir
from http_cluster import kvrelay_up, model_environ
from serving_case import Served
from tiny_models import make_tiny_model, write_tiny_tokenizer

BLOCK = 16


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("fake-cases")
    model_dir = fake_model_dir(directory / "model")
    write_tiny_tokenizer(model_dir, VOCAB_SIZE)
    environ = model_environ(
        model_dir=model_dir, runner="fake", served_model="m", block_size=BLOCK, num_blocks=256, prefill_chunk=64
    )
    with kvrelay_up(directory / "run", "--policy", "always", environ=environ) as running:
        yield Served(running, model_dir)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random Llama in float32."""
    directory = tmp_path_factory.mktemp("tiny-cases")
    model_dir = make_tiny_model("llama", directory / "model", VOCAB_SIZE)
    environ = model_environ(
        model_dir=model_dir, dtype="float32", served_model="m", block_size=BLOCK, num_blocks=256, prefill_chunk=48
    )
    with kvrelay_up(directory / "run", "--policy", "always", environ=environ) as running:
        yield Served(running, model_dir)


@pytest.fixture(params=["always", "never"], ids=["p-d", "colocated"])
def policy(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param
