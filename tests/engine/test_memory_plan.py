"""The plan of a model's memory, against published sizes, the engine's own accounting, and measurements."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA
from small_models import write_model

from mint.compose.memory_plan import plan_model
from mint.config import Settings
from mint.engine.cuda.operations import CudaOperations
from mint.engine.devices import Device
from mint.engine.memory.plan import MemoryPlan, plan_memory
from mint.engine.model.config import read_decoder_config
from mint.engine.protocol import LoraSpec, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError, UnknownBaseModelError
from mint.models.folder import ModelFolder
from mint.models.random_base import SHAPES, ModelShape, write_random_base
from mint.models.tensor_files import StoredTensor

GIB = 1 << 30
EVERY = LoraSpec(16, 0, train_attn=True, train_mlp=True, train_unembed=True)


def _shape(hidden: int, layers: int, heads: int, inner: int, *, tied: bool) -> tuple[Any, dict[str, StoredTensor]]:
    """Configuration and headers of a Qwen3 model with 8 key heads of 128."""
    config = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": tied,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        shapes["lm_head.weight"] = (151936, hidden)
    for layer in range(layers):
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (heads * 128, hidden), "self_attn.k_proj": (1024, hidden),
            "self_attn.v_proj": (1024, hidden), "self_attn.o_proj": (hidden, heads * 128),
            "self_attn.q_norm": (128,), "self_attn.k_norm": (128,), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    tensors = {name: StoredTensor("BF16", shape, name, None, Path()) for name, shape in shapes.items()}
    return read_decoder_config(config), tensors


def _plan(model: tuple[Any, dict[str, StoredTensor]], gib: float, **changes: Any) -> MemoryPlan:
    """On a GPU with so much memory, in bfloat16."""
    memory = int(gib * GIB)
    operations = CudaOperations(torch.bfloat16, torch.device("cuda"), memory_bytes=memory)
    settings: dict[str, Any] = {"context": 16384, "group": 8, "memory_bytes": memory, "free_bytes": memory, **changes}
    return plan_memory(*model, operations, EVERY, **settings)


QWEN3_06B = _shape(1024, 28, 16, 3072, tied=True)
QWEN3_8B = _shape(4096, 36, 32, 12288, tied=False)


def test_the_weights_are_those_of_the_published_models() -> None:
    """596,049,920 and 8,190,735,360 parameters, 2 bytes each; norms take 4."""
    assert _plan(QWEN3_06B, 24).base == pytest.approx(2 * 596_049_920, rel=0.001)
    assert _plan(QWEN3_8B, 80).base == pytest.approx(2 * 8_190_735_360, rel=0.001)


def test_a_lora_takes_weights_gradient_moments_and_a_copy() -> None:
    """docs/operations.md: 783,744 parameters for each unit of rank."""
    assert _plan(QWEN3_06B, 24).model == 5 * 4 * 16 * 783_744


def test_keys_and_values_of_qwen3_8b() -> None:
    """36 layers, keys and values, 8 heads of 128 numbers, 2 bytes each; a quarter of 80 GiB without the base."""
    plan = _plan(QWEN3_8B, 80)
    assert plan.kv_token == 147_456
    assert plan.kv_cache == (80 * GIB - plan.base) // 4
    assert plan.sequences == plan.kv_cache // (147_456 * 16384)
    assert plan.fits_group is (plan.sequences >= 8)


def test_a_small_card_does_not_fit_and_recomputation_helps() -> None:
    assert _plan(QWEN3_8B, 16).fits(0) is False
    plan = _plan(QWEN3_8B, 48)
    assert plan.offloaded < plan.recomputed < plan.kept / 3
    assert plan.host == 16384 * 36 * 4096 * 4
    assert plan.fits(plan.recomputed) is True and plan.fits(plan.kept) is False
    assert _plan(QWEN3_06B, 24, free_bytes=None).fits(1) is None


def test_activations_grow_with_the_sequence_and_the_rest_does_not() -> None:
    short, long = (_plan(QWEN3_06B, 24, context=context) for context in (4096, 8192))
    assert 1.6 < long.kept / short.kept < 2.1  # a chunk of logits is computed at once, whatever the length
    assert (short.base, short.model, short.kv_cache) == (long.base, long.model, long.kv_cache)


def test_what_the_kernels_keep_for_a_rank_is_in_the_plan(tmp_path: Path, native_folder: Path) -> None:
    write_model(tmp_path, "tied", family="qwen3", hidden_size=64, intermediate_size=192, head_dim=32)
    engine = TorchEngine(dtype="bfloat16", threads=1, device="cpu", native=native_folder)
    engine.load_base("base", str(tmp_path))
    folder, tokens = ModelFolder(tmp_path), np.arange(40)
    config = read_decoder_config(folder.config)
    operations = Device("cpu", native_folder, gpu_kernels=False).operations(config, torch.bfloat16)
    example = TrainDatum(tokens, tokens, np.ones(len(tokens), np.float32))
    found = []
    for rank in (4, 64):
        lora = LoraSpec(rank, 0, train_attn=True, train_mlp=True, train_unembed=False)
        engine.create_model(f"rank {rank}", "base", lora)
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(partial(_note, kept), lambda tensor: tensor):
            engine.forward_backward(f"rank {rank}", [example], CROSS_ENTROPY)
        plan = plan_memory(
            config,
            folder.tensors(),
            operations,
            lora,
            context=len(tokens),
            group=1,
            memory_bytes=GIB,
            free_bytes=GIB,
        )
        found.append((sum(kept.values()), plan.kept - 3 * plan.model // 5))  # three vectors of a pass, of five
    (small, planned_small), (large, planned_large) = found
    assert planned_large - planned_small == large - small > 0


def _note(kept: dict[int, int], tensor: torch.Tensor) -> torch.Tensor:
    """Adds the bytes of a tensor that a backward needs, once for each place in memory."""
    kept[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
    return tensor


@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_lora_takes_what_the_engine_counts(tmp_path: Path, native_folder: Path, family: str, is_native: bool) -> None:
    write_model(tmp_path, "tied", family=family, hidden_size=64, intermediate_size=192, head_dim=32)
    native = native_folder if is_native else None
    engine = TorchEngine(threads=1, device="cpu", native=native)
    engine.load_base("base", str(tmp_path))
    folder = ModelFolder(tmp_path)
    config = read_decoder_config(folder.config)
    operations = Device("cpu", native, gpu_kernels=False).operations(config, torch.float32)
    plan = plan_memory(
        config, folder.tensors(), operations, LORA, context=64, group=2, memory_bytes=GIB, free_bytes=GIB
    )
    counted = engine.model_bytes("base", LORA)
    assert plan.model >= counted * 0.99
    if is_native and family == "qwen3":  # elsewhere no matrix is kept turned
        assert plan.model == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_copies_that_small_matrices_keep_for_gradients_are_foreseen(
    native_folder: Path, dtype: torch.dtype, is_native: bool
) -> None:
    native = native_folder if is_native else None
    config, _ = QWEN3_06B
    operations = Device("cpu", native, gpu_kernels=False).operations(config, dtype)
    for outputs, inputs in ((64, 32), (512, 96), (96, 2048), (512, 512), (512, 480), (40, 33), (1024, 1024)):
        matrix = operations.matrix(torch.randn(outputs, inputs).to(dtype))
        matrix.gradient(torch.ones(3, outputs))
        assert operations.turned_copy_bytes(outputs, inputs) == matrix.gradient_bytes, (outputs, inputs)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process as Linux counts it")
@pytest.mark.parametrize("way", ["kept", "recomputed", "offloaded", "sampled"])
def test_the_plan_is_within_15_percent_of_what_is_measured(tmp_path: Path, native_folder: Path, way: str) -> None:
    from benchmarks.memory import plan as benchmark

    shape = ModelShape(256, 4, 8, 2, 32, 768, context=4096)
    write_random_base(tmp_path, shape, seed=0)
    planned = benchmark.predict(tmp_path, "float32", 4096)
    script = f"from benchmarks.memory import plan; plan.measure({str(tmp_path)!r}, 'float32', {way!r}, 4096)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, benchmark.MALLOC: benchmark.BLOCK_BYTES},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(done.stdout)
    predicted = planned.kv_token * 4096 + planned.prompt if way == "sampled" else getattr(planned, way)
    assert predicted + planned.base + planned.model == pytest.approx(sum(found.values()), rel=0.15)
    if way != "sampled":
        assert predicted == pytest.approx(found["peak"], rel=0.15)


def test_a_plan_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_base(tmp_path, SHAPES["tiny"], seed=0)
    monkeypatch.setattr(StoredTensor, "read", lambda *_: pytest.fail("a weight was read"))
    plan = plan_model(Settings(), str(tmp_path), context=512, group=8, rank=8, device="cpu", device_gib=8)
    assert plan.free == 8 * GIB and plan.base > 0 and not plan.is_gpu


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3_text", "qwen3_moe", "qwen3_5_text", "gpt_oss"])
def test_config_json_alone_gives_the_plan_that_the_weights_give(tmp_path: Path, family: str) -> None:
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    write_model(whole, "tied" if family == "gemma3_text" else "untied", family=family)
    bare.mkdir()
    shutil.copy(whole / "config.json", bare)
    asked: dict[str, Any] = {"context": 64, "group": 2, "rank": 4, "device": "cuda", "device_gib": 24}
    assert plan_model(Settings(), str(bare), **asked) == plan_model(Settings(), str(whole), **asked)


def test_what_cannot_be_planned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"context": 512, "group": 8, "rank": 8}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnknownBaseModelError):
        plan_model(Settings(), "nobody/knows", **asked)
    with pytest.raises(InvalidRequestError, match="longer than the context"):
        plan_model(Settings(), "mint/tiny", context=1 << 20, group=8, rank=8)
    with pytest.raises(InvalidRequestError, match="--device-memory"):
        plan_model(Settings(), "mint/tiny", **asked, device="cuda")
    assert plan_model(Settings(), "mint/tiny", **asked, device="cuda", device_gib=24).is_gpu
    write_model(tmp_path, "tied", attention_bias=True)
    with pytest.raises(InvalidRequestError, match="transformers"):
        plan_model(Settings(), str(tmp_path), **asked)
