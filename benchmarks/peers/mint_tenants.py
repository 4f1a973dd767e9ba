"""The tenants of `python -m benchmarks tenants`: GRPO loops in threads of one process.

Run as `python -m benchmarks.peers.mint_tenants SPEC.json`. Each tenant has a session, a lora and data of its own. Uses
the public SDK only, with the service embedded in this process or in a `mint serve`, where every tenant has its own key.
A line on stdin says who runs: `together` all tenants at once, `one` a single client that does the work of all,
`alone-3` tenant 3. Every round begins with new models; creating them is not timed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mint
from benchmarks.compare.contenders import BENCH_BASE
from benchmarks.peers.answering import open_answers, read_spec
from benchmarks.peers.mint_loops import make_datum, reward
from benchmarks.peers.mint_service import CpuClock, server
from mint import types

NEW_KEYS = """\
import sys
from mint.cli.main import app
for number in range(int(sys.argv[2])):
    app(["keys", "create", "--data-dir", sys.argv[1], "--owner", f"tenant-{number}"], standalone_mode=False)
"""


@dataclass(frozen=True)
class Service:
    """Where the tenants' requests go: `url` None is this process. `cpu_s` counts the CPU of all that takes part."""

    url: str | None
    keys: Sequence[str | None]
    process_id: int
    cpu_s: Callable[[], float]

    def peak_rss_bytes(self) -> int:
        """The most memory that the service's process has held at once; 0 where the kernel does not say."""
        try:
            lines = Path(f"/proc/{self.process_id}/status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


@contextmanager
def served(spec: dict[str, Any]) -> Generator[Service]:
    """`mint serve` on a free port of this machine, with a key for each tenant."""
    home = Path(spec["work_dir"])
    command = [sys.executable, "-c", NEW_KEYS, str(home / "served"), str(len(spec["prompts"]))]
    keys = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    with server(home, spec["base_model"]) as (url, process_id):
        yield Service(url, keys, process_id, CpuClock(process_id).seconds)


class Tenant:
    """One client: a session, a model in training, and the prompts of its steps, token ids [steps][prompts]."""

    def __init__(self, spec: dict[str, Any], service: Service, number: int, prompts: list[list[list[int]]]) -> None:
        self.spec, self.prompts = spec, prompts
        self.client = mint.ServiceClient(base_url=service.url, api_key=service.keys[number])
        self.training = self.client.create_lora_training_client(
            base_model=BENCH_BASE, rank=spec["rank"], seed=number, train_unembed=False
        )

    def run(self, began_s: float) -> dict[str, Any]:
        """All steps, one after the other. The digest is that of weights and optimizer after the last of them."""
        digest, sampled = None, 0
        adam = types.AdamParams(learning_rate=self.spec["learning_rate"])
        for prompts in self.prompts:
            groups = self._sample(prompts)
            datums = [
                made for prompt, group in zip(prompts, groups, strict=True) for made in self._datums(prompt, group)
            ]
            trained = self.training.forward_backward(datums, loss_fn="importance_sampling")
            stepped = self.training.optim_step(adam)
            trained.result()
            digest = stepped.result().state_digest
            sampled += sum(len(sequence.tokens) for group in groups for sequence in group)
        return {"seconds": time.perf_counter() - began_s, "digest": digest, "sampled_tokens": sampled}

    def _sample(self, prompts: list[list[int]]) -> list[list[types.SampledSequence]]:
        sampler = self.training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=self.spec["max_tokens"], temperature=1.0, stop=[])
        futures = [sampler.sample(types.ModelInput.from_ints(ids), self.spec["group_size"], params) for ids in prompts]
        return [list(future.result().sequences) for future in futures]

    def _datums(self, prompt: list[int], group: list[types.SampledSequence]) -> list[types.Datum]:
        """One datum for each sample of a group; the advantage is its centred reward over the tokens of the step."""
        rewards = [reward(sequence.tokens) for sequence in group]
        mean = sum(rewards) / len(rewards)
        tokens_per_step = len(self.prompts[0]) * self.spec["group_size"] * self.spec["max_tokens"]
        return [
            make_datum(prompt, sequence.tokens, sequence.logprobs, (value - mean) / tokens_per_step)
            for sequence, value in zip(group, rewards, strict=True)
        ]


def run_round(spec: dict[str, Any], service: Service, who: str) -> dict[str, Any]:
    """One round's line: how long it took as a whole, and how long each tenant took from the common start."""
    prompts: list[list[list[list[int]]]] = spec["prompts"]  # token ids [tenants][steps][prompts]
    if who == "together":
        work = dict(enumerate(prompts))
    elif who == "one":
        work = {0: [step for steps in prompts for step in steps]}
    else:
        number = int(who.removeprefix("alone-"))
        work = {number: prompts[number]}
    with ExitStack() as opened, ThreadPoolExecutor(len(work)) as threads:
        tenants = [Tenant(spec, service, number, steps) for number, steps in work.items()]
        for tenant in tenants:
            opened.enter_context(tenant.client)
        began_s, cpu_began_s = time.perf_counter(), service.cpu_s()
        results = list(threads.map(lambda tenant: tenant.run(began_s), tenants))
        wall_s, cpu_s = time.perf_counter() - began_s, service.cpu_s() - cpu_began_s
    finished = [{"tenant": number, **result} for number, result in zip(work, results, strict=True)]
    return {"event": "round", "who": who, "wall_s": wall_s, "cpu_s": cpu_s, "tenants": finished}


def main() -> None:
    """Answers rounds until told to finish."""
    answers, spec = open_answers(), read_spec()

    def answer(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=answers)

    with ExitStack() as running:
        if spec["transport"] == "http":
            service = running.enter_context(served(spec))
        else:
            service = Service(None, [None] * len(spec["prompts"]), os.getpid(), time.process_time)
        client = running.enter_context(mint.ServiceClient(base_url=service.url, api_key=service.keys[0]))
        model = client.create_lora_training_client(base_model=BENCH_BASE, rank=spec["rank"], seed=0)
        effective = model.get_info().effective
        answer("ready", dtype=effective["dtype"], threads=effective["threads"])
        while (command := json.loads(sys.stdin.readline() or '{"command": "finish"}')["command"]) != "finish":
            print(json.dumps(run_round(spec, service, command)), file=answers)
        versions = {"mint": mint.__version__, "torch": importlib.metadata.version("torch")}
        answer("finished", peak_rss_bytes=service.peak_rss_bytes(), versions=versions)


if __name__ == "__main__":
    main()
