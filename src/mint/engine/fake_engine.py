"""A toy engine whose state is a hash chain: losing, doubling or swapping one operation changes every later digest.

It computes nothing: logprobs and samples are drawn from hashes of the weights and of what was asked. It answers in
microseconds, needs no torch, and keeps the contract of `Engine` (but for `LogitRules`: it has no logits), so that the
service can be tested for order, durability and exactly-once without any arithmetic in the way.

The state of a model is one 32-byte chain value (shown as the weight `chain`), the optimizer's step count, two moments
that copy the chain's history, and the gradient: a second chain over the passes since the last step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np

from mint.engine.protocol import (
    CANCELLED,
    LORA_ALPHA,
    AdamSpec,
    BaseInfo,
    LoraSpec,
    LossSpec,
    MicroBatching,
    ModelState,
    PassResult,
    Sample,
    SampleJob,
    SampleResult,
    TokenListener,
    TokenTable,
    TrainDatum,
    sample_together,
)
from mint.errors import CheckpointError, NotFoundError, RequestFailedError

POISON_TOKEN = 13
"""A datum with this token makes its pass fail, for tests of what follows a failed pass."""

MODEL_BYTES = 1000
"""The memory that a model pretends to take, for each rank."""

_NEWER_SETTINGS = frozenset({"trained_only", "entropy_coef", "dual_clip"})
"""Settings of a loss that do not go into the gradient: the stored data of older versions were trained without them."""

_WEIGHT = "chain"
_EMPTY = b""


@dataclass
class _TrainedModel:
    base: str
    lora: LoraSpec
    chain: bytes
    exp_avg: bytes = b"\0" * 32
    exp_avg_sq: bytes = b"\0" * 32
    gradient: bytes = _EMPTY
    step: int = 0


class FakeEngine:
    """`Engine` over hash chains. `vocab_size` and `context_length` are those of every base it loads."""

    def __init__(
        self,
        *,
        vocab_size: int = 1024,
        context_length: int = 512,
        state_bytes: int = 0,
        memory_bytes: int | None = None,
        lanes: int = 1,
    ) -> None:
        """`state_bytes` pads the saved state, to reach the service's rule for large states. `memory_bytes` is what is
        there for models, each of which takes `MODEL_BYTES` for a rank."""
        self.lanes = lanes
        self._memory_bytes = memory_bytes
        self.vocab_size = vocab_size
        self._context_length = context_length
        self._padding = np.zeros(state_bytes // 4, dtype=np.float32)
        self._bases: dict[str, BaseInfo] = {}
        self._models: dict[str, _TrainedModel] = {}
        self._weights: dict[str, bytes] = {}

    def load_base(self, name: str, path: str) -> BaseInfo:
        """A base with the configured sizes; `path` is only noted."""
        settings = {"implementation": "fake", "dtype": "float32", "device": "none", "path": path}
        info = BaseInfo(name, "fake", self.vocab_size, self._context_length, (0,), settings)
        return self._bases.setdefault(name, info)

    def create_model(self, model_id: str, base: str, lora: LoraSpec) -> dict[str, Any]:
        """A chain that starts from base, shape and seed; never from `model_id`."""
        # the folder's name alone: a test must not depend on where the project lies
        seeded = (PurePath(base).name, lora.rank, lora.seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        self._models[model_id] = _TrainedModel(base, lora, _hash(b"create", repr(seeded)))
        return {"alpha": LORA_ALPHA, "scale": LORA_ALPHA / lora.rank, "parameters": 32}

    def model_bytes(self, base: str, lora: LoraSpec) -> int:
        """`MODEL_BYTES` for each rank."""
        return MODEL_BYTES * lora.rank

    def state_bytes(self, base: str, lora: LoraSpec) -> int:
        """The chain and its moments, and the padding."""
        return 3 * _as_array(b"\0" * 32).nbytes + self._padding.nbytes

    def free_bytes(self) -> int | None:
        """What the models leave of `memory_bytes`."""
        if self._memory_bytes is None:
            return None
        return self._memory_bytes - sum(MODEL_BYTES * model.lora.rank for model in self._models.values())

    def drop_model(self, model_id: str) -> None:
        """Forgets a model; unknown ids are fine."""
        self._models.pop(model_id, None)

    def has_model(self, model_id: str) -> bool:
        """Whether the model is in memory."""
        return model_id in self._models

    def forward(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        """Logprobs of each target under the chain, as `sample` would give them."""
        model = self._model(model_id)
        for datum in data:
            if POISON_TOKEN in datum.tokens:
                raise RequestFailedError(f"a datum holds the poison token {POISON_TOKEN}")
        logprobs = [_logprobs(model.chain, datum.tokens, datum.targets) for datum in data]
        if bool(loss.config.get("trained_only")):
            for datum, own in zip(data, logprobs, strict=True):
                own[datum.weights == 0] = 0
        total = -sum(float((datum.weights * row).sum()) for datum, row in zip(data, logprobs, strict=True))
        tokens = float(sum(datum.trained.sum() for datum in data))
        return PassResult(logprobs, {"loss:sum": total, "tokens:sum": tokens})

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[TrainDatum],
        loss: LossSpec,
        *,
        micro_batching: MicroBatching | None = None,
    ) -> PassResult:
        """Runs `forward`, and chains the whole request onto the gradient; there are no micro-batches here."""
        result = self.forward(model_id, data, loss)
        model = self._model(model_id)
        settings = sorted((name, value) for name, value in loss.config.items() if name not in _NEWER_SETTINGS)
        parts: list[bytes | str] = [model.gradient, loss.name, repr(settings)]
        for datum in data:
            parts += [datum.tokens.tobytes(), datum.targets.tobytes(), datum.weights.tobytes()]
            for key in sorted(datum.inputs):
                parts += [key, datum.inputs[key].tobytes()]
        model.gradient = _hash(*parts)
        return result

    def clear_gradient(self, model_id: str) -> None:
        """Throws the accumulated gradient away."""
        self._model(model_id).gradient = _EMPTY

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        """Chains gradient and settings onto the weights."""
        model = self._model(model_id)
        model.exp_avg = _hash(b"m", model.exp_avg, model.gradient)
        model.exp_avg_sq = _hash(b"v", model.exp_avg_sq, model.gradient)
        model.step += 1
        model.chain = _hash(b"step", model.chain, model.gradient, model.exp_avg, model.exp_avg_sq, repr(adam))
        norm = float(np.frombuffer(model.gradient[:4], dtype=np.uint32)[0]) / 2**32 if model.gradient else 0.0
        model.gradient = _EMPTY
        metrics = {"grad_norm": norm, "step": float(model.step), "learning_rate": adam.learning_rate}
        return {**metrics, "skipped_nonfinite": 0.0}

    def read_state(self, model_id: str) -> ModelState:
        """Chain and moments as float32 arrays (whose bits are the bytes)."""
        model = self._model(model_id)
        weights = {_WEIGHT: _as_array(model.chain)}
        if self._padding.size:
            weights["padding"] = self._padding
        moments = {_WEIGHT: _as_array(model.exp_avg)}, {_WEIGHT: _as_array(model.exp_avg_sq)}
        return ModelState(weights, model.step, *moments)

    def read_weights(self, model_id: str) -> dict[str, np.ndarray]:
        """The chain alone."""
        return dict(self.read_state(model_id).weights)

    def write_state(self, model_id: str, state: ModelState) -> None:
        """Replaces chain, moments and step; `CheckpointError` where the shape is not a chain's."""
        model = self._model(model_id)
        chain = _as_chain(state.weights)
        fresh = state.exp_avg is None or state.exp_avg_sq is None
        model.exp_avg = b"\0" * 32 if fresh else _as_chain(state.exp_avg or {})
        model.exp_avg_sq = b"\0" * 32 if fresh else _as_chain(state.exp_avg_sq or {})
        model.step = 0 if fresh else state.step
        model.chain = chain
        model.gradient = _EMPTY

    def state_digest(self, model_id: str, *, like: str | None = None) -> str:
        """A hash of chain, moments and step count."""
        model = self._model(model_id)
        return _hash(model.chain, model.exp_avg, model.exp_avg_sq, str(model.step)).hex()

    def publish(self, model_id: str, weights_id: str) -> None:
        """Freezes the chain as it is now."""
        self._weights[weights_id] = self._model(model_id).chain

    def load_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes a saved chain available for sampling."""
        self._weights[weights_id] = _as_chain(weights)

    def drop_weights(self, weights_id: str) -> None:
        """Forgets published weights; unknown ids are fine."""
        self._weights.pop(weights_id, None)

    def open_batch(self) -> FakeBatch:
        """An empty batch; training between two steps changes nothing in it."""
        return FakeBatch(self)

    def sample(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """All jobs in a batch of their own, to its end."""
        return sample_together(self.open_batch(), jobs)

    def chain_of(self, job: SampleJob) -> bytes:
        """The weights that a job samples from; raises `NotFoundError` where they are not loaded."""
        if job.weights_id is None:
            return _hash(b"base", PurePath(job.base).name)
        if job.weights_id not in self._weights:
            raise NotFoundError(f"no weights {job.weights_id} are loaded")
        return self._weights[job.weights_id]

    def _model(self, model_id: str) -> _TrainedModel:
        if model_id not in self._models:
            raise NotFoundError(f"no model {model_id} is loaded")
        return self._models[model_id]


@dataclass
class _Running:
    """A job of a batch: the tokens of each of its samples so far."""

    job: SampleJob
    chain: bytes
    listener: TokenListener | None
    tokens: list[list[int]]
    logprobs: list[list[float]]
    stopped: list[bool]


class FakeBatch:
    """`SampleBatch` from hashes of (weights, prompt, seed, sample, position): one token per sequence and step."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._running: dict[str, _Running] = {}
        self._cancelled: set[str] = set()

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        return self._running.keys()

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        """Adds a job; raises `NotFoundError` where its weights are not loaded."""
        count = job.num_samples if job.max_tokens else 0
        chain = self._engine.chain_of(job)
        self._running[key] = _Running(
            job, chain, listener, [[] for _ in range(count)], [[] for _ in range(count)], [False] * count
        )

    def cancel(self, key: str) -> None:
        """Removes the job at the next step; unknown keys are ignored."""
        if key in self._running:
            self._cancelled.add(key)

    def step(self) -> dict[str, SampleResult]:
        """One token for every sequence; returns the results of the jobs that ended."""
        results: dict[str, SampleResult] = {}
        for key, running in list(self._running.items()):
            if key in self._cancelled:
                results[key] = SampleResult([], error=CANCELLED)
            elif self._advance(running):
                results[key] = self._result(running)
        for key in results:
            del self._running[key]
            self._cancelled.discard(key)
        return results

    def _advance(self, running: _Running) -> bool:
        """Whether the job has ended."""
        job = running.job
        ended = True
        for index, tokens in enumerate(running.tokens):
            if running.stopped[index] or len(tokens) >= job.max_tokens:
                continue
            seed, stream = (0, 0) if job.temperature == 0 else (job.seed, index)
            place = repr((seed, stream, len(tokens), job.top_k, job.top_p))
            drawn = _hash(running.chain, job.prompt.tobytes(), place)
            tokens.append(int.from_bytes(drawn[:4], "little") % self._engine.vocab_size)
            running.logprobs[index].append(float(_logprobs_of(running.chain, job, tokens)[-1]))
            running.stopped[index] = tokens[-1] in job.stop.token_ids
            if running.listener is not None:
                running.listener(index, tokens[-1], running.logprobs[index][-1])
            ended &= running.stopped[index] or len(tokens) >= job.max_tokens
        return ended

    def _result(self, running: _Running) -> SampleResult:
        job, chain = running.job, running.chain
        samples = []
        for tokens, logprobs, stopped in zip(running.tokens, running.logprobs, running.stopped, strict=True):
            topk = None
            if job.topk_sample_logprobs:
                best = np.tile(np.arange(job.topk_sample_logprobs), (len(tokens), 1))
                topk = TokenTable(best, (-1.0 - best).astype(np.float32))
            processed = None
            if job.logprobs_mode == "both":
                processed = _logprobs_of(chain, replace(job, logprobs_mode="processed"), tokens)
            samples.append(
                Sample(np.asarray(tokens, np.int64), np.asarray(logprobs, np.float32), stopped, topk, processed)
            )
        size = job.prompt.size
        last_n = job.prompt_logprobs_last_n
        first = 1 if last_n is None else size - last_n
        prompt_logprobs, topk_prompt, targets, draws = None, None, None, None
        if job.prompt_logprobs:
            prompt_logprobs = np.full(size, np.nan, dtype=np.float32)
            prompt_logprobs[first:] = _logprobs(chain, job.prompt[:-1], job.prompt[1:])[first - 1 :]
        if job.topk_prompt_logprobs:
            pairs = [(token, -1.0 - token) for token in range(job.topk_prompt_logprobs)]
            topk_prompt = [None if place < first else list(pairs) for place in range(size)]
        if job.target_prompt_logprobs is not None:
            places, tokens = job.target_prompt_logprobs.T
            targets = _logprobs(chain, job.prompt[:-1], np.arange(self._engine.vocab_size)[None])[places - 1, tokens]
        if job.prompt_alt_tokens_k:
            shape = (size - 1, job.prompt_alt_tokens_k)
            drawn = (np.arange(shape[0] * shape[1]).reshape(shape) + job.seed) % self._engine.vocab_size
            draws = TokenTable(drawn, _logprobs(chain, job.prompt[:-1], drawn))
        return SampleResult(
            samples, prompt_logprobs, topk_prompt, target_prompt_logprobs=targets, prompt_alt_tokens=draws
        )


