"""The contract of every engine (torch, fake): its operations, and the values that go in and out, in numpy.

The service has validated everything that arrives here. Each lane of an engine is called from one thread at a time
(`Engine.lanes`).

Letters: N tokens of one datum · K alternatives per position · P prompt tokens · Q tokens asked about in it · T sampled
tokens.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from mint.types.loss_settings import loss_settings

_OUT_OF_MEMORY = re.compile(
    "can't allocate memory|not enough memory|out of memory|bad_alloc|could not create a (memory|primitive(?! desc))"
    "|can't start new thread",
    re.IGNORECASE,
)
"""Messages of torch, its CPU allocator, C++, oneDNN (which then has no memory for its generated code) and Python (which
has none for a stack)."""

LORA_ALPHA = 32.0
"""The lora's scale is LORA_ALPHA / rank, so that one learning rate serves all ranks (as Tinker's)."""


@dataclass(frozen=True)
class BaseInfo:
    """A loaded base model. `settings` are those that took effect (dtype, device, threads, …)."""

    name: str
    arch: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraSpec:
    """The shape of a lora and the seed of its A matrices (B starts at zero)."""

    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True)
class TrainDatum:
    """One example. All arrays have length N; `weights` multiply the loss and mask it before any exp.

    Cross-entropy alone may have K targets per position (top-K distillation); `weights` has the shape of `targets`.
    `inputs` holds the further per-token float32 arrays of the loss; `LOSSES` has the names.
    """

    tokens: np.ndarray  # int64 [N]
    targets: np.ndarray  # int64 [N] or [N, K]
    weights: np.ndarray  # float32 [N] or [N, K]
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def trained(self) -> np.ndarray:
        """Bool [N]: the positions at which any target has a weight."""
        trained = self.weights != 0
        return trained.any(axis=1) if trained.ndim == 2 else trained


@dataclass(frozen=True)
class LossSpec:
    """A loss by name, with its full configuration (defaults filled in)."""

    name: str
    config: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatching:
    """How a pass was fitted into memory.

    A micro-batch had about `rows` rows, and their gradients were added in this `order`: in a fixed tree, or one after
    the other, as older versions did. Both decide the bits of the result. `recompute`: whether activations were computed
    again in the backward instead of kept (None: only of sequences longer than `rows`), which changes no bit.
    """

    rows: int
    recompute: bool | None
    order: Literal["tree", "running"] = "tree"


@dataclass(frozen=True)
class PassResult:
    """For each datum in order the logprobs of its targets, float32 of their shape; and metrics named `name:reduction`.

    `entropies` [N] per datum are those of the distributions the targets were predicted from; empty where the engine
    has no distributions. `micro_batching` is what another pass needs to give the same bits, also when memory was short
    in this one; None where the engine cuts no micro-batches.
    """

    logprobs: list[np.ndarray]
    metrics: dict[str, float]
    entropies: list[np.ndarray] = field(default_factory=list)
    micro_batching: MicroBatching | None = None


@dataclass(frozen=True)
class AdamSpec:
    """One step of AdamW with decoupled weight decay; `grad_clip_norm` 0 is off."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True)
class ModelState:
    """All that a model needs to continue bit for bit: float32 arrays by name, and the optimizer's step count.

    Weights are named as PEFT names modules (`model.layers.0.self_attn.q_proj.lora_A.weight`, `lm_head.lora_B.weight`);
    the moments carry the same names in `exp_avg` and `exp_avg_sq` (None where the optimizer is not wanted).
    """

    weights: Mapping[str, np.ndarray]
    step: int = 0
    exp_avg: Mapping[str, np.ndarray] | None = None
    exp_avg_sq: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True)
class StopRule:
    """When a sequence ends: at one of `token_ids`, or once its text ends with or contains one of `strings`.

    `vocabulary[i]` is the bytes of token i; it is needed only where `strings` are given.
    """

    token_ids: frozenset[int] = frozenset()
    strings: tuple[bytes, ...] = ()
    vocabulary: Sequence[bytes] = ()


