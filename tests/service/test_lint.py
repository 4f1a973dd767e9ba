"""Data that is possible but doubtful is named in `warnings`, by a stable code; good data is not."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from service_harness import Harness, datum, pass_body

import mint
from mint.engine.protocol import PassResult, TrainDatum, resolve_loss
from mint.server.worker import lint as rules

END = 999


def batch(count: int = 8, *, shift: int = 1, first_weight: float = 0.0, **inputs: list[float]) -> list[TrainDatum]:
    rng = np.random.default_rng(0)
    data = []
    for index in range(count):
        full = rng.integers(1, 900, 8)
        weights = np.array([first_weight, 0, 0, 1, 1, 1], dtype=np.float32)
        chosen = {"logprobs": [-1.0] * 6, "advantages": [0.5 if index % 2 else -0.5] * 6, **inputs}
        arrays = {key: np.array(row, dtype=np.float32) for key, row in chosen.items()}
        data.append(TrainDatum(full[:6], full[shift : shift + 6], weights, arrays))
    return data


def batch_of_signs(size: float) -> list[TrainDatum]:
    """Good data, with advantages of this size."""
    data = batch()
    for index, each in enumerate(data):
        each.inputs["advantages"][:] = size if index % 2 else -size
    return data


def lint(data: list[TrainDatum], loss: str, logprob: float = -1.0, **options: Any) -> list[str]:
    if loss == "cross_entropy":
        data = [dataclasses.replace(each, inputs={}) for each in data]
    result = PassResult([np.full(each.weights.shape, logprob, np.float32) for each in data], {})
    return rules.lint(data, resolve_loss(loss), result, stop_tokens=[END], **options)


def codes(warnings: list[str]) -> list[str]:
    return [warning.partition(":")[0] for warning in warnings]


def test_good_data_has_no_warning() -> None:
    assert lint(batch(), "ppo") == []
    assert lint(batch(), "cross_entropy") == []


DOUBTFUL = {
    "not_shifted: targets equal the input": batch(shift=0),
    "not_shifted: targets are not the input shifted by one": batch(shift=2),
    "duplicates: 7 of 8 datums are exact copies": batch(1) * 8,
    "raw_rewards: no advantage is negative": batch(advantages=[1.0] * 6),
    "raw_rewards: no advantage is positive": batch(advantages=[-1.0] * 6),
    "zero_advantages: all advantages are 0": batch(advantages=[0.0] * 6),
    "zero_logprobs: logprobs are exactly 0": batch(logprobs=[0.0] * 6),
    "prompt_trained: the first token has a weight": batch(first_weight=1.0),
    "prompt_trained: 8 of 8 datums train unlikely tokens": batch(logprobs=[0, 0, 0, 0, -1, -1]),
    "foreign_tokens: 8 of 8 datums train unlikely tokens behind": batch(logprobs=[0, 0, 0, -1, 0, 0]),
    "large_advantages: the root mean square of the advantages is 50": batch_of_signs(50.0),
    "stale_policy: the policy has moved far": batch(logprobs=[0, 0, 0, -3, -0.1, -0.2]),
}


@pytest.mark.parametrize("words", DOUBTFUL)
def test_doubtful_data_is_named(words: str) -> None:
    assert any(warning.startswith(words) for warning in lint(DOUBTFUL[words], "importance_sampling"))


def test_the_same_short_sample_many_times_is_normal_in_reinforcement_learning() -> None:
    likely = batch(2, logprobs=[-0.3] * 6)
    assert lint(likely * 8, "ppo", logprob=-0.3) == []
    assert codes(lint(likely * 8, "cross_entropy")) == ["duplicates"]


def test_a_batch_sent_twice_is_named_in_reinforcement_learning_too() -> None:
    assert codes(lint(batch(8) * 2, "ppo")) == ["duplicates"]
    assert codes(lint([each for each in batch(8) for _ in range(2)], "ppo")) == ["duplicates"]


def test_logprobs_of_exactly_zero_are_normal_where_the_policy_is_certain() -> None:
    assert lint(batch(logprobs=[0.0] * 6), "ppo", logprob=-1e-6) == []


def test_a_prompt_of_one_token_may_have_a_weight_on_the_first_sampled_one() -> None:
    data = batch(first_weight=1.0)
    for each in data:
        each.tokens[0] = 1
    assert lint(data, "ppo") == []


def test_nothing_to_train_is_named() -> None:
    data = [dataclasses.replace(each, weights=np.zeros_like(each.weights)) for each in batch()]
    for loss in ("cross_entropy", "ppo"):
        assert codes(lint(data, loss)) == ["nothing_trained"]


def test_a_few_datums_prove_nothing() -> None:
    assert lint(batch(4, advantages=[1.0] * 6), "ppo") == []


def test_a_small_rise_of_nearly_all_logprobs_is_a_mismatch_only_while_the_weights_are_those_that_were_published() -> (
    None
):
    nucleus = batch(logprobs=[0, 0, 0, -0.95, -0.9, -1.0])
    assert lint(nucleus, "ppo", fresh=False) == []
    assert codes(lint(nucleus, "ppo", fresh=True)) == ["mismatch"]
    assert lint(batch(logprobs=[-1.01] * 6), "ppo", fresh=True) == []


def test_samples_of_weights_that_are_a_few_steps_older_are_no_finding() -> None:
    older = batch(logprobs=[0, 0, 0, -1.05, -0.9, -1.1])
    assert lint(older, "ppo", fresh=True) == lint(older, "ppo", fresh=False) == []


def test_one_rare_token_with_a_large_ratio_does_not_make_a_batch_stale() -> None:
    data = batch(16)
    assert lint(data, "ppo", logprob=-1.2) == []
    data[3].inputs["logprobs"][4] = -7.0
    assert lint(data, "ppo", logprob=-1.2) == []


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (lambda p: -p, "sign looks flipped"),
        (np.exp, "look like probabilities"),
        (lambda p: p + np.array([2, -2, 2, -2, 2, -2], np.float32), "as sample() returned them"),
    ],
)
def test_logprobs_above_zero_are_impossible(sent: Callable[[np.ndarray], np.ndarray], cause: str) -> None:
    data = batch()
    policy = random_policy(data)
    for each, own in zip(data, policy, strict=True):
        each.inputs["logprobs"] = sent(own)
    (warning,) = rules.lint(data, resolve_loss("ppo"), PassResult(policy, {}))
    assert warning.startswith("impossible_logprobs") and cause in warning
    data = batch(logprobs=[0, 0, 0, 1e-6, -1, -1])
    assert lint(data, "ppo") == []


def random_policy(data: list[TrainDatum]) -> list[np.ndarray]:
    """Logprobs of a policy that is certain of some tokens and not of others."""
    rng = np.random.default_rng(5)
    return [-rng.gamma(0.5, 1.5, len(each.tokens)).astype(np.float32) for each in data]


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("moved", [0.0, 0.004])
def test_logprobs_of_another_datum_of_the_batch_are_named(fresh: bool, moved: float) -> None:
    data = batch(32)
    policy = random_policy(data)
    for place, each in enumerate(data):
        each.inputs["logprobs"] = policy[(place + 5) % len(data)] * np.float32(1 + moved)
    found = rules.lint(data, resolve_loss("ppo"), PassResult(policy, {}), fresh=fresh)
    assert codes(found) == ["mispaired_logprobs"] and "32 of 32 datums" in found[0]


def test_tokens_that_the_policy_finds_impossible_are_foreign_also_where_the_sampler_was_certain() -> None:
    data = batch(logprobs=[0, 0, 0, 0, -0.5, -0.1])
    assert codes(lint(data, "ppo", logprob=-12.0)) == ["foreign_tokens"]
    assert codes(lint(data, "ppo", logprob=-12.0, fresh=True)) == ["foreign_tokens"]


def test_a_policy_that_training_has_sharpened_is_not_called_another_temperature() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, (8, 6, 50))

    def logprobs(scale: float) -> np.ndarray:
        scaled = logits * scale
        return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))

    before, after = logprobs(1.0), logprobs(1.25)
    chosen = np.array([[rng.choice(50, p=np.exp(row)) for row in rows] for rows in before])[..., None]
    data = batch()
    for each, row in zip(data, np.take_along_axis(before, chosen, -1)[..., 0], strict=True):
        each.inputs["logprobs"] = row.astype(np.float32)
    own = list(np.take_along_axis(after, chosen, -1)[..., 0].astype(np.float32))
    entropies = list(-(np.exp(after) * after).sum(-1).astype(np.float32))
    result = PassResult(own, {}, entropies)
    assert rules.lint(data, resolve_loss("ppo"), result, fresh=False) == []
    assert codes(rules.lint(data, resolve_loss("ppo"), result, fresh=True)) == ["temperature_logprobs"]


def _sure_policy(rng: np.random.Generator) -> np.ndarray:
    """Logits [8, 6, 50] that are certain of most tokens."""
    logits = rng.normal(0, 1.5, (8, 6, 50))
    logits[..., 0] += np.where(rng.random((8, 6)) < 0.95, rng.uniform(8, 16, (8, 6)), 2)
    return logits


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def _found_of(logits: np.ndarray, sampler: np.ndarray, rng: np.random.Generator) -> list[str]:
    """What is found of tokens that `sampler` drew, by a trainer with these `logits`."""
    chosen = np.array([[rng.choice(50, p=np.exp(row)) for row in rows] for rows in sampler])[..., None]
    data = batch()
    for each, row in zip(data, np.take_along_axis(sampler, chosen, -1)[..., 0], strict=True):
        each.inputs["logprobs"] = row.astype(np.float32)
    policy = _log_softmax(logits)
    own = list(np.take_along_axis(policy, chosen, -1)[..., 0].astype(np.float32))
    entropies = list(-(np.exp(policy) * policy).sum(-1).astype(np.float32))
    return codes(rules.lint(data, resolve_loss("ppo"), PassResult(own, {}, entropies), fresh=True))


def test_rounding_of_a_policy_that_is_certain_of_nearly_all_tokens_is_not_called_another_temperature() -> None:
    rng = np.random.default_rng(11)
    rounded, tempered = 0, 0
    for _ in range(100):
        logits = _sure_policy(rng)
        noise = rng.normal(0, 0.3, logits.shape)
        rounded += "temperature_logprobs" in _found_of(logits, _log_softmax(logits + noise), rng)
        tempered += "temperature_logprobs" in _found_of(logits, _log_softmax(logits / 0.88), rng)
    assert rounded <= 2  # up to 15 where the token that differs most may decide alone
    assert tempered >= 50


def test_fresh_logprobs_that_have_nothing_to_do_with_the_tokens_are_not_called_stale() -> None:
    data = batch(logprobs=[0, 0, 0, -4, -0.1, -2.2])
    own = [np.array([-1, -1, -1, -0.2, -6, -5], np.float32) for _ in data]
    close = [np.array([-1, -1, -1, -6, -0.8, -4.5], np.float32) for _ in data]

    def found(logprobs: list[np.ndarray], *, fresh: bool) -> list[str]:
        return codes(rules.lint(data, resolve_loss("ppo"), PassResult(logprobs, {}), stop_tokens=[END], fresh=fresh))

    assert found(own, fresh=True) == ["foreign_tokens"]
    assert found(own, fresh=False) == ["stale_policy"]
    assert found(close, fresh=True) == ["stale_policy"]


def test_tokens_after_the_end_are_told_from_prompts_between_two_samples() -> None:
    padded, turns = batch(logprobs=[0, 0, 0, -1, 0, 0]), batch(logprobs=[0, 0, 0, -1, 0, -1])
    for each in (*padded, *turns):
        each.targets[3] = each.tokens[4] = END
    assert codes(lint(padded, "ppo")) == ["tokens_after_stop"]
    assert codes(lint(turns, "ppo")) == ["prompt_trained"]


def test_warnings_are_counted_in_the_metrics_of_the_response(harness: Harness) -> None:
    model_id = harness.create_model()
    clean = harness.run("forward_backward", model_id, 1, pass_body(datum(1, 2, 3, 4)))
    assert clean["warnings"] == [] and clean["metrics"]["lint_warnings:sum"] == 0
    silent = pass_body(datum(1, 2, 3, 4, weights=[0.0, 0.0, 0.0]))
    doubtful = harness.run("forward_backward", model_id, 2, silent)
    assert codes(doubtful["warnings"]) == ["nothing_trained"] and doubtful["metrics"]["lint_warnings:sum"] == 1


def early_mask(*, own_of_first: float, ends_early: bool = False) -> tuple[list[TrainDatum], PassResult, np.ndarray]:
    """Samples of three tokens; the mask begins at the prompt's last one, of which the policy's logprob is given."""
    data, given, own = batch(16), [], []
    for each in data:
        each.weights[2] = 1.0
        each.weights[5] = not ends_early
        column = np.array([0, 0, 0, -1.0, -0.01, -0.02], np.float32)
        given.append(column)
        own.append(column + np.array([0, 0, own_of_first, 0, 0, 0], np.float32))
        each.inputs["logprobs"] = np.where(each.weights == 0, 0, column)
    return data, PassResult(own, {}), np.concatenate(given)


@pytest.mark.parametrize(
    ("own_of_first", "ends_early", "fresh", "found"),
    [
        (-2e-6, False, True, ["prompt_trained"]),  # a chat template's last token
        (-2e-6, False, False, []),  # weights that have moved differ by as much
        (-0.03, False, False, ["prompt_trained"]),
        (0.0, False, True, []),  # a sampled token of which the policy is certain
        (0.0, True, True, []),  # the same, and the end token is left out on purpose
        (-2e-6, True, False, ["prompt_trained"]),
    ],
)
def test_a_mask_that_begins_one_token_early_is_named(
    own_of_first: float, ends_early: bool, fresh: bool, found: list[str]
) -> None:
    data, result, given = early_mask(own_of_first=own_of_first, ends_early=ends_early)
    warnings = rules.lint(data, resolve_loss("ppo"), result, stop_tokens=[END], fresh=fresh, given_logprobs=given)
    assert codes(warnings) == found


def test_a_nucleus_that_gives_likely_tokens_the_logprob_0_is_no_early_mask() -> None:
    data, result, given = early_mask(own_of_first=-0.04)
    for each in data:
        each.inputs["logprobs"][4:] = 0
    warnings = rules.lint(data, resolve_loss("ppo"), result, stop_tokens=[END], fresh=True, given_logprobs=given)
    assert "prompt_trained" not in codes(warnings)


def group_of_copies(size: int, *, logprob: float, equal: bool = False) -> list[TrainDatum]:
    """Two prompts, each with one sample `size` times; the advantages differ unless `equal`."""
    data = []
    for one, advantage in zip(batch(2, logprobs=[logprob] * 6), (0.5, -0.5), strict=True):
        for place in range(size):
            inputs = {key: row.copy() for key, row in one.inputs.items()}
            inputs["advantages"][:] = advantage if equal else (0.5 if place % 2 else -0.5)
            data.append(dataclasses.replace(one, inputs=inputs))
    return data


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (group_of_copies(8, logprob=-1.0), ["duplicates"]),
        (group_of_copies(8, logprob=-1.0, equal=True), ["duplicates"]),
        (group_of_copies(8, logprob=-0.05), []),  # the policy is nearly certain, and a noisy grader
        (
            group_of_copies(8, logprob=-1.0, equal=True)[:13],
            [],
        ),  # the right answers alone, of which each prompt has one
        (group_of_copies(8, logprob=-0.3, equal=True), []),  # a low temperature
        (group_of_copies(8, logprob=-1.0)[:-1] + batch(3)[2:], ["duplicates"]),
        (group_of_copies(4, logprob=-1.0)[:4] + batch(9)[1:], []),  # one group of many
    ],
)
def test_one_sample_copied_for_its_group_is_named_where_the_policy_would_not_repeat_it(
    data: list[TrainDatum], found: list[str]
) -> None:
    logprob = float(data[0].inputs["logprobs"][0])
    assert codes(lint(data, "ppo", logprob=logprob)) == found


# --- planted into real samples -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "detection" / "lint_mutations.py"
    spec = importlib.util.spec_from_file_location("lint_mutations", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lint_mutations"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny() -> Iterator[mint.ServiceClient]:
    client = mint.ServiceClient()
    yield client
    client.close()


@pytest.mark.slow
def test_every_known_bug_planted_into_real_samples_is_named_and_good_batches_are_not(
    mutations: ModuleType, tiny: mint.ServiceClient
) -> None:
    tally = mutations.Tally()
    for setting in mutations.QUICK:
        mutations.play(mutations.Run(tiny, setting), tally, steps=range(4))
    for name, odd in mutations.odd_runs(950).items():
        mutations.play_odd(mutations.Run(tiny, odd.setting), odd, name, tally)
    good = sum(count for what, count in tally.tried.items() if what.startswith("correct"))
    assert good >= 300
    assert len(tally.alarms) <= 0.01 * good, tally.alarms
    for bug, entry in mutations.BUGS.items():
        assert tally.tried[bug] >= entry.at_least, bug
        assert tally.named[bug] >= entry.named * tally.tried[bug], (bug, tally.named[bug], tally.tried[bug])
    stale = "samples of a policy left long ago"
    assert tally.named[stale] == tally.tried[stale] == len(mutations.QUICK)


def lines_of(lint_it: Callable[[], object]) -> int:
    """How many lines of Python are run, each round of a loop counted."""
    count = 0

    def note(_frame: object, _event: str, _argument: object) -> Any:
        nonlocal count
        count += 1
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        lint_it()
    finally:
        sys.settrace(before)
    return count


def wide(count: int, length: int) -> list[TrainDatum]:
    """Good data: samples of a policy."""
    rng = np.random.default_rng(1)
    data = []
    for _ in range(count):
        full, weights = rng.integers(1, 900, length + 1), np.ones(length, np.float32)
        weights[: length // 2] = 0
        inputs = {"logprobs": rng.normal(-1, 0.1, length), "advantages": np.full(length, rng.normal())}
        arrays = {key: row.astype(np.float32) for key, row in inputs.items()}
        data.append(TrainDatum(full[:-1], full[1:], weights, arrays))
    return data


def test_linting_is_a_few_lines_for_each_datum_however_long_they_are() -> None:
    few, long, many = wide(16, 16), wide(16, 4096), wide(256, 16)
    assert lint(few, "ppo") == lint(long, "ppo") == lint(many, "ppo") == []
    of_few, of_long, of_many = (lines_of(lambda data=data: lint(data, "ppo")) for data in (few, long, many))
    print(of_few, of_long, of_many)
    assert of_long <= 1.1 * of_few
    assert of_many - of_few < 100 * (256 - 16)
