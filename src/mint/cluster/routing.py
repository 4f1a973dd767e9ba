"""Which replica samples a job. Pure: a state of each replica and the needs of a job in, a replica out.

A replica that holds the lora is best, then one that has computed the beginning of the prompt, then the one with the
fewest sequences. A replica with many more sequences than another is not best any more: so a lora that is asked for a
lot comes to several replicas. All samples of a job go together, because they share the prompt.

Knows nothing of processes, engines or weights.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

BLOCK = 16
"""Prompts are compared in blocks of so many tokens."""

LORA_SEQUENCES, PROMPT_SEQUENCES = 16, 8
"""A replica without the lora, or without the beginning of the prompt, counts as one with so many sequences more.

More of them means more hits, and longer waits where a lora is asked for a lot (`benchmarks/serving/routing.py`)."""

KNOWN_BLOCKS = 1 << 14
"""Blocks that a replica is assumed to have cached: those used last. What it really has depends on its KV cache."""


@dataclass(frozen=True)
class Needs:
    """The sequences, the lora and the prompt of a job.

    `lora` is the version of its weights (None: the base alone), with its size in bytes. `beginnings` has a key for each
    beginning of the prompt that ends with a block, the shortest first.
    """

    sequences: int
    lora: str | None = None
    lora_bytes: int = 0
    beginnings: tuple[int, ...] = ()


def beginnings(lora: str | None, scope: str, prompt: np.ndarray) -> tuple[int, ...]:
    """Keys of the beginnings of `prompt` int64 [P]; equal ones only for one lora, in one cache scope."""
    keys = []
    key = hash((lora, scope))
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        key = hash((key, prompt[start : start + BLOCK].tobytes()))
        keys.append(key)
    return tuple(keys)


class ReplicaState:
    """The sequences, the loras and the beginnings of prompts that one replica holds."""

    def __init__(self, lora_limit_bytes: int, *, known_blocks: int = KNOWN_BLOCKS) -> None:
        """Loras may take `lora_limit_bytes`. One that is larger is taken if it is the only one."""
        self.sequences = 0
        self.loras: OrderedDict[str, int] = OrderedDict()  # version → bytes; the least recently used first
        self._limit_bytes = lora_limit_bytes
        self._known_blocks = known_blocks
        self._jobs: Counter[str] = Counter()  # by lora
        self._beginnings: OrderedDict[int, None] = OrderedDict()

    @property
    def lora_bytes(self) -> int:
        """The memory of its loras."""
        return sum(list(self.loras.values()))  # a copy: another thread may ask

    def has_lora(self, needs: Needs) -> bool:
        """Whether nothing must be loaded for the job."""
        return needs.lora is None or needs.lora in self.loras

    def cached_share(self, needs: Needs) -> float:
        """The share of the prompt that is assumed to be cached, 0 to 1; 1 if it is shorter than a block."""
        known = 0
        for key in needs.beginnings:
            if key not in self._beginnings:
                break
            known += 1
        return known / len(needs.beginnings) if needs.beginnings else 1.0

    def has_room(self, needs: Needs) -> bool:
        """Whether the job's lora fits beside those of the running jobs; no other can be removed."""
        if self.has_lora(needs):
            return True
        held = sum(size for lora, size in self.loras.items() if self._jobs[lora])
        return not held or held + needs.lora_bytes <= self._limit_bytes

    def add(self, needs: Needs) -> list[str]:
        """Notes a job that the replica gets; returns the loras that it must remove first."""
        removed = []
        self.sequences += needs.sequences
        if needs.lora is not None:
            if needs.lora not in self.loras:
                removed = self._make_room(needs.lora_bytes)
            self.loras[needs.lora] = needs.lora_bytes
            self.loras.move_to_end(needs.lora)
            self._jobs[needs.lora] += 1
        for key in reversed(needs.beginnings):  # the shortest is the last to be forgotten
            self._beginnings[key] = None
            self._beginnings.move_to_end(key)
        while len(self._beginnings) > self._known_blocks:
            self._beginnings.popitem(last=False)
        return removed

    def end(self, needs: Needs) -> None:
        """Notes that a job has ended."""
        self.sequences -= needs.sequences
        if needs.lora is not None:
            self._jobs[needs.lora] -= 1
            if not self._jobs[needs.lora]:
                del self._jobs[needs.lora]

    def forget(self, lora: str) -> bool:
        """Notes that the lora is not needed any more; returns whether the replica has it."""
        return self.loras.pop(lora, None) is not None

    def _make_room(self, size_bytes: int) -> list[str]:
        removed = []
        for lora in [lora for lora in self.loras if not self._jobs[lora]]:
            if self.lora_bytes + size_bytes <= self._limit_bytes:
                break
            del self.loras[lora]
            removed.append(lora)
        return removed


def route(replicas: Mapping[int, ReplicaState], needs: Needs) -> int | None:
    """The replica for a job; None while none has room for its lora."""
    fitting = [name for name, state in replicas.items() if state.has_room(needs)]
    return min(fitting, key=lambda name: (_cost(replicas[name], needs), name), default=None)


def _cost(state: ReplicaState, needs: Needs) -> float:
    """In sequences."""
    missing = PROMPT_SEQUENCES * (1.0 - state.cached_share(needs))
    return state.sequences + missing + (0 if state.has_lora(needs) else LORA_SEQUENCES)