@dataclass(frozen=True)
class LogitBias:
    """Token ids int64 [J] and the numbers that are added to their logits, float32 [J]; no token twice."""

    tokens: np.ndarray
    values: np.ndarray


class GrammarState(Protocol):
    """The state of one sequence in a grammar over tokens. One thread at a time uses it, not always the same."""

    def allowed(self, bits: np.ndarray) -> None:
        """Writes which tokens may come next into `bits`, uint8 [4 · ceil(vocabulary / 32)]: bit i % 8, from the lowest,
        of byte i // 8 stands for token i. End tokens are among them where the text may end."""
        ...

    def advance(self, token: int) -> None:
        """Adds a token. One that was not allowed may leave any state: its sequence is given up."""
        ...


class Grammar(Protocol):
    """The texts that a sequence may be, over the tokens of one vocabulary."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that complete a text where they are allowed."""
        ...

    def start(self) -> GrammarState:
        """The state of an empty text."""
        ...


@dataclass(frozen=True)
class LogitRules:
    """How a job changes logits before tokens are drawn from them, in this order. The defaults change nothing.

    `allowed` int64 [·] are the only tokens to draw, `grammar` the only texts; `bias` adds to the logits of some tokens;
    before `min_tokens` no stop token is drawn, and no stop string ends a sequence. `repetition_penalty` divides
    the positive logits of tokens in the prompt or the sample, and multiplies the negative ones. From the logits of
    sampled tokens `frequency_penalty` is subtracted for each time, `presence_penalty` once. `min_p` excludes tokens
    whose probability, at the job's temperature, is below that share of the largest.
    """

    allowed: np.ndarray | None = None
    grammar: Grammar | None = None
    bias: LogitBias | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0


@dataclass(frozen=True)
class SampleJob:
    """`num_samples` continuations of one prompt under one set of weights.

    `weights_id` None samples from the base model `base`. Sample i draws its token at position t from the
    counter-based stream `(seed, i, t)`, so nothing else in the batch can change it. `logprobs_mode` is that of
    `SamplingParams`; the prompt's logprobs and all top-k are always the policy's own.

    About the prompt: `prompt_logprobs` asks for those of its own tokens, `topk_prompt_logprobs` for so many best tokens
    at each place, both for its last `prompt_logprobs_last_n` tokens (None: all but the first). `target_prompt_logprobs`
    are pairs (place >= 1, token); each gets its logprob. `prompt_alt_tokens_k` asks for so many draws at every place
    after the first, with replacement, at `temperature` without top-k and top-p.

    What is cached of prompts is reused only among jobs of one `cache_scope`, an opaque name: neither the time of a job
    nor the engine's counts tell it of the prompts of other scopes. Scopes get equal shares of a batch."""

    base: str
    weights_id: str | None
    prompt: np.ndarray  # int64 [P], P >= 1
    num_samples: int
    max_tokens: int  # 0 asks for the prompt's logprobs alone
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: StopRule
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    logprobs_mode: Literal["raw", "processed", "both"] = "raw"
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: np.ndarray | None = None  # int64 [Q, 2]
    prompt_alt_tokens_k: int = 0
    cache_scope: str = ""
    rules: LogitRules | None = None


@dataclass(frozen=True)
class TokenTable:
    """K tokens at each of some places, and their logprobs: int64 and float32, one row per place."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Sample:
    """One continuation: tokens int64 [T], logprobs float32 [T] as the job asked; `stopped` is False at max_tokens.

    `topk` has the most probable tokens at each place, best first, [T, K], where asked. With the logprobs mode `both`,
    `logprobs` are the raw ones, and `processed` float32 [T] those of the distributions that were drawn from. `details`
    is what an external sampler says of the sample beside its tokens (`weight_versions`, `routed_experts`).
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    topk: TokenTable | None = None
    processed: np.ndarray | None = None
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SampleResult:
    """The samples in order; prompt logprobs float32 [P] (NaN at the first place, and at those before the asked) and
    top-k pairs per place (None in the same places), where asked.

    `target_prompt_logprobs` float32 [Q] are those of the job's pairs, `prompt_alt_tokens` [P - 1, K] its draws.
    `samples` is empty where `max_tokens` was 0. With an `error` the job failed (its weights give no finite logits),
    its rules exclude every token (`NO_TOKEN`), or it was cancelled (`CANCELLED`), and the rest is empty. Other jobs
    of the call are not affected. `reused` counts the tokens of the prompt that were not computed, because an earlier
    job had.
    """

    samples: list[Sample]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    error: str | None = None
    target_prompt_logprobs: np.ndarray | None = None
    prompt_alt_tokens: TokenTable | None = None
    reused: int = 0


