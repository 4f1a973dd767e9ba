"""tinker-cookbook's RL training, `tinker_cookbook.rl.train`, on a task of its `ProblemEnv` kind.

`python cookbook_rl.py WORK_DIR MODEL [LOSS]`, in the cookbook's own environment; prints one JSON line. With a loss, the
run is asynchronous: sampling may be a step ahead of training.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz
from tinker_cookbook import renderers
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

STEPS, GROUPS, GROUP_SIZE = 6, 4, 8


class LargeNumbers(ProblemEnv):
    """Rewards an answer by how large it is, up to 99: every group has a signal, and a few steps show it."""

    def get_question(self) -> str:
        return "Say a number."

    def check_answer(self, sample_str: str) -> float:
        return min(int(sample_str), 99) / 99 if sample_str.strip().isdecimal() else 0.0

    def check_format(self, sample_str: str) -> bool:
        return bool(sample_str.strip())

    def get_reference_answer(self) -> str:
        return "99"


class Numbers(RLDataset):
    """A few batches of the same question."""

    def __init__(self, renderer: renderers.Renderer) -> None:
        self.renderer = renderer

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        make = partial(LargeNumbers, self.renderer)
        return [ProblemGroupBuilder(env_thunk=make, num_envs=GROUP_SIZE) for _ in range(GROUPS)]

    def __len__(self) -> int:
        return STEPS


@chz.chz
class NumbersBuilder(RLDatasetBuilder):
    """What the configuration names."""

    model_name: str

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return Numbers(renderers.get_renderer("role_colon", get_tokenizer(self.model_name))), None


def main(work_dir: Path, model: str, async_loss: str | None = None) -> None:
    """Trains and reports the reward of each step and the final checkpoint."""
    log_path = work_dir / "rl"
    ahead = async_loss and train.AsyncConfig(max_steps_off_policy=1, groups_per_batch=GROUPS, loss_fn=async_loss)
    config = train.Config(
        async_config=ahead or None,
        learning_rate=1e-2,
        dataset_builder=NumbersBuilder(model_name=model),
        model_name=model,
        recipe_name="compat_rl",
        renderer_name="role_colon",
        max_tokens=8,
        lora_rank=8,
        log_path=str(log_path),
        eval_every=0,
        save_every=2,
    )
    asyncio.run(train.main(config))
    rows = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    saved = [json.loads(line) for line in (log_path / "checkpoints.jsonl").read_text().splitlines()]
    print(json.dumps({"rewards": rewards, "steps": len(rewards), "checkpoint": saved[-1]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
