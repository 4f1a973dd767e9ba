"""A job of the sampler, and the prompts that it has computed before sequences go on from them.

Letters: S samples of a job · P tokens of a prompt · C pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.protocol import Sample
from mint.engine.sampling.batch_job import BatchJob


def _no_slots() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(eq=False)
class PagedJob(BatchJob):
    """A job whose sequences are in pages. `rows` of them are in the batch, and `left` have not ended; the others are
    among `samples`. `prompts` are waiting, or being computed."""

    prompts: list[Prompt] = field(default_factory=list)
    samples: dict[int, Sample] = field(default_factory=dict)
    left: int = 0
    rows: int = 0
    closed: bool = False
    is_finite: bool = True
    reused: int | None = None


@dataclass(eq=False)
class Prompt:
    """Tokens to compute before sequences go on from them: the prompt of a job, for its samples; or all that is known of
    one sequence, which was preempted, for that sequence.

    `tokens` int64 [P] fill the `pages`; the rest of them is in the first of `own`, which has one page for each of
    `count` sequences. Each of these draws up to `left` tokens. `slot` is that of the preempted sequence (-1: the prompt
    of the job), and `sample` its number.

    In a model with delta nets, `states` are the slots of the sequences, of which the first is the prompt's until it is
    computed. It starts from the state `loaded` of the prefix cache (-1: from nothing). States after the first `cuts`
    tokens are worth keeping there.
    """

    entry: PagedJob
    tokens: np.ndarray
    count: int
    left: int
    slot: int = -1
    sample: int = 0
    pages: np.ndarray = field(default_factory=_no_slots)
    own: np.ndarray = field(default_factory=_no_slots)
    states: np.ndarray = field(default_factory=_no_slots)
    loaded: int = -1
    cuts: list[int] = field(default_factory=list)
    done: int = 0
    beginning: bytes = b""
    hidden: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scope = self.entry.scope
        self.turn = self.entry.arrival, self.sample

    @property
    def is_of_job(self) -> bool:
        """Whether it is the prompt of the job, and not that of one sequence."""
        return self.slot < 0

    @property
    def table(self) -> np.ndarray:
        """The pages [C] that hold the tokens."""
        return np.append(self.pages, self.own[:1]) if len(self.tokens) % PAGE_POSITIONS else self.pages

    @property
    def is_computed(self) -> bool:
        """Whether all tokens are computed."""
        return self.done == len(self.tokens)
