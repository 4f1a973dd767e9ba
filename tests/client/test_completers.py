"""Samplers as functions, and adapters by the names of MinT's documents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine

import mint
import mint.recipe
import mint.renderers
from mint.completers import TinkerMessageCompleter, TinkerTokenCompleter
from mint.compose.embedded import open_embedded
from mint.rl import RLConfig, run_grpo
from mint.rl_core import Reward, RLAdapter
from mint.types import ModelInput

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[mint.SamplingClient]:
    opened = lambda: open_embedded(data_dir=tmp_path, engine=fake_engine())  # noqa: E731
    with mint.ServiceClient(open_embedded=opened) as client:
        yield client.create_sampling_client(base_model="mint/tiny")


def test_tokens_are_continued_in_plain_and_in_async_code(sampler: mint.SamplingClient) -> None:
    complete = TinkerTokenCompleter(sampler, max_tokens=4)
    prompt = ModelInput.from_ints([1, 2])
    for answer in (complete.complete(prompt), asyncio.run(complete(prompt))):
        assert 0 < len(answer.tokens) == len(answer.logprobs) <= 4
    assert complete.complete(prompt, stop=[]).stop_reason == "length"


class Shouting:
    """A renderer as tinker_cookbook's are."""

    def build_generation_prompt(self, messages: list[Any]) -> ModelInput:
        return ModelInput.from_ints([len(messages), 7])

    def get_stop_sequences(self) -> list[int]:
        return [0]

    def parse_response(self, tokens: list[int]) -> tuple[dict[str, str], bool]:
        return {"role": "assistant", "content": f"{len(tokens)} TOKENS"}, True


def test_messages_are_answered_by_the_chat_template_or_by_a_renderer(sampler: mint.SamplingClient) -> None:
    complete = TinkerMessageCompleter(sampler, max_tokens=4)
    for message in (complete.complete(messages=MESSAGES), asyncio.run(complete(MESSAGES))):
        assert message["role"] == "assistant" and isinstance(message["content"], str)
    shouted = TinkerMessageCompleter(sampler, renderer=Shouting(), max_tokens=4).complete(MESSAGES)
    assert shouted["content"].endswith("TOKENS")


def test_what_belongs_to_the_cookbook_says_so_where_that_is_not_installed() -> None:
    with pytest.raises(mint.MintError, match="tinker_cookbook"):
        mint.renderers.get_renderer("qwen3", None)
    with pytest.raises(ImportError, match="tinker-cookbook"):
        _ = mint.recipe.supervised


class Guess(RLAdapter):
    """As the custom-environment page writes an adapter."""

    def build_dataset(self) -> list[dict[str, str]]:
        return [{"prompt": f"Q: {number} + 1\nA:"} for number in range(4)]

    def __call__(self, prompt: str, response: str) -> Reward:
        assert prompt.startswith("Q: ") and self.get_tokenizer() is not None
        return Reward(score=float(len(response) % 2), metadata={"length": len(response)})


def test_an_adapter_may_be_a_function_of_prompt_and_response(tmp_path: Path) -> None:
    config = RLConfig(
        base_model="mint/tiny", steps=1, batch_size=2, group_size=2, max_tokens=4, heldout_size=0, run_dir=tmp_path
    )
    assert run_grpo(Guess(), config).sampler_checkpoint
    reward = Reward(score=0.5, metadata={"why": "half"})
    assert (reward.score, reward.value, reward.metadata["why"], reward.info["why"]) == (0.5, 0.5, "half", "half")
