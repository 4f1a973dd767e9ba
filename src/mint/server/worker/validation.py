"""Checks whether a request's content is possible for a model. Pure: values in, checked arrays out, or an error.

Every message names field, value and remedy. Types were checked when the body was decoded; checked here are ranges,
lengths and the limits of the model.

Letters: N tokens of one datum · K targets per position · P prompt tokens · Q tokens of the prompt that are asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mint.engine.protocol import LOSSES, AdamSpec, BaseInfo, LossRule, LossSpec, TrainDatum, resolve_loss
from mint.errors import InvalidRequestError, PromptTooLongError
from mint.types import (
    AdamParams,
    Datum,
    LoraConfig,
    ProvenanceSpans,
    SampledProvenanceSpan,
    SamplingParams,
    TensorData,
)
from mint.types.tensors import flat_array
from mint.types.training import MAX_RANK, MAX_SEED
from mint.wire.requests import ForwardBackwardInput, SampleRequest

R = TypeVar("R")

MAX_SAMPLES = 1024
MAX_TOP_K = (1 << 31) - 1
MAX_TOPK = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BIASED_TOKENS = 1024
MAX_REPETITION_PENALTY = 100.0

UNASKED = -1
"""A cell of `target_prompt_logprobs` that names no token."""

MAX_TARGET_CELLS = 1 << 23
"""Cells of the [N, K] targets of one pass. Each has a logprob in the answer; a small sparse body may ask for many."""

MAX_ALTERNATIVES = 1 << 21
"""Alternatives (a token and its logprob) in one answer, of each kind."""


@dataclass(frozen=True)
class CheckedPass:
    """The data and the loss for the engine; `warnings` name data that is possible but suspicious.

    `given_logprobs` are the sampler's logprobs of all datums, one after the other, as they came: the engine's are 0
    where nothing is trained. None for a loss without them.
    """

    data: list[TrainDatum]
    loss: LossSpec
    warnings: list[str]
    given_logprobs: np.ndarray | None = None


def check_pass(content: ForwardBackwardInput, base: BaseInfo) -> CheckedPass:
    """The data of a pass as arrays, and its loss with every setting.

    Raises:
        InvalidRequestError: anything in it cannot be honoured.
    """
    loss = resolve_loss(content.loss_fn, content.loss_fn_config)
    if not content.data:
        raise InvalidRequestError("is empty", field="data", value="[]", remedy="Pass at least one Datum")
    _check_target_cells(content.data)
    data = [_as_arrays(datum, loss.name, base, f"data[{index}]") for index, datum in enumerate(content.data)]
    given: np.ndarray | None = None
    if "logprobs" in LOSSES[loss.name].required:
        given = np.concatenate([datum.inputs["logprobs"] for datum in data])
        data = _without_unread_logprobs(data, given)
    _check_numbers(data, base)
    return CheckedPass(data, loss, _weight_warnings(content.data, loss.name), given)


def check_adam(params: AdamParams) -> AdamSpec:
    """The settings of one step.

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
    """The shape of a lora.

    Raises:
        InvalidRequestError: the rank or the seed is out of range, or nothing is trained.
    """
    _require(1 <= config.rank <= MAX_RANK, "rank", config.rank, f"a whole number from 1 to {MAX_RANK}")
    if config.seed is not None:
        _require(0 <= config.seed <= MAX_SEED, "seed", config.seed, "a whole number from 0 to 2**63 - 1")
    trains = config.train_attn or config.train_mlp or config.train_unembed
    _require(trains, "train_attn, train_mlp, train_unembed", "all False", "at least one of them True")
    return config


