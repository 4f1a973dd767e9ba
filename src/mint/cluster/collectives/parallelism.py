"""How the ranks of a group divide the work: the base, its layers, and in which order they add up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mint.config import Reductions
from mint.errors import InvalidRequestError


@dataclass(frozen=True)
class Parallelism:
    """With `shards`, each rank holds a part of the base's layers instead of all. With `tensor_parallel`, so many ranks
    have one copy of the base together, and compute each layer together. With `experts`, the ranks divide the experts of
    each layer, and send each other the rows for them.

    `exact` reductions add in a fixed order, and give the bits of one process on every number of ranks. `ordinary` ones
    add in the order of the library's all-reduce: the same bits on the same number of ranks, and others on another.
    """

    shards: bool = False
    tensor_parallel: int | None = None
    experts: bool = False
    reductions: Reductions = "exact"

    def __post_init__(self) -> None:
        """Raises:
        InvalidRequestError: two of the settings exclude each other.
        """
        given: dict[str, str] = {"--shard-base": "on"} if self.shards else {}
        if self.tensor_parallel is not None:
            given["--tensor-parallel"] = str(self.tensor_parallel)
        if self.experts:
            given["--expert-parallel"] = "on"
        if len(given) > 1:
            raise InvalidRequestError(
                "divide the base, each in its own way; the ranks cannot divide it twice",
                field=" and ".join(given),
                value=" and ".join(given.values()),
                remedy="Give one of them",
            )

    @property
    def is_exact(self) -> bool:
        """Whether the bits do not depend on the number of ranks."""
        return self.reductions == "exact"

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The arguments of the engine of each process, also of those that sample: whether layers are cut, and into how
        many chunks. With ordinary reductions one chunk for each rank is enough."""
        if self.tensor_parallel is None:
            return {}
        if self.is_exact:
            return {"chunked": True}
        return {"chunked": self.tensor_parallel > 1, "most_chunks": self.tensor_parallel}

    def step(self, trainers: int) -> int:
        """Ranks start in multiples of so many, if `trainers` are wanted and there is not room for all."""
        return (self.tensor_parallel or 1) if self.is_exact else trainers

    def require_divisor(self, trainers: int) -> None:
        """Checks that so many ranks can be divided in groups that compute each layer together.

        Raises:
            InvalidRequestError: they cannot.
        """
        size = self.tensor_parallel or 1
        if trainers % size:
            raise InvalidRequestError(
                f"is no multiple of the {size} ranks that compute each layer together",
                field="--trainers",
                value=trainers,
                remedy="Give a multiple of --tensor-parallel",
            )

    def promise(self, trainers: int) -> dict[str, Any]:
        """The entries of `get_info`: the `reductions`, and on which numbers of ranks a run ends with one digest
        (`same_digest_on`)."""
        return {
            "reductions": self.reductions,
            "same_digest_on": "any number of ranks" if self.is_exact else ranks(trainers),
        }


ALIKE = Parallelism()
"""All ranks have the whole base, and add up in a fixed order."""


def ranks(count: int) -> str:
    """A number of ranks in words."""
    return "1 rank" if count == 1 else f"{count} ranks"
