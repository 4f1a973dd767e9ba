"""A job's bits do not depend on its neighbours: alone or in any mix, the same tokens and the same logprobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_data import LORA, job, train
from small_models import write_model

from mint.engine.protocol import LoraSpec, SampleJob, SampleResult, StopRule
from mint.engine.torch_engine import TorchEngine

# Wide enough that BLAS has a choice of kernels; odd where mint allows it.
WIDE = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 1024}  # fmt: skip
ODD = {"hidden_size": 100, "intermediate_size": 76, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24,
       "vocab_size": 331}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("float32", WIDE), id="wide", marks=pytest.mark.slow),
        pytest.param(("float32", ODD), id="odd"),
        pytest.param(("bfloat16", WIDE), id="bf16"),
    ],
)
def busy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """An engine with three published loras of different ranks."""
    dtype, shape = request.param
    folder: Path = tmp_path_factory.mktemp("wide")
    write_model(folder, "tied", **shape)
    engine = TorchEngine(dtype=dtype, threads=1, device="cpu")
    assert engine.load_base("base", str(folder)).settings["batch_invariant"]
    loras = (LORA, LoraSpec(16, 1, True, True, False), LoraSpec(3, 2, False, True, True))
    for index, lora in enumerate(loras):
        engine.create_model("m", "base", lora)
        train(engine, "m", steps=1, seed=index)
        engine.publish("m", f"w{index}")
    return engine


def _random_job(rng: np.random.Generator, weights: str | None) -> SampleJob:
    prompt = rng.integers(2, 300, int(rng.choice([1, 3, 15, 16, 31, 32, 33, 70])))
    restricted = rng.random() < 0.3
    return job(
        prompt,
        weights_id=weights,
        num_samples=int(rng.integers(1, 7)),
        max_tokens=int(rng.integers(1, 30)),
        temperature=float(rng.choice([0.0, 0.8, 1.0])),
        top_k=int(rng.integers(2, 50)) if restricted else -1,
        top_p=float(rng.uniform(0.5, 1)) if restricted else 1.0,
        seed=int(rng.integers(1 << 40)),
        stop=StopRule(frozenset(rng.integers(0, 300, 3).tolist())),
        prompt_logprobs=bool(rng.random() < 0.5),
    )


def _bits(result: SampleResult) -> list[bytes]:
    assert result.error is None
    prompt = [] if result.prompt_logprobs is None else [result.prompt_logprobs.tobytes()]
    return prompt + [part.tobytes() for sample in result.samples for part in (sample.tokens, sample.logprobs)]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_job_alone_equals_the_job_in_any_mix(busy: TorchEngine, threads: int) -> None:
    torch.set_num_threads(threads)
    rng = np.random.default_rng(threads)
    weights = [None, "w0", "w1", "w2"]
    own = [_random_job(rng, name) for name in weights for _ in range(3 - threads)]
    alone = [_bits(busy.sample([one])[0]) for one in own]
    for mix in (0, 3, 20) if threads == 1 else (7,):
        others = [_random_job(rng, weights[int(rng.integers(4))]) for _ in range(mix)]
        everyone = [*own, *others]
        order = rng.permutation(len(everyone))
        results = busy.sample([everyone[index] for index in order])
        found = {int(index): result for index, result in zip(order, results, strict=True)}
        for index, expected in enumerate(alone):
            assert _bits(found[index]) == expected, f"job {index} beside {mix} others"


def test_one_prompt_in_many_mixes_has_one_answer(busy: TorchEngine) -> None:
    rng = np.random.default_rng(5)
    own = job([5, 6, 7, 8, 9], weights_id="w1", num_samples=2, max_tokens=6, seed=11)
    answers = set()
    for _ in range(40):
        others = [
            job(rng.integers(2, 300, int(rng.integers(1, 40))), weights_id="w1", num_samples=int(rng.integers(1, 9)))
            for _ in range(int(rng.integers(0, 4)))
        ]
        place = int(rng.integers(0, len(others) + 1))
        answers.add(tuple(_bits(busy.sample([*others[:place], own, *others[place:]])[place])))
    assert len(answers) == 1
