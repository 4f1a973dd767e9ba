"""The memory of caches that grow with their sequences, as those of transformers do, and the bound on all of them."""

from __future__ import annotations

from dataclasses import dataclass

from mint.engine.sampling.kv_cache import FREE_SHARE, UNKNOWN_MEMORY_BYTES


@dataclass(frozen=True)
class CacheCost:
    """The bytes that a cache takes for each sequence, and for each token of it."""

    sequence: int
    token: int

    def of(self, sequences: int, tokens: int) -> int:
        """The bytes of so many sequences with so many tokens each."""
        return sequences * (self.sequence + tokens * self.token)


@dataclass(frozen=True)
class CacheBudget:
    """All caches of a base model together may take `limit_bytes`."""

    cost: CacheCost
    limit_bytes: int

    @property
    def most_tokens(self) -> int:
        """The tokens of a sequence that is alone."""
        return max(0, self.limit_bytes - self.cost.sequence) // max(1, self.cost.token)


def fit_budget(cost: CacheCost, *, chosen_bytes: int | None, free_bytes: int | None) -> CacheBudget:
    """The budget of a base that is loaded: as chosen, or a share of the memory that is free then."""
    if chosen_bytes is not None:
        return CacheBudget(cost, chosen_bytes)
    return CacheBudget(cost, UNKNOWN_MEMORY_BYTES if free_bytes is None else free_bytes // FREE_SHARE)
