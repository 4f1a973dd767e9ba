"""The reward model: its score is linear in the last hidden state, its loss the closed form, and it grades a run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import mint
from mint.errors import InvalidRequestError
from mint.recipes.dpo import Preference
from mint.recipes.reward_model import (
    RewardModel,
    RewardModelConfig,
    bradley_terry_loss,
    default_head,
    pair_datums,
    run_reward_model,
)
from mint.recipes.supervised import reply_ids
from mint.rl import RLAdapter, RLConfig, run_grpo

TINY = Path(mint.__file__).parent / "models" / "tiny"


def test_the_score_is_a_linear_head_on_the_last_hidden_state() -> None:
    """Against transformers' own hidden states and the rows of its unembedding, in float64."""
    model = RewardModel(mint.ServiceClient(), "mint/tiny")
    network = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    head = network.get_output_embeddings().weight.detach().double()
    a, b = model.head_tokens
    for prompt, reply in (("Q: What is 3 + 4?\nA:", " 7"), ("Hello", " to you all")):
        ids = [*model.tokenizer.encode(prompt)]
        full = [*ids, *reply_ids(reply, model.tokenizer)]
        with torch.no_grad():
            hidden = network.model(torch.tensor([full])).last_hidden_state[0, -1].double()
        expected = float((head[a] - head[b]) @ hidden)
        assert asyncio.run(model.score(ids, reply)) == pytest.approx(expected, abs=1e-4)
        assert asyncio.run(model.reward(ids, reply)) == pytest.approx(1 / (1 + math.exp(-expected)), abs=1e-4)


def test_the_loss_and_its_gradient_are_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(-3, 2, (6, 4, 2))
    rows = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
    loss, metrics = bradley_terry_loss(0.05)([], rows)
    loss.backward()
    scores = values[:, -1, 0] - values[:, -1, 1]
    chosen, rejected = scores[::2], scores[1::2]
    expected = np.log1p(np.exp(rejected - chosen)) + 0.05 * (chosen + rejected) ** 2
    assert float(loss.detach()) == pytest.approx(expected.sum(), rel=1e-12)
    assert metrics["pair_accuracy"] == np.mean(chosen > rejected)
    push = 1 / (1 + np.exp(chosen - rejected))
    centring = 0.1 * (chosen + rejected)
    slopes = np.stack([centring - push, centring + push], axis=1).reshape(-1)
    for row, slope in zip(rows, slopes, strict=True):
        assert row.grad is not None
        np.testing.assert_allclose(row.grad[-1].numpy(), [slope, -slope], rtol=1e-9, atol=1e-12)
        assert not row.grad[:-1].any()


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [({"train_unembed": False}, "train_unembed = False"), ({"head_tokens": (3, 3)}, "are equal")],
)
def test_a_head_that_cannot_be_trained_is_refused(fields: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidRequestError, match=refusal):
        RewardModelConfig(**fields)


def prompt_text(number: int) -> str:
    return f"Q: What is {number} + {number + 1}?\nA:"


def preferences(numbers: range, tokenizer: Any) -> list[Preference]:
    """Replies with an odd last digit are preferred."""
    rng = np.random.default_rng(numbers.start)
    pairs = []
    for number in numbers:
        even = int(rng.integers(0, 40)) * 2
        odd = int(rng.integers(0, 40)) * 2 + 1
        pairs.append(Preference(tokenizer.encode(prompt_text(number)), f" {odd}", f" {even}"))
    return pairs


class Liked(RLAdapter):
    """The reward is what the reward model says; `odd` counts what it was trained to like."""

    def __init__(self, model: RewardModel) -> None:
        self.model = model
        self.odd: list[bool] = []

    def build_dataset(self) -> Sequence[int]:
        return range(80)

    def make_prompt(self, item: int, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is {item} + {item // 2}?\nA:")

    async def compute_reward(self, response: str, item: int) -> float:
        text = response.strip()
        self.odd.append(text[-1:].isdigit() and int(text[-1]) % 2 == 1)
        return await self.model.reward(self.make_prompt(item, self.model.tokenizer), response)


@pytest.mark.slow
def test_a_model_of_pairs_puts_held_out_pairs_in_order_and_grades_a_run(tmp_path: Path) -> None:
    service = mint.ServiceClient()
    tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
    config = RewardModelConfig(epochs=6, batch_size=16, print_progress=False, run_dir=tmp_path / "rm")
    result = run_reward_model(
        preferences(range(128), tokenizer), preferences(range(1000, 1064), tokenizer), config, service_client=service
    )
    assert result.before is not None
    assert result.after is not None
    assert result.after.accuracy[1] > 0.8 > result.before.accuracy[1]
    assert result.after.loss[2] < result.before.loss[1]
    assert result.head_tokens == default_head(tokenizer)

    model = RewardModel(service, result.sampler_checkpoint, head_tokens=result.head_tokens)
    pair = preferences(range(1000, 1001), tokenizer)[0]
    datums = pair_datums(pair, tokenizer, result.head_tokens)
    trainer = service.create_training_client_from_state(result.checkpoint)
    outputs = trainer.forward(datums, "cross_entropy").result().loss_fn_outputs
    for reply, output in zip((pair.chosen, pair.rejected), outputs, strict=True):
        first, second = output["logprobs"].to_numpy()[-1]
        assert asyncio.run(model.score(pair.prompt, reply)) == pytest.approx(float(first - second), abs=1e-4)

    task = Liked(model)
    run = RLConfig(
        base_model="mint/tiny", steps=20, batch_size=8, group_size=8, max_tokens=4, temperature=1.5, heldout_size=0,
        learning_rate=3e-3, print_progress=False, run_dir=tmp_path / "rl",
    )  # fmt: skip
    run_grpo(task, run, service_client=service)
    assert np.mean(task.odd[-128:]) > np.mean(task.odd[:128]) + 0.2