def check_sample(request: SampleRequest, base: BaseInfo) -> int:
    """The most tokens that may be sampled.

    Raises:
        InvalidRequestError: the prompt or a setting cannot be honoured.
        PromptTooLongError: the prompt, with the tokens asked for, does not fit the context.
    """
    for field in ("base_model", "model_path"):
        value = getattr(request, field)
        if value is not None:
            remedy = "Leave it out: name it when you create the sampling session"
            raise InvalidRequestError("is not read in a sample request", field=field, value=value, remedy=remedy)
    params = request.sampling_params
    prompt = request.prompt.to_numpy()
    _require(len(prompt) > 0, "prompt", "[]", "at least one token (a bos token will do)", was="is empty")
    _check_tokens(prompt, base, "prompt")
    _require(1 <= request.num_samples <= MAX_SAMPLES, "num_samples", request.num_samples, f"from 1 to {MAX_SAMPLES}")
    _check_sampling_params(params, base)
    room = base.context_length - len(prompt)
    scored = request.prompt_logprobs or request.topk_prompt_logprobs > 0 or request.prompt_alt_tokens_k > 0
    only_prompt = params.max_tokens == 0 and (scored or request.target_prompt_logprobs is not None)
    if params.max_tokens is not None and not only_prompt:
        _require(params.max_tokens >= 1, "max_tokens", params.max_tokens, "a whole number >= 1, or None")
    wanted = 1 if params.max_tokens is None else params.max_tokens  # None: as many as fit, so at least one must
    if wanted > room:
        raise PromptTooLongError(
            f"has {len(prompt)} tokens; with max_tokens = {params.max_tokens} that is more than the context of "
            f"{base.context_length}",
            field="prompt",
            value=f"{len(prompt)} tokens",
            remedy=_fitting(base.context_length, len(prompt), wanted),
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    _check_logit_rules(params, max_tokens, base)
    _check_alternatives(request, len(prompt), max_tokens, base)
    return max_tokens


def target_pairs(tensor: TensorData, length: int, base: BaseInfo) -> np.ndarray:
    """The tokens whose logprobs `target_prompt_logprobs` asks for, as pairs (place in the prompt, token) int64 [Q, 2].

    `length` is that of the prompt.

    Raises:
        InvalidRequestError: it is no [P - 1, K] tensor of token ids, or names none.
    """
    name = "target_prompt_logprobs"
    shape = tensor.shape
    size = len(tensor.values)
    most = f"at most {MAX_ALTERNATIVES}"
    _require(size <= MAX_ALTERNATIVES, name, f"{size} cells", most, was="asks for too large an answer")
    _require(tensor.dtype == "int64", name, tensor.dtype, "an int64 tensor of token ids", was="holds no ids")
    good = shape is not None and len(shape) == 2 and shape[0] == length - 1 and 1 <= shape[1] <= MAX_ALTERNATIVES
    wanted = f"[prompt tokens - 1, K] = [{length - 1}, K]; row i is about token i + 1"
    _require(good, f"{name}.shape", shape, wanted, was="does not fit the prompt")
    tokens = tensor.values
    if tensor.is_sparse:
        rows, _ = _placed(tensor.cells, name)
    else:
        columns = shape[1] if shape is not None else 1
        _require(len(tokens) == (length - 1) * columns, name, f"{len(tokens)} numbers", f"as many as {shape} has cells")
        rows = np.arange(len(tokens)) // columns
    asked = tokens != UNASKED
    _require(bool(asked.any()), name, "no ids", "at least one token id (-1 asks for nothing)", was="is empty")
    _check_tokens(tokens[asked], base, name)
    return np.stack([rows[asked] + 1, tokens[asked]], axis=1)


def _check_alternatives(request: SampleRequest, length: int, max_tokens: int, base: BaseInfo) -> None:
    """Checks what is asked for besides tokens and logprobs, about the prompt (`length` tokens) and the samples."""
    last_n = request.prompt_logprobs_last_n
    if last_n is not None:
        scored = request.prompt_logprobs or request.topk_prompt_logprobs > 0
        _require(scored, "prompt_logprobs_last_n", last_n, "prompt_logprobs=True as well", was="needs prompt logprobs")
        _require(1 <= last_n < length, "prompt_logprobs_last_n", last_n, f"from 1 to {length - 1} (prompt tokens - 1)")
    most = min(MAX_TOPK, base.vocab_size)
    sampled = request.num_samples * max_tokens
    for name, places, highest in (
        ("topk_prompt_logprobs", length if last_n is None else last_n, most),
        ("topk_sample_logprobs", sampled, most),
        ("prompt_alt_tokens_k", length, MAX_TOPK),
    ):
        count = getattr(request, name)
        _require(0 <= count <= highest, name, count, f"a whole number from 0 to {highest}")
        wanted = f"at most {MAX_ALTERNATIVES // max(places, 1)} for these {places} places"
        _require(count * places <= MAX_ALTERNATIVES, name, count, wanted, was="asks for too large an answer")


def _fitting(context: int, prompt: int, wanted: int) -> str:
    """How a request would fit: by fewer new tokens, where one has room, or by a shorter prompt."""
    if prompt < context:
        return f"Shorten the prompt, or ask for at most {context - prompt} tokens"
    if wanted < context:
        return f"Shorten the prompt to at most {context - wanted} tokens"
    return "Shorten the prompt, and ask for fewer tokens" if context > 1 else "Take a model with a longer context"


def _check_sampling_params(params: SamplingParams, base: BaseInfo) -> None:
    _require(0 <= params.temperature < math.inf, "temperature", params.temperature, "a finite number >= 0 (0: greedy)")
    _require(0 < params.top_p <= 1, "top_p", params.top_p, "a number in (0, 1] (1 is off)")
    good = params.top_k == -1 or 1 <= params.top_k <= MAX_TOP_K
    _require(good, "top_k", params.top_k, "a whole number from 1 to 2**31 - 1, or -1 for off")
    if params.seed is not None:
        _require(0 <= params.seed <= MAX_SEED, "seed", params.seed, "a whole number from 0 to 2**63 - 1")
    stops = [params.stop] if isinstance(params.stop, str) else [*(params.stop or ())]
    count = len(stops) + len(params.stop_token_ids or ())
    _require(count <= MAX_STOPS, "stop", f"{count} entries", f"at most {MAX_STOPS} strings and token ids")
    ids: list[int] = []
    for item in (*stops, *(params.stop_token_ids or ())):
        if isinstance(item, str):
            _require(0 < len(item) <= MAX_STOP_CHARS, "stop", item, f"strings of 1 to {MAX_STOP_CHARS} characters")
        else:
            ids.append(item)
    _check_tokens(flat_array(ids, np.dtype(np.int64), "stop_token_ids"), base, "stop_token_ids")


def _check_logit_rules(params: SamplingParams, max_tokens: int, base: BaseInfo) -> None:
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(params, name)
        _require(-2 <= value <= 2, name, value, "a number from -2 to 2 (0 is off)")
    repetition = params.repetition_penalty
    _require(
        0 < repetition <= MAX_REPETITION_PENALTY, "repetition_penalty", repetition, "a number in (0, 100] (1 is off)"
    )
    _require(0 <= params.min_p <= 1, "min_p", params.min_p, "a number from 0 to 1 (0 is off)")
    _require(
        0 <= params.min_tokens <= max_tokens, "min_tokens", params.min_tokens, f"from 0 to max_tokens {max_tokens}"
    )
    if params.allowed_token_ids is not None:
        _require(len(params.allowed_token_ids) > 0, "allowed_token_ids", "[]", "at least one token id", was="is empty")
        ids = flat_array(params.allowed_token_ids, np.dtype(np.int64), "allowed_token_ids")
        _check_tokens(ids, base, "allowed_token_ids")
    if params.logit_bias is not None and len(params.logit_bias) > 0:
        count = len(params.logit_bias)
        _require(count <= MAX_BIASED_TOKENS, "logit_bias", f"{count} tokens", f"at most {MAX_BIASED_TOKENS}")
        _check_tokens(flat_array([*params.logit_bias], np.dtype(np.int64), "logit_bias"), base, "logit_bias")
        for token, bias in params.logit_bias.items():
            _require(-100 <= bias <= 100, f"logit_bias[{token}]", bias, "a number from -100 to 100")


def _check_target_cells(data: Sequence[Datum]) -> None:
    """Counts the cells of all [N, K] targets, before the sparse ones among them become dense arrays."""
    cells = 0
    for datum in data:
        targets = datum.loss_fn_inputs.get("target_tokens")
        shape = None if targets is None else targets.shape
        if shape is not None and len(shape) >= 2:
            cells += abs(math.prod(shape))  # a negative size is refused later, with its own message
    if cells > MAX_TARGET_CELLS:
        raise InvalidRequestError(
            "are too many",
            field="target_tokens",
            value=f"{cells} cells",
            remedy=f"Pass at most {MAX_TARGET_CELLS} in one request",
        )


def _as_arrays(datum: Datum, loss: str, base: BaseInfo, where: str) -> TrainDatum:
    """One datum with every input in its shape; `_check_numbers` checks the numbers of all datums at once."""
    tokens = datum.model_input.to_numpy()
    n_tokens = len(tokens)
    if n_tokens == 0:
        raise InvalidRequestError(
            "is empty", field=f"{where}.model_input", value="[]", remedy="Pass at least one token"
        )
    if n_tokens > base.context_length:
        raise PromptTooLongError(
            f"is longer than the context of {base.context_length}",
            field=f"{where}.model_input",
            value=f"{n_tokens} tokens",
            remedy="Cut the example, or use a base model with a longer context",
        )
    rule = LOSSES[loss]
    inputs = datum.loss_fn_inputs
    if not _NEEDED_INPUTS[loss] <= inputs.keys() <= _KNOWN_INPUTS:
        raise _bad_keys(inputs, loss, rule, where)
    given_shape = inputs["target_tokens"].shape
    shape = (n_tokens,)
    if given_shape is not None and len(given_shape) == 2:
        shape = _many_targets_shape(given_shape, loss, n_tokens, f"{where}.loss_fn_inputs.target_tokens")
    arrays: dict[str, np.ndarray] = {}
    for key, tensor in inputs.items():
        arrays[key] = _array(tensor, shape if key in ("target_tokens", "weights") else shape[:1], where, key)
    weights = arrays.get("weights")
    spans = datum.loss_fn_input_spans
    if spans is not None and rule.sampled_only:
        sampled = _sampled_positions(spans)
        _check_advantages_of_prompt(arrays["advantages"], sampled, where)
        weights = sampled if weights is None else weights
    if weights is None:
        # A position without an advantage has no gradient in any policy loss.
        weights = arrays["advantages"] != 0 if rule.required else _usual_weights(inputs["target_tokens"], shape)
    weights = weights.astype(np.float32, copy=False)
    used: dict[str, np.ndarray] = {}
    for key in (*rule.required, *rule.optional):
        if key in arrays:
            used[key] = arrays[key]
    return TrainDatum(tokens, arrays["target_tokens"], weights, used)


def _sampled_positions(spans: ProvenanceSpans) -> np.ndarray:
    """Which targets were sampled, by the spans that cover them: bool [N]."""
    of_spans = [isinstance(span, SampledProvenanceSpan) for span in spans]
    return np.repeat(of_spans, [span.length for span in spans])


def _check_advantages_of_prompt(advantages: np.ndarray, sampled: np.ndarray, where: str) -> None:
    wrong = (advantages != 0) & ~sampled
    if wrong.any():
        raise InvalidRequestError(
            "is not 0 at a token that was not sampled, by the datum's own provenance",
            field=f"{where}.loss_fn_inputs.advantages{_place(wrong)}",
            value=float(advantages[wrong][0]),
            remedy="Give the tokens of a prompt the advantage 0, or correct loss_fn_input_spans",
        )


def _without_unread_logprobs(data: Sequence[TrainDatum], given: np.ndarray) -> list[TrainDatum]:
    """Sets logprobs at positions of weight 0 to 0: no loss reads them, so padding there may hold anything, NaN too.

    `given` are the logprobs of all datums, one after the other.
    """
    weights = np.concatenate([datum.weights for datum in data])
    logprobs = np.where(weights == 0, 0, given).astype(given.dtype, copy=False)
    cleared: list[TrainDatum] = []
    start = 0
    for datum in data:
        end = start + len(datum.tokens)
        inputs = {**datum.inputs, "logprobs": logprobs[start:end]}
        cleared.append(TrainDatum(datum.tokens, datum.targets, datum.weights, inputs))
        start = end
    return cleared


def _check_numbers(data: Sequence[TrainDatum], base: BaseInfo) -> None:
    """Token ids within the vocabulary, everything else finite.

    Looks at all datums together first: a numpy call costs more than the numbers of one datum.
    """
    ids: list[np.ndarray] = []
    floats: list[np.ndarray] = []
    for datum in data:
        ids += (datum.tokens, datum.targets.reshape(-1))
        floats += (datum.weights.reshape(-1), *datum.inputs.values())
    # as unsigned numbers, negative ones are beyond any vocabulary
    if np.concatenate(ids).view(np.uint64).max() < base.vocab_size and np.isfinite(np.concatenate(floats)).all():
        return
    for index, datum in enumerate(data):
        inputs = f"data[{index}].loss_fn_inputs"
        _check_tokens(datum.tokens, base, f"data[{index}].model_input")
        _check_tokens(datum.targets, base, f"{inputs}.target_tokens")
        _check_finite(datum.weights, f"{inputs}.weights")
        for key, array in datum.inputs.items():
            _check_finite(array, f"{inputs}.{key}")


_NEEDED_INPUTS = {name: frozenset({"target_tokens", *rule.required}) for name, rule in LOSSES.items()}
_KNOWN_INPUTS = frozenset(
    {"target_tokens", "weights", *(key for rule in LOSSES.values() for key in rule.required + rule.optional)}
)


def _bad_keys(inputs: Mapping[str, TensorData], loss: str, rule: LossRule, where: str) -> InvalidRequestError:
    """The error for inputs of which one is missing, or is one of no loss."""
    for key in ("target_tokens", *rule.required):
        if key not in inputs:
            needs = ", ".join(("target_tokens", *rule.required))
            return InvalidRequestError(
                "is missing",
                field=f"{where}.loss_fn_inputs.{key}",
                value="(missing)",
                remedy=f"{loss} needs {needs}; logprobs are those that sample() returned",
            )
    unknown = next(key for key in inputs if key not in _KNOWN_INPUTS)
    remedy = f"{loss} reads {', '.join(('target_tokens', 'weights', *rule.required, *rule.optional))}"
    field = f"{where}.loss_fn_inputs"
    return InvalidRequestError("is not an input of any loss", field=field, value=unknown, remedy=remedy)


def _many_targets_shape(given: Sequence[int], loss: str, length: int, where: str) -> tuple[int, int]:
    """(N, K) for targets of two dimensions, if the loss may have several targets per position."""
    if not LOSSES[loss].many_targets:
        able = ", ".join(name for name, rule in LOSSES.items() if rule.many_targets)
        raise InvalidRequestError(
            f"{loss} reads one target per token",
            field=where,
            value=f"shape {given}",
            remedy=f"Pass {length} token ids; several weighted targets per token are for {able}",
        )
    _require(given[1] >= 1, where, f"shape {given}", "at least one target per token", was="is empty")
    return (length, given[1])


def _usual_weights(targets: TensorData, shape: tuple[int, ...]) -> np.ndarray:
    """1 for every target; a cell that a sparse tensor does not list is no target."""
    if not targets.is_sparse:
        return np.ones(shape)
    weights = np.zeros(shape)
    weights[targets.cells()] = 1
    return weights


def _array(tensor: TensorData, shape: tuple[int, ...], where: str, key: str) -> np.ndarray:
    """The numbers of an input in its shape; a sparse matrix becomes dense."""
    given, array = tensor.shape, tensor.values
    fits = given is None or given == list(shape)
    if tensor.is_sparse and given is not None and fits:
        return _placed(tensor.to_numpy, f"{where}.loss_fn_inputs.{key}")
    if fits and len(array) == math.prod(shape):
        return array if len(shape) == 1 else array.reshape(shape)
    length = shape[0]
    raise InvalidRequestError(
        f"does not fit model_input, which has {length} tokens"
        if len(shape) == 1
        else f"does not fit: model_input and target_tokens make it {list(shape)}",
        field=f"{where}.loss_fn_inputs.{key}",
        value=f"length {len(array)}" if given in (None, [len(array)]) else f"shape {given}",
        remedy=f"Pass {length} numbers, one per token: inputs are full[:-1] where targets are full[1:]"
        if len(shape) == 1
        else f"Pass {length} rows, one per token, for targets and weights alike",
    )


def _placed(read: Callable[[], R], where: str) -> R:
    """The result of `read`; an error of a tensor's layout gets the tensor's place in the request as its field."""
    try:
        return read()
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, field=where, value=error.value, remedy=error.remedy) from error


