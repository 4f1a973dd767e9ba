"""Sample requests in the engine's terms: a request as a `SampleJob`, and a `SampleResult` as the result to send."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import mint.wire as wire
from mint.engine.protocol import CANCELLED, NO_TOKEN, BaseInfo, LogitBias, LogitRules, SampleJob, SampleResult, StopRule
from mint.errors import InvalidRequestError, RequestCancelledError, RequestFailedError
from mint.server.grammars.compiler import compile_grammar
from mint.server.ids import sample_seed
from mint.server.queue.futures import FutureResult
from mint.server.store.rows import SamplerRow
from mint.server.worker import validation
from mint.tokenizer import token_bytes
from mint.types import PromptAltTokens, SampledSequence, SampleResponse, SamplingParams, TensorData, TopkLogprobs
from mint.wire.requests import SampleRequest

_NUMBERS = ("min_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_p")
_RULES = (*_NUMBERS, "allowed_token_ids", "logit_bias", "structured_outputs")
_NO_RULES = LogitRules()


def sample_job(request: SampleRequest, row: SamplerRow, base: BaseInfo, folder: Path, *, owner: str) -> SampleJob:
    """The request with all that it left open filled in; `folder` is the base model's.

    Prompts are cached for each `owner` alone: nobody learns from the time of a request what others have asked.

    Raises:
        InvalidRequestError: it does not fit the base model.
    """
    params = request.sampling_params
    max_tokens = validation.check_sample(request, base)
    prompt = request.prompt.to_numpy()
    targets = request.target_prompt_logprobs
    seed = params.seed if params.seed is not None else sample_seed(row.seed_root, request.seq_id)
    return SampleJob(
        base=base.name,
        weights_id=row.weights_id,
        prompt=prompt,
        num_samples=request.num_samples,
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=seed,
        stop=_stop_rule(params, base.eos_token_ids, folder),
        prompt_logprobs=bool(request.prompt_logprobs),
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        logprobs_mode=params.logprobs_mode,
        topk_sample_logprobs=request.topk_sample_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        target_prompt_logprobs=None if targets is None else validation.target_pairs(targets, len(prompt), base),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        cache_scope=owner,
        rules=_logit_rules(params, base, folder, owner),
    )


def _stop_rule(params: SamplingParams, eos: tuple[int, ...], folder: Path) -> StopRule:
    """`stop` None: the model's own end. A non-empty `stop` adds to it. `[]`: nothing but `stop_token_ids`. The model's
    own end is left out with `ignore_eos`."""
    extra = frozenset(params.stop_token_ids or ())
    stop = params.stop
    if params.ignore_eos:
        eos = ()
    if stop is None:
        return StopRule(frozenset(eos) | extra)
    items = [stop] if isinstance(stop, str) else list(stop)
    ids = frozenset(item for item in items if isinstance(item, int))
    strings = tuple(item.encode() for item in items if isinstance(item, str))
    ends = frozenset(eos) if items else frozenset()
    vocabulary = token_bytes(folder) if strings else ()
    return StopRule(ids | ends | extra, strings, vocabulary)


def _logit_rules(params: SamplingParams, base: BaseInfo, folder: Path, owner: str) -> LogitRules | None:
    """None where nothing changes the logits."""
    grammar = None
    if params.structured_outputs is not None:
        wanted = params.structured_outputs
        grammar = compile_grammar(wanted, folder, base.eos_token_ids, base.vocab_size, owner=owner)
    allowed = None if params.allowed_token_ids is None else np.unique(np.array(params.allowed_token_ids, np.int64))
    bias = None
    if params.logit_bias is not None and len(params.logit_bias) > 0:
        bias = LogitBias(np.array([*params.logit_bias], np.int64), np.array([*params.logit_bias.values()], np.float32))
    numbers = {name: getattr(params, name) for name in _NUMBERS}
    if allowed is bias is grammar is None and all(numbers[name] == getattr(_NO_RULES, name) for name in _NUMBERS):
        return None
    return LogitRules(allowed=allowed, grammar=grammar, bias=bias, **numbers)


def sample_result(request: SampleRequest, result: SampleResult) -> FutureResult:
    """The encoded result, or the error with which the request failed."""
    if result.error == CANCELLED:
        return FutureResult.of_error(RequestCancelledError("the request was cancelled by its client"))
    if result.error == NO_TOKEN:
        return FutureResult.of_error(_contradiction(request.sampling_params))
    if result.error is not None:
        return FutureResult.of_error(RequestFailedError(result.error))
    return FutureResult(wire.encode_result(_response(request, result)))


def _contradiction(params: SamplingParams) -> InvalidRequestError:
    given = [name for name in _RULES if getattr(params, name) != type(params).model_fields[name].default]
    return InvalidRequestError(
        "exclude every token: they contradict one another, or the grammar is too complex",
        field="sampling_params",
        value=given,
        remedy="Relax one of them",
    )


def _response(request: SampleRequest, result: SampleResult) -> SampleResponse:
    alternatives = result.prompt_alt_tokens
    targets = request.target_prompt_logprobs
    sequences: list[SampledSequence] = []
    for sample in result.samples:
        stop_reason = "stop" if sample.stopped else "length"
        topk = None if sample.topk is None else TopkLogprobs(sample.topk.tokens, sample.topk.logprobs)
        sequences.append(
            SampledSequence(sample.tokens, sample.logprobs, stop_reason, topk, processed_logprobs=sample.processed)
        )
    return SampleResponse(
        sequences,
        prompt_logprobs=result.prompt_logprobs if request.prompt_logprobs else None,
        topk_prompt_logprobs=result.topk_prompt_logprobs,
        target_prompt_logprobs=None
        if targets is None or result.target_prompt_logprobs is None
        else _in_layout(targets, result.target_prompt_logprobs),
        prompt_alt_tokens=None
        if alternatives is None
        else PromptAltTokens(
            tokens=TensorData.from_numpy(alternatives.tokens), logprobs=TensorData.from_numpy(alternatives.logprobs)
        ),
        prompt_cache_hit_tokens=result.reused,
    )


def _in_layout(asked: TensorData, logprobs: np.ndarray) -> TensorData:
    """The logprobs of the cells that name a token, in the layout of `asked`; 0 in the other cells."""
    cells = np.zeros(len(asked.values), np.float32)
    cells[asked.values != validation.UNASKED] = logprobs
    return asked.with_values(cells, "float32")
