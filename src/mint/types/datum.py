"""`Datum`: one training example, and what its tensors hold. Knows no loss: which inputs a loss reads is checked later.

Letters: N tokens of one datum · K alternatives per position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from mint.errors import InvalidRequestError
from mint.types.model_input import ModelInput
from mint.types.provenance import ProvenanceSpan, ProvenanceSpans, check_cover
from mint.types.tensors import DType, TensorData
from mint.types.value_classes import ArrayValue, StrictValue

INT_INPUTS = frozenset({"target_tokens"})
"""Keys of `Datum.loss_fn_inputs` that hold token ids; all others are float32."""

LOSS_WEIGHTS = "loss_weights"
"""Another name of the input `weights`."""


class DatumJson(StrictValue):
    """A datum as JSON has it."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]
    model_input_spans: list[ProvenanceSpan] | None = None
    loss_fn_input_spans: list[ProvenanceSpan] | None = None


class Datum(ArrayValue):
    """One training example: an input of N tokens and the tensors that its loss reads, each of length N.

    Position t of every tensor is about predicting `target_tokens[t]` from `model_input[: t + 1]`; so
    `model_input = full[:-1]` and `target_tokens = full[1:]`. Values may be lists, numpy arrays, torch tensors or
    `TensorData`; `loss_weights` is read as `weights`. For cross-entropy, targets and weights may both be [N, K]: K
    weighted targets per position (top-K distillation), dense or sparse.
    """

    __slots__ = ("loss_fn_input_spans", "loss_fn_inputs", "model_input", "model_input_spans")
    json_form = DatumJson

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]
    model_input_spans: ProvenanceSpans | None
    """Which sampled sequences the tokens of `model_input` come from; set by `with_provenance`."""
    loss_fn_input_spans: ProvenanceSpans | None
    """The same of `target_tokens`."""

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, Any],
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        """Raises `InvalidRequestError` for an input that is not a tensor of numbers of its type, and for spans that do
        not cover the tokens that they are about."""
        if not isinstance(model_input, ModelInput):
            raise InvalidRequestError(
                "is not a ModelInput",
                field="Datum.model_input",
                value=model_input,
                remedy="Pass ModelInput.from_ints(tokens)",
            )
        if not isinstance(loss_fn_inputs, Mapping):
            raise InvalidRequestError(
                "is not a dictionary of tensors",
                field="Datum.loss_fn_inputs",
                value=loss_fn_inputs,
                remedy="Pass {'target_tokens': […], …}",
            )
        self.model_input = model_input
        self.loss_fn_inputs = {}
        for key, value in loss_fn_inputs.items():
            dtype: DType = "int64" if key in INT_INPUTS else "float32"
            is_tensor = isinstance(value, TensorData) and value.dtype == dtype
            name = "weights" if key == LOSS_WEIGHTS else key
            self.loss_fn_inputs[name] = value if is_tensor else _as_tensor(key, value, dtype)
        if LOSS_WEIGHTS in loss_fn_inputs and "weights" in loss_fn_inputs:
            raise InvalidRequestError(
                "is an alias of `weights`, and both were given",
                field="loss_fn_inputs.loss_weights",
                value="(given twice)",
                remedy="Give one of them",
            )

        self.model_input_spans = model_input_spans
        self.loss_fn_input_spans = loss_fn_input_spans
        self._check_spans()

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Self:
        """The same datum with the origin of its tokens: spans over `model_input`, and spans over `target_tokens`.

        Raises:
            InvalidRequestError: spans do not cover the tokens exactly.
        """
        return type(self)(self.model_input, self.loss_fn_inputs, list(model_input), list(loss_fn_inputs))

    def _check_spans(self) -> None:
        of_input, of_targets = self.model_input_spans, self.loss_fn_input_spans
        if of_input is None and of_targets is None:
            return
        if of_input is None or of_targets is None:
            missing = "model_input_spans" if of_input is None else "loss_fn_input_spans"
            remedy = "Give the spans of the input and of the targets, or neither; with_provenance sets both"
            raise InvalidRequestError("is missing", field=f"Datum.{missing}", value="(missing)", remedy=remedy)
        check_cover(of_input, self.model_input.length, "Datum.model_input_spans")
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None:
            check_cover(of_targets, len(targets), "Datum.loss_fn_input_spans")

    def _content(self) -> tuple[Any, ...]:
        return self.model_input, self.loss_fn_inputs, self.model_input_spans, self.loss_fn_input_spans


def _as_tensor(key: str, value: Any, dtype: DType) -> TensorData:
    if isinstance(value, dict):
        value = TensorData.model_validate(value)
    try:
        return TensorData.from_any(value, dtype=dtype)
    except (ValueError, OverflowError) as error:
        if isinstance(error, InvalidRequestError):
            error.field = f"loss_fn_inputs.{key}"
            raise
        raise InvalidRequestError(
            str(error), field=f"loss_fn_inputs.{key}", value=value, remedy="Pass numbers, one per token"
        ) from error
