"""What only a machine with a GPU can show: every family there computes what it computes on a CPU, twice the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_data import ADAM, CROSS_ENTROPY, LORA, job, random_data
from small_models import FAMILIES, write_model

from mint.engine.cuda.capture import capture
from mint.engine.cuda.fast_paths import QUANTIZED
from mint.engine.protocol import StopRule
from mint.engine.quantized.number_formats import Quantization
from mint.engine.torch_engine import TorchEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = "cuda"


def _engine(folder: Path, dtype: str, device: str) -> TorchEngine:
    engine = TorchEngine(dtype="float32" if dtype == "float32" else "bfloat16", threads=1, device=device)
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    return engine


def _train(engine: TorchEngine, steps: int) -> list[np.ndarray]:
    """Logprobs of the last step's examples."""
    found: list[np.ndarray] = []
    for step in range(steps):
        found = engine.forward_backward("m", random_data(step, shared=12), CROSS_ENTROPY).logprobs
        engine.optim_step("m", ADAM)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_trains_and_samples_every_family_as_a_cpu_does(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", family=family)
    prompts = [np.arange(20, 30), np.arange(21, 51)]
    logprobs, weights, samples = [], [], []
    engines = [_engine(tmp_path, "float32", device) for device in ("cpu", GPU)]
    fresh = [engine.read_state("m") for engine in engines]
    # The modules of transformers, which a GPU takes for delta nets, draw other loras, and not of the same matrices.
    steps = 3 if fresh[0].weights.keys() == fresh[1].weights.keys() else 1
    for engine, own in zip(engines, fresh, strict=True):
        begin = fresh[0] if steps > 1 else own
        engine.write_state("m", begin)
        logprobs.append(np.concatenate(_train(engine, steps)))
        if steps == 1:
            engine.write_state("m", begin)
        weights.append(engine.read_state("m").weights)
        engine.publish("m", "w")
        jobs = [job(prompt, weights_id="w", max_tokens=20, temperature=0.0, stop=StopRule()) for prompt in prompts]
        samples.append([result.samples[0] for result in engine.sample(jobs)])
    assert np.abs(logprobs[0] - logprobs[1]).max() <= 1e-3
    for name, expected in weights[0].items() if steps > 1 else ():
        assert np.abs(weights[1][name] - expected).max() <= 1e-3, name
    for ours, theirs in zip(*samples, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_cuda_trains_and_samples_on_a_quantized_base_as_a_cpu_does(kind: Quantization, tmp_path: Path) -> None:
    write_model(tmp_path, "tied", hidden_size=128, intermediate_size=192, head_dim=32, num_attention_heads=4)
    found = []
    for device in ("cpu", GPU):
        engine = TorchEngine(dtype="float32", threads=1, device=device, quantize=kind)
        assert QUANTIZED not in engine.load_base("base", str(tmp_path)).settings["switched_off"]
        engine.create_model("m", "base", LORA)
        logprobs = np.concatenate(_train(engine, 3))
        engine.publish("m", "w")
        greedy = job(np.arange(20, 30), weights_id="w", max_tokens=20, temperature=0.0, stop=StopRule())
        found.append((logprobs, engine.sample([greedy])[0].samples[0]))
    (ours, own), (theirs, other) = found
    assert np.abs(ours - theirs).max() <= 1e-3
    assert own.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(own.logprobs, other.logprobs, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_gives_the_same_bits_for_the_same_steps(dtype: str, tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    digests = set()
    for _ in range(2):
        engine = _engine(tmp_path, dtype, GPU)
        _train(engine, 3)
        digests.add(engine.state_digest("m"))
    assert len(digests) == 1


def test_cuda_in_bfloat16_stays_near_float32_and_its_sampler_near_its_trainer(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    wide, narrow = (_engine(tmp_path, "float32", "cpu"), _engine(tmp_path, "bfloat16", GPU))
    data = random_data(5, count=8, shared=16)
    exact, rounded = (engine.forward("m", data, CROSS_ENTROPY).logprobs for engine in (wide, narrow))
    assert np.abs(np.concatenate(exact) - np.concatenate(rounded)).mean() <= 0.05
    narrow.publish("m", "w")
    prompt = np.arange(20, 40)
    sample = narrow.sample([job(prompt, weights_id="w", max_tokens=30)])[0].samples[0]
    whole = np.concatenate([prompt, sample.tokens])
    scored = narrow.sample([job(whole, weights_id="w", max_tokens=0, prompt_logprobs=True)])[0].prompt_logprobs
    assert scored is not None
    assert np.abs(scored[len(prompt) :] - sample.logprobs).mean() <= 0.05


def test_a_capture_that_fails_leaves_stream_and_memory_as_they_were() -> None:
    x = torch.ones(1 << 20, device=GPU)
    present, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError):
        capture(lambda: x * float(x.sum()), pool=pool)  # it waits for the device
    assert torch.cuda.current_stream() == present
    graph, found = capture(lambda: x + 1, pool=torch.cuda.graph_pool_handle())
    graph.replay()
    assert float(found.sum()) == 2 << 20
    reserved = torch.cuda.memory_reserved()
    torch.empty(256 << 20, dtype=torch.uint8, device=GPU)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
