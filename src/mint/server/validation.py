"""Is a request's content possible for this model? Pure: values in, checked arrays out, or an error.

Every message names field, value and remedy. Types were checked when the body was decoded; here are ranges, lengths and
what the model can hold. Letters: N tokens of one datum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mint.engine.protocol import LOSSES, AdamSpec, BaseInfo, LossRule, LossSpec, TrainDatum, resolve_loss
from mint.errors import InvalidRequestError, PromptTooLongError
from mint.types import AdamParams, Datum, LoraConfig, SamplingParams, TensorData
from mint.wire import ForwardBackwardInput, SampleRequest

MAX_RANK = 256
MAX_SAMPLES = 1024
MAX_TOPK_PROMPT_LOGPROBS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class CheckedPass:
    """What the engine gets; `warnings` name data that is possible but suspicious."""

    data: list[TrainDatum]
    loss: LossSpec
    warnings: list[str]


def check_pass(content: ForwardBackwardInput, base: BaseInfo) -> CheckedPass:
    """The data of a pass as arrays, and its loss with every setting.

    Raises:
        InvalidRequestError: anything in it cannot be honoured.
    """
    loss = resolve_loss(content.loss_fn, content.loss_fn_config)
    if not content.data:
        raise InvalidRequestError("is empty", field="data", value="[]", remedy="Pass at least one Datum")
    data = [_check_datum(datum, loss.name, base, f"data[{index}]") for index, datum in enumerate(content.data)]
    return CheckedPass(data, loss, _weight_warnings(content.data, loss.name))


def check_adam(params: AdamParams) -> AdamSpec:
    """One step's settings.

    Raises:
        InvalidRequestError: a setting is out of its range.
    """
    _require(0 <= params.learning_rate < math.inf, "learning_rate", params.learning_rate, "a finite number >= 0")
    _require(0 <= params.beta1 < 1, "beta1", params.beta1, "a number in [0, 1)")
    _require(0 <= params.beta2 < 1, "beta2", params.beta2, "a number in [0, 1)")
    _require(0 < params.eps < math.inf, "eps", params.eps, "a finite number > 0")
    _require(0 <= params.weight_decay < math.inf, "weight_decay", params.weight_decay, "a finite number >= 0")
    clip = params.grad_clip_norm
    _require(0 <= clip < math.inf, "grad_clip_norm", clip, "a finite number >= 0 (0 is off)")
    return AdamSpec(params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, clip)


def check_lora(config: LoraConfig) -> LoraConfig:
    """The lora's shape.

    Raises:
        InvalidRequestError: a rank that cannot be, a seed out of range, or nothing to train.
    """
    _require(1 <= config.rank <= MAX_RANK, "rank", config.rank, f"a whole number from 1 to {MAX_RANK}")
    if config.seed is not None:
        _require(0 <= config.seed <= MAX_SEED, "seed", config.seed, "a whole number from 0 to 2**63 - 1")
    trains = config.train_attn or config.train_mlp or config.train_unembed
    _require(trains, "train_attn, train_mlp, train_unembed", "all False", "at least one of them True")
    return config


def check_sample(request: SampleRequest, base: BaseInfo) -> int:
    """How many tokens may be sampled at most.

    Raises:
        InvalidRequestError: the prompt or a setting cannot be honoured.
        PromptTooLongError: the prompt, with the tokens asked for, does not fit the context.
    """
    params, prompt = request.sampling_params, request.prompt.to_ints()
    _require(len(prompt) > 0, "prompt", "[]", "at least one token (a bos token will do)", was="is empty")
    _check_tokens(_int_array(prompt, "prompt"), base, "prompt")
    _require(1 <= request.num_samples <= MAX_SAMPLES, "num_samples", request.num_samples, f"from 1 to {MAX_SAMPLES}")
    most = min(MAX_TOPK_PROMPT_LOGPROBS, base.vocab_size)
    topk = request.topk_prompt_logprobs
    _require(0 <= topk <= most, "topk_prompt_logprobs", topk, f"a whole number from 0 to {most}")
    _check_sampling_params(params, base)
    room = base.context_length - len(prompt)
    only_prompt = params.max_tokens == 0 and (request.prompt_logprobs or topk > 0)
    if params.max_tokens is not None and not only_prompt:
        _require(params.max_tokens >= 1, "max_tokens", params.max_tokens, "a whole number >= 1, or None")
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted > room:
        raise PromptTooLongError(
            f"has {len(prompt)} tokens; with max_tokens = {params.max_tokens} that is more than the context of "
            f"{base.context_length}",
            field="prompt",
            value=f"{len(prompt)} tokens",
            remedy=f"Shorten the prompt, or ask for at most {max(room, 0)} tokens",
        )
    return room if params.max_tokens is None else params.max_tokens


def _check_sampling_params(params: SamplingParams, base: BaseInfo) -> None:
    _require(0 <= params.temperature < math.inf, "temperature", params.temperature, "a finite number >= 0 (0: greedy)")
    _require(0 < params.top_p <= 1, "top_p", params.top_p, "a number in (0, 1] (1 is off)")
    _require(params.top_k == -1 or params.top_k >= 1, "top_k", params.top_k, "a whole number >= 1, or -1 for off")
    if params.seed is not None:
        _require(0 <= params.seed <= MAX_SEED, "seed", params.seed, "a whole number from 0 to 2**63 - 1")
    stops = [params.stop] if isinstance(params.stop, str) else [*(params.stop or ())]
    count = len(stops) + len(params.stop_token_ids or ())
    _require(count <= MAX_STOPS, "stop", f"{count} entries", f"at most {MAX_STOPS} strings and token ids")
    for text in stops:
        if isinstance(text, str):
            _require(0 < len(text) <= MAX_STOP_CHARS, "stop", text, f"strings of 1 to {MAX_STOP_CHARS} characters")
    ids = [*(item for item in stops if isinstance(item, int)), *(params.stop_token_ids or ())]
    _check_tokens(_int_array(ids, "stop_token_ids"), base, "stop_token_ids")


def _check_datum(datum: Datum, loss: str, base: BaseInfo, where: str) -> TrainDatum:
    tokens = _int_array(datum.model_input.to_ints(), f"{where}.model_input")
    n_tokens = len(tokens)
    _require(n_tokens > 0, f"{where}.model_input", "[]", "at least one token", was="is empty")
    if n_tokens > base.context_length:
        raise PromptTooLongError(
            f"is longer than the context of {base.context_length}",
            field=f"{where}.model_input",
            value=f"{n_tokens} tokens",
            remedy="Cut the example, or use a base model with a longer context",
        )
    _check_tokens(tokens, base, f"{where}.model_input")
    rule = LOSSES[loss]
    inputs = datum.loss_fn_inputs
    _check_keys(inputs, loss, rule, where)
    tensors = {key: _vector(inputs[key], n_tokens, f"{where}.loss_fn_inputs.{key}") for key in inputs}
    targets = tensors.pop("target_tokens")
    _check_tokens(targets, base, f"{where}.loss_fn_inputs.target_tokens")
    weights = tensors.pop("weights", None)
    if weights is None:
        weights = np.ones(n_tokens, np.float32) if not rule.required else (tensors["advantages"] != 0)
        weights = weights.astype(np.float32)
    _check_finite(weights, f"{where}.loss_fn_inputs.weights")
    used = {key: tensors[key] for key in (*rule.required, *rule.optional) if key in tensors}
    if "logprobs" in used:
        # a padded or filtered position may hold anything where its weight says that nobody reads it
        used["logprobs"] = np.where(weights != 0, used["logprobs"], np.float32(0))
    for key, tensor in used.items():
        _check_finite(tensor, f"{where}.loss_fn_inputs.{key}")
    return TrainDatum(tokens, targets, weights, used)


def _check_keys(inputs: dict[str, TensorData], loss: str, rule: LossRule, where: str) -> None:
    for key in ("target_tokens", *rule.required):
        if key not in inputs:
            needs = ", ".join(("target_tokens", *rule.required))
            raise InvalidRequestError(
                "is missing",
                field=f"{where}.loss_fn_inputs.{key}",
                value="(missing)",
                remedy=f"{loss} needs {needs}; logprobs are those that sample() returned",
            )
    known = {"target_tokens", "weights", *(key for other in LOSSES.values() for key in other.required + other.optional)}
    for key in inputs:
        if key not in known:
            remedy = f"{loss} reads {', '.join(('target_tokens', 'weights', *rule.required, *rule.optional))}"
            field = f"{where}.loss_fn_inputs"
            raise InvalidRequestError("is not an input of any loss", field=field, value=key, remedy=remedy)


def _vector(tensor: TensorData, length: int, where: str) -> np.ndarray:
    if tensor.dtype == "int64":
        array = _int_array(tensor.data, where)
    else:
        array = np.asarray(tensor.data, dtype=np.float32)
    if len(array) != length or tensor.shape not in (None, [length]):
        size = f"shape {tensor.shape}" if tensor.shape not in (None, [len(array)]) else f"length {len(array)}"
        raise InvalidRequestError(
            f"does not fit model_input, which has {length} tokens",
            field=where,
            value=size,
            remedy=f"Pass {length} numbers, one per token: inputs are full[:-1] where targets are full[1:]",
        )
    return array


def _int_array(values: Sequence[int] | Sequence[float], where: str) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.int64)
    except (OverflowError, ValueError) as error:
        raise InvalidRequestError(
            "holds a number that does not fit 64 bits", field=where, value=values, remedy="Pass token ids"
        ) from error


def _check_tokens(tokens: np.ndarray, base: BaseInfo, where: str) -> None:
    wrong = (tokens < 0) | (tokens >= base.vocab_size)
    if wrong.any():
        index = int(wrong.argmax())
        raise InvalidRequestError(
            f"is no token id: the vocabulary has {base.vocab_size} tokens",
            field=f"{where}[{index}]",
            value=int(tokens[index]),
            remedy=f"Pass ids from 0 to {base.vocab_size - 1}, from this model's own tokenizer",
        )


def _check_finite(array: np.ndarray, where: str) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        index = int(finite.argmin())
        raise InvalidRequestError(
            "is not finite",
            field=f"{where}[{index}]",
            value=float(array[index]),
            remedy="Pass finite numbers, or give the position weight 0 where a logprob is unknown",
        )


def _weight_warnings(data: Sequence[Datum], loss: str) -> list[str]:
    without = sum("weights" not in datum.loss_fn_inputs for datum in data)
    rule = LOSSES[loss]
    warnings = []
    if without and rule.required:
        warnings.append(
            f"weights_missing: weights are missing in {without} of {len(data)} datums: "
            "1 was used where the advantage is not 0, else 0"
        )
    read = {"target_tokens", "weights", *rule.required, *rule.optional}
    unread = sorted({key for datum in data for key in datum.loss_fn_inputs if key not in read})
    if unread:
        warnings.append(f"unread_inputs: {loss} does not read {', '.join(unread)}: ignored")
    return warnings


def _require(good: bool, field: str, value: object, wanted: str, *, was: str = "is out of range") -> None:
    if not good:
        raise InvalidRequestError(was, field=field, value=value, remedy=f"Pass {wanted}")
