"""Training within bounds of memory: what is computed again, and what happens when memory runs out."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, flat, job, random_data, take_gradient, train
from small_models import write_model
from transformers import Qwen3ForCausalLM

from mint.engine.bases import decoder_base
from mint.engine.model.decoder import Decoder
from mint.engine.model.layer_parts import Mlp
from mint.engine.protocol import LoraSpec, MicroBatching, PassResult, TrainDatum, is_out_of_memory, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.errors import OutOfMemoryError, RequestFailedError


def _engine(
    folder: Path, *, dtype: str = "float32", recompute: bool | None = None, native: Path | None = None
) -> TorchEngine:
    engine = TorchEngine(dtype=dtype, threads=1, device="cpu", recompute=recompute, native=native)  # ty: ignore[invalid-argument-type]
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    return engine


def _take_gradient(engine: TorchEngine) -> bytes:
    return flat(take_gradient(engine, "m")).tobytes()


def _allocator_error() -> RuntimeError:
    """The real one."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    return caught.value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5_text"])
def test_computing_activations_again_changes_no_bit(tmp_path: Path, dtype: str, family: str) -> None:
    write_model(tmp_path, "tied", family=family)
    results = []
    for recompute in (False, True):
        engine = _engine(tmp_path, dtype=dtype, recompute=recompute)
        result = engine.forward_backward("m", random_data(3, count=8, shared=10), CROSS_ENTROPY)
        results.append(([row.tobytes() for row in result.logprobs], result.metrics, _take_gradient(engine)))
    assert results[0] == results[1]


@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_computing_a_few_trained_rows_again_changes_no_bit(
    tmp_path: Path, native_folder: Path, family: str, dtype: str, is_native: bool
) -> None:
    """The last layer computes these rows alone: fewer than a product with a gradient needs."""
    write_model(tmp_path, "tied", family=family)
    data = [datum(np.arange(20, 50), prompt=27)]
    results = []
    for recompute in (False, True):
        engine = _engine(tmp_path, dtype=dtype, recompute=recompute, native=native_folder if is_native else None)
        result = engine.forward_backward("m", data, resolve_loss("cross_entropy", {"trained_only": 1}))
        results.append(([row.tobytes() for row in result.logprobs], result.metrics, _take_gradient(engine)))
    assert results[0] == results[1] and any(results[0][2])


