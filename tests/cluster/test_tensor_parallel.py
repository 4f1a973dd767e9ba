"""Ranks that divide every layer, by heads, inner widths and experts: one digest for every number of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed.distributed_c10d as dist
from engine_data import ADAM, CROSS_ENTROPY, datum, flat, job, random_data, take_gradient
from rank_work import engine_with, train_on_ranks, train_steps
from small_models import write_model

from mint.cluster.collectives.chunk_ranks import ChunkGroup
from mint.cluster.collectives.parallelism import Parallelism
from mint.cluster.sums import Ranks
from mint.engine.chunked.chunk_shapes import chunk_count
from mint.engine.chunked.chunked_decoder import ChunkedDecoder
from mint.engine.cpu.operations import NativeOperations
from mint.engine.cpu.panels import PanelMatrix
from mint.engine.model.config import read_decoder_config
from mint.engine.model.weights import layer_matrices
from mint.engine.protocol import PassResult, resolve_loss
from mint.engine.reductions.division import ALONE
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder

OnRanks = Callable[..., list[Any]]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen3_moe": {"num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 8},
}
HYBRID = {"num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 4}
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "gpt_oss": {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8},
    "phi3": {"num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Delta nets, gates of outputs, shared and stacked experts, sinks and fused matrices."""
