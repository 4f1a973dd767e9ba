"""Ranks that divide the experts of a base end with the bits of one process, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from engine_data import ADAM, random_data
from rank_work import engine_with, train_on_ranks, train_steps
from small_models import write_model

from mint.cluster.collectives import expert_ranks
from mint.cluster.collectives.parallelism import Parallelism
from mint.cluster.sums import Ranks
from mint.engine import training_pass
from mint.engine.cpu.mixture_of_experts import NativeMixtureOfExperts
from mint.engine.model.weights import MixtureWeights
from mint.engine.protocol import LossSpec, PassResult, resolve_loss
from mint.engine.reductions.division import ALONE
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError

OnRanks = Callable[..., list[Any]]
EXPERTS = Parallelism(experts=True)
LOSS: LossSpec = resolve_loss("importance_sampling")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts of which a token goes to two, of widths that the kernels in C take."""
    path = tmp_path_factory.mktemp("mixture")
    widths = {"hidden_size": 64, "head_dim": 32, "num_experts": 8, "moe_intermediate_size": 32}
    write_model(path, "tied", family="qwen3_moe", **widths)
    return path


def _values(digests: list[str], results: list[PassResult], *_: Any) -> tuple[Any, ...]:
    return digests, [own.metrics for own in results], [[each.tobytes() for each in own.logprobs] for own in results]


def _divided(folder: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    return _values(*train_on_ranks(folder, parallelism=EXPERTS, **options))


@pytest.mark.parametrize(("world", "dtype"), [
    (2, "float32"),
    (3, "bfloat16"),
    pytest.param(1, "float32", marks=pytest.mark.slow),
    pytest.param(4, "float32", marks=pytest.mark.slow),
    pytest.param(2, "bfloat16", marks=pytest.mark.slow),
    pytest.param(4, "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_steps_with_divided_experts_end_with_the_state_of_one_process(
    on_ranks: OnRanks, mixture: Path, world: int, dtype: str, recompute: bool
) -> None:
    options = {"dtype": dtype, "recompute": recompute}
    expected = _values(*train_steps(engine_with(ALONE, mixture, **options)))
    assert all(found == expected for found in on_ranks(world, _divided, mixture, options))


@pytest.mark.parametrize(("world", "dtype"), [
    (2, "bfloat16"),
    pytest.param(2, "float32", marks=pytest.mark.slow),
    pytest.param(4, "float32", marks=pytest.mark.slow),
    pytest.param(4, "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_kernels_in_c_compute_divided_experts(
    on_ranks: OnRanks, mixture: Path, native_folder: Path, world: int, dtype: str
) -> None:
    options = {"dtype": dtype, "native": native_folder}
    engine = engine_with(ALONE, mixture, **options)
    decoder: Any = engine._bases["base"]._trained
    if not isinstance(decoder.mixtures[0], NativeMixtureOfExperts):
        pytest.skip("this processor has no vectors of 16 numbers, or does not multiply bfloat16")
    expected = _values(*train_steps(engine))
    assert all(found == expected for found in on_ranks(world, _divided, mixture, options))


@pytest.mark.slow
def test_layers_of_both_kinds_and_a_shared_expert_are_divided(on_ranks: OnRanks, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family="qwen3_next")
    expected = _values(*train_steps(engine_with(ALONE, tmp_path)))
    assert all(found == expected for found in on_ranks(2, _divided, tmp_path, {}))


@pytest.mark.slow
def test_ranks_without_experts_help_none_and_get_help(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Five experts on four ranks: the last one has none."""
    write_model(tmp_path, "tied", family="qwen3_moe", num_experts=5)
    expected = _values(*train_steps(engine_with(ALONE, tmp_path)))
    assert all(found == expected for found in on_ranks(4, _divided, tmp_path, {}))


def _expert_bytes(engine: TorchEngine) -> int:
    decoder: Any = engine._bases["base"]._trained
    layers = [layer.mlp for layer in decoder.weights.layers if isinstance(layer.mlp, MixtureWeights)]
    experts: list[Any] = [matrix for mlp in layers for own in mlp.experts for matrix in (own.gate_up, own.down)]
    return sum(matrix.memory.nbytes for matrix in experts)


def _bytes_of_a_rank(folder: Path) -> int:
    return _expert_bytes(engine_with(Ranks(EXPERTS), folder))


def test_each_rank_keeps_its_experts_alone(on_ranks: OnRanks, mixture: Path) -> None:
    whole = _expert_bytes(engine_with(ALONE, mixture))
    assert on_ranks(4, _bytes_of_a_rank, mixture) == [whole // 4] * 4


def _step_after_a_failure(folder: Path, rank: int, error: Exception, place: str) -> tuple[str, str]:
    """What happens in a pass in which one rank raises an error, and the digest of a step after it."""
    engine = engine_with(Ranks(EXPERTS), folder)
    data = random_data(3, count=24, shared=8, policy=True)
    owner: Any = training_pass if place == "_run" else expert_ranks._LayerExchange
    plain, calls = getattr(owner, place), 0

    def fails(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if dist.get_rank() == rank and calls == 2:
            raise error
        return plain(*arguments, **named)

    outcome = "done"
    with patch.object(owner, place, fails):
        try:
            engine.forward_backward("m", data, LOSS)
        except RuntimeError as raised:
            outcome = type(raised).__name__
    engine.clear_gradient("m")
    engine.forward_backward("m", data, LOSS)
    engine.optim_step("m", ADAM)
    return outcome, engine.state_digest("m")


@pytest.mark.parametrize("place", ["_run", "forward", "backward"])
@pytest.mark.parametrize("is_memory", [False, True], ids=["error", "memory"])
def test_a_rank_that_fails_does_not_keep_the_others_waiting(
    on_ranks: OnRanks, mixture: Path, place: str, is_memory: bool
) -> None:
    engine = engine_with(ALONE, mixture)
    engine.forward_backward("m", random_data(3, count=24, shared=8, policy=True), LOSS)
    engine.optim_step("m", ADAM)
    expected = engine.state_digest("m")
    error = MemoryError("can't allocate memory") if is_memory else RuntimeError("broken")
    outcomes, digests = zip(*on_ranks(2, _step_after_a_failure, mixture, 0, error, place), strict=True)
    assert digests == (expected, expected)
    assert outcomes == (("done", "done") if is_memory else ("RuntimeError", "PeerFailedError"))


def _open(folder: Path) -> str:
    try:
        engine_with(Ranks(EXPERTS), folder)
    except InvalidRequestError as error:
        return str(error)
    return "done"


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused(on_ranks: OnRanks, tmp_path: Path) -> None:
    write_model(tmp_path / "few", "tied", family="qwen3_moe", num_experts=2)
    assert all("fewer than ranks" in text for text in on_ranks(3, _open, tmp_path / "few"))
    write_model(tmp_path / "stacked", "tied", family="gpt_oss")
    assert all("expert_parallel" in text for text in on_ranks(2, _open, tmp_path / "stacked"))
    with pytest.raises(InvalidRequestError, match="--shard-base and --expert-parallel"):
        Parallelism(shards=True, experts=True)
