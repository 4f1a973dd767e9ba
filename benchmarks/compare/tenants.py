"""`python -m benchmarks tenants`: many GRPO loops on one service at once, beside one loop with the same total work.

Answers three questions: does the service do as much for many tenants as for one, does it treat them alike, and is a
tenant's training the same to the last bit as when it runs alone? The tenants run in `benchmarks.peers.mint_tenants`;
this module starts the rounds and makes rows of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.base_models import base_model_folder
from benchmarks.compare.contenders import Contender, Transport, machine_facts, make_worker, work_folder
from benchmarks.compare.report import PIPE_WIDTH
from benchmarks.compare.shapes import GrpoShape, make_prompt_ids
from benchmarks.compare.turns import START_TIMEOUT_S, STEP_TIMEOUT_S, Say
from mint.models.random_base import SHAPES, DType

Round = Mapping[str, Any]

SEED = 0


def run_tenants_bench(
    *,
    home: Path,
    tenants: int = 8,
    steps: int = 4,
    repeats: int = 3,
    threads: int = 1,
    shape: str = "tiny",
    transports: Sequence[Transport] = ("http", "embedded"),
    dtype: DType = "float32",
) -> list[dict[str, Any]]:
    """One row for each transport (`tenants_row` has the fields). Progress is told on stderr.

    Every tenant makes `steps` GRPO steps a round, several of them: where one engine serves all, the order in which they
    come by their last step sets them apart by some training steps. After one round of all together to warm up, such
    rounds and those of the single client take turns, `repeats` of each; then each tenant runs alone.

    Raises:
        RequestFailedError: a worker failed; the message shows the end of its log.
    """
    say = Console(stderr=True, highlight=False).print
    work = GrpoShape(model=SHAPES[shape])
    spec = make_spec(work, tenants=tenants, steps=steps) | {"threads": threads, "dtype": dtype}
    spec["base_model"] = str(base_model_folder(home, work.model, seed=SEED, say=say))
    order = ["together", *["together", "one"] * repeats, *(f"alone-{number}" for number in range(tenants))]
    rows = []
    with work_folder("tenants", home, say) as folder:
        for transport in transports:
            row = _measure(spec, transport, order, folder, say)
            rows.append({"bench": "tenants", "shape": shape, "transport": transport, "steps_each": steps, **row})
    return rows


def make_spec(shape: GrpoShape, *, tenants: int, steps: int) -> dict[str, Any]:
    """The spec of the worker: sizes, and different prompts for all tenants, token ids [tenants][steps][prompts]."""
    ids = iter(make_prompt_ids(shape, steps=tenants * steps, seed=SEED + 1))
    return {
        "prompts": [[[next(ids) for _ in range(shape.prompts)] for _ in range(steps)] for _ in range(tenants)],
        "group_size": shape.group,
        "max_tokens": shape.max_tokens,
        "rank": shape.rank,
        "learning_rate": shape.learning_rate,
    }


def _measure(
    spec: Mapping[str, Any], transport: Transport, order: Sequence[str], folder: Path, say: Say
) -> dict[str, Any]:
    worker = make_worker(
        f"tenants-{transport}", Contender("mint_tenants", overrides={"transport": transport}), spec, folder
    )
    load_before = machine_facts(0.0)["load_after"]
    rounds = []
    with worker:
        ready = worker.hear("ready", timeout_s=START_TIMEOUT_S)
        for who in order:
            rounds.append(worker.ask(who, answer="round", timeout_s=STEP_TIMEOUT_S))
            say(f"{transport}, {who}: {rounds[-1]['wall_s']:.2f} s")
        finished = worker.ask("finish", answer="finished", timeout_s=START_TIMEOUT_S)
    return {
        **tenants_row(rounds),
        "dtype": ready["dtype"],
        "threads": ready["threads"],
        "peak_rss_mib": round(finished["peak_rss_bytes"] / 2**20),
        "versions": finished["versions"],
        "machine": machine_facts(load_before),
    }


def tenants_row(rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of one transport. The first round, of all together, warms up: its digests count, its time does not.

    `throughput_ratio` is the single client's time over that of all together, for the same steps: 1 says that many cost
    no more than one. `slowest_over_fastest` compares the tenants of one round. `tenants_with_same_bits` counts those
    whose digests of all rounds, together and alone, are one and the same.
    """
    together = [one["tenants"] for one in rounds if one["who"] == "together"]
    alone = [one["tenants"] for one in rounds if one["who"].startswith("alone-")]
    timed = [one for one in rounds if one["who"] == "together"][1:]
    single = [one for one in rounds if one["who"] == "one"]
    digests: dict[int, list[str | None]] = {}
    for result in (result for results in [*together, *alone] for result in results):
        digests.setdefault(result["tenant"], []).append(result["digest"])
    others = [number for number, found in sorted(digests.items()) if len(set(found)) > 1 or None in found]
    spreads = [_spread([result["seconds"] for result in one["tenants"]]) for one in timed]
    walls_s = [one["wall_s"] for one in timed]
    return {
        "tenants": len(digests),
        "repeats": len(timed),
        "seconds_together": walls_s,
        "seconds_one": [one["wall_s"] for one in single],
        "seconds_alone": [results[0]["seconds"] for results in alone],
        "cpu_seconds_together": [one["cpu_s"] for one in timed],
        "cpu_seconds_one": [one["cpu_s"] for one in single],
        "sampled_tokens_per_second": sum(result["sampled_tokens"] for result in together[0]) / median(walls_s),
        "throughput_ratio": median(_ratios(single, timed, "wall_s")),
        "throughput_ratios": _ratios(single, timed, "wall_s"),
        "cpu_ratio": median(_ratios(single, timed, "cpu_s")),
        "slowest_over_fastest": median(spreads),
        "slowest_over_fastest_max": max(spreads),
        "tenants_with_same_bits": len(digests) - len(others),
        "tenants_with_other_bits": others,
    }


def print_table(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """The rows of `run_tenants_bench` for people."""
    console = console or Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    table = Table("", "together s", "one s", "one / together", "by CPU", "slowest / fastest", "same bits", "MiB")
    for row in rows:
        table.add_row(
            f"{row['tenants']} tenants, {row['transport']}",
            f"{median(row['seconds_together']):.2f}",
            f"{median(row['seconds_one']):.2f}",
            f"{row['throughput_ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
            f"{row['slowest_over_fastest']:.2f}",
            f"{row['tenants_with_same_bits']} of {row['tenants']}",
            str(row["peak_rss_mib"]),
        )
    console.print(table)
    machine = rows[0]["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {rows[0]['threads']} thread(s), {rows[0]['dtype']}, "
        f"load {machine['load_before']:.1f} before; {rows[0]['steps_each']} steps for each tenant, "
        f"medians of {rows[0]['repeats']} rounds"
    )


def _ratios(over: Sequence[Round], under: Sequence[Round], key: str) -> list[float]:
    return [float(one[key]) / float(other[key]) for one, other in zip(over, under, strict=True)]


def _spread(seconds: Sequence[float]) -> float:
    return max(seconds) / min(seconds)
