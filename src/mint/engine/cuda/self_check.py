"""Compares each fast path with plain operations of torch, on this device and in a process of its own.

A path that raises, differs, hangs, leaks or is too slow is switched off before a model uses it. The comparisons run in
a child process, because a faulty kernel may end its process, spoil the device for it, or never return. Another program
on the device may take its memory or its time for a while: where memory ran out, or a path was slow, it is tried once
more. Knows no kernel: `check_paths` says which paths there are.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

DEADLINE_S = 120.0
"""For one path, with what torch compiles for it. It takes seconds; a busy machine may need longer."""

START_S = 300.0
"""For the start of a process: it imports torch, and on a GPU makes its context."""

REPEATS = 3
"""Runs after the first one, which compiles."""

LEAK_RUNS = 24
"""Where a path seems to keep some MiB, so many runs decide. The memory of a process on a CPU may grow in the first runs
of a sound path, until the allocator has an arena for each thread."""

TRY_AGAIN_S = 2.0
"""The pause before a path is tried once more, for another program to end or to give memory back."""

SLOWER = 3.0
"""A path that takes so many times as long as plain operations is not worth its risk."""

LEAST_SLOW_S = 2e-3
LEAST_LEAK_BYTES = 1 << 20
LEAST_PEAK_BYTES = 64 << 20
"""Smaller amounts are not judged: what the allocator keeps, and how long a call of Python takes."""

MORE_MEMORY = 4.0
"""A path may take so many times the memory of plain operations in a run after the first one."""

SET_UP_BYTES = 1 << 30
"""The first run may keep so much beyond that. Torch gives cuBLAS a workspace of up to 128 MiB for each stream, and a
capture has two streams of its own."""


_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mint.engine.cuda.self_check import run_paths
run_paths(*sys.argv[2:])
"""


@dataclass(frozen=True)
class FastPath:
    """A computation in two ways, on inputs of one size. Each returns its results and all memory that it may write."""

    name: str
    case: str
    fast: Callable[[], Sequence[Tensor]]
    plain: Callable[[], Sequence[Tensor]]
    tolerance: float
    """The largest difference, in parts of the largest number of the plain result."""

    is_timed: bool = True
    """Whether it is faulty if it takes much longer than plain operations."""


@dataclass(frozen=True)
class Verdict:
    """What was found of one path; `fault` is None if it may be used."""

    name: str
    fault: str | None
    seconds: float = 0.0
    plain_seconds: float = 0.0
    error: float = 0.0

    is_passing: bool = False
    """Whether another program on the device may have caused the fault: memory ran out, or it took too long, twice."""

    @property
    def remedy(self) -> str | None:
        """The remedy for a fault that may pass."""
        return (
            "another program on this GPU may have caused it: end that one, and start again" if self.is_passing else None
        )


Paths = Callable[[Any], Iterator[FastPath]]


def rounding_limit(dtype: torch.dtype, *, terms: int, roundings: int = 1, tf32: bool = False) -> float:
    """How far two sound ways may differ, in parts of the largest number, on random inputs.

    Both add up to `terms` products one after another in float32, in any order, and round up to `roundings` times on the
    way to `dtype`. The parts of the limit:

    * Rounding. Sums that differ in their last bits may round to neighbours, which lie eps apart (`torch.finfo`: 2^-7 in
      bfloat16, 2^-10 in float16). An error in front of another linear operation stays below its share of the largest
      number. So `roundings · eps`.
    * Order. A float32 sum of n terms has an error of at most λ·√n·u·Σ|terms|, u = 2^-24, but for a probability of
      2·exp(-λ²/2) (Higham and Mary 2019, doi:10.1137/18M1226312); split sums, trees and fused multiply-adds have less.
      Random terms have Σ|terms| ≤ √n times the largest sum. Two ways with λ = 4 each: `8 · n · u`. The bound without
      probabilities, n·u for √n·u, would let the narrow accumulators pass that must fail.
    * Functions. `exp` and `rsqrt` of a GPU err by some units of the last place, and an argument up to 64 that was
      rounded by 64·u: 2^-16 in all.
    * TF32. Factors of float32 products may be rounded to 11 bits: 2^-11 for each of two factors, with λ = 4: 2^-8.
    """
    unit = 2.0**-24
    rounded = 0.0 if dtype == torch.float32 else roundings * torch.finfo(dtype).eps
    return rounded + 8 * terms * unit + 2.0**-16 + (2.0**-8 if tf32 and dtype == torch.float32 else 0.0)


def judge(path: FastPath, *, is_timed: bool) -> Verdict:
    """Runs both ways and compares them, and once more after a fault that may pass. `is_timed`: whether the times mean
    something (an interpreter's do not)."""
    verdict = _judge_once(path, is_timed=is_timed and path.is_timed)
    if not verdict.is_passing:
        return verdict
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    time.sleep(TRY_AGAIN_S)
    return _judge_once(path, is_timed=is_timed and path.is_timed)


