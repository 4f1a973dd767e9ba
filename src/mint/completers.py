"""A sampler as a function: token ids in and out, or chat messages in and out.

Knows sampling clients and chat templates, no tasks and no training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mint.client.sampling_client import SamplingClient
from mint.types import ModelInput, SampleResponse, SamplingParams

Message = Mapping[str, Any]
"""A chat message: `role` and `content`."""


@dataclass(frozen=True)
class TokensWithLogprobs:
    """Sampled token ids, and the logprob of each."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str = "stop"


@dataclass
class TinkerTokenCompleter:
    """Continues token ids."""

    sampling_client: SamplingClient
    max_tokens: int = 256
    temperature: float = 1.0

    def complete(self, model_input: ModelInput, stop: Any = None) -> TokensWithLogprobs:
        """One continuation; `stop` as in `SamplingParams`."""
        return _first(self.sampling_client.sample(model_input, 1, self._params(stop)).result())

    async def __call__(self, model_input: ModelInput, stop: Any = None) -> TokensWithLogprobs:
        """Same as `complete`, without blocking the event loop."""
        return _first(await self.sampling_client.sample_async(model_input, 1, self._params(stop)))

    def _params(self, stop: Any) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, stop=stop)


@dataclass
class TinkerMessageCompleter:
    """Answers a conversation.

    `renderer` turns messages into tokens and back (`build_generation_prompt`, `parse_response`, `get_stop_sequences`,
    as those of tinker_cookbook do); None takes the chat template of the model's tokenizer.
    """

    sampling_client: SamplingClient
    renderer: Any = None
    max_tokens: int = 256
    temperature: float = 1.0
    stop_condition: Any = None
    template_options: dict[str, Any] = field(default_factory=dict)

    def complete(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The assistant's next message."""
        prompt = self._prompt(messages)
        return self._message(self.sampling_client.sample(prompt, 1, self._params()).result())

    async def __call__(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Same as `complete`, without blocking the event loop."""
        prompt = self._prompt(messages)
        return self._message(await self.sampling_client.sample_async(prompt, 1, self._params()))

    def _prompt(self, messages: Sequence[Message]) -> ModelInput:
        if self.renderer is not None:
            return self.renderer.build_generation_prompt(list(messages))
        text = self.sampling_client.get_tokenizer().apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            **self.template_options,
        )
        tokens = self.sampling_client.get_tokenizer().encode(text, add_special_tokens=False)
        return ModelInput.from_ints(tokens)

    def _params(self) -> SamplingParams:
        stop = self.stop_condition
        if stop is None and self.renderer is not None:
            stop = self.renderer.get_stop_sequences()
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, stop=stop)

    def _message(self, response: SampleResponse) -> dict[str, Any]:
        tokens = response.sequences[0].tokens
        if self.renderer is not None:
            message, _well_formed = self.renderer.parse_response(tokens)
            return dict(message)
        text = self.sampling_client.get_tokenizer().decode(tokens, skip_special_tokens=True)
        return {"role": "assistant", "content": text}


def _first(response: SampleResponse) -> TokensWithLogprobs:
    sequence = response.sequences[0]
    return TokensWithLogprobs(sequence.tokens, sequence.logprobs, sequence.stop_reason)