def _check_tokens(tokens: np.ndarray, base: BaseInfo, where: str) -> None:
    wrong = (tokens < 0) | (tokens >= base.vocab_size)
    if wrong.any():
        raise InvalidRequestError(
            f"is not a token id: the vocabulary has {base.vocab_size} tokens",
            field=where + _place(wrong),
            value=int(tokens[wrong][0]),
            remedy=f"Pass ids from 0 to {base.vocab_size - 1}, from this model's own tokenizer",
        )


def _check_finite(array: np.ndarray, where: str) -> None:
    wrong = ~np.isfinite(array)
    if wrong.any():
        raise InvalidRequestError(
            "is not finite",
            field=where + _place(wrong),
            value=float(array[wrong][0]),
            remedy="Pass finite numbers, or give the position weight 0 where a logprob is unknown",
        )


def _place(wrong: np.ndarray) -> str:
    """The index of the first cell that is True, as it would be written in Python."""
    return "".join(f"[{index}]" for index in np.argwhere(wrong)[0])


def _weight_warnings(data: Sequence[Datum], loss: str) -> list[str]:
    rule = LOSSES[loss]
    read = {"target_tokens", "weights", *rule.required, *rule.optional}
    without = 0
    unread = set[str]()
    for datum in data:
        known = rule.sampled_only and datum.loss_fn_input_spans is not None
        without += "weights" not in datum.loss_fn_inputs and not known
        unread |= datum.loss_fn_inputs.keys() - read
    warnings = []
    if without and rule.required:
        warnings.append(
            f"weights_missing: weights are missing in {without} of {len(data)} datums: "
            "1 was used where the advantage is not 0, else 0"
        )
    if unread:
        warnings.append(f"unread_inputs: {loss} does not read {', '.join(sorted(unread))}: ignored")
    return warnings


def _require(good: bool, field: str, value: object, wanted: str, *, was: str = "is out of range") -> None:
    if not good:
        raise InvalidRequestError(was, field=field, value=value, remedy=f"Pass {wanted}")