def test_a_sequence_beyond_the_budget_is_computed_again_without_being_asked(
    tied: tuple[Path, Qwen3ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = Decoder._layer
    monkeypatch.setattr(Decoder, "_layer", lambda *args, **named: calls.append(1) or real(*args, **named))
    for rows, expected in ((4096, 2), (40, 4)):  # two layers, once and twice
        monkeypatch.setattr(decoder_base, "fit_rows", lambda *_, rows=rows, **__: rows)
        engine = _engine(tied[0])
        calls.clear()
        engine.forward_backward("m", [datum(np.arange(20, 90) % 64 + 20)], CROSS_ENTROPY)
        assert len(calls) == expected


class _Fails:
    """Stands in a block's backward: raises the `fail`-th to the `last`-th time; part of the gradient may be added."""

    def __init__(self, error: BaseException, *, fail: int, last: int | None = None, forever: bool = False) -> None:
        self.error, self.fail, self.calls = error, fail, 0
        self.last = 1 << 30 if forever else last or fail
        self.real = Mlp.backward

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.fail <= self.calls <= self.last:
            raise self.error
        return self.real(*arguments)


def test_a_pass_for_which_memory_does_not_suffice_runs_again_and_adds_once(
    tied: tuple[Path, Qwen3ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [random_data(seed, count=8, shared=10) for seed in (3, 4)]
    engine = _engine(tied[0])
    _, expected = (engine.forward_backward("m", batch, CROSS_ENTROPY) for batch in data)
    whole = _take_gradient(engine)
    engine.forward_backward("m", data[0], CROSS_ENTROPY)
    monkeypatch.setattr(Mlp, "backward", staticmethod(_Fails(_allocator_error(), fail=2)))
    result = engine.forward_backward("m", data[1], CROSS_ENTROPY)
    assert result.metrics == {**expected.metrics, "memory_retries:sum": 1.0}
    assert _take_gradient(engine) == whole


def _passes(
    engine: TorchEngine, data: list[TrainDatum], micro_batching: MicroBatching | None = None
) -> tuple[PassResult, tuple[list[bytes], bytes]]:
    """The result of a pass, and the bits of it: all logprobs and the gradient."""
    engine.clear_gradient("m")
    result = engine.forward_backward("m", data, CROSS_ENTROPY, micro_batching=micro_batching)
    return result, ([row.tobytes() for row in result.logprobs], _take_gradient(engine))


def test_a_pass_that_was_split_for_lack_of_memory_is_repeated_bit_for_bit(
    tied: tuple[Path, Qwen3ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_data(3, count=8, shared=10)
    engine = _engine(tied[0])
    whole, whole_bits = _passes(engine, data)
    split = []
    for fail in (1, 2):  # in the first or the second layer: where memory ran out decides nothing more
        with monkeypatch.context() as patch:
            patch.setattr(Mlp, "backward", staticmethod(_Fails(_allocator_error(), fail=fail, last=fail + 1)))
            split.append(_passes(engine, data))
    (first, first_bits), (_, second_bits) = split
    assert first_bits == second_bits != whole_bits
    assert first.micro_batching is not None and whole.micro_batching is not None
    assert first.micro_batching.rows < whole.micro_batching.rows
    repeated, bits = _passes(_engine(tied[0]), data, first.micro_batching)
    assert bits == first_bits and repeated.micro_batching == first.micro_batching
    assert _passes(engine, data, whole.micro_batching)[1] == whole_bits


def test_a_repeated_pass_is_never_split_further(
    tied: tuple[Path, Qwen3ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(tied[0])
    data = random_data(3, count=8, shared=10)
    used = engine.forward_backward("m", data, CROSS_ENTROPY).micro_batching
    before = _take_gradient(engine)
    engine.forward_backward("m", data, CROSS_ENTROPY)
    monkeypatch.setattr(Mlp, "backward", staticmethod(_Fails(_allocator_error(), fail=1, forever=True)))
    with pytest.raises(OutOfMemoryError, match="as it was run before"):
        engine.forward_backward("m", data, CROSS_ENTROPY, micro_batching=used)
    assert _take_gradient(engine) == before


def test_memory_that_never_suffices_is_an_error_that_names_the_way_out_and_adds_nothing(
    tied: tuple[Path, Qwen3ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(tied[0])
    engine.forward_backward("m", random_data(3), CROSS_ENTROPY)
    before = _take_gradient(engine)
    engine.forward_backward("m", random_data(3), CROSS_ENTROPY)
    failing = _Fails(_allocator_error(), fail=1, forever=True)
    monkeypatch.setattr(Mlp, "backward", staticmethod(failing))
    with pytest.raises(RequestFailedError, match="Shorten the sequences"):
        engine.forward_backward("m", random_data(4, count=16), CROSS_ENTROPY)
    assert _take_gradient(engine) == before
    assert failing.calls >= 4  # as it was, computing again, and in at least two smaller parts


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    tied: tuple[Path, Qwen3ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (_allocator_error(), MemoryError(), torch.OutOfMemoryError()):
        assert is_out_of_memory(error)
    engine = _engine(tied[0])
    monkeypatch.setattr(Mlp, "backward", staticmethod(_Fails(RuntimeError("a bug"), fail=1)))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.forward_backward("m", random_data(3), CROSS_ENTROPY)


_LIMITED = """
import sys, resource
import numpy as np
sys.path.insert(0, {tests!r})
from engine_data import CROSS_ENTROPY, datum, flat, take_gradient
from mint.engine.protocol import LoraSpec
from mint.engine.torch_engine import TorchEngine
engine = TorchEngine(dtype="float32", threads=1, device="cpu", recompute=False)
engine.load_base("base", {folder!r})
engine.create_model("m", "base", LoraSpec(4, 0, True, True, False))
rng = np.random.default_rng(0)
data = [datum(rng.integers(20, 90, 200)) for _ in range(20)]
engine.forward_backward("m", data[:1], CROSS_ENTROPY)
engine.clear_gradient("m")
pages = int(open("/proc/self/statm").read().split()[0])
if len(sys.argv) > 1:
    limit = pages * resource.getpagesize() + (int(sys.argv[1]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = engine.forward_backward("m", data, CROSS_ENTROPY)
retries = found.metrics.get("memory_retries:sum", 0)
print(found.metrics["loss:sum"], retries, np.abs(flat(take_gradient(engine, "m"))).sum())
"""


@pytest.mark.slow
def test_under_a_real_limit_of_the_process_the_pass_is_split_until_it_fits(tmp_path: Path) -> None:
    """4,000 rows of 4 wide layers keep some 150 MB at once; the process may take 50 MB more."""
    write_model(tmp_path, "tied", num_hidden_layers=4, hidden_size=256, intermediate_size=512)
    script = _LIMITED.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    found = []
    for limit in ([], ["50"]):
        done = subprocess.run([sys.executable, "-c", script, *limit], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found.append([float(number) for number in done.stdout.split()])
    (free_loss, free_retries, free_gradient), (loss, retries, gradient) = found
    assert free_retries == 0 and retries >= 1
    assert loss == pytest.approx(free_loss, rel=1e-6) and gradient == pytest.approx(free_gradient, rel=1e-4)


def _tensor_bytes() -> int:
    """The memory of all real tensors of this process; tests of compiled attention leave others without memory."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [each for each in gc.get_objects() if type(each) in kinds and each.device.type == "cpu"]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _use(engine: TorchEngine, name: str, lora: LoraSpec) -> None:
    """A model that is trained, and sampled from."""
    engine.create_model(name, "base", lora)
    train(engine, name)
    engine.publish(name, name)
    engine.sample([job([3, 4, 5], weights_id=name, num_samples=3)])


@pytest.mark.parametrize(
    "is_native", [pytest.param(False, marks=pytest.mark.slow, id="torch"), pytest.param(True, id="native")]
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_takes_the_memory_that_is_said(
    tmp_path: Path, native_folder: Path, family: str, is_native: bool
) -> None:
    write_model(tmp_path, "tied", family=family)
    engine = TorchEngine(threads=1, device="cpu", native=native_folder if is_native else None)
    engine.load_base("base", str(tmp_path))
    lora = replace(LORA, rank=3)
    _use(engine, "earlier", lora)  # now all caches are there
    before = _tensor_bytes()
    _use(engine, "own", lora)
    assert _tensor_bytes() - before == pytest.approx(engine.model_bytes("base", lora), rel=0.03)
    engine.drop_model("own")
    engine.drop_weights("own")
    assert _tensor_bytes() == before
