"""What a model reads: chunks of token ids, in order. Chunks of other types, as images, are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from mint.errors import InvalidRequestError
from mint.types.arrays import np, require_numpy
from mint.types.tensors import TensorData, flat_array
from mint.types.value_classes import ArrayValue, StrictValue

_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)


class EncodedTextChunkJson(StrictValue):
    """A chunk as JSON has it."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class EncodedTextChunk(ArrayValue):
    """Consecutive token ids."""

    __slots__ = ("_list", "ids")
    json_form = EncodedTextChunkJson

    ids: np.ndarray
    """The token ids as a read-only array, int32, or int64 where they do not fit."""

    def __init__(self, tokens: Sequence[int] | np.ndarray, type: Literal["encoded_text"] = "encoded_text") -> None:
        """A read-only array of int32 or int64 is shared, anything else is copied."""
        if type != "encoded_text":
            raise InvalidRequestError("is not this chunk's type", field="EncodedTextChunk.type", value=type)
        field = "EncodedTextChunk.tokens"
        wide = isinstance(tokens, np.ndarray) and tokens.dtype != _INT32
        try:
            self.ids = flat_array(tokens, _INT64 if wide else _INT32, field)
        except InvalidRequestError:
            self.ids = flat_array(tokens, _INT64, field)
        self._list: list[int] | None = None

    @property
    def tokens(self) -> list[int]:
        """The token ids; changing the list does not change the chunk."""
        if self._list is None:
            self._list = self.ids.tolist()
        return self._list

    @property
    def type(self) -> Literal["encoded_text"]:
        """Which chunk this is."""
        return "encoded_text"

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def _content(self) -> tuple[Any, ...]:
        return (self.ids,)


class ImageChunk(StrictValue):
    """An image. It may be built, but no model here reads it: `ModelInput` refuses it."""

    data: bytes = Field(repr=False)
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image"] = "image"


class ImageAssetPointerChunk(StrictValue):
    """The place of an image. It may be built, but no model here reads it: `ModelInput` refuses it."""

    location: str
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"


class DmelChunk(StrictValue):
    """Sound. It may be built, but no model here reads it: `ModelInput` refuses it."""

    dmel: bytes = Field(repr=False)
    type: Literal["dmel"] = "dmel"


_UNREADABLE = ("image", "image_asset_pointer", "dmel")


class ModelInputJson(StrictValue):
    """A model input as JSON has it."""

    chunks: list[EncodedTextChunk] = Field(default_factory=list)

    @field_validator("chunks", mode="before")
    @classmethod
    def _only_text(cls, chunks: Any) -> Any:
        for chunk in chunks if isinstance(chunks, list) else ():
            _require_text(chunk, None)  # pydantic names the field
        return chunks


class ModelInput(ArrayValue):
    """What the model reads: chunks of token ids, in order."""

    __slots__ = ("chunks",)
    json_form = ModelInputJson

    chunks: list[EncodedTextChunk]

    def __init__(self, chunks: Sequence[EncodedTextChunk] = ()) -> None:
        """Raises `InvalidRequestError` for a chunk that is not text."""
        for chunk in chunks:
            if not isinstance(chunk, EncodedTextChunk):
                _require_text(chunk, "ModelInput.chunks")
                raise InvalidRequestError(
                    "is not a chunk", field="ModelInput.chunks", value=chunk, remedy="Pass EncodedTextChunk"
                )
        self.chunks = list(chunks)

    @classmethod
    def from_ints(cls, tokens: Any) -> Self:
        """From any sequence of integers (list, numpy array, torch tensor), or from a tokenizer's dictionary with
        `input_ids`.

        Raises:
            InvalidRequestError: it holds no integers, or is a dictionary without `input_ids`.
        """
        if isinstance(tokens, Mapping):
            if "input_ids" not in tokens:
                raise InvalidRequestError(
                    "is a dictionary without input_ids",
                    field="ModelInput.tokens",
                    value=list(tokens),
                    remedy="Pass token ids, or what a tokenizer gives for one text",
                )
            tokens = tokens["input_ids"]
        if hasattr(tokens, "detach"):
            tokens = TensorData.from_torch(tokens).values
        return cls([EncodedTextChunk(tokens)])

    @classmethod
    def empty(cls) -> Self:
        """No tokens yet; `append_tokens` adds some."""
        return cls()

    def to_ints(self) -> list[int]:
        """All token ids, chunks joined."""
        return [token for chunk in self.chunks for token in chunk.tokens]

    def to_numpy(self) -> np.ndarray:
        """All token ids, chunks joined: a new int64 array."""
        require_numpy("ModelInput.to_numpy()")
        if len(self.chunks) == 1:
            return self.chunks[0].ids.astype(np.int64)
        return np.concatenate([np.zeros(0, np.int64), *(chunk.ids for chunk in self.chunks)])

    def append(self, chunk: EncodedTextChunk) -> Self:
        """A new input with one more chunk."""
        return type(self)([*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """A new input with one more token."""
        return self.append_tokens([token])

    def append_tokens(self, tokens: Any) -> Self:
        """A new input with more tokens."""
        return type(self)([*self.chunks, *type(self).from_ints(tokens).chunks])

    def append_chunks(self, chunks: list[EncodedTextChunk]) -> Self:
        """A new input with more chunks."""
        return type(self)([*self.chunks, *chunks])

    @property
    def length(self) -> int:
        """Number of tokens."""
        count = 0
        for chunk in self.chunks:
            count += len(chunk.ids)
        return count

    def context_length(self) -> int:
        """Number of tokens (MinT's name for `length`)."""
        return self.length

    def _content(self) -> tuple[Any, ...]:
        return (self.chunks,)


def _require_text(chunk: Any, field: str | None) -> None:
    kind = chunk.get("type") if isinstance(chunk, dict) else getattr(chunk, "type", None)
    if kind in _UNREADABLE:
        raise InvalidRequestError(
            "cannot be read: the models here read text alone, no images and no sound",
            field=field,
            value=kind,
            remedy="Pass EncodedTextChunk",
        )
