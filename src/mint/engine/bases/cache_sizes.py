"""What the caches of a base model may take, as the settings say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheSizes:
    """The KV cache of a base model, and the part of it that is kept for later prompts that begin alike; bytes.

    None: by the memory that is free once the base is loaded. `sharers` processes on this machine divide that.
    """

    kv_cache: int | None
    prefix_cache: int | None
    sharers: int = 1

    def part_of(self, free_bytes: int | None) -> int | None:
        """The part of the free memory that this process may count on; None if that is unknown."""
        return None if free_bytes is None else free_bytes // self.sharers