FAMILIES = [*SHAPES, "qwen3_next", "gpt_oss"]
FAST = [
    ("qwen3", "float32"),
    ("qwen3", "bfloat16"),
    ("qwen3_moe", "bfloat16"),
    ("qwen3_next", "float32"),
    ("gpt_oss", "float32"),
]
CASES = [
    pytest.param(family, dtype, marks=() if (family, dtype) in FAST else pytest.mark.slow)
    for family in (*SHAPES, *OTHER_SHAPES)
    for dtype in ("float32", "bfloat16")
]
"""Each family in each dtype, those that are alike only in the slow suite."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shapes = SHAPES | OTHER_SHAPES
    folders = {family: tmp_path_factory.mktemp(family) for family in shapes}
    for family, folder in folders.items():
        write_model(folder, "tied", family=family, **shapes[family])
    return folders


def plain_values(digests: list[str], results: list[PassResult], *_: Any) -> tuple[Any, ...]:
    return digests, [own.metrics for own in results], [[each.tobytes() for each in own.logprobs] for own in results]


def divided_steps(folder: Path, tensor_parallel: int, **options: Any) -> tuple[Any, ...]:
    return plain_values(
        *train_on_ranks(folder, parallelism=Parallelism(tensor_parallel=tensor_parallel), chunked=True, **options)
    )


def steps_of(folder: Path, tensor_parallel: int, dtype: str, recompute: bool | None = None) -> tuple[Any, ...]:
    return divided_steps(folder, tensor_parallel, dtype=dtype, recompute=recompute)


def of_one_process(folder: Path, **options: Any) -> tuple[Any, ...]:
    return plain_values(*train_steps(engine_with(ALONE, folder, chunked=True, **options)))


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_two_ranks_that_divide_the_layers_end_with_the_state_of_one_process(
    on_ranks: OnRanks, models: dict[str, Path], family: str, dtype: str
) -> None:
    expected = of_one_process(models[family], dtype=dtype)
    assert on_ranks(2, steps_of, models[family], 2, dtype) == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tensor_parallel"), [(4, 4), (4, 2), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*SHAPES, *OTHER_SHAPES])
def test_any_number_of_ranks_that_divide_the_layers_and_the_micro_batches_ends_with_the_state_of_one_process(
    on_ranks: OnRanks, models: dict[str, Path], family: str, dtype: str, world: int, tensor_parallel: int
) -> None:
    expected = of_one_process(models[family], dtype=dtype)
    assert on_ranks(world, steps_of, models[family], tensor_parallel, dtype) == [expected] * world


@pytest.mark.slow
def test_layers_that_are_computed_twice_have_the_same_bits(on_ranks: OnRanks, models: dict[str, Path]) -> None:
    expected = of_one_process(models["qwen3"], dtype="float32")
    assert on_ranks(2, steps_of, models["qwen3"], 2, "float32", True) == [expected] * 2


def steps_with_kernels(folder: Path, tensor_parallel: int, dtype: str, kernels: Path, merged: bool) -> tuple[Any, ...]:
    merges = nullcontext() if merged else patch.object(NativeOperations, "merged_bytes", 0)
    with merges:
        return divided_steps(folder, tensor_parallel, dtype=dtype, native=kernels)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "merged"), [("float32", True), ("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_in_c_compute_chunks(
    on_ranks: OnRanks, tmp_path: Path, family: str, dtype: str, merged: bool
) -> None:
    """Also where loras are not merged into copies of the matrices, as those of large models are not."""
    model, kernels = tmp_path / "model", tmp_path / "kernels"
    wide = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 256}
    experts = {"moe_intermediate_size": 32} if family in ("qwen3_moe", "qwen3_next") else {}
    write_model(model, "tied", family=family, **{**(SHAPES | OTHER_SHAPES)[family], **wide, **experts})
    merges = nullcontext() if merged else patch.object(NativeOperations, "merged_bytes", 0)
    with merges:
        engine = engine_with(ALONE, model, dtype=dtype, native=kernels, chunked=True)
        decoder: Any = engine._bases["base"]._trained
        matrices = [matrix for chunk in decoder._parts for layer in chunk.layers for matrix in layer_matrices(layer)]
        # the matrices of the mixture with delta nets are too narrow; its nets and heads have kernels
        assert family == "qwen3_next" or any(isinstance(own, PanelMatrix) for own in matrices)
        expected = plain_values(*train_steps(engine))
    for world in (2, 4):
        assert on_ranks(world, steps_with_kernels, model, world, dtype, kernels, merged) == [expected] * world


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen2", "llama", "gemma3_text", "exaone4", *OTHER_SHAPES])
def test_a_chunked_model_computes_what_the_plain_one_does(tmp_path: Path, family: str) -> None:
    shape = (SHAPES | OTHER_SHAPES).get(family, {"num_attention_heads": 8, "num_key_value_heads": 4})
    if family == "qwen2":  # a head's width follows from the hidden size
        shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None}
    write_model(tmp_path, "tied", family=family, **shape)
    plain, chunked = (engine_with(ALONE, tmp_path, chunked=is_chunked) for is_chunked in (False, True))
    data, loss = random_data(1, count=24, shared=8, policy=True), resolve_loss("importance_sampling")
    for _ in range(2):
        found = [engine.forward_backward("m", data, loss) for engine in (plain, chunked)]
        for logprobs in zip(*(own.logprobs for own in found), strict=True):
            np.testing.assert_allclose(*logprobs, atol=1e-5, rtol=0)
        first, second = (flat(take_gradient(engine, "m")) for engine in (plain, chunked))
        assert np.linalg.norm(first - second) < 1e-5 * np.linalg.norm(first)
        for engine in (plain, chunked):  # from one state: Adam makes whole steps of the smallest gradients
            engine.forward_backward("m", data, loss)
            engine.optim_step("m", ADAM)
            engine.write_state("m", plain.read_state("m"))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text", "phi3"])
def test_a_lora_that_was_trained_in_chunks_is_that_of_a_plain_model(models: dict[str, Path], family: str) -> None:
    plain, chunked = (engine_with(ALONE, models[family], chunked=is_chunked) for is_chunked in (False, True))
    train_steps(chunked)
    state = chunked.read_state("m")
    plain.write_state("m", state)
    assert plain.state_digest("m") == chunked.state_digest("m")
    data, loss = random_data(9, policy=True), resolve_loss("importance_sampling")
    for logprobs in zip(
        plain.forward("m", data, loss).logprobs, chunked.forward("m", data, loss).logprobs, strict=True
    ):
        np.testing.assert_allclose(*logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_samples_have_the_logprobs_of_the_trainer_bit_for_bit(
    models: dict[str, Path], tmp_path: Path, family: str, dtype: str
) -> None:
    engine = engine_with(ALONE, models[family], chunked=True, dtype=dtype, native=tmp_path)
    train_steps(engine)
    engine.publish("m", "w")
    prompts = [[20, 31, 42], [25, 26, 27, 28] * 6, [50]]
    jobs = [job(prompt, weights_id="w", num_samples=2, max_tokens=12) for prompt in prompts]
    jobs.append(job([33, 34], max_tokens=5))  # the base, in the same batch
    results = engine.sample(jobs)
    for prompt, result in zip(prompts, results, strict=False):
        for sample in result.samples:
            whole = np.concatenate([prompt, sample.tokens])
            example = datum(whole, prompt=len(prompt))
            (logprobs,) = engine.forward("m", [example], CROSS_ENTROPY).logprobs
            assert logprobs[len(prompt) - 1 :].tobytes() == np.asarray(sample.logprobs, np.float32).tobytes()


def memory_of_a_rank(folder: Path, tensor_parallel: int) -> tuple[int, int]:
    """The bytes of the matrices of layers on this rank, and how many of them every rank has."""
    engine = engine_with(Ranks(Parallelism(tensor_parallel=tensor_parallel)), folder, chunked=True)
    train_steps(engine)
    decoder: Any = engine._bases["base"]._trained
    assert isinstance(decoder, ChunkedDecoder)
    layers = [layer for chunk in decoder._parts for layer in chunk.layers]
    matrices = {id(matrix): matrix for layer in layers for matrix in layer_matrices(layer)}
    own = sum(matrix.size_bytes for matrix in matrices.values())
    return own, sum(frame.router.size_bytes for frame in decoder._frames if frame.router is not None)


@pytest.mark.parametrize("family", [*SHAPES, pytest.param("qwen3_next", marks=pytest.mark.slow), "gpt_oss"])
def test_each_rank_keeps_its_part_of_the_layers(on_ranks: OnRanks, models: dict[str, Path], family: str) -> None:
    plain: Any = engine_with(ALONE, models[family])._bases["base"]._trained
    whole = sum(matrix.size_bytes for layer in plain.weights.layers for matrix in layer_matrices(layer))
    for own, routers in on_ranks(2, memory_of_a_rank, models[family], 2):
        assert own - routers == (whole - routers) // 2


def step_after_a_failure(
    folder: Path, tensor_parallel: int, failing: int, error: Exception, at: int
) -> tuple[str, str]:
    """What happens in a pass in which one rank raises an error at a sum over chunks, and the digest of that step,
    which is taken again where it failed."""
    engine = engine_with(Ranks(Parallelism(tensor_parallel=tensor_parallel)), folder, chunked=True)
    data, loss = random_data(3, count=24, shared=8, policy=True), resolve_loss("importance_sampling")
    plain, calls = ChunkGroup.sum, 0

    def fails(self: ChunkGroup, part: Any) -> Any:
        nonlocal calls
        calls += 1
        if dist.get_rank() == failing and calls == at:
            raise error
        return plain(self, part)

    outcome = "done"
    with patch.object(ChunkGroup, "sum", fails):
        try:
            engine.forward_backward("m", data, loss)
        except RuntimeError as raised:
            outcome = type(raised).__name__
    if outcome != "done":
        engine.clear_gradient("m")
        engine.forward_backward("m", data, loss)
    engine.optim_step("m", ADAM)
    return outcome, engine.state_digest("m")


@pytest.mark.parametrize(
    ("world", "tensor_parallel", "at"),
    [(2, 2, 1), (2, 2, 6), pytest.param(4, 2, 2, marks=pytest.mark.slow)],  # in a forward, and in a backward
)
@pytest.mark.parametrize(
    ("error", "outcomes"),
    [
        (RuntimeError("broken"), ["PeerFailedError", "RuntimeError", "PeerFailedError", "PeerFailedError"]),
        (MemoryError("can't allocate memory"), ["done"] * 4),
    ],
)
def test_a_rank_that_fails_does_not_keep_the_others_waiting(
    on_ranks: OnRanks,
    models: dict[str, Path],
    world: int,
    tensor_parallel: int,
    at: int,
    error: Exception,
    outcomes: list[str],
) -> None:
    engine = engine_with(ALONE, models["qwen3"], chunked=True)
    engine.forward_backward("m", random_data(3, count=24, shared=8, policy=True), resolve_loss("importance_sampling"))
    engine.optim_step("m", ADAM)
    found = on_ranks(world, step_after_a_failure, models["qwen3"], tensor_parallel, 1, error, at)
    assert found == [(outcome, engine.state_digest("m")) for outcome in outcomes[:world]]


def refusal(folder: Path, tensor_parallel: int) -> str:
    try:
        engine_with(Ranks(Parallelism(tensor_parallel=tensor_parallel)), folder, chunked=True)
    except InvalidRequestError as error:
        return str(error)
    return "none"


def test_more_ranks_than_chunks_are_refused(on_ranks: OnRanks, folder: Path) -> None:
    for found in on_ranks(4, refusal, folder, 4):  # of two key heads
        assert "2 chunks" in found and "tensor_parallel = 4" in found


@pytest.mark.parametrize("family", ["olmo2", "olmo3"])
def test_families_whose_layers_are_not_cut_are_refused(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, "tied", family=family)
    with pytest.raises(InvalidRequestError, match=f"model_type = {family}: .* not cut into chunks"):
        engine_with(ALONE, tmp_path, chunked=True)


def test_a_base_that_transformers_computes_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=rf"base_model = {folder}: is computed by transformers"):
        TorchEngine(device="cpu", chunked=True, implementation="transformers").load_base(str(folder), str(folder))


def test_what_does_not_go_together_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequestError, match="nf4"):
        TorchEngine(device="cpu", chunked=True, quantize="nf4")


def test_the_number_of_chunks_follows_from_the_model(models: dict[str, Path], folder: Path) -> None:
    counts = [chunk_count(read_decoder_config(ModelFolder(path).config)) for path in (folder, *models.values())]
    assert counts == [2, *[4] * len(models)]
    engine = engine_with(ALONE, models["qwen3"], chunked=True)
    assert engine.load_base("base", "").settings["tensor_chunks"] == 4
