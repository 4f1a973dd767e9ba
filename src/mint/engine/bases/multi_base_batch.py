"""A batch of jobs over several base models. Each base has its own sampler; a step runs all of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection

from mint.engine.bases.base_model import BaseModel, BaseSampler
from mint.engine.lora import LoraWeights
from mint.engine.protocol import SampleJob, SampleResult, TokenListener

Resolve = Callable[[SampleJob], tuple[BaseModel, LoraWeights | None]]
"""Finds the base model of a job, and the job's lora; raises `NotFoundError`."""


class MultiBaseBatch:
    """`SampleBatch` over the base models of one engine."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._samplers: dict[BaseModel, BaseSampler] = {}
        self._sampler_of: dict[str, BaseSampler] = {}

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        return self._sampler_of.keys()

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        """Adds a job; it joins at the next step.

        Raises:
            NotFoundError: its base or weights are not loaded.
        """
        base, lora = self._resolve(job)
        if base not in self._samplers:
            self._samplers[base] = base.open_sampler()
        sampler = self._samplers[base]
        sampler.add(key, job, lora, listener)
        self._sampler_of[key] = sampler

    def cancel(self, key: str) -> None:
        """Removes the job at the next step; unknown keys are ignored."""
        if key in self._sampler_of:
            self._sampler_of[key].cancel(key)

    def step(self) -> dict[str, SampleResult]:
        """One step of every base that has jobs; returns the results of the jobs that ended."""
        results: dict[str, SampleResult] = {}
        for sampler in self._samplers.values():
            if sampler.keys:
                results |= sampler.step()
        for key in results:
            del self._sampler_of[key]
        return results