def _hash(*parts: bytes | str) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()


def _logprobs_of(chain: bytes, job: SampleJob, tokens: list[int]) -> np.ndarray:
    """float32 [T] of sampled tokens, as the job asked for them."""
    if job.logprobs_mode == "processed" and job.temperature == 0:
        return np.zeros(len(tokens), np.float32)
    whole = np.concatenate([job.prompt, np.asarray(tokens, dtype=np.int64)])
    return _logprobs(chain, whole[:-1], whole[1:])[job.prompt.size - 1 :]


def _logprobs(chain: bytes, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float32 in (-4, 0], of the shape of `targets` ([N] or [N, K]): a function of the chain, of how far the sequence
    has come, and of the target."""
    salt = int.from_bytes(chain[:8], "little")
    seen = np.cumsum(tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)
    seen = seen[:, None] if targets.ndim == 2 else seen
    mixed = (seen ^ np.uint64(salt)) + targets.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (-(mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**22)).astype(np.float32)


def _as_array(chain: bytes) -> np.ndarray:
    """Each byte as one small float, so that no bit pattern is a NaN on its way through a file."""
    return np.frombuffer(chain, dtype=np.uint8).astype(np.float32)


def _as_chain(arrays: Mapping[str, np.ndarray]) -> bytes:
    array = arrays.get(_WEIGHT)
    if array is None or array.shape != (32,):
        raise CheckpointError(f"the fake engine's state is one array `{_WEIGHT}` of 32 numbers")
    return array.astype(np.uint8).tobytes()
