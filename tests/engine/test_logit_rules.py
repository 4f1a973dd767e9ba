"""What jobs change in their logits: each rule against transformers or numpy, and in a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, job, train
from small_models import write_model
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from mint.engine.drawing.logit_rules import LogitRuleTable
from mint.engine.drawing.token_masks import packed
from mint.engine.protocol import NO_TOKEN, LogitBias, LogitRules, SampleJob, StopRule
from mint.engine.torch_engine import TorchEngine

VOCAB = 97


@pytest.fixture(scope="module", params=["mint", "transformers"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    folder: Path = tmp_path_factory.mktemp("rules")
    write_model(folder, "tied")
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", implementation=request.param)
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    return engine


class EvenGrammar:
    """Any number of even tokens, then token 1, which ends the text."""

    ends = frozenset({1})

    def start(self) -> EvenGrammar:
        return EvenGrammar()

    def allowed(self, bits: np.ndarray) -> None:
        bits[:] = packed(np.append(np.arange(2, VOCAB, 2), 1), VOCAB)

    def advance(self, token: int) -> None:
        assert token % 2 == 0 and token > 1


def applied(
    rules: LogitRules, logits: np.ndarray, drawn: np.ndarray, *, temperature: float = 1.0, **changes: Any
) -> np.ndarray:
    """The logits of one sequence with `rules` that has drawn some tokens; two others with other rules are beside it."""
    table = LogitRuleTable()
    table.add(np.array([4]), job([3, 5, 3], rules=rules, **changes))
    table.add(np.array([0, 2]), job([8, 9], rules=LogitRules(min_p=0.5, frequency_penalty=1.0), num_samples=2))
    rows = torch.from_numpy(np.stack([logits + 1, logits, logits[::-1]]).astype(np.float32))
    others = np.array([7, 7], np.int64)
    table.apply(
        rows, np.array([0, 4, 2]), np.array([1.0, temperature, 1.0]), lambda slot: drawn if slot == 4 else others
    )
    return rows[1].numpy()


def random_logits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 3, VOCAB).astype(np.float32), rng.integers(0, VOCAB, 12)


@pytest.mark.parametrize("seed", range(5))
def test_every_rule_is_that_of_transformers(seed: int) -> None:
    logits, drawn = random_logits(seed)
    ids = torch.from_numpy(np.concatenate([[3, 5, 3], drawn]))[None]
    scores = torch.from_numpy(logits)[None]
    ends = StopRule(frozenset({1, 60}))
    bias = LogitBias(np.array([4, 90]), np.array([2.5, -100.0], np.float32))
    cases: list[tuple[LogitRules, Any, float]] = [
        (LogitRules(min_p=0.07), MinPLogitsWarper(0.07), 1.0),
        (LogitRules(min_p=0.3), lambda ids, own: MinPLogitsWarper(0.3)(ids, own / 2.5), 2.5),
        (LogitRules(repetition_penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3), 1.0),
        (LogitRules(bias=bias), SequenceBiasLogitsProcessor([[[4], 2.5], [[90], -100.0]]), 1.0),
        (LogitRules(min_tokens=13), MinNewTokensLengthLogitsProcessor(3, 13, [1, 60], device="cpu"), 1.0),
        (LogitRules(min_tokens=12), MinNewTokensLengthLogitsProcessor(3, 12, [1, 60], device="cpu"), 1.0),
    ]
    for rules, reference, temperature in cases:
        expected = reference(ids, scores.clone())[0] * temperature
        found = applied(rules, logits, drawn, temperature=temperature, stop=ends)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_frequency_and_presence_penalties_count_sampled_tokens_alone(seed: int) -> None:
    logits, drawn = random_logits(seed)
    counts = np.bincount(drawn, minlength=VOCAB)
    expected = logits.astype(np.float64) - 0.4 * counts - 1.1 * (counts > 0)
    found = applied(LogitRules(frequency_penalty=0.4, presence_penalty=1.1), logits, drawn)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    found = applied(LogitRules(frequency_penalty=-2.0), logits, drawn)
    np.testing.assert_allclose(found, logits + 2.0 * counts, atol=1e-5)


def test_all_rules_apply_in_the_order_of_the_page() -> None:
    logits, drawn = random_logits(9)
    allowed = np.arange(1, 80)
    rules = LogitRules(
        allowed=allowed,
        grammar=EvenGrammar(),
        bias=LogitBias(np.array([6]), np.array([3.0], np.float32)),
        min_tokens=20,
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        min_p=0.2,
    )
    expected = logits.astype(np.float64)
    expected[[token for token in range(VOCAB) if (token % 2 and token != 1) or token == 0 or token >= 80]] = -np.inf
    expected[6] += 3
    expected[1] = -np.inf
    for token in {3, 5, *drawn.tolist()}:
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    counts = np.bincount(drawn, minlength=VOCAB)
    expected -= 0.5 * counts + 0.25 * (counts > 0)
    shares = np.exp((expected - expected.max()) / 0.8)
    expected[shares < 0.2] = -np.inf
    found = applied(rules, logits, drawn, temperature=0.8, stop=StopRule(frozenset({1})))
    np.testing.assert_allclose(found, expected, atol=1e-5)


RULES = LogitRules(min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_k": 9}, {"temperature": 1.4, "top_p": 0.8}]


def ruled(**changes: Any) -> SampleJob:
    return job([3, 4, 5], weights_id="w", **{"num_samples": 3, "max_tokens": 12, "rules": RULES, **changes})


@pytest.mark.parametrize("settings", SETTINGS)
def test_raw_logprobs_stay_the_policys_own_and_processed_ones_are_those_of_the_draw(
    engine: TorchEngine, settings: dict[str, Any]
) -> None:
    asked = ruled(logprobs_mode="both", topk_sample_logprobs=20, **settings)
    raw, drawn = engine.sample([replace(asked, logprobs_mode="raw"), replace(asked, logprobs_mode="processed")])
    for sample, own, other in zip(engine.sample([asked])[0].samples, raw.samples, drawn.samples, strict=True):
        assert sample.tokens.tobytes() == own.tokens.tobytes() == other.tokens.tobytes()
        assert sample.logprobs.tobytes() == own.logprobs.tobytes() and own.processed is None
        assert sample.processed is not None and sample.processed.tobytes() == other.logprobs.tobytes()
        whole = datum(np.concatenate([asked.prompt, sample.tokens]))
        expected = engine.forward("m", [whole], CROSS_ENTROPY).logprobs[0][2:]
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)
        assert (sample.processed <= 1e-6).all() and not np.array_equal(sample.processed, sample.logprobs)


def test_raw_logprobs_of_ruled_draws_are_the_trainers_to_the_last_bit(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(tmp_path))
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    for settings in SETTINGS:
        for sample in engine.sample([ruled(**settings)])[0].samples:
            whole = datum(np.concatenate([[3, 4, 5], sample.tokens]))
            expected = engine.forward("m", [whole], CROSS_ENTROPY).logprobs[0][2:]
            assert sample.logprobs.tobytes() == expected.tobytes()


def test_processed_logprobs_with_rules_are_those_of_numpy(engine: TorchEngine) -> None:
    # Without the repetition penalty: it depends on the sign of a logit, which logprobs do not tell.
    rules = replace(RULES, repetition_penalty=1.0)
    own = ruled(rules=rules, logprobs_mode="processed", temperature=0.7, topk_sample_logprobs=VOCAB, num_samples=4)
    for sample in engine.sample([own])[0].samples:
        assert sample.topk is not None
        for place, token in enumerate(sample.tokens.tolist()):
            logits = np.zeros(VOCAB)
            logits[sample.topk.tokens[place]] = sample.topk.logprobs[place]
            counts = np.bincount(sample.tokens[:place], minlength=VOCAB)
            logits -= 0.3 * counts + 0.2 * (counts > 0)
            weights = np.exp((logits - logits.max()) / 0.7)
            weights[weights < 0.02] = 0
            assert abs(np.log(weights[token] / weights.sum()) - sample.logprobs[place]) < 1e-4


@pytest.mark.parametrize("settings", SETTINGS)
def test_frequencies_follow_the_rules(engine: TorchEngine, settings: dict[str, Any]) -> None:
    rules = LogitRules(
        allowed=np.arange(10, 60), bias=LogitBias(np.array([12, 13]), np.array([1.5, -1.0], np.float32)), min_p=0.05
    )
    count = 4000
    asked = job(
        [3, 4, 5], weights_id="w", num_samples=count, max_tokens=1, rules=rules, logprobs_mode="processed", **settings
    )
    samples = engine.sample([asked])[0].samples
    found = {int(sample.tokens[0]): float(np.exp(sample.logprobs[0])) for sample in samples}
    counts = np.bincount([int(sample.tokens[0]) for sample in samples], minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(range(10, 60))
    for token, share in found.items():
        assert abs(counts[token] / count - share) < 5 * np.sqrt(share * (1 - share) / count) + 1e-9


def test_a_job_with_rules_gets_the_same_in_any_company(engine: TorchEngine) -> None:
    jobs = [ruled(), ruled(rules=None, seed=3), ruled(rules=LogitRules(grammar=EvenGrammar()), top_k=30), ruled(seed=5)]
    alone = [engine.sample([one])[0].samples for one in jobs]
    for own, beside in zip(alone, engine.sample(jobs), strict=True):
        assert [sample.tokens.tobytes() for sample in own] == [sample.tokens.tobytes() for sample in beside.samples]
        assert [sample.logprobs.tobytes() for sample in own] == [sample.logprobs.tobytes() for sample in beside.samples]


def test_rules_that_change_nothing_change_no_bit(engine: TorchEngine) -> None:
    plain, with_rules = engine.sample([ruled(rules=None)])[0], engine.sample([ruled(rules=LogitRules())])[0]
    for one, other in zip(plain.samples, with_rules.samples, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes() and one.logprobs.tobytes() == other.logprobs.tobytes()


def test_a_grammar_decides_every_token_and_the_end(engine: TorchEngine) -> None:
    bias = LogitBias(np.array([1]), np.array([4.0], np.float32))
    asked = ruled(rules=LogitRules(grammar=EvenGrammar(), bias=bias), num_samples=32, max_tokens=60)
    samples = engine.sample([asked])[0].samples
    assert any(sample.stopped for sample in samples)
    for sample in samples:
        body = sample.tokens[:-1] if sample.stopped else sample.tokens
        assert (body % 2 == 0).all() and (body > 1).all() and (sample.tokens[-1] == 1) == sample.stopped


def test_no_end_comes_before_min_tokens(engine: TorchEngine) -> None:
    bias = LogitBias(np.array([7]), np.array([30.0], np.float32))
    stop = StopRule(frozenset({7}))
    [early] = engine.sample([ruled(rules=LogitRules(bias=bias), stop=stop)])
    assert [sample.tokens.tolist() for sample in early.samples] == [[7]] * 3
    [late] = engine.sample([ruled(rules=LogitRules(bias=bias, min_tokens=5), stop=stop)])
    for sample in late.samples:
        assert len(sample.tokens) == 6 and 7 not in sample.tokens[:5] and sample.tokens[5] == 7 and sample.stopped


def test_a_stop_string_ends_a_sequence_only_if_it_begins_after_min_tokens(engine: TorchEngine) -> None:
    vocabulary = [b"x"] * VOCAB
    stop = StopRule(strings=(b"xx",), vocabulary=vocabulary)
    for least in (0, 1, 4):
        [result] = engine.sample([ruled(rules=LogitRules(min_tokens=least), stop=stop)])
        assert [len(sample.tokens) for sample in result.samples] == [least + 2] * 3


def test_rules_that_leave_no_token_fail_their_own_job_only(engine: TorchEngine) -> None:
    bad = ruled(rules=LogitRules(allowed=np.array([1]), min_tokens=2), stop=StopRule(frozenset({1})))
    good, failed = engine.sample([ruled(), bad])
    assert failed.error == NO_TOKEN and failed.samples == []
    assert good.error is None and len(good.samples) == 3
