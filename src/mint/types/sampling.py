"""How to sample, and what was sampled. Token ids and logprobs are arrays inside; users may read them as lists.

Letters: T sampled tokens · P prompt tokens · L places (sampled or prompt tokens) · K alternatives at each place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field

from mint.errors import InvalidRequestError
from mint.types.arrays import np
from mint.types.checkpoint_path import CheckpointUri
from mint.types.tensors import TensorData, flat_array
from mint.types.value_classes import ArrayValue, Params, Result

StopReason = Literal["stop", "length"]
LogprobsMode = Literal["raw", "processed", "both"]

_INT32 = np.dtype(np.int32)
_INT32_MAX = 2**31 - 1
_FLOAT32 = np.dtype(np.float32)
_EMPTY_CELL = (0, -99999.0)


def _token_of_key(key: Any) -> Any:
    """JSON has texts as keys."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key


LogitBiases = dict[Annotated[int, BeforeValidator(_token_of_key)], float]
"""Token id → what is added to its logit."""


class StructuredOutputs(Params):
    """The texts that a sample may be; exactly one field says which.

    `json_schema`: JSON that fits the schema · `json_object`: any JSON object · `regex`: a full match, as in Rust ·
    `choice`: one of these texts · `grammar`: Lark, in llguidance's dialect, or GBNF (with `::=`).
    """

    json_schema: dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingParams(Params):
    """How to sample.

    `max_tokens` None means up to the context. `stop` is a string, strings or token ids, besides the model's own end
    token; None keeps that alone, `[]` disables every stop. `stop_token_ids` adds token ids to `stop`. With `ignore_eos`
    the model's end token ends nothing.
    The stop token is kept as the last of the sequence. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1.0 are off.

    Further options are vLLM's, in the order in which they act on the logits. `allowed_token_ids` are the only tokens to
    draw. `logit_bias` adds to the logits of tokens. Before `min_tokens`, no stop token is drawn, and no stop string
    begins. `repetition_penalty` divides the positive logits of tokens in prompt and sample, and multiplies the
    negative ones; from the logits of sampled tokens `frequency_penalty` is subtracted for each time, and
    `presence_penalty` once. Then come the temperature, `min_p` (excludes tokens below that share of the largest
    probability), `top_k` and `top_p`. `structured_outputs` lets only those tokens through that continue a text of its
    kind, and ends the sequence with the model's end token, also with `ignore_eos`. It needs the extra `structured`.

    `logprobs_mode` "raw": logprobs are the policy's own, at temperature 1 without any option. "processed": those
    of the distribution that was sampled from (greedy: 0); to train on them, pass the same temperature to the loss
    (`loss_fn_config={"temperature": …}`). "both": `logprobs` are raw, and `processed_logprobs` are there, too.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    allowed_token_ids: list[int] | None = None
    logit_bias: LogitBiases | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    structured_outputs: StructuredOutputs | None = None
    logprobs_mode: LogprobsMode = "raw"


class CreateSamplingSessionResponse(Result):
    """A new sampler."""

    sampling_session_id: str
    type: str = "create_sampling_session"


class SamplerInfo(Result):
    """What a sampler samples from."""

    sampler_id: str
    base_model: str
    model_path: CheckpointUri | None = None
    tokenizer_id: str | None = None


_Row = list[tuple[int, float]]


class TopkLogprobs(NamedTuple):
    """The most probable tokens at L places, best first: int32 and float32 [L, K]. Empty cells are (0, -99999)."""

    token_ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[tuple[int, float]] | None]) -> Self:
        """From pairs (token, logprob); a row that is None or short gets empty cells, and K is at least 1.

        Raises:
            InvalidRequestError: a token id does not fit int32.
        """
        filled = [row or () for row in rows]
        width = max(1, *map(len, filled)) if filled else 1
        token_ids = np.full((len(filled), width), _EMPTY_CELL[0], np.int32)
        logprobs = np.full((len(filled), width), _EMPTY_CELL[1], np.float32)
        for place, row in enumerate(filled):
            for column, (token, logprob) in enumerate(row):
                if abs(token) > _INT32_MAX:
                    remedy = f"Token ids are at most {_INT32_MAX}"
                    raise InvalidRequestError("is not a token id", field="topk_logprobs", value=token, remedy=remedy)
                token_ids[place, column], logprobs[place, column] = token, logprob
        return cls(token_ids, logprobs)

    def rows(self) -> list[_Row]:
        """Pairs (token, logprob) for each place, without the empty cells."""
        pairs = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [[cell for cell in zip(*row, strict=True) if cell != _EMPTY_CELL] for row in pairs]


class SampledSequenceJson(Result):
    """A sampled sequence as JSON has it."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    topk_logprobs: list[_Row] | None = None
    processed_logprobs: list[float] | None = None
    sequence_id: str | None = None


