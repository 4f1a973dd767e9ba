"""The three adapters of the RL library (math, chat, code) by the shared loop, against the server of a `.env`.

`python mint_adapters.py NAME STEPS RUN_DIR`; goes on where RUN_DIR stopped; prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dotenv import load_dotenv

import mint
from mint.recipes import chat, code, math
from mint.rl import run_grpo

load_dotenv(".env")

ADAPTERS = {
    "math": (math.MathAdapter, math.DEMO),
    "chat": (chat.ChatAdapter, chat.DEMO),
    "code": (code.CodeAdapter, code.DEMO),
}


def main(name: str, steps: int, run_dir: Path) -> None:
    make, demo = ADAPTERS[name]
    settings = {"steps": steps, "batch_size": 4, "heldout_size": 8, "save_every": 1, "eval_every": 0}
    adapter = make()
    with mint.ServiceClient() as service_client:
        config = demo.changed(**settings, run_dir=run_dir)
        result = run_grpo(adapter, config, service_client=service_client, resume=True)
        names = [row.model_name for row in service_client.get_server_capabilities().supported_models]
    adapter.close()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    print(
        json.dumps(
            {
                "models": names,
                "steps": [line["step"] for line in lines],
                "rewards": [row["reward"] for row in rollouts],
                "tokens": [row["tokens"] for row in rollouts],
                "run_dir": str(result.run_dir),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
