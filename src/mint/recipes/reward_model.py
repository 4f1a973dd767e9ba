"""A reward model from pairs: a scalar head on the last hidden state, trained with its lora by the Bradley-Terry loss.

The head is the difference of two rows of the unembedding, those of the `head_tokens`: score = log p(a) - log p(b) after
the whole text. The normalizer of both logprobs is the same and falls away, so the score is (w_a - w_b) · h, a linear
function of the last hidden state h, and the lora on the unembedding trains its weights. So every server of the protocol
trains and serves it, and nothing is added to a checkpoint. It differs from a head of its own in two ways: it starts at
w_a - w_b, not at 0 or at random, and other libraries do not load it as a sequence classifier.

loss = -log σ(s_c - s_r) + coef · (s_c + s_r)², c chosen, r rejected: Bradley-Terry (arXiv 2203.02155), and the term
that keeps the mean score near 0 (arXiv 2312.09244).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import Field, model_validator

import mint
from mint import types
from mint.errors import InvalidRequestError
from mint.recipes.dpo import Preference
from mint.recipes.supervised import (
    ConfidenceInterval,
    SupervisedConfig,
    SupervisedResult,
    batch_places,
    check_disjoint,
    data_digest,
    reply_ids,
    run_steps,
    steps_per_epoch,
)
from mint.rl.checkpoint_sampler import checkpoint_sampler
from mint.rl.estimate import interval
from mint.rl.run_frame import ProgressHook, open_run

UNASKED = -1
"""In a request for logprobs of prompt tokens: nothing is asked at this place."""


class RewardModelConfig(SupervisedConfig):
    """One run. `learning_rate` suits the bundled model. `head_tokens` None: the last two ids of the tokenizer, which
    most models hardly ever train, so that the scores begin near each other."""

    learning_rate: float = Field(1e-3, ge=0, allow_inf_nan=False)
    epochs: int = Field(1, ge=1)
    center_coef: float = Field(0.01, ge=0, allow_inf_nan=False)
    head_tokens: tuple[int, int] | None = Field(None, strict=False)

    @model_validator(mode="after")
    def _head_is_trained(self) -> RewardModelConfig:
        if not self.train_unembed:
            raise InvalidRequestError(
                "leaves the head untrained: it is a lora on the unembedding",
                field="RewardModelConfig.train_unembed",
                value=False,
                remedy="Set train_unembed=True",
            )
        if self.head_tokens is not None and self.head_tokens[0] == self.head_tokens[1]:
            raise InvalidRequestError(
                "are equal, so that every score is 0",
                field="RewardModelConfig.head_tokens",
                value=self.head_tokens,
                remedy="Give two different token ids, or None",
            )
        return self


@dataclass(frozen=True)
class RewardModelResult(SupervisedResult):
    """Of `before` and `after`, `loss` is that of a pair without the centring term (log 2 for equal scores), and
    `accuracy` is the share of pairs whose chosen reply has the higher score."""

    head_tokens: tuple[int, int] = (0, 1)


def run_reward_model(
    preferences: Sequence[Preference],
    heldout: Sequence[Preference],
    config: RewardModelConfig,
    *,
    service_client: mint.ServiceClient | None = None,
    resume: bool = False,
    on_progress: ProgressHook | None = None,
) -> RewardModelResult:
    """Trains on `preferences` and evaluates on `heldout` before and after.

    `resume` continues the run in `config.run_dir` from its last checkpoint, to the same bits as without a break.

    Raises:
        InvalidRequestError: there is nothing to train on, an item is not a `Preference`, a prompt is both trained on
            and held out, or `run_dir` holds another run.
    """
    check_disjoint(preferences, heldout, Preference)
    steps = config.epochs * steps_per_epoch(len(preferences), config.batch_size)
    described = {"task": "reward_model", "steps": steps, "data": data_digest(preferences, heldout)}
    with open_run(
        config, service_client, name="reward-model", described=described, resume=resume, on_progress=on_progress
    ) as run:
        trainer = run.trainer
        tokenizer = trainer.get_tokenizer()
        head = config.head_tokens or default_head(tokenizer)
        data = [datum for pair in preferences for datum in pair_datums(pair, tokenizer, head)]
        heldout_data = [datum for pair in heldout for datum in pair_datums(pair, tokenizer, head)]

        def evaluate_now() -> dict[str, ConfidenceInterval]:
            if not heldout_data:
                return {}
            outputs = trainer.forward(heldout_data, "cross_entropy").result().loss_fn_outputs
            last = [output["logprobs"].to_numpy()[-1] for output in outputs]
            scores = [float(row[0]) - float(row[1]) for row in last]
            margins = [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
            losses = [max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))) for margin in margins]
            right = [float(margin > 0) for margin in margins]
            return {"loss": interval(losses), "accuracy": interval(right, proportion=True)}

        def train_step(step: int) -> dict[str, float]:
            places = batch_places(len(preferences), config.batch_size, step, config.seed)
            rows = [data[row] for place in places for row in (2 * place, 2 * place + 1)]
            passed = trainer.forward_backward_custom(rows, bradley_terry_loss(config.center_coef))
            stepped = trainer.optim_step(config.adam_params(step, steps))
            metrics = passed.result().metrics
            return {
                **{f"train/{name}": metrics[name] for name in ("pair_loss", "pair_accuracy", "margin", "mean_score")},
                "optim/grad_norm": stepped.result().metrics["grad_norm"],
            }

        trained = run_steps(run, steps, train_step, evaluate_now, heldout=len(heldout))
        return replace(RewardModelResult.of(trained, len(heldout)), head_tokens=head)


def default_head(tokenizer: Any) -> tuple[int, int]:
    """The last two ids of the tokenizer."""
    return len(tokenizer) - 1, len(tokenizer) - 2


def pair_datums(pair: Preference, tokenizer: Any, head: tuple[int, int]) -> list[types.Datum]:
    """Two datums, the chosen reply first: at each place the two tokens of the head, with a weight at the last alone."""
    datums = []
    for reply in (pair.chosen, pair.rejected):
        tokens = [*pair.prompt, *reply_ids(reply, tokenizer)]
        targets = np.tile(np.asarray(head, dtype=np.int64), (len(tokens), 1))
        weights = np.zeros(targets.shape, dtype=np.float32)
        weights[-1] = 1.0
        inputs = {
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(weights),
        }
        datums.append(types.Datum(types.ModelInput.from_ints(tokens), inputs))
    return datums


def bradley_terry_loss(center_coef: float) -> Any:
    """The loss for `forward_backward_custom`, summed over pairs; rows are chosen, rejected, chosen, rejected, …"""

    def loss(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        scores = [row[-1, 0] - row[-1, 1] for row in logprobs]
        pairs = list(zip(scores[::2], scores[1::2], strict=True))
        # log(1 + exp(-m)), in the form that does not overflow
        losses = [(rejected - chosen).logaddexp(0 * chosen) for chosen, rejected in pairs]
        center = [center_coef * (chosen + rejected) ** 2 for chosen, rejected in pairs]
        count = len(pairs)
        metrics = {
            "pair_loss": float(sum(losses).detach()) / count,
            "pair_accuracy": sum(bool(chosen > rejected) for chosen, rejected in pairs) / count,
            "margin": float(sum(chosen - rejected for chosen, rejected in pairs).detach()) / count,
            "mean_score": float(sum(scores).detach()) / len(scores),
        }
        return sum(losses) + sum(center), metrics

    return loss


class RewardModel:
    """Scores replies; a grader for `compute_reward`. Both methods may be awaited many at once."""

    def __init__(
        self, service: mint.ServiceClient, weights: str, *, head_tokens: tuple[int, int] | None = None
    ) -> None:
        """`weights` is the `sampler_checkpoint` of a `RewardModelResult`, `head_tokens` those of the run."""
        self.sampler = checkpoint_sampler(service, weights)
        self.tokenizer = self.sampler.get_tokenizer()
        self.head_tokens = head_tokens or default_head(self.tokenizer)

    async def score(self, prompt: Sequence[int], reply: str) -> float:
        """The score of a reply to a prompt of token ids: any number, near 0 on average over the training pairs."""
        tokens = [*prompt, *reply_ids(reply, self.tokenizer)]
        asked = np.full((len(tokens), 2), UNASKED, dtype=np.int64)
        asked[-1] = self.head_tokens
        response = await self.sampler.sample(
            # One more token, whatever it is: what is asked is which token comes at its place.
            types.ModelInput.from_ints([*tokens, self.head_tokens[0]]),
            1,
            types.SamplingParams(max_tokens=0),
            target_prompt_logprobs=types.TensorData.from_numpy(asked),
        )
        found = response.target_prompt_logprobs
        assert found is not None, "the server answers what it was asked"
        first, second = found.to_numpy().reshape(-1, 2)[-1].tolist()
        return first - second

    async def reward(self, prompt: Sequence[int], reply: str) -> float:
        """The score as a reward in [0, 1]: σ(score), the chance that the reply is preferred to one of score 0."""
        score = await self.score(prompt, reply)
        return 1 / (1 + math.exp(-score)) if score > -700 else 0.0
