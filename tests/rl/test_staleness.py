"""Sampling ahead of training: never older than allowed, weights swapped between tokens, logprobs of each version."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import mint
from mint.errors import InvalidRequestError
from mint.rl import RLAdapter, RLConfig, RunResult, run_grpo
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.rollouts.swapping_sampler import PublishedPolicy, SwappingSampler, VersionedSequence, sampled_turn
from mint.types import AdamParams, Datum, ModelInput, SampledSequence, SampleResponse, SamplingParams


class ManyDigits(RLAdapter):
    """More digits, more reward; a reward takes `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def build_dataset(self) -> Sequence[str]:
        return [f"{number} + {number}" for number in range(1, 9)]

    def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {item}?\nA:")

    async def compute_reward(self, response: str, item: str) -> float:
        await asyncio.sleep(self.seconds)
        return sum(character.isdigit() for character in response) / 16


def run(seconds: float = 0.0, **fields: Any) -> tuple[RunResult, list[dict[str, Any]]]:
    config = RLConfig(
        base_model="mint/tiny", group_size=4, temperature=1.0, learning_rate=5e-3, heldout_size=0,
        print_progress=False, **{"steps": 6, "batch_size": 4, "max_tokens": 8, "max_staleness": 2, **fields},
    )  # fmt: skip
    result = run_grpo(ManyDigits(seconds), config)
    return result, [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


class Counting:
    """A sampler that says its version again and again, and stops after `stop` tokens in all."""

    def __init__(self, version: int, stop: int = 100) -> None:
        self.version, self.stop = version, stop
        self.requests: list[tuple[list[int], int, SamplingParams]] = []

    async def sample(self, prompt: ModelInput, num_samples: int, params: SamplingParams) -> SampleResponse:
        ids = prompt.to_ints()
        self.requests.append((ids, num_samples, params))
        count = min(params.max_tokens or 0, self.stop - (len(ids) - 1))
        reason = "stop" if len(ids) - 1 + count == self.stop else "length"
        sequence = SampledSequence([self.version] * count, [-float(self.version)] * count, reason)
        return SampleResponse(sequences=[sequence] * num_samples)


class Policies:
    """The newest policy changes with each question, up to the last."""

    def __init__(self, *policies: Counting) -> None:
        self.left = [PublishedPolicy(one.version, one.version, one) for one in policies]

    def newest(self) -> PublishedPolicy:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=5)


def swapped(swap_every: int, *policies: Counting, samples: int = 1) -> list[SampledSequence]:
    known = Policies(*policies)
    sampler = SwappingSampler(known.newest, swap_every, threading.Event())
    return list(run_in_own_thread(sampler.sample(ModelInput.from_ints([0]), samples, PARAMS)).sequences)


def test_a_completion_goes_on_with_the_newest_weights_and_each_token_keeps_its_version() -> None:
    policies = [Counting(version) for version in (1, 2, 3, 4)]  # the first is asked at the start of the batch
    [sequence] = swapped(3, *policies)
    assert sequence.tokens == [2, 2, 2, 3, 3, 3, 4, 4]
    assert sequence.logprobs == [-2, -2, -2, -3, -3, -3, -4, -4]
    turn = sampled_turn([0], sequence)
    assert list(turn.policy_steps) == sequence.tokens
    assert sequence.stop_reason == "length"
    assert [request[0] for request in policies[2].requests] == [[0, 2, 2, 2]]
    assert [request[2].max_tokens for policy in policies for request in policy.requests] == [3, 3, 2]


def test_samples_of_a_group_share_their_first_piece_and_draw_from_streams_of_their_own() -> None:
    policy = Counting(1)
    sequences = swapped(4, policy, samples=3)
    assert [len(sequence.tokens) for sequence in sequences] == [8, 8, 8]
    assert [request[1] for request in policy.requests] == [3, 1, 1, 1]
    seeds = [request[2].seed for request in policy.requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4


def test_a_completion_that_stops_is_not_continued() -> None:
    policy = Counting(1, stop=5)
    [sequence] = swapped(4, policy)
    assert (len(sequence.tokens), sequence.stop_reason) == (5, "stop")


def test_without_pieces_a_batch_keeps_the_weights_of_its_start() -> None:
    first, later = Counting(1), Counting(2)
    [sequence] = swapped(0, first, later)
    assert sequence.tokens == [1] * 8
    assert not isinstance(sequence, VersionedSequence)


def test_each_piece_has_the_logprobs_of_the_weights_that_sampled_it() -> None:
    """Two real versions: the logprobs of a swapped completion are those that each version computes, bit for bit."""
    service = mint.ServiceClient()
    trainer = service.create_lora_training_client("mint/tiny", rank=8, seed=1)
    tokenizer = trainer.get_tokenizer()
    old = trainer.save_weights_and_get_sampling_client()
    demonstration = tokenizer.encode("Q: What is 3 + 4?\nA: 7")
    datum = Datum(
        ModelInput.from_ints(demonstration[:-1]),
        {"target_tokens": demonstration[1:], "weights": [1.0] * (len(demonstration) - 1)},
    )
    trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
    new = trainer.save_weights_and_get_sampling_client()
    known = Policies(*[Counting(0)] * 3)
    known.left = [PublishedPolicy(0, 0, old), PublishedPolicy(0, 0, old), PublishedPolicy(1, 1, new)]
    sampler = SwappingSampler(known.newest, 3, threading.Event())
    prompt = tokenizer.encode("Q: Tell me a story about a sheep.\nA:")
    params = SamplingParams(max_tokens=6, temperature=1.5, seed=3, stop=[])
    response = run_in_own_thread(sampler.sample(ModelInput.from_ints(prompt), 2, params))
    for sequence in response.sequences:
        turn = sampled_turn(prompt, sequence)
        assert list(turn.policy_steps) == [0, 0, 0, 1, 1, 1]
        full = ModelInput.from_ints([*prompt, *turn.tokens])
        by_old, by_new = (client.compute_logprobs(full).result()[len(prompt) :] for client in (old, new))
        assert turn.logprobs[:3] == by_old[:3]
        assert turn.logprobs[3:] == by_new[3:]
        assert by_old[3:] != by_new[3:]


@pytest.mark.learns
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_token_is_older_than_allowed_and_slow_grading_is_hidden(staleness: int) -> None:
    _, rows = run(seconds=0.1, max_staleness=staleness)
    assert all(row["staleness/max"] <= staleness for row in rows)
    assert rows[0]["staleness/max"] == 0
    assert rows[-1]["staleness/max"] >= 1


@pytest.mark.learns
def test_exactly_lags_by_the_stated_number_of_steps_and_repeats_bit_for_bit() -> None:
    (one, rows), (again, _) = (run(staleness="exactly") for _ in range(2))
    assert [row["staleness/max"] for row in rows] == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert one.state_digest == again.state_digest


@pytest.mark.learns
def test_a_run_with_swapped_weights_trains_with_the_ratios_of_each_version() -> None:
    result, rows = run(swap_every=2, max_staleness=1, seconds=0.05, steps=8, batch_size=8, max_tokens=12)
    assert all(row["staleness/max"] <= 1 for row in rows)
    rollouts = [json.loads(line) for line in (result.run_dir / "rollouts.jsonl").read_text().splitlines()]
    versions = [row["policy_steps"] for row in rollouts if "policy_steps" in row]
    assert all(list(each) == sorted(each) for each in versions)
    assert all(len(row["policy_steps"]) == len(row["tokens"]) for row in rollouts if "policy_steps" in row)
    assert all(np.isfinite(row["train/ratio"]) for row in rows if row["datums"])


@pytest.mark.learns
def test_a_run_that_is_stopped_ends_without_waiting_for_steps_that_never_come() -> None:
    def interrupt(event: str, fields: dict[str, Any]) -> None:
        if event == "step" and fields["step"] == 2:
            raise KeyboardInterrupt

    config = RLConfig(
        base_model="mint/tiny", batch_size=2, group_size=2, max_tokens=4, steps=500, max_staleness=3, heldout_size=0
    )
    with pytest.raises(KeyboardInterrupt):
        run_grpo(ManyDigits(), config, on_progress=interrupt)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("mint-rollouts")]


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"swap_every": 4}, "swap_every = 4: needs max_staleness of at least 1"),
        ({"swap_every": 4, "max_staleness": 1, "staleness": "exactly"}, "cannot be combined with staleness = exactly"),
        ({"swap_every": 4, "max_staleness": 1, "stop": ["\n"]}, "cannot be combined with stop"),
    ],
)
def test_what_cannot_be_swapped_is_refused(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidRequestError, match=refusal):
        RLConfig(**fields)
