"""Ten things that a researcher changes in an RL run, each in at most ten lines.

    python examples/06_ten_changes.py              all of them, two steps each
    python examples/06_ten_changes.py my_loss      one of them

Each function returns a task and the settings to train it with. The functions inside it are yours: mint names them in
the run's record, and refuses what they may not return.
"""

import sys

import numpy as np

from mint.recipes.math import DEMO, MathAdapter
from mint.rl import MessageEnvAdapter, Reward, mixture, run_grpo
from mint.rl.tasks.tool_calls import tool
from mint.rl.tasks.tool_env import Costs, ToolEnv

SHORT = DEMO.changed(steps=2, batch_size=8, heldout_size=16)


def my_advantage():
    """Advantages by rank instead of by size: one outlier cannot outweigh a group."""

    def by_rank(rewards):
        ranks = rewards.argsort().argsort() / (len(rewards) - 1) - 0.5
        return ranks if rewards.std() else np.zeros(len(rewards))

    return MathAdapter(), SHORT.changed(advantage=by_rank)


def my_baseline():
    """The median of the group instead of its mean."""

    def median(group):
        return float(np.median([rollout.reward for rollout in group.rollouts]))

    return MathAdapter(), SHORT.changed(baseline=median)


def my_loss():
    """A loss of your own on the logprobs, in torch: the ratio to the sampler, cut off at 2."""

    def cut_ratio(logprobs, sampler_logprobs, advantages, weights):
        ratio = (logprobs - sampler_logprobs).exp().clamp(max=2.0)
        return -(weights * advantages * ratio)

    return MathAdapter(), SHORT.changed(loss_fn=cut_ratio)


def my_weights():
    """Failures count half, and long answers no more than short ones."""

    def weight(rollout, advantage):
        return (0.5 if advantage < 0 else 1.0) / max(1, len(rollout.tokens))

    return MathAdapter(), SHORT.changed(loss_weighting=weight)


def my_filter():
    """Train only on groups that are neither hopeless nor almost solved; dynamic sampling replaces the others."""

    def in_between(group):
        return 0.1 < sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts) < 0.9

    return MathAdapter(), SHORT.changed(group_filter=in_between, dynamic_sampling=True)


def my_metrics():
    """Numbers of your own in metrics.jsonl: how many different answers a prompt gets."""

    def diversity(groups):
        return {"distinct": float(np.mean([len({one.text for one in group.rollouts}) for group in groups]))}

    return MathAdapter(), SHORT.changed(metrics=(diversity,))


def my_reward():
    """Partial credit with named parts: the right answer, and a number at all."""

    class Lenient(MathAdapter):
        def compute_reward(self, response, item):
            parts = {"right": 0.9 * super().compute_reward(response, item).value}
            parts["number"] = 0.1 * response.strip().lstrip("-").isdigit()
            return Reward(sum(parts.values()), parts)

    return Lenient(), SHORT


def my_batch_reward():
    """Rewards that need the whole batch: a right answer is worth more, the rarer right answers are."""

    class Rare(MathAdapter):
        def compute_batch_rewards(self, responses, items):
            pairs = zip(responses, items, strict=True)
            right = [[self.compute_reward(one, item).value for one in group] for group, item in pairs]
            return [[value * (1 - 0.5 * np.mean(group)) for value in group] for group in right]

    return Rare(), SHORT


def my_mixture():
    """Two tasks, three to one, each with readings of its own."""
    tasks = {"small": MathAdapter(train_size=64), "large": MathAdapter(seed=1)}
    return mixture(tasks, weights={"large": 3}), SHORT


def my_tool():
    """A tool of your own in episodes of several turns; each call costs a little."""

    @tool
    def double(number: int) -> int:
        """Twice a number."""
        return 2 * number

    class Doubling(MessageEnvAdapter):
        def build_dataset(self):
            return list(range(10, 99))

        def make_env(self, item):
            asked = [{"role": "user", "content": f"What is twice {item}?"}]
            return ToolEnv(asked, [double], lambda text, _: float(str(2 * item) in text), costs=Costs(per_call=0.05))

    return Doubling(), SHORT.changed(max_turns=2, max_tokens=32)


CHANGES = (
    my_advantage,
    my_baseline,
    my_loss,
    my_weights,
    my_filter,
    my_metrics,
    my_reward,
    my_batch_reward,
    my_mixture,
    my_tool,
)

if __name__ == "__main__":
    for change in CHANGES:
        if change.__name__ in (sys.argv[1:] or [change.__name__]):
            task, config = change()
            result = run_grpo(task, config)
            print(f"{change.__name__}: {result.samples} samples, run {result.run_dir}")
