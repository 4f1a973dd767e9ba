"""The sampling part of the matrix: every parameter, logprobs of prompts, concurrency, pickled clients.

Run inside a tinker SDK's own environment: imports nothing of mint.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
from capability import Lab, case
from data import TOKENS, logprobs_of, plain_datum


def draw(lab: Lab, sampler: Any, count: int = 1, prompt: list[int] = TOKENS, **params: Any) -> Any:
    return sampler.sample(
        prompt=lab.types.ModelInput.from_ints(prompt),
        num_samples=count,
        sampling_params=lab.types.SamplingParams(**params),
    ).result()


def tokens_of(response: Any) -> list[list[int]]:
    return [list(row.tokens) for row in response.sequences]


@case("Sampling", "create_sampling_client(base_model), sample")
def sample(lab: Lab) -> None:
    response = draw(lab, lab.sampler(), max_tokens=8)
    (row,) = response.sequences
    assert row.stop_reason in ("stop", "length") and 1 <= len(row.tokens) <= 8
    assert len(row.logprobs) == len(row.tokens) and max(row.logprobs) <= 0


@case("Sampling", "n, max_tokens")
def counts(lab: Lab) -> None:
    rows = draw(lab, lab.sampler(), 5, max_tokens=7, stop=[]).sequences
    assert [len(row.tokens) for row in rows] == [7] * 5
    assert {row.stop_reason for row in rows} == {"length"}
    assert len({tuple(row.tokens) for row in rows}) > 1


@case("Sampling", "temperature, top_k, top_p")
def nucleus(lab: Lab) -> None:
    sampler = lab.sampler()
    greedy = tokens_of(draw(lab, sampler, max_tokens=8, temperature=0.0, stop=[]))
    assert tokens_of(draw(lab, sampler, max_tokens=8, temperature=1.0, top_k=1, stop=[])) == greedy
    assert tokens_of(draw(lab, sampler, max_tokens=8, temperature=1.0, top_p=1e-6, stop=[])) == greedy
    hot = tokens_of(draw(lab, sampler, 4, max_tokens=8, temperature=1.5, top_k=50, top_p=0.95, stop=[]))
    assert len({tuple(row) for row in hot}) > 1


@case("Sampling", "seed: the same again, n different samples")
def seeded(lab: Lab) -> None:
    sampler = lab.sampler()
    first = tokens_of(draw(lab, sampler, 4, max_tokens=8, seed=11, stop=[]))
    assert tokens_of(draw(lab, sampler, 4, max_tokens=8, seed=11, stop=[])) == first
    assert tokens_of(draw(lab, sampler, 4, max_tokens=8, seed=12, stop=[])) != first
    assert len({tuple(row) for row in first}) > 1


@case("Sampling", "stop: token ids, text, texts, []")
def stops(lab: Lab) -> None:
    sampler = lab.sampler()
    tokenizer = lab.trainer().get_tokenizer()
    special = set(tokenizer.all_special_ids)
    for seed in range(20):  # without one, an end-of-text token could stop first
        (drawn,) = tokens_of(draw(lab, sampler, max_tokens=12, seed=seed, stop=[]))
        assert len(drawn) == 12
        if not special & set(drawn[:5]):
            break
    stopped_at = drawn.index(drawn[4])
    text = tokenizer.decode([drawn[4]])
    for stop in ([drawn[4]], text, [text], ["never to be seen", text]):
        (row,) = draw(lab, sampler, max_tokens=12, seed=seed, stop=stop).sequences
        assert row.stop_reason == "stop" and text in tokenizer.decode(list(row.tokens)), (stop, drawn, row.tokens)
        assert list(row.tokens) == drawn[: len(row.tokens)], (stop, drawn, row.tokens)
        assert len(row.tokens) == stopped_at + 1 or isinstance(stop[0], str), (stop, drawn, row.tokens)


@case("Sampling", "logprobs are the trainer's at temperature 1")
def logprobs(lab: Lab) -> str:
    trainer = lab.trainer()
    sampler = trainer.save_weights_and_get_sampling_client(name="lp")
    (row,) = draw(lab, sampler, max_tokens=8, temperature=0.7, top_k=20, seed=3, stop=[]).sequences
    datum = plain_datum(lab.types, [*TOKENS, *row.tokens])
    trained = logprobs_of(trainer.forward([datum], "cross_entropy").result())[len(TOKENS) - 1 :]
    difference = float(np.abs(trained - np.asarray(row.logprobs)).max())
    assert difference < 1e-3, difference
    return f"|p − q| ≤ {difference:.1e}"


@case("Sampling", "prompt logprobs, compute_logprobs")
def prompt_logprobs(lab: Lab) -> None:
    trainer = lab.trainer()
    sampler = trainer.save_weights_and_get_sampling_client(name="pl")
    expected = logprobs_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result())
    prompt = lab.types.ModelInput.from_ints(TOKENS)
    params = lab.types.SamplingParams(max_tokens=2)
    response = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    for measured in (response.prompt_logprobs, sampler.compute_logprobs(prompt).result()):
        assert measured[0] is None and len(measured) == len(TOKENS)
        assert np.allclose(measured[1:], expected, atol=1e-3), (measured, expected)
    assert sampler.sample(prompt, 1, params).result().prompt_logprobs is None


@case("Sampling", "topk_prompt_logprobs")
def topk_prompt(lab: Lab) -> None:
    sampler = lab.sampler()
    prompt, params = lab.types.ModelInput.from_ints(TOKENS), lab.types.SamplingParams(max_tokens=1)
    response = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    rows = response.topk_prompt_logprobs
    assert len(rows) == len(TOKENS) and not rows[0]
    for token, logprob, row in zip(TOKENS[1:], response.prompt_logprobs[1:], rows[1:], strict=True):
        found = {int(key): value for key, value in row}
        assert len(found) == 3 and list(found.values()) == sorted(found.values(), reverse=True)
        assert logprob <= max(found.values()) + 1e-4 and abs(found.get(token, logprob) - logprob) < 1e-4


@case("Sampling", "topk_sample_logprobs", needs="SamplingClient.sample(topk_sample_logprobs)")
def topk_sample(lab: Lab) -> None:
    params = lab.types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    response = lab.sampler().sample(lab.types.ModelInput.from_ints(TOKENS), 1, params, topk_sample_logprobs=3).result()
    (row,) = response.sequences
    assert len(row.topk_logprobs) == 4
    for token, logprob, best in zip(row.tokens, row.logprobs, row.topk_logprobs, strict=True):
        assert len(best) == 3 and int(best[0][0]) == token and abs(best[0][1] - logprob) < 1e-4


@case("Sampling", "target_prompt_logprobs", needs="SamplingClient.sample(target_prompt_logprobs)")
def target_prompt(lab: Lab) -> None:
    targets = np.asarray([[token, 70] for token in TOKENS[1:]], dtype=np.int64)
    response = (
        lab.sampler()
        .sample(
            lab.types.ModelInput.from_ints(TOKENS),
            1,
            lab.types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            target_prompt_logprobs=lab.types.TensorData.from_numpy(targets),
        )
        .result()
    )
    measured = np.asarray(response.target_prompt_logprobs.tolist())
    assert measured.shape == targets.shape
    assert np.allclose(measured[:, 0], response.prompt_logprobs[1:], atol=1e-4)


@case("Sampling", "prompt_alt_tokens_k", needs="SamplingClient.sample(prompt_alt_tokens_k)")
def alternative_tokens(lab: Lab) -> None:
    params = lab.types.SamplingParams(max_tokens=1)
    response = lab.sampler().sample(lab.types.ModelInput.from_ints(TOKENS), 1, params, prompt_alt_tokens_k=2).result()
    tokens = np.asarray(response.prompt_alt_tokens.tokens.tolist())
    assert tokens.shape == (len(TOKENS) - 1, 2)
    assert (np.asarray(response.prompt_alt_tokens.logprobs.tolist()) <= 0).all()


@case("Sampling", "prompt_logprobs_last_n", needs="SamplingClient.sample(prompt_logprobs_last_n)")
def last_logprobs(lab: Lab) -> None:
    sampler = lab.sampler()
    prompt = lab.types.ModelInput.from_ints(TOKENS)
    whole = sampler.compute_logprobs(prompt).result()
    tail = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result()
    assert tail[:-3] == [None] * (len(TOKENS) - 3) and np.allclose(tail[-3:], whole[-3:], atol=1e-4)


@case("Sampling", "get_base_model", needs="SamplingClient.get_base_model")
def base_model(lab: Lab) -> None:
    assert lab.sampler().get_base_model() == lab.base_model


@case("Sampling", "get_tokenizer (sampling client)", needs="SamplingClient.get_tokenizer")
def tokenizer(lab: Lab) -> str:
    return f"{len(lab.sampler().get_tokenizer())} tokens"


@case("Sampling", "64 samples at once")
def concurrent(lab: Lab) -> None:
    sampler = lab.sampler()
    prompt = lab.types.ModelInput.from_ints(TOKENS)
    futures = [
        sampler.sample(prompt, 2, lab.types.SamplingParams(max_tokens=6, seed=seed, stop=[])) for seed in range(64)
    ]
    rows = [future.result() for future in futures]
    assert all(len(response.sequences) == 2 for response in rows)
    assert all(len(row.tokens) == 6 for response in rows for row in response.sequences)
    assert len({tuple(response.sequences[0].tokens) for response in rows}) > 32


CHILD = """
import pickle, sys, tinker
sampler = pickle.load(open(sys.argv[1], "rb"))
prompt = tinker.types.ModelInput.from_ints([40, 73, 61])
rows = sampler.sample(prompt, 3, tinker.types.SamplingParams(max_tokens=4, seed=1, stop=[])).result().sequences
print([list(row.tokens) for row in rows])
"""


@case("Sampling", "a pickled sampling client, in another process", needs="SamplingClient.__reduce__")
def pickled(lab: Lab) -> None:
    sampler = lab.sampler()
    path = lab.work_dir / "sampler.pickle"
    path.write_bytes(pickle.dumps(sampler))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=100, env=dict(os.environ)
    )
    assert child.returncode == 0, child.stderr[-400:]
    expected = tokens_of(draw(lab, sampler, 3, prompt=[40, 73, 61], max_tokens=4, seed=1, stop=[]))
    assert child.stdout.strip().splitlines()[-1] == str(expected), child.stdout


@case("Sampling", "get_sampler_handle, from_sampler_handle", needs="SamplingClient.get_sampler_handle")
def handle(lab: Lab) -> None:
    sampler = lab.sampler()
    again = lab.tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    same = {"prompt": [40, 73], "max_tokens": 4, "seed": 5, "stop": []}
    assert tokens_of(draw(lab, again, **same)) == tokens_of(draw(lab, sampler, **same))
