"""vLLM's protocol from the side of the sampler: the body of `generate` as a job, and a result as its answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mint.engine.protocol import LogitBias, LogitRules, Sample, SampleJob, SampleResult, StopRule
from mint.errors import InvalidRequestError


def job_of(body: Mapping[str, Any], base: str, weights_id: str | None, vocabulary: Sequence[bytes]) -> SampleJob:
    """What a body asks for; `vocabulary` is needed for stop strings.

    Raises:
        InvalidRequestError: it is no such body.
    """
    try:
        params = body["sampling_params"]
        wants_prompt = params.get("prompt_logprobs") is not None
        strings = tuple(text.encode() for text in params.get("stop") or ())
        return SampleJob(
            base,
            weights_id,
            np.array(body["token_ids"], np.int64),
            int(params.get("n", 1)),
            int(params["max_tokens"]),
            float(params.get("temperature", 1.0)),
            int(params.get("top_k", -1)),
            float(params.get("top_p", 1.0)),
            int(params.get("seed") or 0),
            StopRule(frozenset(params.get("stop_token_ids") or ()), strings, vocabulary if strings else ()),
            prompt_logprobs=wants_prompt,
            topk_prompt_logprobs=int(params.get("prompt_logprobs") or 0),
            topk_sample_logprobs=int(params.get("logprobs") or 0),
            cache_scope=str(body.get("cache_salt") or ""),
            rules=_rules(params),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(
            f"cannot be read: {type(error).__name__}: {error}",
            field="body",
            value=", ".join(map(str, body)),
            remedy="Send token_ids, and sampling_params with max_tokens",
        ) from error


def _rules(params: Mapping[str, Any]) -> LogitRules:
    allowed, bias = params.get("allowed_token_ids"), params.get("logit_bias")
    own = None
    if bias:
        own = LogitBias(np.array([int(token) for token in bias], np.int64), np.array([*bias.values()], np.float32))
    return LogitRules(
        allowed=None if allowed is None else np.array(allowed, np.int64),
        bias=own,
        min_tokens=int(params.get("min_tokens", 0)),
        repetition_penalty=float(params.get("repetition_penalty", 1.0)),
        frequency_penalty=float(params.get("frequency_penalty", 0.0)),
        presence_penalty=float(params.get("presence_penalty", 0.0)),
        min_p=float(params.get("min_p", 0.0)),
    )


def answer_of(job: SampleJob, result: SampleResult, version: str) -> dict[str, Any]:
    """The answer to a request that does not stream; `version` is the name of the weights."""
    answer: dict[str, Any] = {"choices": [_choice(i, sample, version) for i, sample in enumerate(result.samples)]}
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = _prompt(job, result)
    return answer


def token_part(index: int, token: int, logprob: float) -> dict[str, Any]:
    """One token of a stream."""
    return {"choices": [{"index": index, "token_ids": [token], "logprobs": {"content": [_token(token, logprob)]}}]}


def end_parts(result: SampleResult, version: str) -> dict[str, Any]:
    """The end of a stream."""
    return {"choices": [_end(i, sample, version) | {"token_ids": []} for i, sample in enumerate(result.samples)]}


def _end(index: int, sample: Sample, version: str) -> dict[str, Any]:
    spans = [{"version": version, "start": 0, "end": len(sample.tokens)}]
    reason = "stop" if sample.stopped else "length"
    return {"index": index, "finish_reason": reason, "weight_versions": spans}


def _choice(index: int, sample: Sample, version: str) -> dict[str, Any]:
    content = [_token(*pair) for pair in zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True)]
    if sample.topk is not None:
        for entry, tokens, values in zip(content, sample.topk.tokens, sample.topk.logprobs, strict=True):
            pairs = zip(tokens.tolist(), values.tolist(), strict=True)
            entry["top_logprobs"] = [_token(*pair) for pair in pairs]
    return _end(index, sample, version) | {"token_ids": sample.tokens.tolist(), "logprobs": {"content": content}}


def _token(token: int, logprob: float) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob}


def _prompt(job: SampleJob, result: SampleResult) -> list[dict[str, Any] | None]:
    assert result.prompt_logprobs is not None
    rows: list[dict[str, Any] | None] = [None]
    for place in range(1, len(job.prompt)):
        best = (result.topk_prompt_logprobs or [None] * len(job.prompt))[place] or []
        row = {str(token): {"logprob": float(value)} for token, value in best}
        row[str(int(job.prompt[place]))] = {"logprob": float(result.prompt_logprobs[place])}
        rows.append(row)
    return rows
