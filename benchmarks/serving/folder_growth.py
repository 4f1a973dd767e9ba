"""How large a data directory becomes while an RL loop trains: files, their bytes, and the journal, step by step.

    python -m benchmarks.serving.folder_growth fake 10000
    python -m benchmarks.serving.folder_growth tiny 1000

Each step is one `forward_backward`, one `optim_step`, one sampler without a name, and one request to it, through the
SDK in process. `fake` computes nothing: its state is padded to 64 KiB. `tiny` trains mint/tiny at rank 8 on 16 datums
of 64 tokens.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import mint
from mint import types
from mint.compose.embedded import open_embedded
from mint.engine.fake_engine import FakeEngine

REPORTS = 10


def measure(engine: str, steps: int) -> None:
    """Prints a line for each tenth of the steps."""
    folder = Path(tempfile.mkdtemp())
    fake = FakeEngine(state_bytes=1 << 16) if engine == "fake" else None
    shape = (16, 64) if engine == "tiny" else (1, 4)
    data = [_datum(row) for row in np.random.default_rng(0).integers(20, 48, (shape[0], shape[1] + 1))]
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=2)
    print("step  published  snapshots  files MB  journal MB  s/step")
    with mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=folder, engine=fake)) as client:
        trainer = client.create_lora_training_client("mint/tiny", rank=8, seed=1)
        began_at = time.monotonic()
        for step in range(1, steps + 1):
            pass_done = trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
            pass_done.result()
            trainer.save_weights_and_get_sampling_client().sample(prompt, 1, params).result()
            if step % max(1, steps // REPORTS) == 0:
                _report(folder, step, (time.monotonic() - began_at) / step)


def _datum(tokens: np.ndarray) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def _report(folder: Path, step: int, seconds: float) -> None:
    published, snapshots = (list((folder / name).iterdir()) for name in ("published", "snapshots"))
    files = sum(_size(path) for path in (*published, *snapshots))
    journal = sum(path.stat().st_size for path in folder.glob("journal*"))
    row = f"{len(published):9}  {len(snapshots):9}  {files / 1e6:8.2f}  {journal / 1e6:10.2f}  {seconds:.4f}"
    print(f"{step:5} {row}", flush=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it has just gone
        return 0


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2]))