def _judge_once(path: FastPath, *, is_timed: bool) -> Verdict:
    try:
        expected, plain_bytes, plain_s = _measured(path.plain, repeats=1)
    except Exception as error:  # noqa: BLE001  says nothing of the fast path
        what = f"it was not compared, because plain operations {_words(error)}"
        return Verdict(path.name, f"{path.case}: {what}", is_passing=_is_out_of_memory(error))
    before = _allocated()
    try:
        found, first_bytes, _ = _measured(path.fast, repeats=0)
        is_repeated, held = True, [_allocated()]
        while len(held) <= REPEATS or (len(held) <= LEAK_RUNS and LEAST_LEAK_BYTES < _growth(held) < LEAST_PEAK_BYTES):
            is_repeated &= _same_bits(found, _copied(path.fast()))
            held.append(_allocated())
        leaked = _growth(held)
        # The fastest of several runs: one run alone may have waited for another program.
        _, fast_bytes, seconds = _measured(path.fast, repeats=REPEATS if is_timed else 0)
    except Exception as error:  # noqa: BLE001  whatever a kernel does is a finding
        return Verdict(path.name, f"{path.case}: it {_words(error)}", is_passing=_is_out_of_memory(error))
    difference, error = _difference(expected, found, path.tolerance)
    fault = difference
    if fault is None and not is_repeated:
        fault = "it gave other bits when it was repeated"
    if fault is None and leaked > LEAST_LEAK_BYTES:
        fault = f"it kept {leaked >> 20} MiB after each run"
    allowed = max(MORE_MEMORY * plain_bytes, LEAST_PEAK_BYTES)
    # What is set up by the first run is not there again in `fast_bytes`, and neither is the memory of a captured graph.
    if fault is None and (fast_bytes > allowed or max(first_bytes, held[0] - before) > allowed + SET_UP_BYTES):
        needed = max(fast_bytes, first_bytes) >> 20
        fault = f"it needed {needed} MiB, where plain operations need {plain_bytes >> 20}"
    is_slow = fault is None and is_timed and seconds > max(SLOWER * plain_s, LEAST_SLOW_S)
    if is_slow:
        fault = f"it took {1e3 * seconds:.2f} ms, where plain operations take {1e3 * plain_s:.2f}"
    return Verdict(path.name, fault and f"{path.case}: {fault}", seconds, plain_s, error, is_passing=is_slow)


def _growth(held: Sequence[int]) -> int:
    """The bytes that a run keeps, from what was in use after each: the median of the later half. A leak grows with
    nearly every run (freed memory may take some of it up), and what a library sets up in the first ones alone."""
    later = held[(len(held) - 1) // 2 :]
    return int(median(after - before for before, after in pairwise(later)))


def _words(error: Exception) -> str:
    """Describes the error that a computation raised."""
    verb = "ran out of memory with" if _is_out_of_memory(error) else "raised"
    return f"{verb} {type(error).__name__}: {str(error)[:300]}"


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _tells_of_memory(str(error))


def _tells_of_memory(words: str) -> bool:
    """The words of torch, driver and cuBLAS. A kernel that wants too much shared memory has others."""
    return "out of memory" in words or "STATUS_ALLOC_FAILED" in words


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: float) -> tuple[str | None, float]:
    """What differs, and the largest error in parts of the largest number."""
    if len(expected) != len(found):
        return f"it returned {len(found)} tensors instead of {len(expected)}", 0.0
    worst = 0.0
    for index, (right, own) in enumerate(zip(expected, found, strict=True)):
        if own.shape != right.shape:
            return f"result {index} has the shape {tuple(own.shape)} instead of {tuple(right.shape)}", worst
        if own.dtype != right.dtype:
            return f"result {index} is {own.dtype} instead of {right.dtype}", worst
        if not own.is_floating_point():
            if not torch.equal(own, right):
                return f"result {index} differs", worst
            continue
        if not torch.equal(own.isfinite(), right.isfinite()):
            return f"result {index} is not finite where it should be", worst
        own, right = own.double(), right.double()
        error = float((own - right).nan_to_num(0, 0, 0).abs().max()) if own.numel() else 0.0
        worst = max(worst, error / max(1.0, float(right.nan_to_num(0, 0, 0).abs().max()) if right.numel() else 0.0))
        if worst > tolerance:
            return f"result {index} differs by {worst:.2g} of the largest number; {tolerance:.2g} is allowed", worst
    return None, worst


