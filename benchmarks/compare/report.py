"""From measured steps to rows: one for each contender, and one that compares them. Pure, but for the printing.

All ratios are the peer's time over mint's for the same number of tokens, so that 2.0 reads "mint takes half of the
time"; `ratio_to_limit` is the share of the machine's limit that a side reaches.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.turns import Measured
from mint.errors import RequestFailedError

LIMIT = "limit"
PIPE_WIDTH = 144
"""Where nobody watches, a row is not broken to the width of a terminal."""

PROBE_TOLERANCE = {"float32": 1e-2, "bfloat16": 1.0}
"""By dtype: how far the summed logprob of the probe (79 tokens) may differ between two sides with the same base."""

COLUMNS = {
    "s/step": ("seconds_median", ".3f"),
    "min-max": ("", ""),
    "CPU s": ("cpu_seconds_median", ".3f"),
    "first s": ("seconds_first", ".2f"),
    "sample s": ("sample_seconds_median", ".3f"),
    "train s": ("train_seconds_median", ".3f"),
    "rows": ("computed_rows", "d"),
    "tokens/s": ("tokens_per_second", ".5g"),
    "TFLOP/s": ("model_teraflops", ".1f"),
    "GB/s": ("decode_gigabytes_per_second", ".0f"),
    "MiB": ("peak_rss_mib", "d"),
    "GPU MiB": ("peak_device_mib", "d"),
}
"""Columns of the table: the field that each shows, and its format; those that no row has are left out."""

RATIOS = {"of mint's": "ratios", "CPU of mint's": "cpu_ratios", "CPU per row": "row_ratios"}
"""Columns with the ratios of `comparison_row`."""


def sides_of(contenders: Sequence[Measured]) -> list[Measured]:
    """Those that took part to the end."""
    return [side for side in contenders if not side.failure]


def check_same_work(contenders: Sequence[Measured], shape: GrpoShape) -> None:
    """That every side sampled every token, trained as many parameters of the same base, and changed them.

    Raises:
        RequestFailedError: the sides did not do the same work, so their times must not be compared.
    """
    full = [shape.max_tokens] * shape.sequences
    first = contenders[0]
    for side in sides_of(contenders):
        if any(step["completion_lengths"] != full for step in side.steps):
            raise unequal(f"{side.name} did not sample {shape.sequences} x {shape.max_tokens} tokens in every step")
        before, after = side.ready["probe_logprob"], side.finished["probe_logprob"]
        if abs(before - first.ready["probe_logprob"]) > PROBE_TOLERANCE[side.ready["dtype"]]:
            raise unequal(f"{side.name} starts from a probe logprob of {before}, {first.name} from another")
        if before == after:
            raise unequal(f"{side.name}'s probe logprob is still {after} after training")
        expected = shape.rank * shape.model.lora_parameters_per_rank
        if side.ready["trained_parameters"] != expected:
            raise unequal(f"{side.name} trains {side.ready['trained_parameters']} parameters, not {expected}")
        for key in ("dtype", "threads"):
            if side.ready[key] != first.ready[key]:
                raise unequal(f"{side.name} has {key} {side.ready[key]}, {first.name} {first.ready[key]}")


def unequal(what: str) -> RequestFailedError:
    """The error for sides that must not be compared."""
    return RequestFailedError(f"the sides did not do the same work: {what}")


def side_row(side: Measured, bench: str) -> dict[str, Any]:
    """The figures that every benchmark has of one contender, or why there are none; times in seconds per step."""
    if side.failure:
        return {"bench": bench, "contender": side.name, "failure": side.failure}
    walls_s = side.column("wall_s")
    tokens = side.column("tokens")[0]
    on_device = side.finished.get("peak_device_bytes")
    return ({} if on_device is None else {"peak_device_mib": round(on_device / 2**20)}) | {
        "bench": bench,
        "contender": side.name,
        "steps": len(side.steps),
        "seconds_median": median(walls_s),
        "seconds_min": min(walls_s),
        "seconds_max": max(walls_s),
        "seconds": walls_s,
        "cpu_seconds_median": median(side.column("cpu_s")),
        "cpu_seconds": side.column("cpu_s"),
        "tokens_per_step": int(tokens),
        "tokens_per_second": tokens / median(walls_s),
        "idle_cpu_seconds_max": max(side.column("idle_cpu_s")),
        "seconds_first": side.ready.get("first_step_s") or side.first_s,
        "peak_rss_mib": round(side.finished.get("peak_rss_bytes", side.peak_rss_bytes) / 2**20),
        "dtype": side.ready["dtype"],
        "threads": side.ready["threads"],
        "versions": side.finished["versions"],
    }


def flops_row(row: Mapping[str, Any], flops: float, peak: float, datasheet: float | None) -> dict[str, Any]:
    """The row with the model's FLOPs per second, and their share of `peak` and of the maker's `datasheet`."""
    if "failure" in row:
        return dict(row)
    reached = flops / row["seconds_median"]
    return {
        **row,
        "model_teraflops": reached / 1e12,
        "utilisation": reached / peak,
        "utilisation_of_datasheet": None if datasheet is None else reached / datasheet,
    }


def bandwidth_row(row: Mapping[str, Any], read: float, limit: Mapping[str, Any]) -> dict[str, Any]:
    """The row with how fast decoding has read its `read` bytes at least, and its share of the machine's `limit`."""
    if "failure" in row:
        return dict(row)
    reached = read / row["seconds_median"]
    share = reached / limit["read_bytes_per_second"]
    return {**row, "decode_gigabytes_per_second": reached / 1e9, "bandwidth_share": share}


