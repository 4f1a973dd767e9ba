"""A contender without arithmetic: answers like the real ones, at once. `argv`: the spec, then how to misbehave."""

import json
import sys
from pathlib import Path

spec = json.loads(Path(sys.argv[1]).read_text())
fault = sys.argv[2] if len(sys.argv) > 2 else ""
print("what libraries print goes to stderr", file=sys.stderr)


def answer(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


base = -400.0 if fault == "other base" else -494.3
answer(event="ready", probe_logprob=base, trained_parameters=155_648, dtype="float32", threads=spec["threads"])
for line in sys.stdin:
    if json.loads(line)["command"] == "finish":
        answer(
            event="finished",
            probe_logprob=base if fault == "no training" else base + 0.1,
            versions={},
        )
        break
    if fault == "dies":
        sys.exit("out of memory, say")
    lengths = [spec["max_tokens"]] * spec["prompts_per_step"] * spec["group_size"]
    if fault == "stops early":
        lengths[0] -= 1
    wall_s = 2.0 if fault == "slow" else 1.0
    answer(
        event="step",
        wall_s=wall_s,
        cpu_s=wall_s,
        sample_s=0.25,
        idle_cpu_s=0.0,
        completion_lengths=lengths,
        tokens=sum(lengths),
    )
