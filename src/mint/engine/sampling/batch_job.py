"""A sample job within a sampling batch: its turn, its lora, and the listener that hears its tokens.

Letters: S samples of a job · N sequences that drew a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mint.engine.lora import LoraWeights
from mint.engine.protocol import SampleJob, TokenListener
from mint.engine.sampling.prompt_scoring import PromptScores


@dataclass(eq=False)
class BatchJob:
    """The fields of a job that both samplers need. `arrival` counts upwards."""

    key: str
    job: SampleJob
    lora: LoraWeights | None
    listener: TokenListener | None
    arrival: int
    scores: PromptScores = field(default_factory=PromptScores)

    def __post_init__(self) -> None:
        self.scope = self.job.cache_scope
        """Jobs of one scope share its turns, and its part of the prefix cache."""
        self.turn = self.arrival, 0
        self.count = self.job.num_samples if self.job.max_tokens else 0
        """S, or 0 where the job only asks about its prompt."""
        self.tokens_sent = np.zeros(self.job.num_samples, np.int64)
        """[S]: how many tokens of each sample the listener has heard."""


def stream_tokens(listening: Mapping[int, BatchJob], own: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    """Calls the listeners of the jobs `listening`, which are given by arrival, with new tokens and logprobs, both [N].

    `own` [N] are the rows of `Sequences.of` before these tokens. A job that started again repeats no token.
    """
    for row in np.flatnonzero(np.isin(own["entry"], list(listening))).tolist():
        entry = listening[int(own["entry"][row])]
        sample = int(own["sample"][row])
        if entry.listener is not None and own["emitted"][row] >= entry.tokens_sent[sample]:
            entry.tokens_sent[sample] += 1
            entry.listener(sample, int(tokens[row]), float(logprobs[row]))