class SampledSequence(ArrayValue):
    """Token ids, and for each its logprob, as `SamplingParams.logprobs_mode` says. Same length, always present."""

    __slots__ = (
        "_lists",
        "logprobs_np",
        "processed_logprobs_np",
        "sequence_id",
        "stop_reason",
        "tokens_np",
        "topk_logprobs_np",
    )
    json_form = SampledSequenceJson

    tokens_np: np.ndarray
    """`tokens` as a read-only array, int32 [T]."""
    logprobs_np: np.ndarray
    """`logprobs` as a read-only array, float32 [T]."""
    stop_reason: StopReason
    topk_logprobs_np: TopkLogprobs | None
    """`topk_logprobs` as matrices [T, K]."""
    processed_logprobs_np: np.ndarray | None
    """`processed_logprobs` as a read-only array, float32 [T]."""
    sequence_id: str | None
    """Names the sequence in the provenance of a datum; the client of a sampler sets it."""

    def __init__(
        self,
        tokens: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        stop_reason: StopReason,
        topk_logprobs: TopkLogprobs | Sequence[Sequence[tuple[int, float]]] | None = None,
        sequence_id: str | None = None,
        processed_logprobs: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        self.tokens_np = flat_array(tokens, _INT32, "SampledSequence.tokens")
        self.logprobs_np = flat_array(logprobs, _FLOAT32, "SampledSequence.logprobs")
        self.stop_reason = stop_reason
        self.topk_logprobs_np = None if topk_logprobs is None else _matrices(topk_logprobs)
        self.processed_logprobs_np = (
            None
            if processed_logprobs is None
            else flat_array(processed_logprobs, _FLOAT32, "SampledSequence.processed_logprobs")
        )
        self.sequence_id = sequence_id
        self._lists: tuple[list[int], list[float]] | None = None

    @property
    def tokens(self) -> list[int]:
        """The sampled token ids [T]; the last may be the stop token."""
        return self._as_lists()[0]

    @property
    def logprobs(self) -> list[float]:
        """The logprob of each token [T]."""
        return self._as_lists()[1]

    @property
    def processed_logprobs(self) -> list[float] | None:
        """The logprob of each token [T] under the distribution that it was drawn from, with all sampling options; only
        with the logprobs mode `both`."""
        return None if self.processed_logprobs_np is None else self.processed_logprobs_np.tolist()

    @property
    def topk_logprobs(self) -> list[_Row] | None:
        """The most probable tokens at each place, best first, and the policy's own logprobs of them; on request."""
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.rows()

    def _as_lists(self) -> tuple[list[int], list[float]]:
        if self._lists is None:
            self._lists = self.tokens_np.tolist(), self.logprobs_np.tolist()
        return self._lists

    def _content(self) -> tuple[Any, ...]:
        return self.tokens_np, self.logprobs_np, self.stop_reason, self.topk_logprobs, self.processed_logprobs_np


class PromptAltTokens(Result):
    """Draws from the policy at every place of the prompt after the first, both [P - 1, K]: row i is about token
    i + 1, and the logprobs are the policy's own, whatever the temperature of the draws."""

    tokens: TensorData
    logprobs: TensorData


class SampleResponseJson(Result):
    """A sample response as JSON has it."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[_Row | None] | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] = 0


class SampleResponse(ArrayValue):
    """The samples; on request the prompt's logprobs, and the most probable tokens at each place of the prompt."""

    __slots__ = (
        "prompt_alt_tokens",
        "prompt_cache_hit_tokens",
        "prompt_logprobs_np",
        "sequences",
        "target_prompt_logprobs",
        "topk_prompt_logprobs_np",
    )
    json_form = SampleResponseJson

    sequences: list[SampledSequence]
    prompt_logprobs_np: np.ndarray | None
    """`prompt_logprobs` as a read-only array, float32 [P], NaN where there is none."""
    topk_prompt_logprobs_np: TopkLogprobs | None
    """`topk_prompt_logprobs` as matrices [P, K]."""
    target_prompt_logprobs: TensorData | None
    """Logprobs of the tokens that the request named, in its layout; 0 where it named none (-1)."""
    prompt_alt_tokens: PromptAltTokens | None
    prompt_cache_hit_tokens: int
    """How many tokens of the prompt were not computed, because an earlier request of the same owner had. Two responses
    may be equal without it."""

    def __init__(
        self,
        sequences: Sequence[SampledSequence],
        prompt_logprobs: Sequence[float | None] | np.ndarray | None = None,
        topk_prompt_logprobs: TopkLogprobs | Sequence[Sequence[tuple[int, float]] | None] | None = None,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens: PromptAltTokens | None = None,
        prompt_cache_hit_tokens: int = 0,
    ) -> None:
        self.prompt_cache_hit_tokens = prompt_cache_hit_tokens
        self.sequences = list(sequences)
        if prompt_logprobs is not None and not isinstance(prompt_logprobs, np.ndarray):
            prompt_logprobs = [math.nan if logprob is None else logprob for logprob in prompt_logprobs]
        self.prompt_logprobs_np = (
            None if prompt_logprobs is None else flat_array(prompt_logprobs, _FLOAT32, "SampleResponse.prompt_logprobs")
        )
        self.topk_prompt_logprobs_np = None if topk_prompt_logprobs is None else _matrices(topk_prompt_logprobs)
        self.target_prompt_logprobs = target_prompt_logprobs
        self.prompt_alt_tokens = prompt_alt_tokens

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """The logprob of each prompt token given those before it; None for the first, and where none was asked for."""
        if self.prompt_logprobs_np is None:
            return None
        return [None if math.isnan(logprob) else logprob for logprob in self.prompt_logprobs_np.tolist()]

    @property
    def topk_prompt_logprobs(self) -> list[_Row | None] | None:
        """The most probable tokens at each place of the prompt, best first; None where there are none."""
        if self.topk_prompt_logprobs_np is None:
            return None
        return [row or None for row in self.topk_prompt_logprobs_np.rows()]

    def _content(self) -> tuple[Any, ...]:
        return tuple(value for name, value in self._fields().items() if name != "prompt_cache_hit_tokens")


def _matrices(rows: TopkLogprobs | Iterable[Sequence[tuple[int, float]] | None]) -> TopkLogprobs:
    return rows if isinstance(rows, TopkLogprobs) else TopkLogprobs.from_rows(rows)
