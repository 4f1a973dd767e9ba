"""TRL's side of `against_trl`: one whole run of `GRPOTrainer`, with a JSON line on stdout for each step.

Run as `python -m benchmarks.learning.trl_run SPEC.json` in TRL's own environment. Imports nothing of mint. The trainer
and its settings are those of `benchmarks.peers.trl`, changed by the spec's `overrides`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoTokenizer
from typing_extensions import override

from benchmarks.learning.answer_rewards import REWARDS
from benchmarks.peers.trl import Turns, make_trainer

HELDOUT_BATCH = 128


class Watch(Turns):
    """Gives the reward, and says after each step what it earned and when it ended. Never waits for a turn."""

    def __init__(self, answers: TextIO, spec: dict[str, Any]) -> None:
        """`spec` is that of `against_trl`."""
        super().__init__(answers, spec["probe_tokens"])
        self.spec = spec
        self.solution = dict(zip(spec["prompts"], spec["solutions"], strict=True))
        self.grade = REWARDS[spec["reward"]]
        self.steps = self.samples = self.tokens = 0
        self.reward_sum = 0.0

    @override
    def reward(  # ty: ignore[incompatible-method-override]  # the trainer passes columns by name
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """What the spec's reward gives for each completion.

        Raises:
            RuntimeError: these are not the prompts of this step, in order.
        """
        first, size = self.steps * self.spec["prompts_per_step"], self.spec["group_size"]
        asked = self.spec["prompts"][first : first + self.spec["prompts_per_step"]]
        if prompts != [prompt for prompt in asked for _ in range(size)]:
            raise RuntimeError(f"step {self.steps + 1} was given other prompts than the spec has, or in another order")
        rewards = [self.grade(text, self.solution[prompt]) for prompt, text in zip(prompts, completions, strict=True)]
        self.samples += len(rewards)
        self.tokens += sum(len(ids) for ids in completion_ids)
        self.reward_sum = sum(rewards)
        return rewards

    @override
    def wait(self, control: Any) -> Any:
        """The trainer is ready: the first step begins."""
        self.began_s, self.cpu_began_s = time.monotonic(), time.process_time()
        return control

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """After the optimizer's step."""
        self.steps += 1
        batch = self.spec["prompts_per_step"] * self.spec["group_size"]
        self.answer(event="step", at_s=time.monotonic(), reward=self.reward_sum / batch, samples=self.samples)
        self.cpu_s = time.process_time() - self.cpu_began_s
        return control


@torch.no_grad()
def heldout_rewards(model: Any, tokenizer: Any, spec: dict[str, Any], *, sampled: bool) -> list[float]:
    """The reward of each held-out question, answered greedily or by a sample at temperature 1."""
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    grade, rewards = REWARDS[spec["reward"]], []
    for first in range(0, len(spec["heldout"]), HELDOUT_BATCH):
        asked = spec["heldout"][first : first + HELDOUT_BATCH]
        batch = tokenizer([prompt for prompt, _ in asked], return_tensors="pt", padding=True, padding_side="left")
        output = model.generate(**batch, max_new_tokens=spec["max_tokens"], **how)
        texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += [grade(text, solution) for text, (_, solution) in zip(texts, asked, strict=True)]
    return rewards


def main() -> None:
    """Speaks JSON lines on the real stdout; whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    watch = Watch(answers, spec)
    trainer = make_trainer(spec, watch)
    trainer.train()
    model, tokenizer = trainer.model.eval(), AutoTokenizer.from_pretrained(spec["base_model"])
    watch.answer(
        event="finished",
        first_step_at_s=watch.began_s,
        cpu_seconds=watch.cpu_s,
        tokens=watch.tokens,
        heldout_greedy=heldout_rewards(model, tokenizer, spec, sampled=False),
        heldout_sampled=heldout_rewards(model, tokenizer, spec, sampled=True),
        versions={name: importlib.metadata.version(name) for name in ("trl", "transformers", "peft", "torch")},
    )


if __name__ == "__main__":
    main()