CANCELLED = "cancelled"
"""`SampleResult.error` of a job that was cancelled."""

NO_TOKEN = "no token"
"""`SampleResult.error` of a job whose rules exclude every token."""


TokenListener = Callable[[int, int, float], None]
"""Called with each token as it is drawn: (sample, token, logprob), in order for each sample. An exception from it ends
the step."""


class SampleBatch(Protocol):
    """Jobs that are sampled together; they join and leave between two steps. Used on the lane that samples.

    The result of a job is a function of that job alone, not of the other jobs or of when it joined. After `step` has
    raised, the batch must not be used any more.
    """

    @property
    def keys(self) -> Collection[str]:
        """The jobs without a result yet."""
        ...

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        """Adds a job, which joins at the next step; `key` is the caller's name for it.

        Raises `NotFoundError` where its weights are not loaded. They may be dropped later: the job keeps its own
        reference.
        """
        ...

    def cancel(self, key: str) -> None:
        """Removes the job at the next step, which returns it with the error `CANCELLED`; unknown keys are ignored."""
        ...

    def step(self) -> dict[str, SampleResult]:
        """Computes some prompt tokens and one token of every sequence; returns the results of the jobs that ended.

        An engine that draws samples elsewhere waits a moment for news of them instead.
        """
        ...


def sample_together(batch: SampleBatch, jobs: Sequence[SampleJob]) -> list[SampleResult]:
    """Samples `jobs` in an empty batch until all have ended; returns their results in order."""
    for place, job in enumerate(jobs):
        batch.add(str(place), job)
    results: dict[str, SampleResult] = {}
    while batch.keys:
        results |= batch.step()
    return [results[str(place)] for place in range(len(jobs))]


