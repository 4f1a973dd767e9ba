"""From `import mint` to the first sampled token, in fresh processes: wall and CPU seconds, part by part.

    python -m benchmarks.serving.first_token [--runs 5] [--base-model mint/tiny] [--threads 1]

Each run is a new interpreter with an empty data directory and the service embedded: `import mint`, `ServiceClient()`, a
sampler of the base model, and one token. The clock starts at the first line of the program; the interpreter's own start
is reported beside it and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

PARTS = ("import", "client", "sampler", "token")

PROGRAM = """
import time
marks = [(time.perf_counter(), time.process_time())]
def mark():
    marks.append((time.perf_counter(), time.process_time()))
import mint
from mint import types
mark()
client = mint.ServiceClient()
mark()
sampler = client.create_sampling_client(base_model=BASE)
mark()
prompt, params = types.ModelInput.from_ints([1, 40, 60, 22]), types.SamplingParams(max_tokens=1, seed=0)
tokens = sampler.sample(prompt, 1, params).result().sequences[0].tokens
mark()
assert len(tokens) == 1
import json, resource
peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"marks": marks, "peak_mib": peak_kib / 1024, "interpreter_cpu_s": marks[0][1]}))
"""


def run(base_model: str, threads: int) -> dict[str, float]:
    """One fresh process: seconds of each part, wall as `import` and CPU as `import cpu`, and their totals."""
    with tempfile.TemporaryDirectory() as home:
        variables = {"MINT_HOME": home, "MINT_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        without = ("MINT_BASE_URL", "TINKER_BASE_URL", "MINT_MODELS", "MINT_DTYPE")
        environment = {name: value for name, value in os.environ.items() if name not in without} | variables
        command = [sys.executable, "-c", f"BASE = {base_model!r}\n{PROGRAM}"]
        began_s = time.perf_counter()
        made = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        whole_s = time.perf_counter() - began_s
    answer = json.loads(made.stdout.splitlines()[-1])
    marks = answer["marks"]
    found = {"whole process": whole_s, "peak MiB": answer["peak_mib"], "interpreter cpu": answer["interpreter_cpu_s"]}
    for part, (before, after) in zip(PARTS, pairwise(marks), strict=True):
        found[part], found[f"{part} cpu"] = after[0] - before[0], after[1] - before[1]
    found["total"], found["total cpu"] = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    return found


def main() -> None:
    """A table of medians and ranges, and one JSON line with everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--base-model", default="mint/tiny")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    run(options.base_model, options.threads)  # files into the page cache, and bytecode
    runs = [run(options.base_model, options.threads) for _ in range(options.runs)]
    print("| part | wall s, median (range) | CPU s, median (range) |\n|---|---|---|")
    for part in (*PARTS, "total"):
        columns = [sorted(one[name] for one in runs) for name in (part, f"{part} cpu")]
        cells = [f"{statistics.median(column):.2f} ({column[0]:.2f}-{column[-1]:.2f})" for column in columns]
        print(f"| {part} | {cells[0]} | {cells[1]} |")
    peak_mib = statistics.median(one["peak MiB"] for one in runs)
    print(f"\n{options.base_model}, {options.runs} runs, {options.threads} thread(s), {peak_mib:.0f} MiB at most")
    print(json.dumps({"runs": runs, "load": os.getloadavg()[0], "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
