"""What a model reads: chunks of token ids, in order; and the chunks of other protocols' types that no model here reads.

Knows no loss, no encoding and no model.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator

from mint.errors import InvalidRequestError
from mint.types.tensors import StrictValue, TensorData, of_checked


class EncodedTextChunk(StrictValue):
    """A run of token ids."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class ImageChunk(StrictValue):
    """An image. It may be built, and no model here reads it: `ModelInput` refuses it."""

    data: bytes = Field(repr=False)
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image"] = "image"


class ImageAssetPointerChunk(StrictValue):
    """Where an image is. It may be built, and no model here reads it: `ModelInput` refuses it."""

    location: str
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"


class DmelChunk(StrictValue):
    """Sound. It may be built, and no model here reads it: `ModelInput` refuses it."""

    dmel: bytes = Field(repr=False)
    type: Literal["dmel"] = "dmel"


_UNREADABLE = ("image", "image_asset_pointer", "dmel")


class ModelInput(StrictValue):
    """What the model reads: chunks of token ids, in order."""

    chunks: list[EncodedTextChunk] = Field(default_factory=list)

    def __init__(self, **fields: Any) -> None:
        _require_text(fields.get("chunks"))
        super().__init__(**fields)

    @field_validator("chunks", mode="before")
    @classmethod
    def _only_text(cls, chunks: Any) -> Any:
        return _require_text(chunks)

    @classmethod
    def from_ints(cls, tokens: Any) -> Self:
        """From any sequence of integers (list, numpy array, torch tensor)."""
        ids = TensorData.from_any(tokens, dtype="int64").data if len(tokens) else []
        return of_checked(cls, chunks=[of_checked(EncodedTextChunk, tokens=ids, type="encoded_text")])

    @classmethod
    def empty(cls) -> Self:
        """No tokens yet; grow it with `append_tokens`."""
        return cls(chunks=[])

    def to_ints(self) -> list[int]:
        """All token ids, chunks joined."""
        return [token for chunk in self.chunks for token in chunk.tokens]

    def append(self, chunk: EncodedTextChunk) -> Self:
        """A new input with one more chunk."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """A new input with one more token."""
        return self.append_tokens([token])

    def append_tokens(self, tokens: Any) -> Self:
        """A new input with more tokens."""
        return type(self)(chunks=[*self.chunks, *type(self).from_ints(tokens).chunks])

    def append_chunks(self, chunks: list[EncodedTextChunk]) -> Self:
        """A new input with more chunks."""
        return type(self)(chunks=[*self.chunks, *chunks])

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def context_length(self) -> int:
        """Number of tokens (MinT's name for `length`)."""
        return self.length


def _require_text(chunks: Any) -> Any:
    for chunk in chunks if isinstance(chunks, list) else ():
        kind = chunk.get("type") if isinstance(chunk, dict) else getattr(chunk, "type", None)
        if kind in _UNREADABLE:
            raise InvalidRequestError(
                "cannot be read: the models here read text alone, no images and no sound",
                field="ModelInput.chunks",
                value=kind,
                remedy="Pass EncodedTextChunk",
            )
    return chunks