def contender_row(side: Measured, shape: GrpoShape) -> dict[str, Any]:
    """The figures of one contender of `python -m benchmarks grpo`: as `side_row`, and the parts of a step."""
    if side.failure:
        return side_row(side, "grpo")
    samples_s = side.column("sample_s")
    parts = sorted({part for step in side.steps for part in step.get("part_ends_s", {})})
    row = side_row(side, "grpo")
    return row | {
        "sample_seconds_median": median(samples_s),
        "train_seconds_median": median(
            wall_s - sample_s for wall_s, sample_s in zip(row["seconds"], samples_s, strict=True)
        ),
        "seconds_until_median": {part: median(step["part_ends_s"][part] for step in side.steps) for part in parts},
        "sampled_tokens_per_step": shape.sampled_tokens,
        "sampled_tokens_per_second": shape.sampled_tokens / row["seconds_median"],
        "trained_parameters": side.ready["trained_parameters"],
        "probe_logprob_before": side.ready["probe_logprob"],
        "probe_logprob_after": side.finished["probe_logprob"],
    }


def limit_row(bench: str, tokens: int, seconds: Sequence[float], rates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The machine's limit in each turn: the least `seconds` for a step of so many tokens, from these rates."""
    latest = rates[-1]
    return {
        "bench": bench,
        "contender": LIMIT,
        "steps": len(seconds),
        "seconds_median": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "seconds": list(seconds),
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / median(seconds),
        "flops_per_second": {kind: latest[kind] for kind in ("block", "unembedding")},
        "read_bytes_per_second": median(float(rate["read"]) for rate in rates),
    }


def comparison_row(
    rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], limit: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """How many times longer than mint each peer takes, and on what machine; the first row is mint's.

    `ratios` is of the medians, `turn_ratios` of each turn, `cpu_ratios` and `cpu_turn_ratios` of CPU time, `row_ratios`
    of CPU time for each row that a side computes, where that is known. `ratio_to_limit` is the share of
    `limit` that each side reached; with one thread `cpu_ratio_to_limit` says the same of its CPU time, which suffers
    less from neighbours.
    """
    mint = rows[0]
    peers = {row["contender"]: row for row in rows[1:] if "failure" not in row}
    share = {name: mint["tokens_per_step"] / peer["tokens_per_step"] for name, peer in peers.items()}
    found: dict[str, Any] = {"bench": mint["bench"]}
    for ratios, key in (("ratios", "seconds_median"), ("cpu_ratios", "cpu_seconds_median")):
        found[ratios] = {name: peer[key] / mint[key] * share[name] for name, peer in peers.items()}
    for ratios, key in (("turn_ratios", "seconds"), ("cpu_turn_ratios", "cpu_seconds")):
        found[ratios] = {
            name: [theirs / ours * share[name] for theirs, ours in zip(peer[key], mint[key], strict=True)]
            for name, peer in peers.items()
        }
    if "computed_rows" in mint:
        found["row_ratios"] = {
            name: peer["cpu_seconds_median"]
            / peer["computed_rows"]
            * mint["computed_rows"]
            / mint["cpu_seconds_median"]
            for name, peer in peers.items()
        }
    if limit is not None:
        if mint["threads"] == 1:
            found["cpu_ratio_to_limit"] = {
                row["contender"]: row["tokens_per_step"] / row["cpu_seconds_median"] / limit["tokens_per_second"]
                for row in (mint, *peers.values())
            }
        found["ratio_to_limit"] = {
            row["contender"]: row["tokens_per_second"] / limit["tokens_per_second"] for row in (mint, *peers.values())
        }
    return found | {"machine": dict(machine)}


def print_table(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """The rows of a benchmark for people."""
    console = console or Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    *sides, comparison = rows
    shown = {title: how for title, how in COLUMNS.items() if not how[0] or any(how[0] in side for side in sides)}
    ratios = {title: comparison[key] for title, key in RATIOS.items() if key in comparison}
    of_limit = comparison.get("cpu_ratio_to_limit") or comparison.get("ratio_to_limit", {})
    if "workload" in comparison:
        console.print(comparison["workload"], markup=False)
    table = Table("", *shown, *ratios, *(["of the limit"] if of_limit else []))
    for side in sides:
        name = side["contender"]
        table.add_row(
            name,
            *(_cell(side, field, form) for field, form in shown.values()),
            *(f"{found[name]:.2f}x" if name in found else "" for found in ratios.values()),
            *([f"{of_limit[name]:.0%}" if name in of_limit else ""] if of_limit else []),
        )
    console.print(table)
    for side in sides:
        if "failure" in side:
            console.print(f"{side['contender']}: {side['failure']}", markup=False)
    machine = comparison["machine"]
    on = "" if machine.get("device", "cpu") == "cpu" else f"{machine['device']}; "
    console.print(
        f"{on}{machine['cpu']}, {machine['cores']} cores, {sides[0]['threads']} thread(s) each, "
        f"load {machine['load_before']:.1f} before and {machine['load_after']:.1f} after, "
        f"medians of {sides[0]['steps']} steps"
    )


def _cell(side: Mapping[str, Any], field: str, form: str) -> str:
    if "failure" in side:
        return "failed" if field == "seconds_median" else ""
    if not field:
        return f"{side['seconds_min']:.3f}-{side['seconds_max']:.3f}"
    return format(side[field], form) if field in side else ""
