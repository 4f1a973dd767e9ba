"""What SFT, DPO and distillation share: settings, examples as datums, batches, the loop over steps, evaluations.

The run itself (folder, checkpoints, resume, progress) is `mint.rl.run_frame`.

Letters: P prompt tokens · T completion tokens.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field

from mint.errors import InvalidRequestError
from mint.rl.run_config import RunConfig
from mint.rl.run_frame import RunFrame
from mint.rl.tracking.shown_result import ShownResult
from mint.types import Datum, ModelInput

TRAINED_ONLY = {"trained_only": 1.0}
"""The loss settings of every pass: no recipe reads the logprobs of prompts."""

ConfidenceInterval = tuple[float, float, float]
"""A mean with the low and high end of its 95 % interval."""


class SupervisedConfig(RunConfig):
    """The settings that these recipes share, with defaults for the bundled model."""

    base_model: str = "mint/tiny"
    batch_size: int = Field(16, ge=1)
    grad_clip_norm: float = Field(1.0, ge=0, allow_inf_nan=False)
    save_every: int = Field(50, ge=1)


@dataclass(frozen=True)
class Demonstration:
    """A prompt as token ids, as the task's `make_prompt` returns it, and the reply to learn."""

    prompt: list[int]
    completion: str


@dataclass(frozen=True)
class HeldoutScores:
    """`loss` and `accuracy` over `n` held-out examples; each recipe says of what."""

    loss: ConfidenceInterval
    accuracy: ConfidenceInterval
    n: int


@dataclass(frozen=True)
class TrainedRun:
    """The checkpoints of a run, and its held-out metrics by name, before and after."""

    run_dir: Path
    checkpoint: str
    sampler_checkpoint: str
    before: Mapping[str, ConfidenceInterval]
    after: Mapping[str, ConfidenceInterval]


@dataclass(frozen=True)
class SupervisedResult(ShownResult):
    """`checkpoint` can be trained on, `sampler_checkpoint` sampled from. Each recipe says what its scores measure;
    `before` and `after` are None if nothing is held out."""

    sampler_checkpoint: str
    before: HeldoutScores | None
    after: HeldoutScores | None

    @classmethod
    def of(cls, trained: TrainedRun, heldout: int) -> Self:
        """The result of a run that was evaluated on `heldout` examples."""
        return cls(
            run_dir=trained.run_dir,
            checkpoint=trained.checkpoint,
            sampler_checkpoint=trained.sampler_checkpoint,
            before=HeldoutScores(**trained.before, n=heldout) if heldout else None,
            after=HeldoutScores(**trained.after, n=heldout) if heldout else None,
        )


def completion_datum(prompt: Sequence[int], completion: Sequence[int]) -> Datum:
    """Weight 1 on the T completion tokens, 0 on the P prompt tokens; position t predicts token t + 1."""
    full = [*prompt, *completion]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return Datum(
        model_input=ModelInput.from_ints(full[:-1]), loss_fn_inputs={"target_tokens": full[1:], "weights": weights}
    )


def reply_ids(completion: str, tokenizer: Any) -> list[int]:
    """The token ids of a reply, with the end of turn, so that the model learns to stop."""
    return [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]


def steps_per_epoch(size: int, batch_size: int) -> int:
    """How many batches cover `size` examples; the last one may be smaller."""
    return -(-size // batch_size)


def batch_places(size: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Which of `size` examples make up the batch of `step`, counted from 1. Each epoch has its own order."""
    epoch, place = divmod(step - 1, steps_per_epoch(size, batch_size))
    order = np.random.default_rng([seed, epoch]).permutation(size)
    return order[place * batch_size : (place + 1) * batch_size].tolist()


def check_items(items: Any, kind: type, *, field: str, remedy: str) -> None:
    """Refuses what is not a list (or another sequence) of `kind`.

    Raises:
        InvalidRequestError: names the first item of another type.
    """
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise InvalidRequestError(
            f"is not a list, but a {type(items).__name__}", field=field, value=items, remedy=remedy
        )
    for place, item in enumerate(items):
        if not isinstance(item, kind):
            raise InvalidRequestError(
                f"is not a {kind.__name__}, but a {type(item).__name__}",
                field=f"{field}[{place}]",
                value=item,
                remedy=remedy,
            )


def check_disjoint(trained: Sequence[Any], heldout: Sequence[Any], kind: type) -> None:
    """Refuses an empty training set, one that shares a prompt with the held-out set, and items of another type.

    Raises:
        InvalidRequestError: one of these is the case.
    """
    for name, items in (("training set", trained), ("held-out set", heldout)):
        check_items(items, kind, field=name, remedy=f"Give a list of {kind.__name__}(prompt, …)")
    if not trained:
        raise InvalidRequestError("is empty", field="training set", value=[], remedy="Give at least one example")
    heldout_prompts = {tuple(example.prompt) for example in heldout}
    shared = sum(tuple(example.prompt) in heldout_prompts for example in trained)
    if shared:
        raise InvalidRequestError(
            f"shares {shared} prompts with the held-out set",
            field="training set",
            value=shared,
            remedy="Leave them out",
        )


def data_digest(*parts: Sequence[Any]) -> str:
    """A hash of the data, for `config.json`: a run is only resumed on the same data."""
    rows = [[example if isinstance(example, list) else asdict(example) for example in part] for part in parts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def run_steps(
    run: RunFrame,
    steps: int,
    train_step: Callable[[int], Mapping[str, float]],
    evaluate: Callable[[], Mapping[str, ConfidenceInterval]],
    *,
    heldout: int,
) -> TrainedRun:
    """Evaluates, takes the steps that are left, saves checkpoints as the settings say, and evaluates again.

    `train_step` takes the optimizer step of this number, counted from 1, and returns its metrics. `evaluate` measures
    the present weights on the `heldout` examples.
    """
    before = evaluate_once(run, "before", 0, heldout, evaluate)
    for step in range(run.first_step, steps + 1):
        began = time.monotonic()
        metrics = train_step(step)
        run.record_step(
            {
                "step": step,
                **metrics,
                "learning_rate": run.config.learning_rate_at(step, steps),
                "time/train_s": time.monotonic() - began,
                "time/unix_s": time.time(),
            }
        )
        if run.is_save_due(step, steps):
            run.save(step)
    checkpoint = run.save(steps)
    sampler_checkpoint = run.save_sampler_weights()
    after = evaluate_once(run, "after", steps, heldout, evaluate)
    return TrainedRun(run.log.folder, checkpoint, sampler_checkpoint, before, after)


def evaluate_once(
    run: RunFrame, when: str, step: int, count: int, evaluate: Callable[[], Mapping[str, ConfidenceInterval]]
) -> dict[str, ConfidenceInterval]:
    """Evaluates on `count` held-out examples and logs a row per metric; a resumed run takes these from its log.

    Nothing if `count` is 0.
    """
    if not count:
        return {}
    logged = [row for row in run.log.read("evaluations.jsonl") if (row["when"], row["step"]) == (when, step)]
    if logged:
        return {row["metric"]: (row["mean"], row["low"], row["high"]) for row in logged}
    scores = dict(evaluate())
    rows = [
        {"step": step, "when": when, "metric": name, "mean": mean, "low": low, "high": high, "n": count}
        for name, (mean, low, high) in scores.items()
    ]
    run.record_evaluations(rows)
    return scores