def _same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(one, other, strict=True)
    )


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def _measured(run: Callable[[], Sequence[Tensor]], *, repeats: int) -> tuple[list[Tensor], int, float]:
    """The results of the last run, the memory that the runs took, and the time of the fastest one after the first."""
    before = _start_peak()
    found = _copied(run())
    times = [0.0]
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        found = _copied(run())
        times.append(time.perf_counter() - start)
    return found, _peak() - before, min(times[1:], default=0.0)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _start_peak() -> int:
    """Begins to look for the most memory that is in use at once; returns what is in use now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return _allocated()


def _peak() -> int:
    """The most memory since `_start_peak`; of the process on a CPU, where Linux says it."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def _allocated() -> int:
    """The memory in use; of the process on a CPU, where Linux says it."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass(frozen=True)
class PathSource:
    """Where a child process finds the paths: `function` of `module`, called with `argument`, which JSON can say."""

    module: str
    function: str
    argument: Any


Say = Callable[[str], None]


def check_paths(
    source: PathSource, *, is_timed: bool, deadline_s: float = DEADLINE_S, say: Say | None = None
) -> list[Verdict]:
    """The verdict of each path by name, in order; of several cases of a path the first fault. `say` hears the name of
    each path that is tried; it may miss one that takes less than a look at the report.

    Each case of a path has `deadline_s`. After one that does not return or ends the process, the others are checked in
    another process. A path that has failed is faulty: its further cases are left out. If not even the first path of a
    process can be named, one verdict of the name `self-check` says why; where memory ran out, after a second try.
    """
    verdicts: dict[str, Verdict] = {}
    first, is_second = 0, False
    while True:
        faulty = [name for name, verdict in verdicts.items() if verdict.fault is not None]
        lines, ending = _run_child(source, first, faulty, is_timed=is_timed, deadline_s=deadline_s, say=say)
        started: str | None = None
        for line in lines:
            if "started" in line:
                started, first = line["started"], line["index"] + 1
                continue
            started = None
            own = Verdict(**line)
            if own.name not in verdicts or verdicts[own.name].fault is None:
                verdicts[own.name] = own
        if ending is None:
            return list(verdicts.values())
        is_passing = _tells_of_memory(ending)
        if started is None and is_passing and not is_second:
            is_second = True
            time.sleep(TRY_AGAIN_S)
            continue
        if started is None:
            return [*verdicts.values(), Verdict("self-check", f"it {ending}", is_passing=is_passing)]
        verdicts[started] = Verdict(started, f"it {ending}")


def _run_child(
    source: PathSource, first: int, faulty: Sequence[str], *, is_timed: bool, deadline_s: float, say: Say | None
) -> tuple[list[dict[str, Any]], str | None]:
    """What a child process has reported of the cases from the `first` one on, but for those of `faulty` paths, and how
    it ended too early."""
    task = json.dumps([asdict(source), first, faulty, is_timed])
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder) / "report", Path(folder) / "errors"
        report.touch()
        with errors.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(sys.path), task, str(report)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
            ending = _wait(child, report, deadline_s, say)
        lines = _read(report)
        if ending is None and child.returncode:
            last = errors.read_text(errors="replace").strip().splitlines()[-1:]
            ending = f"ended the process with status {child.returncode}: {' '.join(last)[:300]}"
        return lines, ending


def _read(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines() if line.endswith("}")]


def _wait(child: subprocess.Popen[bytes], report: Path, deadline_s: float, say: Say | None) -> str | None:
    """Waits until the child ends, or has reported nothing for so long."""
    size, since = 0, time.monotonic()
    tried: str | None = None

    def hear() -> None:
        nonlocal tried
        name = next((line["started"] for line in reversed(_read(report)) if "started" in line), None)
        if say is not None and name is not None and name != tried:
            say(name)
        tried = name

    while child.poll() is None:
        time.sleep(0.05)
        found = report.stat().st_size
        if found != size:
            size, since = found, time.monotonic()
            hear()
        limit = deadline_s if size else START_S
        if time.monotonic() - since > limit:
            child.kill()
            child.wait()
            return f"did not end within {limit:.0f} s"
    hear()
    return None


def run_paths(task: str, report: str) -> None:
    """In the child process: a line before each case, and one after it."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    source, first, faulty, is_timed = json.loads(task)
    paths: Paths = getattr(importlib.import_module(source["module"]), source["function"])
    with Path(report).open("a") as lines:
        for index, path in enumerate(paths(source["argument"])):
            if index < first or path.name in faulty:
                continue
            lines.write(json.dumps({"started": path.name, "index": index}) + "\n")
            lines.flush()
            verdict = judge(path, is_timed=is_timed)
            lines.write(json.dumps(asdict(verdict)) + "\n")
            lines.flush()
            faulty += [path.name] * (verdict.fault is not None)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, also while a kernel hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
