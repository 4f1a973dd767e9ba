"""From measured steps to rows: one for each contender, and one that compares them. Pure, but for the printing.

All ratios are the peer's time over mint's, so that 2.0 reads "mint takes half of the time".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from mint.bench.shapes import GrpoShape
from mint.errors import RequestFailedError

PROBE_TOLERANCE = {"float32": 1e-2, "bfloat16": 1.0}
"""By dtype: how far the summed logprob of the probe (79 tokens) may differ between two sides with the same base."""


@dataclass(frozen=True)
class Measured:
    """All answers of one contender: `ready` and `finished` once, `steps` one for each timed step."""

    name: str
    ready: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    finished: Mapping[str, Any]
    peak_rss_bytes: int

    def column(self, key: str) -> list[float]:
        """One figure of every timed step, in order."""
        return [float(step[key]) for step in self.steps]


def check_same_work(contenders: Sequence[Measured], shape: GrpoShape) -> None:
    """That every side sampled every token, trained as many parameters of the same base, and changed them.

    Raises:
        RequestFailedError: the sides did not do the same work, so their times must not be compared.
    """
    full = [shape.max_tokens] * shape.sequences
    first = contenders[0]
    for side in contenders:
        if any(step["completion_lengths"] != full for step in side.steps):
            raise _unequal(f"{side.name} did not sample {shape.sequences} x {shape.max_tokens} tokens in every step")
        before, after = side.ready["probe_logprob"], side.finished["probe_logprob"]
        if abs(before - first.ready["probe_logprob"]) > PROBE_TOLERANCE[side.ready["dtype"]]:
            raise _unequal(f"{side.name} starts from a probe logprob of {before}, {first.name} from another")
        if before == after:
            raise _unequal(f"{side.name}'s probe logprob is still {after} after training")
        expected = shape.rank * shape.model.lora_parameters_per_rank
        if side.ready["trained_parameters"] != expected:
            raise _unequal(f"{side.name} trains {side.ready['trained_parameters']} parameters, not {expected}")
        for key in ("dtype", "threads"):
            if side.ready[key] != first.ready[key]:
                raise _unequal(f"{side.name} has {key} {side.ready[key]}, {first.name} {first.ready[key]}")


def contender_row(side: Measured, shape: GrpoShape) -> dict[str, Any]:
    """The figures of one contender; times in seconds per step."""
    walls_s = side.column("wall_s")
    parts = sorted({part for step in side.steps for part in step.get("marks_s", {})})
    return {
        "bench": "grpo",
        "contender": side.name,
        "steps": len(side.steps),
        "seconds_median": median(walls_s),
        "seconds_min": min(walls_s),
        "seconds_max": max(walls_s),
        "seconds": walls_s,
        "cpu_seconds_median": median(side.column("cpu_s")),
        "sample_seconds_median": median(side.column("sample_s")),
        "train_seconds_median": median(
            wall_s - sample_s for wall_s, sample_s in zip(walls_s, side.column("sample_s"), strict=True)
        ),
        "seconds_until_median": {part: median(step["marks_s"][part] for step in side.steps) for part in parts},
        "sampled_tokens_per_step": shape.sampled_tokens,
        "sampled_tokens_per_second": shape.sampled_tokens / median(walls_s),
        "idle_cpu_seconds_max": max(side.column("idle_cpu_s")),
        "peak_rss_mib": round(side.peak_rss_bytes / 2**20),
        "trained_parameters": side.ready["trained_parameters"],
        "dtype": side.ready["dtype"],
        "threads": side.ready["threads"],
        "probe_logprob_before": side.ready["probe_logprob"],
        "probe_logprob_after": side.finished["probe_logprob"],
        "versions": side.finished["versions"],
    }


def comparison_row(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> dict[str, Any]:
    """How many times longer than mint each peer takes, and on what machine; the first row is mint's."""
    mint, *peers = rows
    return {
        "bench": "grpo",
        "ratios": {peer["contender"]: peer["seconds_median"] / mint["seconds_median"] for peer in peers},
        "cpu_ratios": {peer["contender"]: peer["cpu_seconds_median"] / mint["cpu_seconds_median"] for peer in peers},
        "turn_ratios": {
            peer["contender"]: [theirs / ours for theirs, ours in zip(peer["seconds"], mint["seconds"], strict=True)]
            for peer in peers
        },
        "machine": dict(machine),
    }


def print_table(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """The rows of `run_grpo_bench` for people."""
    console = console or Console()
    *sides, comparison = rows
    table = Table("", "s/step", "min-max", "CPU s", "sample s", "train s", "tokens/s", "MiB", "of mint's")
    for side in sides:
        ratio = comparison["ratios"].get(side["contender"])
        table.add_row(
            side["contender"],
            f"{side['seconds_median']:.3f}",
            f"{side['seconds_min']:.3f}-{side['seconds_max']:.3f}",
            f"{side['cpu_seconds_median']:.3f}",
            f"{side['sample_seconds_median']:.3f}",
            f"{side['train_seconds_median']:.3f}",
            f"{side['sampled_tokens_per_second']:.0f}",
            str(side["peak_rss_mib"]),
            "" if ratio is None else f"{ratio:.2f}x",
        )
    console.print(table)
    machine = comparison["machine"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {sides[0]['threads']} thread(s) each, "
        f"load {machine['load_before']:.1f} before and {machine['load_after']:.1f} after, "
        f"medians of {sides[0]['steps']} steps"
    )


def _unequal(what: str) -> RequestFailedError:
    return RequestFailedError(f"the sides did not do the same work: {what}")
