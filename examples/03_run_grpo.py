"""A task of your own in the RL library: write data, prompt and reward; `run_grpo` does the rest.

    python examples/03_run_grpo.py

A run is a folder of metrics, rollouts, findings and checkpoints. `mint dashboard` shows it; `mint diagnose` judges it.
"""

import random

from mint.rl import RLAdapter, RLConfig, run_grpo


class Subtraction(RLAdapter):
    """Two-digit subtraction; the reward is 1 for the right number and nothing else."""

    def __init__(self):
        pairs = [(left, right) for left in range(10, 100) for right in range(10, left)]
        random.Random(0).shuffle(pairs)
        self.heldout, self.training = pairs[:128], pairs[128:]

    def build_dataset(self):
        """The training items: any objects that the other methods understand."""
        return self.training

    def build_heldout(self):
        """Items that are evaluated before and after the run, and never trained on."""
        return self.heldout

    def make_prompt(self, item, tokenizer):
        """Token ids of the prompt."""
        left, right = item
        return tokenizer.encode(f"Q: What is {left} - {right}?\nA:")

    def compute_reward(self, response, item):
        """Scores the text of one answer. It may also be `async`, or return a `Reward` with named parts."""
        left, right = item
        return float(response.strip() == str(left - right))


config = RLConfig(
    base_model="mint/tiny",
    steps=12,
    batch_size=16,
    group_size=8,
    max_tokens=8,
    learning_rate=3e-3,
    lr_schedule="linear",
    seed=0,
)
result = run_grpo(Subtraction(), config)

before, after = result.heldout_before[0.0], result.heldout_after[0.0]
print(
    f"held-out reward, greedy: {before.mean:.2f} before, {after.mean:.2f} after ({after.low:.2f} to {after.high:.2f})"
)
print(f"{result.samples} samples in {result.steps} steps, {result.seconds:.0f} s")
for finding in result.findings:
    print(f"finding: {finding.code}")
print("run:", result.run_dir)
print("checkpoint:", result.checkpoint)
