"""mint's side of `mint bench grpo`: the loop of the documentation, one step whenever a line on stdin asks for one.

Run as `python -m mint.bench.mint_peer SPEC.json`. Uses the public SDK only, with the service embedded in this process
or, where the spec says so, behind a socket in a process of its own, which is started here.
A step is timed from the arrival of its command to the end of the optimizer step, on the caller's side: it includes
whatever the service does (journal, snapshots, hand-over of the weights) as well as tokenisation and decoding.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import mint
from mint import types

SERVED_BASE = "bench/base"


class Step:
    """The clock and the counts of one step; `clock` gives the CPU seconds of all processes that take part."""

    def __init__(self, clock: CpuClock) -> None:
        self.clock = clock
        self.started_s, self.cpu_started_s = time.perf_counter(), clock.seconds()
        self.marks_s: dict[str, float] = {}
        self.completion_lengths: list[int] = []

    def mark(self, name: str) -> None:
        """Notes that the part `name` has just ended."""
        self.marks_s[name] = time.perf_counter() - self.started_s

    def answer(self, idle_cpu_s: float) -> dict[str, Any]:
        """The step's line; `sample_s` runs to the start of the reward, as on TRL's side."""
        return {
            "event": "step",
            "wall_s": time.perf_counter() - self.started_s,
            "cpu_s": self.clock.seconds() - self.cpu_started_s,
            "sample_s": self.marks_s["sample"],
            "marks_s": self.marks_s,
            "idle_cpu_s": idle_cpu_s,
            "completion_lengths": self.completion_lengths,
        }


class CpuClock:
    """CPU seconds of this process, and of the server's where there is one."""

    def __init__(self, server_pid: int | None) -> None:
        self._stat = None if server_pid is None else Path(f"/proc/{server_pid}/stat")

    def seconds(self) -> float:
        """Since the processes began."""
        own_s = time.process_time()
        if self._stat is None:
            return own_s
        user, system = self._stat.read_text().rpartition(")")[2].split()[11:13]
        return own_s + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(home: Path, base_model: str) -> Generator[tuple[str, int]]:
    """`mint serve` on a free port of this machine, with a data directory below `home`: its address and process id.

    It offers the folder `base_model` as `SERVED_BASE`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from mint.cli import app; app()", "serve", "--port", str(port)]
    offer = ["--model", f"{SERVED_BASE}={base_model}", "--data-dir", str(home / "served")]
    process = subprocess.Popen([*command, *offer], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


class GrpoLoop:
    """One training client and the loop around it."""

    def __init__(self, spec: dict[str, Any], base_model: str, *, base_url: str | None, clock: CpuClock) -> None:
        self.spec, self.clock = spec, clock
        self.training = mint.ServiceClient(base_url=base_url).create_lora_training_client(
            base_model=base_model,
            rank=spec["rank"],
            seed=spec["seed"],
            train_mlp=True,
            train_attn=True,
            train_unembed=False,
        )
        self.tokenizer = self.training.get_tokenizer()
        self.sampling_params = types.SamplingParams(max_tokens=spec["max_tokens"], temperature=1.0, stop=[])
        self.adam_params = types.AdamParams(
            learning_rate=spec["learning_rate"], beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
        )

    def step(self, index: int) -> Step:
        """Sample, reward, centre, train: the step as the documentation writes it."""
        step = Step(self.clock)
        first = index * self.spec["prompts_per_step"]
        texts = self.spec["prompts"][first : first + self.spec["prompts_per_step"]]
        sampler = self.training.save_weights_and_get_sampling_client(name=f"grpo-{index}")
        step.mark("save")
        prompts = [self.tokenizer.encode(text) for text in texts]
        futures = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(prompt),
                num_samples=self.spec["group_size"],
                sampling_params=self.sampling_params,
            )
            for prompt in prompts
        ]
        groups = [future.result().sequences for future in futures]
        self.tokenizer.batch_decode([sequence.tokens for group in groups for sequence in group])
        step.mark("sample")
        datums = [datum for prompt, group in zip(prompts, groups, strict=True) for datum in self.datums(prompt, group)]
        step.mark("datums")
        self.training.forward_backward(datums, loss_fn="importance_sampling").result()
        step.mark("forward_backward")
        self.training.optim_step(self.adam_params).result()
        step.mark("optim_step")
        step.completion_lengths = [len(sequence.tokens) for group in groups for sequence in group]
        return step

    def datums(self, prompt: list[int], group: list[types.SampledSequence]) -> list[types.Datum]:
        """One datum for each sample of a group, with the centred reward as its advantage.

        The advantage is divided by the tokens of the step, as the loss of Dr. GRPO is on TRL's side.
        """
        rewards = [reward(sequence.tokens) for sequence in group]
        mean = sum(rewards) / len(rewards)
        tokens_per_step = self.spec["prompts_per_step"] * self.spec["group_size"] * self.spec["max_tokens"]
        prefix = [0.0] * (len(prompt) - 1)
        datums = []
        for sequence, value in zip(group, rewards, strict=True):
            full = [*prompt, *sequence.tokens]
            advantage = (value - mean) / tokens_per_step
            datums.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(full[:-1]),
                    loss_fn_inputs={
                        "target_tokens": full[1:],
                        "weights": prefix + [1.0] * len(sequence.tokens),
                        "logprobs": prefix + sequence.logprobs,
                        "advantages": prefix + [advantage] * len(sequence.tokens),
                    },
                )
            )
        return datums

    def probe(self, name: str) -> float:
        """The policy's logprob of a fixed sequence: shows that the base is the same, and that training changes it."""
        sampler = self.training.save_weights_and_get_sampling_client(name=f"probe-{name}")
        logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(self.spec["probe_tokens"])).result()
        return sum(logprob for logprob in logprobs if logprob is not None)


def reward(tokens: list[int]) -> float:
    """The share of even token ids: as cheap as a reward can be, and different within a group."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def main() -> None:
    """Speaks JSON lines on the real stdout; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec["transport"] == "embedded":
        run(GrpoLoop(spec, spec["base_model"], base_url=None, clock=CpuClock(None)), answers)
        return
    with server(Path(sys.argv[1]).with_suffix(".home"), spec["base_model"]) as (url, process_id):
        run(GrpoLoop(spec, SERVED_BASE, base_url=url, clock=CpuClock(process_id)), answers)


def run(loop: GrpoLoop, answers: TextIO) -> None:
    """One step for each command."""
    effective = loop.training.get_info().effective
    ready = {
        "event": "ready",
        "probe_logprob": loop.probe("before"),
        "trained_parameters": effective["trainable_parameters"],
        "dtype": effective["dtype"],
        "threads": effective["threads"],
    }
    print(json.dumps(ready), file=answers)
    for index in range(loop.spec["steps"] + 1):
        idle_from_s = loop.clock.seconds()
        command = json.loads(sys.stdin.readline() or '{"command": "finish"}')["command"]
        idle_cpu_s = loop.clock.seconds() - idle_from_s
        if command == "finish":
            break
        print(json.dumps(loop.step(index).answer(idle_cpu_s)), file=answers)
    finished = {
        "event": "finished",
        "probe_logprob": loop.probe("after"),
        "versions": {"mint": mint.__version__, "torch": importlib.metadata.version("torch")},
    }
    print(json.dumps(finished), file=answers)


if __name__ == "__main__":
    main()
