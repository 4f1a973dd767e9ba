"""What a grammar costs: time of each sampled token, constrained against unconstrained, in turns.

    python -m benchmarks.structured_outputs FOLDER [--sequences 64] [--tokens 48] [--turns 5]

FOLDER is a Hugging Face folder of a base model. Both kinds sample the same number of tokens from one prompt, without
an end; the constrained ones write a JSON array of records. CPU time counts all threads of the process. Where a second
core is idle, the wall time is shorter: masks are computed while the forward runs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from mint.config import read_settings
from mint.engine.protocol import LogitRules, SampleJob, StopRule
from mint.engine.torch_engine import TorchEngine
from mint.server.grammars.compiler import compile_grammar
from mint.types import StructuredOutputs

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["person", "animal", "thing"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": RECORD, "minItems": 100}


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    wanted = parser.parse_args()
    engine = TorchEngine(dtype=wanted.dtype, threads=1, device="cpu", native=read_settings().native_folder)
    base = engine.load_base("base", str(wanted.folder))
    began = time.process_time()
    schema = StructuredOutputs(json_schema=SCHEMA)
    grammar = compile_grammar(schema, wanted.folder, base.eos_token_ids, base.vocab_size, owner="local")
    compiled_ms = 1e3 * (time.process_time() - began)

    def cost(rules: LogitRules | None, turn: int) -> np.ndarray:
        """CPU and wall seconds of one job."""
        job = SampleJob(
            "base", None, np.arange(5, 37), wanted.sequences, wanted.tokens, 1.0, -1, 1.0, turn, StopRule(), rules=rules
        )
        began = np.array([time.process_time(), time.perf_counter()])
        [result] = engine.sample([job])
        seconds = np.array([time.process_time(), time.perf_counter()]) - began
        assert sum(len(sample.tokens) for sample in result.samples) == wanted.sequences * wanted.tokens, result.error
        return seconds

    constrained = LogitRules(grammar=grammar)
    cost(None, 0), cost(constrained, 0)
    plain, ruled = [], []
    for turn in range(1, wanted.turns + 1):
        plain.append(cost(None, turn))
        ruled.append(cost(constrained, turn))
    ratios = np.array(ruled) / np.array(plain)
    shown = (f"{np.median(own):.3f} ({own.min():.3f} to {own.max():.3f})" for own in ratios.T)
    step_ms = 1e3 * np.median(plain, axis=0) / wanted.tokens
    print(
        f"vocabulary {base.vocab_size}, {wanted.sequences} sequences: a step takes {step_ms[0]:.1f} ms of CPU; "
        f"constrained {next(shown)} times as long by CPU time, {next(shown)} by wall time; "
        f"tokenizer and grammar {compiled_ms:.0f} ms, once"
    )


if __name__ == "__main__":
    main()
