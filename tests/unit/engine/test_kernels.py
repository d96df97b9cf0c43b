"""The compiled kernels, with every instruction set that this CPU has, against torch and a naive reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_reference import Shape, check_any_batch, chunkings, shapes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_attention import CompiledAttention
from tiny_models import VARIANTS, make_tiny_model

from engine.attention import SequenceRows, TorchAttention
from engine.errors import KernelsUnavailable
from engine.kernels.build import built_library
from engine.kernels.library import Isa, Kernels
from engine.kv_pool import TORCH_DTYPES, KvPool
from engine.model_config import load_model_config
from engine.model_files import weight_files
from engine.models.compiled import CompiledModel
from engine.models.linear import plain_linear
from engine.models.packed_linear import PackedLinear, PackedLinears
from engine.models.weights import load_model
from engine.step_model import StepLogits, StepModel, StepRows, TorchModel

BLOCK, NUM_BLOCKS = 8, 40


@pytest.fixture(scope="module", params=list(Isa), ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    try:
        library = Kernels(built_library())
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    if request.param > library.best_isa:
        pytest.skip(f"this CPU has no {request.param.name}")
    return Kernels(built_library(), request.param)


# -- linear layers ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.one_of(st.integers(1, 20), st.integers(21, 300)),
    num_in=st.one_of(st.integers(1, 70), st.just(800)),
    parts=st.lists(st.integers(1, 140), min_size=1, max_size=2),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_linear_layer_equals_its_float64_product(
    kernels: Kernels, rows: int, num_in: int, parts: list[int], dtype: str, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(sum(parts), num_in, generator=generator).to(TORCH_DTYPES[dtype])
    offset = torch.randn(sum(parts), generator=generator).to(TORCH_DTYPES[dtype]) if bias else None
    x = torch.randn(rows, num_in, generator=generator)
    if kernels.isa is Isa.AVX512_BF16 and dtype == "bfloat16":
        x = x.bfloat16().float()  # these kernels round what a product reads
    layer = PackedLinears(kernels)(weight, offset, parts)
    expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_a_linear_layer_does_not_depend_on_how_many_there_are(kernels: Kernels, dtype: str) -> None:
    weight = torch.randn(200, 900, generator=torch.Generator().manual_seed(0)).to(TORCH_DTYPES[dtype])
    x = torch.randn(100, 900, generator=torch.Generator().manual_seed(1))
    layer: PackedLinear = PackedLinears(kernels)(weight, None)
    alone = torch.cat([layer(row.view(1, -1)) for row in x[:20]])
    for rows in (2, 3, 4, 7, 13, 15, 29, 60, 100):
        assert torch.equal(layer(x[:rows])[:20], alone[:rows]), f"{rows} rows"


# -- attention ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes,
    chunking=chunkings,
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    threads=st.sampled_from([1, 2]),
)
def test_attention_of_any_batch_equals_the_naive_reference(
    kernels: Kernels, shape: Shape, chunking: list[list[int]], seed: int, dtype: str, threads: int
) -> None:
    def kernel_of(config: object, pool: KvPool) -> CompiledAttention:
        return CompiledAttention(shape.config, pool, kernels, threads)

    if dtype == "float32":
        check_any_batch(kernel_of, shape, chunking, seed)
    else:
        check_any_batch(kernel_of, shape, chunking, seed, dtype, tolerance=0.02)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(kv_heads=3, group=3, dim=64, block_size=64, windows=(None, 300), softcap=None),
        Shape(kv_heads=1, group=20, dim=128, block_size=16, windows=(None,), softcap=30.0),
        Shape(kv_heads=2, group=1, dim=80, block_size=32, windows=(700, None), softcap=None),
    ],
    ids=lambda shape: f"dim{shape.dim}",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_at_real_sizes(kernels: Kernels, shape: Shape, dtype: str) -> None:
    """Long enough for split decode rows and several tiles of a chunk, in a batch of both."""

    def kernel_of(config: object, pool: KvPool) -> CompiledAttention:
        return CompiledAttention(shape.config, pool, kernels, 2)

    tolerance = 1e-4 if dtype == "float32" else 0.02
    check_any_batch(kernel_of, shape, [[600, 1, 70, 1], [255, 1, 1], [3, 500, 1]], 7, dtype, tolerance=tolerance)


def test_a_decode_row_does_not_depend_on_its_batch_or_the_threads(kernels: Kernels) -> None:
    shape = Shape(kv_heads=2, group=3, dim=64, block_size=16, windows=(None,), softcap=None)
    layout = shape.config.kv_layout(16, "float32")
    pool = KvPool(layout, memoryview(bytearray(200 * layout.block_bytes)), 200)
    pool.blocks.normal_(generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, heads, 64, generator=generator) for heads in (6, 2, 2))
    rows = [
        SequenceRows(0, 1, 1000, tuple(range(63))),
        SequenceRows(1, 1, 3, (70,)),
        SequenceRows(2, 1, 400, tuple(range(80, 106))),
    ]
    outputs = []
    for threads in (1, 2):
        step = CompiledAttention(shape.config, pool, kernels, threads).begin(rows)
        step.write(0, k, v)
        outputs.append(step.attend(0, q))
    assert torch.equal(outputs[0], outputs[1])
    for row in rows:
        at = slice(row.first_row, row.first_row + 1)
        step = CompiledAttention(shape.config, pool, kernels).begin([SequenceRows(0, 1, row.start, row.block_ids)])
        step.write(0, k[at], v[at])
        assert torch.equal(step.attend(0, q[at]), outputs[0][at])


# -- whole steps --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VARIANTS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("kernels") / request.param, seed=3)


def load_both(directory: Path, kernels: Kernels, dtype: str) -> tuple[StepModel, StepModel]:
    config, models = load_model_config(directory), []
    for compiled in (True, False):
        layout = config.kv_layout(BLOCK, dtype)
        memory = bytearray(b"\xff" * (NUM_BLOCKS * layout.block_bytes))  # NaN everywhere
        pool = KvPool(layout, memoryview(memory), NUM_BLOCKS)
        linear = PackedLinears(kernels) if compiled else plain_linear
        model = load_model(config, weight_files(directory), TORCH_DTYPES[dtype], linear)
        models.append(
            CompiledModel(config, model, pool, kernels) if compiled else TorchModel(model, TorchAttention(config, pool))
        )
    return models[0], models[1]


def mixed_steps() -> list[StepRows]:
    """A prompt, then a chunk behind it beside a decode row and a new prompt, then decode rows alone."""
    a, b, c = tuple(range(12)), tuple(range(12, 24)), tuple(range(24, 36))

    def rows(*parts: tuple[int, int, tuple[int, ...]], wanted: list[int]) -> StepRows:
        sequences, tokens, positions = [], [], []
        for start, count, blocks in parts:
            sequences.append(SequenceRows(len(tokens), count, start, blocks))
            tokens += [(7 * position + blocks[0]) % 300 for position in range(start, start + count)]
            positions += range(start, start + count)
        return StepRows(tokens, positions, sequences, wanted)

    return [
        rows((0, 30, a), (0, 9, b), wanted=[]),
        rows((30, 21, a), (9, 1, b), (0, 5, c), wanted=[0, 20, 21, 26]),
        rows((51, 1, a), (10, 1, b), (5, 1, c), wanted=[0, 1, 2]),
    ]


def same_best(found: StepLogits, expected: torch.Tensor) -> None:
    assert found.best == found.values.argmax(-1).tolist()
    assert found.best == expected.argmax(-1).tolist()


@torch.inference_mode()
def test_a_step_of_every_family_equals_the_torch_layers(kernels: Kernels, directory: Path) -> None:
    compiled, reference = load_both(directory, kernels, "float32")
    for step in mixed_steps():
        found, expected = compiled.run(step), reference.run(step)
        if not step.logit_rows:
            assert found is expected is None
            continue
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-4)
        same_best(found, expected.values)


@torch.inference_mode()
def test_bfloat16_steps_are_at_least_as_close_to_float32_as_torch_gets(kernels: Kernels, directory: Path) -> None:
    compiled, reference = load_both(directory, kernels, "bfloat16")
    _, exact = load_both(directory, kernels, "float32")
    errors = [0.0, 0.0]
    for step in mixed_steps():
        expected = exact.run(step)
        for index, model in enumerate((compiled, reference)):
            found = model.run(step)
            if found is not None and expected is not None:
                errors[index] = max(errors[index], float((found.values.float() - expected.values).abs().max()))
    assert errors[0] <= 1.2 * errors[1] + 0.02


@torch.inference_mode()
def test_a_step_is_the_same_with_any_number_of_threads(kernels: Kernels, tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        compiled, _ = load_both(directory, kernels, "bfloat16")
        results.append([found.values.clone() for step in mixed_steps() if (found := compiled.run(step)) is not None])
    torch.set_num_threads(1)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@torch.inference_mode()
def test_a_logit_that_is_no_number_leaves_the_best_token_open(kernels: Kernels, tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path)
    compiled, _ = load_both(directory, kernels, "float32")
    assert isinstance(compiled, CompiledModel)
    compiled._kv_pool.blocks[0] = float("nan")
    found = compiled.run(StepRows([5, 6], [8, 0], [SequenceRows(0, 1, 8, (0, 1)), SequenceRows(1, 1, 0, (2,))], [0, 1]))
    assert found is not None
    assert found.best is not None
    assert found.best[0] is None
    assert found.best[1] == int(found.values[1].argmax())
