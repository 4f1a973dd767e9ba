"""tinker-cookbook's preference training, `tinker_cookbook.preference.train_dpo`, on a local file of comparisons.

`python cookbook_dpo.py WORK_DIR MODEL`, in the cookbook's own environment; prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

PAIRS, BATCH_SIZE = 24, 4


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def write_comparisons(path: Path) -> Path:
    """Short answers are preferred to long ones."""
    rows: list[dict[str, Any]] = [
        {
            "comparison": {
                "prompt_conversation": said("user", f"What is {n % 4} + 1?"),
                "completion_A": said("assistant", str(n % 4 + 1)),
                "completion_B": said("assistant", f"That would be {n % 4 + 1}, I think."),
            },
            "label": "A",
        }
        for n in range(PAIRS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main(work_dir: Path, model: str) -> None:
    """Trains and reports the loss of each step and the final checkpoint."""
    log_path = work_dir / "dpo"
    comparisons = ComparisonBuilderFromJsonl(train_path=str(write_comparisons(work_dir / "comparisons.jsonl")))
    config = train_dpo.Config(
        log_path=str(log_path),
        model_name=model,
        recipe_name="compat_dpo",
        renderer_name="role_colon",
        dataset_builder=DPODatasetBuilderFromComparisons(
            comparison_builder=comparisons,
            common_config=ChatDatasetBuilderCommonConfig(
                model_name_for_tokenizer=model, renderer_name="role_colon", max_length=128, batch_size=BATCH_SIZE
            ),
        ),
        learning_rate=1e-3,
        dpo_beta=0.1,
        lora_rank=8,
        save_every=3,
        eval_every=0,
        max_steps=5,
    )
    train_dpo.main(config)
    rows = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["dpo_loss"] for row in rows if "dpo_loss" in row]
    saved = [json.loads(line) for line in (log_path / "checkpoints.jsonl").read_text().splitlines()]
    print(json.dumps({"first": losses[0], "last": losses[-1], "steps": len(losses), "checkpoint": saved[-1]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
