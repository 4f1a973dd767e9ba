"""The settings of an RL run, over those of every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, field_serializer, field_validator, model_validator

from mint.config import rl_variables
from mint.errors import InvalidRequestError
from mint.rl.objective import (
    AdvantageFunction,
    BaselineFunction,
    FilterFunction,
    LossFunction,
    MetricsFunction,
    WeightFunction,
    check_function,
    recorded,
)
from mint.rl.run_config import RunConfig
from mint.types import LossName, SamplingParams
from mint.types.checkpoint_path import is_checkpoint_path
from mint.types.loss_settings import loss_settings
from mint.types.sampling import LogprobsMode
from mint.types.tool_call_formats import ToolCallFormat

AdvantageName = Literal["center", "rloo", "std", "std_batch", "reinforce++"]
BaselineName = Literal["group", "batch"]
CreditName = Literal["rollout", "turn"]
NormalizationName = Literal["sum", "constant", "token", "sequence"]
TruncationName = Literal["keep", "mask", "penalize", "soft"]
CorrectionName = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]
StalenessName = Literal["at_most", "exactly"]
CollapseName = Literal["warn", "stop", "rollback"]


BASE_REFERENCE = "base"
"""The value of `kl_reference` that means the base model."""


class RLConfig(RunConfig):
    """One RL run. Frozen; a changed copy is `config.changed(steps=100)`, which is checked as well.

    Raises:
        InvalidRequestError: a field is unknown, of the wrong type or out of range, the loss has no such setting, or two
            fields contradict each other.
    """

    not_in_the_result: ClassVar[frozenset[str]] = RunConfig.not_in_the_result | {
        "grader_concurrency", "grader_threads", "grader_retries", "grader_backoff_s", "metrics"
    }  # fmt: skip
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **RunConfig.names_elsewhere,
        **dict.fromkeys(("num_generations", "rollout_n", "rollouts_per_example", "n"), "group_size"),
        **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "kl_tau"), "kl_penalty_coef"),
        **dict.fromkeys(
            ("epsilon", "epsilon_low", "epsilon_high", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "cliprange"),
            "loss_fn='ppo' and loss_fn_config={'clip_low_threshold': 0.8, 'clip_high_threshold': 1.2}",
        ),
        **dict.fromkeys(("entropy_coef", "entropy_coeff"), "loss_fn_config={'entropy_coef': …}"),
        **dict.fromkeys(("loss_type", "loss_agg_mode"), "loss_fn and loss_normalization"),
        **dict.fromkeys(("scale_rewards", "adv_estimator", "norm_adv_by_std_in_grpo"), "advantage and baseline"),
        **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_response_length", "seq_len"), "max_tokens"),
        **dict.fromkeys(("num_iterations", "ppo_epochs", "epochs"), "epochs_per_batch"),
        **dict.fromkeys(("max_steps", "total_steps", "total_training_steps", "num_train_epochs"), "steps"),
        **dict.fromkeys(("eval_steps", "test_freq", "eval_interval"), "eval_every"),
        **dict.fromkeys(("mask_truncated_completions", "overlong_filtering"), "truncation='mask'"),
        **dict.fromkeys(("num_substeps", "ppo_mini_batch_size"), "optim_steps_per_batch"),
        **dict.fromkeys(("ref_model_sync_steps", "sync_ref_model"), "kl_reference_every"),
        "delta": "loss_fn='ppo' and loss_fn_config={'dual_clip': 3}",
        "oversampling_factor": "max_refill",
        **dict.fromkeys(("async_level", "max_async_level", "staleness_threshold"), "max_staleness"),
        **dict.fromkeys(("importance_sampling_level", "tis_imp_ratio_cap"), "correction and correction_high"),
        **dict.fromkeys(("filter_groups", "remove_constant_reward_groups"), "dynamic_sampling or group_filter"),
        "chat_template_kwargs": "chat_options",
        "reference": "kl_reference",
    }

    # The algorithm. Names and defaults are those of the parameter table in MinT's overview of RL.
    loss_fn: LossName | LossFunction = "importance_sampling"
    """A loss of the server, or your own function of logprobs, the sampler's logprobs, advantages and weights."""
    group_size: int = Field(4, ge=2, le=1024)
    """Completions per prompt."""
    batch_size: int = Field(8, ge=1, validation_alias=AliasChoices("batch_size", "groups_per_batch"))
    """Prompts per training step; `groups_per_batch` is the same."""
    max_tokens: int = Field(16, ge=1)
    """The most tokens of a completion; of an episode, those of one turn."""
    temperature: float = Field(0.8, gt=0, allow_inf_nan=False)
    """The sampling temperature of rollouts."""
    kl_penalty_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of KL(policy ‖ reference), taken as k1 inside the advantage (its exact gradient; see `kl_reference`)."""
    steps: int = Field(10, ge=0)
    """Training steps; each samples one batch of rollouts and trains on it."""

    # The objective.
    loss_fn_config: dict[str, float] | None = None
    """Sent unchanged, for example `{"clip_high_threshold": 1.28}` for ppo (clip-higher, arXiv 2503.14476)."""
    advantage: AdvantageName | AdvantageFunction = "center"
    """`center`: r − mean. `rloo`: r − mean of the others. `std`: (r − mean) / (std of the group + 1e-4). `std_batch`:
    the same with the deviation over the whole batch. `reinforce++`: reward less baseline, normalized to mean 0 and
    deviation 1 over the whole batch (arXiv 2501.03262). A function gets the rewards of a group less the baseline."""
    baseline: BaselineName | BaselineFunction = "group"
    """What is subtracted from a reward. `group`: the mean of its group. `batch`: the mean of all rewards of the batch.
    A function of the group gives a number, or one for each rollout. With a function as `advantage`, `group` leaves
    the rewards unchanged."""
    credit: CreditName = "rollout"
    """Of episodes. `rollout`: all tokens have the advantage of the whole reward. `turn`: the tokens of a turn have that
    of the rewards from this turn on, compared with the same turn of the other episodes of the group."""
    loss_normalization: NormalizationName = "sum"
    """What a token's loss is divided by. `sum`: nothing. `constant`: prompts · group_size · max_tokens (Dr. GRPO).
    `token`: the trained tokens of the batch (DAPO). `sequence`: first the tokens of its own rollout (GRPO; favours
    short answers when right and long ones when wrong)."""
    loss_weighting: WeightFunction | None = None
    """A function of a rollout and its advantage: a factor of its tokens' weights, besides `loss_normalization`."""
    group_filter: FilterFunction | None = None
    """A function of a group: whether it is trained on. With `dynamic_sampling`, the others are replaced, too."""
    kl_reference: str | None = None
    """The reference of the KL penalty. None: the policy at the start of the run, which is `init_from` or else the base
    model. `"base"`: the base model. A checkpoint (`mint://…`): its weights. The command line also takes a
    run: its name or the beginning of it, its number, or latest."""
    kl_penalty_coef_end: float | None = Field(None, ge=0, allow_inf_nan=False)
    """`kl_penalty_coef` changes linearly to this; None keeps it."""
    kl_reference_every: int = Field(0, ge=0)
    """Steps after which the policy of that moment becomes the reference (ProRL, arXiv 2505.24864); 0: never."""
    correction: CorrectionName | None = None
    """How samples of other weights are corrected for: a factor of each token's weight, from the ratio of the weights at
    the start of the step to those that sampled. The loss then compares with the weights at the start of the step (the
    decoupled objective, arXiv 2505.24298). `token_truncate`: the ratio of the token, at most `correction_high` (TIS).
    `token_mask`: the ratio of the token, 0 outside the bounds (IcePop). `sequence_truncate`, `sequence_mask`: the same
    with the ratio of the rollout, which is 0 above `correction_high` (MIS). `geometric_mask`: 1, or 0 for a rollout
    whose mean ratio per token is outside the bounds. Costs one more forward."""
    correction_low: float = Field(0.5, ge=0, allow_inf_nan=False)
    """The lower bound of the ratio, for `token_mask` and `geometric_mask`."""
    correction_high: float = Field(2.0, gt=0, allow_inf_nan=False)
    """The upper bound of the ratio, for every `correction`."""
    optim_steps_per_batch: int = Field(1, ge=1)
    """Optimizer steps per batch of rollouts, each on a part of the groups; off-policy from the second on."""
    epochs_per_batch: int = Field(1, ge=1)
    """How often a batch of rollouts is trained on; off-policy from the second time on."""
    replay_size: int = Field(0, ge=0)
    """Successes to keep for replay, at most one for each item; 0 keeps none. A group without a success gets that of its
    item in place of a failure (arXiv 2507.07451)."""
    replay_below: float = Field(0.25, gt=0, le=1)
    """A success is kept if at most this share of its group succeeded."""
    max_staleness: int = Field(0, ge=0)
    """Steps by which the sampling weights may lag behind; 0 is strictly on-policy, more samples ahead of training."""
    staleness: StalenessName = "at_most"
    """With `max_staleness`. `at_most`: a batch is sampled with the newest weights when it is begun, so that a run does
    not repeat bit for bit. `exactly`: with those of `max_staleness` steps before, so that it does."""
    swap_every: int = Field(0, ge=0)
    """With `max_staleness`: after so many tokens, a completion goes on with the newest weights; 0: never."""
    on_collapse: CollapseName = "warn"
    """On an `error` finding of a collapse: report it, stop the run, or stop and load the best checkpoint."""

    # Sampling.
    temperature_end: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The temperature changes linearly from `temperature` to this; None keeps it."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Rollouts are sampled from the most likely tokens that together have this probability; 1 is off."""
    top_k: int = Field(-1, ge=-1)
    """Rollouts are sampled from this many most likely tokens; -1 is off."""
    logprobs_mode: LogprobsMode = "raw"
    """Of the sampled tokens, as the loss gets them. `raw`: the policy's own, so that ratios are 1 on fresh weights at
    any temperature and `top_p`. `processed`: those of the distribution that was sampled from, so that ratios correct
    for temperature, `top_p` and `top_k`."""
    stop: list[str] | None = Field(None, strict=False)
    """Texts that end a completion, in addition to the model's own end token."""
    stop_token_ids: list[int] | None = Field(None, strict=False)
    """In addition to the model's own end token."""
    dynamic_sampling: bool = False
    """Replaces groups with equal rewards by groups of other prompts (DAPO, arXiv 2503.14476)."""
    max_refill: float = Field(3.0, ge=0, allow_inf_nan=False)
    """With `dynamic_sampling`: the most extra groups, per group of the batch."""
    truncation: TruncationName = "keep"
    """For a rollout that a limit cut off. `keep`: its reward counts. `mask`: it is left out of its group.
    `penalize`: its reward loses `truncation_penalty`. `soft`: a rollout loses a share of `truncation_penalty` that
    grows linearly over the last `overlong_buffer` tokens before the limit (DAPO, arXiv 2503.14476)."""
    truncation_penalty: float = Field(0.5, ge=0, allow_inf_nan=False)
    """What a rollout that a limit cut off loses, with `penalize`; the most that one loses, with `soft`."""
    overlong_buffer: int = Field(0, ge=0)
    """With `truncation="soft"`: the tokens before the limit in which the penalty grows."""
    chat_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of the model's chat template, for example `{"enable_thinking": False}`; for every prompt of the run."""
    tool_call_format: ToolCallFormat | None = None
    """How the policy writes tool calls; None: what the model's chat template or its special tokens say."""
    max_turns: int = Field(8, ge=1)
    """The most turns of an episode."""
    max_episode_tokens: int | None = Field(None, ge=1)
    """The most sampled tokens of an episode; None: only the model's context limits it."""
    max_episode_s: float = Field(60.0, gt=0)
    """The most seconds in an episode's own environment and tools; sampling does not count."""

    # Data.
    curriculum: bool = False
    """Prefers items with a success rate from `curriculum_low` to `curriculum_high`; retires solved items and tests them
    again."""
    curriculum_low: float = Field(0.2, ge=0, le=1)
    """The lowest success rate of the items that `curriculum` prefers."""
    curriculum_high: float = Field(0.8, ge=0, le=1)
    """The highest success rate of the items that `curriculum` prefers."""
    curriculum_retire_at: float = Field(0.95, gt=0, le=1)
    """The success rate at which an item is retired."""
    curriculum_retest_share: float = Field(0.05, ge=0, lt=1)
    """The share of picks that test solved and retired items again."""

    # Grading and evaluation.
    grader_timeout_s: float = Field(30.0, gt=0)
    """The longest time of one call of a reward function, an environment or a judge, without its wait for its turn."""
    grader_concurrency: int = Field(1024, ge=1, le=100_000)
    """Calls of `async` functions in flight at once, of all groups together."""
    grader_threads: int | None = Field(None, ge=1, le=4096)
    """Threads that call plain functions; None: one for each core, at least 4."""
    grader_retries: int = Field(0, ge=0, le=100)
    """How often a reward function that raised or timed out is called again; `UnsupportedError` is final."""
    grader_backoff_s: float = Field(1.0, ge=0, allow_inf_nan=False)
    """The pause before the first retry; it doubles with each further one, up to a minute."""
    heldout_size: int = Field(512, ge=0)
    """The most held-out items to evaluate on; 0 evaluates nothing."""
    heldout_samples: int = Field(1, ge=1)
    """Completions per held-out item at temperature 1, for pass@k."""
    eval_every: int = Field(0, ge=0)
    """Steps between held-out evaluations; 0: only before and after. The weights of the best one are saved."""
    metrics: tuple[MetricsFunction, ...] = Field((), strict=False)
    """Functions of the groups of a step; the numbers that they return are in `metrics.jsonl` as `custom/NAME`. One that
    is not finite is left out of the step, with a warning."""
    print_samples: int = Field(1, ge=0)
    """Rollouts to print per step, drawn at random, where progress is printed as lines; the screen of a terminal shows
    one anyway."""

    @field_serializer("loss_fn", "advantage", "baseline", "loss_weighting", "group_filter", when_used="json")
    def _function_by_name(self, value: Any) -> Any:
        return recorded(value)

    @model_validator(mode="after")
    def _functions_fit(self) -> Self:
        arguments = {
            "loss_fn": ("logprobs", "sampled_logprobs", "advantages", "weights"),
            "advantage": ("rewards",),
            "baseline": ("group",),
            "loss_weighting": ("rollout", "advantage"),
            "group_filter": ("group",),
        }
        for name, wanted in arguments.items():
            given = getattr(self, name)
            if callable(given):
                check_function(f"RLConfig.{name}", given, wanted)
        for given in self.metrics:
            check_function("RLConfig.metrics", given, ("groups",))
        if self.credit == "turn" and self.advantage == "reinforce++":
            raise InvalidRequestError(
                "cannot be combined with credit = turn",
                field="RLConfig.advantage",
                value=self.advantage,
                remedy='Set advantage="std_batch" or credit="rollout"',
            )
        if self.baseline != "group" and (self.advantage == "rloo" or self.credit == "turn"):
            other = "advantage = rloo" if self.advantage == "rloo" else "credit = turn"
            raise InvalidRequestError(
                f"cannot be combined with {other}, which has a baseline of its own",
                field="RLConfig.baseline",
                value=recorded(self.baseline),
                remedy='Leave out the baseline, or set advantage="center" and credit="rollout"',
            )
        return self

    @model_validator(mode="after")
    def _loss_is_known(self) -> Self:
        if callable(self.loss_fn):
            if self.loss_fn_config is not None:
                raise InvalidRequestError(
                    "is for the losses of the server, and loss_fn is a function",
                    field="RLConfig.loss_fn_config",
                    value=self.loss_fn_config,
                    remedy="Give the function its settings with functools.partial",
                )
            return self
        if self.loss_fn == "cross_entropy":
            raise InvalidRequestError(
                "is for demonstrations: it has no advantages",
                field="RLConfig.loss_fn",
                value=self.loss_fn,
                remedy="Choose importance_sampling, or train on demonstrations with mint.recipes.sft",
            )
        loss_settings(self.loss_fn, self.loss_fn_config)
        return self

    @field_validator("metrics", mode="before")
    @classmethod
    def _one_is_several(cls, given: Any) -> Any:
        return (given,) if callable(given) else given

    @field_validator("stop")
    @classmethod
    def _stops_have_text(cls, given: list[str] | None) -> list[str] | None:
        if given is not None and "" in given:
            raise InvalidRequestError(
                "has an empty text, which is in every completion", value=given, remedy="Leave it out, or give its text"
            )
        return given

    @field_validator("kl_reference")
    @classmethod
    def _reference_is_named(cls, given: str | None) -> str | None:
        if given is not None and given != BASE_REFERENCE and not is_checkpoint_path(given):
            raise InvalidRequestError(
                "is not a checkpoint",
                value=given,
                remedy=f'Give a path as mint://…/sampler_weights/NAME, "{BASE_REFERENCE}" for the base model, or None '
                "for the policy at the start of the run",
            )
        return given

    @model_validator(mode="after")
    def _curriculum_is_on_policy(self) -> Self:
        if self.curriculum and self.max_staleness:
            raise InvalidRequestError(
                "cannot be combined with curriculum: success rates are not known yet when samples are drawn ahead",
                field="RLConfig.max_staleness",
                value=self.max_staleness,
                remedy="Set max_staleness=0 or curriculum=False",
            )
        return self

    @model_validator(mode="after")
    def _swapping_is_possible(self) -> Self:
        if not self.swap_every:
            return self
        if not self.max_staleness or self.staleness == "exactly" or bool(self.stop):
            why = (
                "needs max_staleness of at least 1"
                if not self.max_staleness
                else "cannot be combined with staleness = exactly"
                if self.staleness == "exactly"
                else "cannot be combined with stop, whose text may lie in two pieces"
            )
            raise InvalidRequestError(
                why,
                field="RLConfig.swap_every",
                value=self.swap_every,
                remedy='Set max_staleness=1, staleness="at_most" and stop_token_ids in place of stop',
            )
        return self

    @model_validator(mode="after")
    def _correction_is_possible(self) -> Self:
        if self.correction_low >= self.correction_high:
            raise InvalidRequestError(
                f"is not below correction_high = {self.correction_high:g}",
                field="RLConfig.correction_low",
                value=self.correction_low,
                remedy="Try 0.5 and 2",
            )
        return self

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        limit = self.max_episode_tokens or self.max_tokens
        if self.truncation == "soft" and not 0 < self.overlong_buffer <= limit:
            raise InvalidRequestError(
                f'must be from 1 to the limit of {limit} tokens with truncation="soft"',
                field="RLConfig.overlong_buffer",
                value=self.overlong_buffer,
                remedy=f"Try {max(1, limit // 4)}",
            )
        return self

    @model_validator(mode="after")
    def _logprobs_are_the_policys(self) -> Self:
        if self.logprobs_mode == "processed" and (self.has_kl_penalty or self.correction is not None):
            what = "a KL penalty" if self.has_kl_penalty else "correction"
            raise InvalidRequestError(
                f"cannot be combined with {what}, which needs the policy's own logprobs",
                field="RLConfig.logprobs_mode",
                value=self.logprobs_mode,
                remedy='Set logprobs_mode="raw"',
            )
        return self

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        if self.curriculum_low > self.curriculum_high:
            raise InvalidRequestError(
                f"is above curriculum_high = {self.curriculum_high:g}",
                field="RLConfig.curriculum_low",
                value=self.curriculum_low,
                remedy="Try 0.2 and 0.8",
            )
        return self

    @model_validator(mode="after")
    def _steps_have_groups(self) -> Self:
        if self.optim_steps_per_batch > self.batch_size:
            raise InvalidRequestError(
                f"is above batch_size = {self.batch_size}: every optimizer step trains whole groups, at least one",
                field="RLConfig.optim_steps_per_batch",
                value=self.optim_steps_per_batch,
                remedy=f"Set it to at most {self.batch_size}, or raise epochs_per_batch to train more often on a batch",
            )
        return self

    def unused_settings(self) -> list[str]:
        """As `RunConfig.unused_settings`."""
        shaped = self.truncation in ("penalize", "soft")
        curriculum = ("curriculum_low", "curriculum_high", "curriculum_retire_at", "curriculum_retest_share")
        needs = (
            (self.has_kl_penalty, "kl_penalty_coef above 0", ("kl_reference", "kl_reference_every")),
            (self.max_staleness > 0, "max_staleness above 0", ("staleness",)),
            (self.truncation == "soft", "truncation = soft", ("overlong_buffer",)),
            (shaped, "truncation = penalize or soft", ("truncation_penalty",)),
            (self.correction is not None, "correction", ("correction_low", "correction_high")),
            (self.replay_size > 0, "replay_size above 0", ("replay_below",)),
            (self.dynamic_sampling, "dynamic_sampling = True", ("max_refill",)),
            (self.curriculum, "curriculum = True", curriculum),
            (self.heldout_size > 0, "heldout_size above 0", ("eval_every", "heldout_samples")),
            (self.grader_retries > 0, "grader_retries above 0", ("grader_backoff_s",)),
        )
        found = [each for met, needed, names in needs if not met for each in self.without_effect(needed, *names)]
        if self.dynamic_sampling and int(self.max_refill * self.batch_size) == 0:
            found.append(
                f"dynamic_sampling = True has no effect with max_refill = {self.max_refill:g} and batch_size = "
                f"{self.batch_size}, which allow no extra group"
            )
        cap = (self.loss_fn_config or {}).get("tis_cap")
        if cap is not None and cap >= 1 and self.correction and self.optim_steps_per_batch * self.epochs_per_batch == 1:
            found.append(
                f"loss_fn_config = {{'tis_cap': {cap:g}}} has no effect beside correction = {self.correction}, with "
                "which every ratio is 1 in the first optimizer step on a batch"
            )
        return found

    @classmethod
    def from_env(cls, **fields: Any) -> Self:
        """Reads `MINT_BASE_MODEL, MINT_LORA_RANK, MINT_RL_STEPS, MINT_RL_BATCH, MINT_RL_GROUP,
        MINT_RL_LR, MINT_RL_MAX_TOKENS, MINT_RL_TEMPERATURE`; `fields` are the values for variables that are not set."""
        settings: dict[str, Any] = {**fields, **rl_variables()}
        return cls(**settings)

    @property
    def groups_per_batch(self) -> int:
        """The other name of `batch_size`."""
        return self.batch_size

    def temperature_at(self, step: int) -> float:
        """The sampling temperature of `step` (counted from 1)."""
        if self.temperature_end is None or self.steps < 2:
            return self.temperature
        return self.temperature + (self.temperature_end - self.temperature) * (step - 1) / (self.steps - 1)

    @property
    def samples_raw_logprobs(self) -> bool:
        """Whether the sampler's logprobs are the policy's own: the trainer must then find the same on fresh weights."""
        unchanged = self.temperature == 1 and self.temperature_end in (None, 1) and self.top_p == 1 and self.top_k == -1
        return self.logprobs_mode == "raw" or unchanged

    @property
    def has_kl_penalty(self) -> bool:
        """Whether there is a KL penalty at any step."""
        return self.kl_penalty_coef > 0 or bool(self.kl_penalty_coef_end)

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss of the server has an entropy bonus."""
        return (self.loss_fn_config or {}).get("entropy_coef", 0.0) > 0

    def kl_penalty_coef_at(self, step: int) -> float:
        """The weight of the KL penalty at `step` (counted from 1)."""
        if self.kl_penalty_coef_end is None or self.steps < 2:
            return self.kl_penalty_coef
        return self.kl_penalty_coef + (self.kl_penalty_coef_end - self.kl_penalty_coef) * (step - 1) / (self.steps - 1)

    def evaluation_params(self, seed: int, temperature: float) -> SamplingParams:
        """How held-out completions are sampled: without `top_p` and `top_k`."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=temperature,
            seed=seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
        )

    def sampling_params(self, seed: int, temperature: float | None = None) -> SamplingParams:
        """How rollouts are sampled; `temperature` replaces the run's own."""
        return self.evaluation_params(seed, self.temperature if temperature is None else temperature).model_copy(
            update={"top_p": self.top_p, "top_k": self.top_k, "logprobs_mode": self.logprobs_mode}
        )
