"""tinker-cookbook's supervised training, `tinker_cookbook.supervised.train`, on a local file of conversations.

`python cookbook_supervised.py WORK_DIR MODEL`, in the cookbook's own environment; prints one JSON line. The cookbook
loads tokenizers by the model's name: a Hugging Face name, or, as here, a folder below the working directory.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

BATCHES, BATCH_SIZE = 6, 4


def write_conversations(path: Path) -> Path:
    """The same short exchange in a few variants, so that six steps are enough to see it learned."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n % 4} + 1?"},
                {"role": "assistant", "content": str(n % 4 + 1)},
            ]
        }
        for n in range(BATCHES * BATCH_SIZE)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main(work_dir: Path, model: str) -> None:
    """Trains, with a checkpoint on the way, and reports the first and last loss and the final checkpoint."""
    log_path = work_dir / "supervised"
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name="role_colon", max_length=128, batch_size=BATCH_SIZE
    )
    conversations = str(write_conversations(work_dir / "conversations.jsonl"))
    config = train.Config(
        log_path=str(log_path),
        model_name=model,
        recipe_name="compat_supervised",
        renderer_name="role_colon",
        dataset_builder=FromConversationFileBuilder(file_path=conversations, test_size=4, common_config=common),
        learning_rate=3e-3,
        lora_rank=8,
        save_every=3,
        eval_every=3,
        max_steps=5,
    )
    asyncio.run(train.main(config))
    rows = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    saved = [json.loads(line) for line in (log_path / "checkpoints.jsonl").read_text().splitlines()]
    print(json.dumps({"first": losses[0], "last": losses[-1], "steps": len(losses), "checkpoint": saved[-1]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
