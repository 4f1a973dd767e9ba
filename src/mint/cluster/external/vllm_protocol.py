"""vLLM's protocol: a job as the body of `POST /inference/v1/generate`, and its answer as a result. Pure.

Where an answer is not what was asked for (too few samples or tokens, numbers that are not finite), it is refused: a
policy must not be trained on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mint.engine.protocol import LogitRules, Sample, SampleJob, SampleResult, TokenTable
from mint.engine.sampling.stop_checker import StopChecker
from mint.errors import InvalidRequestError

GENERATE = "/inference/v1/generate"
LOAD_LORA = "/v1/load_lora_adapter"
UNLOAD_LORA = "/v1/unload_lora_adapter"
MODELS = "/v1/models"
HEALTH = "/health"

SEEDS = 1 << 62
"""Seeds below this: vLLM adds the number of the sample, and torch takes 63 bits."""


class BadAnswerError(RuntimeError):
    """A sampler has answered, and not with what was asked for."""


@dataclass
class Choice:
    """One sample as it arrives, in one piece or in many."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def require_possible(job: SampleJob) -> None:
    """Refuses what the protocol has no words for.

    Raises:
        InvalidRequestError: the job asks for such a thing.
    """
    rules = job.rules
    asked = {
        "prompt_alt_tokens_k": job.prompt_alt_tokens_k > 0,
        "target_prompt_logprobs": job.target_prompt_logprobs is not None,
        "logprobs_mode": job.logprobs_mode != "raw",
        "a grammar": rules is not None and rules.grammar is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequestError(
                "cannot be asked of an external sampler",
                field=name,
                value=job.logprobs_mode if name == "logprobs_mode" else "given",
                remedy="Leave it out, or use a server that samples itself",
            )


def generate_body(job: SampleJob, model: str, *, stream: bool) -> dict[str, Any]:
    """What is sent for a job; `model` is the name of the lora or of the base."""
    params: dict[str, Any] = {
        "n": max(1, job.num_samples),
        "max_tokens": max(1, job.max_tokens),
        "temperature": job.temperature,
        "top_p": job.top_p,
        "top_k": job.top_k if job.top_k > 0 else -1,
        "seed": job.seed % SEEDS,
        "logprobs": job.topk_sample_logprobs,
        "ignore_eos": True,  # the stop rule says which tokens end a text
        "skip_special_tokens": False,
        **_stop(job),
        **({} if job.rules is None else _rules(job.rules)),
    }
    if job.prompt_logprobs or job.topk_prompt_logprobs:
        params["prompt_logprobs"] = job.topk_prompt_logprobs
    body: dict[str, Any] = {"token_ids": job.prompt.tolist(), "model": model, "sampling_params": params}
    if job.cache_scope:
        body["cache_salt"] = job.cache_scope
    return body | ({"stream": True} if stream else {})


def _stop(job: SampleJob) -> dict[str, Any]:
    given: dict[str, Any] = {"stop_token_ids": sorted(job.stop.token_ids)} if job.stop.token_ids else {}
    texts = [text for text in (_text(string) for string in job.stop.strings) if text is not None]
    if texts:  # those that are no text are found when the answer is here
        given |= {"stop": texts, "include_stop_str_in_output": True}
    return given


def _text(string: bytes) -> str | None:
    try:
        return string.decode()
    except UnicodeDecodeError:
        return None


def _rules(rules: LogitRules) -> dict[str, Any]:
    given: dict[str, Any] = {
        "min_tokens": rules.min_tokens,
        "repetition_penalty": rules.repetition_penalty,
        "frequency_penalty": rules.frequency_penalty,
        "presence_penalty": rules.presence_penalty,
        "min_p": rules.min_p,
    }
    if rules.allowed is not None:
        given["allowed_token_ids"] = rules.allowed.tolist()
    if rules.bias is not None:
        pairs = zip(rules.bias.tokens.tolist(), rules.bias.values.tolist(), strict=True)
        given["logit_bias"] = {str(token): value for token, value in pairs}
    return given


def read_choice(choice: Choice, part: Mapping[str, Any]) -> int:
    """Adds a part of an answer to a choice; returns how many tokens it had.

    Raises:
        BadAnswerError: tokens and logprobs do not fit each other.
    """
    tokens = part.get("token_ids") or []
    content = (part.get("logprobs") or {}).get("content") or []
    if len(content) != len(tokens):
        raise BadAnswerError(f"it gave {len(content)} logprobs for {len(tokens)} tokens")
    for token, each in zip(tokens, content, strict=True):
        if each.get("token_id") != token:
            raise BadAnswerError(f"it gave the logprob of token {each.get('token_id')} for token {token}")
        choice.tokens.append(token)
        choice.logprobs.append(number(each.get("logprob")))
        tops = {top["token_id"]: number(top["logprob"]) for top in each.get("top_logprobs") or ()}
        choice.topk.append(sorted(tops.items(), key=lambda item: -item[1]))
    choice.finish_reason = part.get("finish_reason") or choice.finish_reason
    for name in ("weight_versions", "routed_experts"):
        if part.get(name) is not None:
            choice.details[name] = part[name]
    return len(tokens)


def number(value: Any) -> float:
    """A logprob; JSON has no NaN, so it may come as null.

    Raises:
        BadAnswerError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise BadAnswerError(f"it gave {value} as a logprob")
    if value > 1e-3:
        raise BadAnswerError(f"it gave {value} as a logprob, which is above 0")
    return float(value)


def result_of(job: SampleJob, choices: Sequence[Choice], prompt_logprobs: Any, reused: int = 0) -> SampleResult:
    """The result of a job.

    Raises:
        BadAnswerError: it is not what the job asked for.
    """
    wanted = max(1, job.num_samples)
    if len(choices) != wanted:
        raise BadAnswerError(f"it gave {len(choices)} samples, and {wanted} were asked for")
    samples = [_sample(job, choice) for choice in choices] if job.max_tokens else []
    row, topk = None, None
    if job.prompt_logprobs or job.topk_prompt_logprobs:
        row, topk = _prompt(job, prompt_logprobs)
    return SampleResult(
        samples,
        prompt_logprobs=row if job.prompt_logprobs else None,
        topk_prompt_logprobs=topk if job.topk_prompt_logprobs else None,
        reused=reused,
    )


def _sample(job: SampleJob, choice: Choice) -> Sample:
    end, stopped = _end(job, choice.tokens)
    if not stopped and choice.finish_reason == "stop":  # at a string that it knows in another form
        stopped = True
    elif not stopped and len(choice.tokens) < job.max_tokens:
        raise BadAnswerError(
            f"it ended a sample ({choice.finish_reason}) after {len(choice.tokens)} of {job.max_tokens} tokens"
        )
    topk = None
    if job.topk_sample_logprobs:
        width = job.topk_sample_logprobs
        rows = [row[:width] for row in choice.topk[:end]]
        if any(len(row) < width for row in rows):
            raise BadAnswerError(f"it gave fewer than {width} most likely tokens at a place")
        table = np.array(rows, np.float64).reshape(end, width, 2)
        topk = TokenTable(table[..., 0].astype(np.int64), table[..., 1].astype(np.float32))
    return Sample(
        np.array(choice.tokens[:end], np.int64),
        np.array(choice.logprobs[:end], np.float32),
        stopped,
        topk,
        details=choice.details or None,
    )


def _end(job: SampleJob, tokens: Sequence[int]) -> tuple[int, bool]:
    """How many tokens there are up to the first end by the stop rule, and whether there is one."""
    checker = StopChecker()
    own = np.zeros(1, np.int64)
    checker.add(own, job.stop, min_tokens=0 if job.rules is None else job.rules.min_tokens)
    for place, token in enumerate(tokens):
        if checker.stopped(own, np.array([token]))[0]:
            return place + 1, True
    return len(tokens), False


def _prompt(job: SampleJob, given: Any) -> tuple[np.ndarray, list[list[tuple[int, float]] | None]]:
    if not isinstance(given, list) or len(given) != len(job.prompt):
        raise BadAnswerError("it gave no logprobs for the prompt")
    row = np.full(len(job.prompt), np.nan, np.float32)
    topk: list[list[tuple[int, float]] | None] = [None] * len(job.prompt)
    last_n = len(job.prompt) - 1 if job.prompt_logprobs_last_n is None else job.prompt_logprobs_last_n
    for place in range(max(1, len(job.prompt) - last_n), len(job.prompt)):
        found = {int(token): number(each["logprob"]) for token, each in (given[place] or {}).items()}
        token = int(job.prompt[place])
        if token not in found:
            raise BadAnswerError(f"it gave no logprob for token {place} of the prompt")
        row[place] = found[token]
        topk[place] = sorted(found.items(), key=lambda item: -item[1])[: job.topk_prompt_logprobs]
    return row, topk
