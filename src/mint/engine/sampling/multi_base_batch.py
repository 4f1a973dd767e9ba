"""A batch of jobs over several base models: each model's jobs are sampled by a sampler of its own, in turns.

Knows nothing of requests, tenants or text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from mint.engine.lora import LoraWeights
from mint.engine.model.decoder import Decoder
from mint.engine.protocol import SampleJob, SampleResult, TokenListener
from mint.engine.sampling.sampler import Sampler, SamplerMemory

Resolve = Callable[[SampleJob], tuple[Decoder, SamplerMemory, LoraWeights | None]]
"""A job's base model, its memory and weights; raises `NotFoundError`."""


class MultiBaseBatch:
    """`SampleBatch` on PyTorch."""

    def __init__(self, resolve: Resolve) -> None:
        """Empty."""
        self._resolve = resolve
        self._samplers: dict[Decoder, Sampler] = {}
        self._sampler_of: dict[str, Sampler] = {}

    @property
    def keys(self) -> Collection[str]:
        """The jobs whose results are still to come."""
        return self._sampler_of.keys()

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        """A job, from the next step on.

        Raises:
            NotFoundError: its base or weights are not here.
        """
        decoder, memory, lora = self._resolve(job)
        sampler = self._samplers.setdefault(decoder, Sampler(decoder, memory))
        sampler.add(key, job, lora, listener)
        self._sampler_of[key] = sampler

    def cancel(self, key: str) -> None:
        """The job leaves at the next step; unknown keys are fine."""
        if key in self._sampler_of:
            self._sampler_of[key].cancel(key)

    def step(self) -> dict[str, SampleResult]:
        """A little further for each base model that has jobs; the jobs that ended by it."""
        results: dict[str, SampleResult] = {}
        for sampler in self._samplers.values():
            if sampler.keys:
                results |= sampler.step()
        for key in results:
            del self._sampler_of[key]
        return results