class Engine(Protocol):
    """The arithmetic behind the service.

    With two `lanes`, an engine trains and samples at the same time. `open_batch`, what it opens, `sample`,
    `load_weights` and `drop_weights` are called on the lane that samples; `load_base` on either one, by one thread at
    a time; all others on the lane that trains. The lanes meet in published weights alone.
    """

    @property
    def lanes(self) -> int:
        """1: one thread at a time calls the engine. 2: one trains while another samples."""
        ...

    def load_base(self, name: str, path: str) -> BaseInfo:
        """Loads the weights in `path` (a Hugging Face folder) as base `name`; does nothing if it is loaded."""
        ...

    def create_model(self, model_id: str, base: str, lora: LoraSpec) -> dict[str, Any]:
        """A new lora with fresh optimizer; returns the settings that took effect (alpha, scale, parameters, …)."""
        ...

    def model_bytes(self, base: str, lora: LoraSpec) -> int:
        """The memory of a model of this shape, with gradient, optimizer and a published copy; its base is loaded."""
        ...

    def state_bytes(self, base: str, lora: LoraSpec) -> int:
        """The size of what `read_state` gives of a model of this shape that was trained; its base is loaded."""
        ...

    def free_bytes(self) -> int | None:
        """The memory that is free where this engine keeps models; None if unknown."""
        ...

    def drop_model(self, model_id: str) -> None:
        """Forgets a model; unknown ids are fine."""
        ...

    def has_model(self, model_id: str) -> bool:
        """Whether the model is in memory."""
        ...

    def forward(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        """Logprobs and loss, no gradient; the model does not change."""
        ...

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[TrainDatum],
        loss: LossSpec,
        *,
        micro_batching: MicroBatching | None = None,
    ) -> PassResult:
        """Runs `forward`, and adds the gradient of the summed loss to the accumulated one.

        `micro_batching` of an earlier result makes this pass compute the same bits as that one. Raises
        `OutOfMemoryError`, with the gradient unchanged, where memory does not suffice for it.
        """
        ...

    def clear_gradient(self, model_id: str) -> None:
        """Throws the accumulated gradient away."""
        ...

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        """Applies and clears the gradient; a non-finite one is dropped, and nothing else changes."""
        ...

    def read_state(self, model_id: str) -> ModelState:
        """A copy of weights and optimizer."""
        ...

    def read_weights(self, model_id: str) -> dict[str, np.ndarray]:
        """A copy of the weights, named as those of `read_state`."""
        ...

    def write_state(self, model_id: str, state: ModelState) -> None:
        """Replaces weights and optimizer (moments None: a fresh optimizer) and clears the gradient.

        Raises `CheckpointError`, with the model unchanged, where names or shapes differ.
        """
        ...

    def state_digest(self, model_id: str, *, like: str | None = None) -> str:
        """A hash of weights, moments and step count, bit for bit.

        It is in the form of the digest `like`, so that the two can be compared: older versions had other forms.
        """
        ...

    def publish(self, model_id: str, weights_id: str) -> None:
        """Freezes a copy of the model's weights for sampling; later steps do not touch it.

        `weights_id` names this version, and jobs of it may be added from now on. If the copy takes a while to reach
        where samples are drawn, this does not wait for it: the jobs do, in their batch.
        """
        ...

    def load_weights(self, weights_id: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> None:
        """Makes saved weights available for sampling."""
        ...

    def drop_weights(self, weights_id: str) -> None:
        """Forgets published weights; unknown ids are fine."""
        ...

    def open_batch(self) -> SampleBatch:
        """An empty batch. Several may be open; training between two steps changes nothing in them."""
        ...

    def sample(self, jobs: Sequence[SampleJob]) -> list[SampleResult]:
        """Samples all jobs in a batch of their own; returns their results in order."""
        ...


# --- losses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossRule:
    """What a loss reads per token (required, optional), whether a position may have several targets, and whether it
    trains sampled tokens alone, where a datum says which those are."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    many_targets: bool = False
    sampled_only: bool = False


_POLICY = ("logprobs", "advantages")
_BOUNDS = ("clip_low_threshold", "clip_high_threshold")

LOSSES: Mapping[str, LossRule] = {
    "cross_entropy": LossRule(many_targets=True),
    "importance_sampling": LossRule(required=_POLICY),
    "ppo": LossRule(required=_POLICY, optional=_BOUNDS),
    "cispo": LossRule(required=_POLICY, optional=_BOUNDS),
    "dro": LossRule(required=_POLICY),
    "gspo": LossRule(required=_POLICY, optional=("sequence_ratio_mask",)),
    "stable_reinforce": LossRule(required=_POLICY, sampled_only=True),
    "sapo": LossRule(required=_POLICY),
}
"""Every loss with its inputs. `types.loss_settings` has the settings of each, `losses` the mathematics."""


def resolve_loss(name: str, config: Mapping[str, float | str] | None = None) -> LossSpec:
    """The loss with its full configuration, defaults filled in.

    Raises:
        InvalidRequestError: as `types.loss_settings`.
    """
    return LossSpec(name, loss_settings(name, config))


class ModelsLostError(RuntimeError):
    """The engine has lost all models, because processes that held them have ended. It works: they can be made again.

    From then on `has_model` is False for all of them; published weights are not lost. Any call on the lane that trains
    may raise this, if an engine has processes of its own.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short when this was raised: the same work may succeed in smaller parts, or later.

    Knows torch's errors by name and message.
    """
    match error:
        case MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            return type(error).__name__ == "OutOfMemoryError" or _OUT_OF_MEMORY.search(str(error)) is not None
    return False
