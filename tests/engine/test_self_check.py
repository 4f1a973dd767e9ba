"""The self-check of fast paths finds every planted fault, names it, and lets the sound paths be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from planted_paths import PLANTS
from pydantic import ValidationError
from small_models import write_model

from mint.config import GPU_PATHS, Settings
from mint.engine import devices
from mint.engine.cuda import self_check
from mint.engine.cuda.fast_paths import (
    CAPTURE,
    EXPERTS,
    FLEX,
    FUSED,
    INVARIANT,
    LOGITS,
    NAMES,
    OPTIMIZER,
    SETTING,
    TRITON,
    Shapes,
    paths,
)
from mint.engine.cuda.grouped_experts import ExpertsProduct, StackedLora
from mint.engine.cuda.self_check import FastPath, PathSource, Verdict, check_paths, judge, rounding_limit
from mint.engine.devices import Device
from mint.engine.model.config import read_decoder_config
from mint.models.folder import ModelFolder


def test_every_planted_fault_is_found_and_named_and_sound_paths_beside_it_are_let_be() -> None:
    verdicts = check_paths(PathSource("planted_paths", "paths", list(PLANTS)), is_timed=True, deadline_s=10)
    faults = {verdict.name: verdict.fault for verdict in verdicts}
    assert list(faults) == ["sound before", *PLANTS, "sound after"]
    found = {name: faults[name] for name, (_, words) in PLANTS.items() if words in (faults[name] or "")}
    assert found.keys() == PLANTS.keys(), faults
    assert faults["sound before"] is None and faults["sound after"] is None


def test_a_check_that_cannot_begin_says_why() -> None:
    (verdict,) = check_paths(PathSource("no_such_module", "paths", []), is_timed=True)
    assert verdict.name == "self-check" and "no_such_module" in (verdict.fault or "")


@pytest.mark.parametrize(("growing_runs", "is_leak"), [(8, False), (1000, True)])
def test_memory_that_grows_in_the_first_runs_alone_is_no_leak(
    growing_runs: int, is_leak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0

    def settles() -> list[torch.Tensor]:
        nonlocal runs
        runs += 1
        return [torch.ones(4)]

    for name in ("_allocated", "_peak"):  # what a process really takes depends on what it has freed before
        monkeypatch.setattr(self_check, name, lambda: min(runs, growing_runs) << 22)
    path = FastPath("settles", "4 rows", settles, lambda: [torch.ones(4)], 0.0)
    fault = judge(path, is_timed=False).fault
    assert (fault == "4 rows: it kept 4 MiB after each run") is is_leak and (fault is None) is not is_leak
    assert runs > growing_runs or is_leak


def test_torch_s_fused_optimizer_and_grouped_products_pass_the_check() -> None:
    shapes = Shapes(64, 96, 4, 2, 32, 1, 1e-6, True, True, "float32", "cpu", (OPTIMIZER, EXPERTS))
    verdicts = check_paths(shapes.source, is_timed=False)
    assert [(verdict.name, verdict.fault) for verdict in verdicts] == [(EXPERTS, None), (OPTIMIZER, None)]


def _without_up(lora: StackedLora) -> StackedLora:
    return replace(lora, parts=lora.parts[:1])


def _without_a(lora: StackedLora) -> StackedLora:
    return replace(lora, a=torch.zeros_like(lora.a))


@pytest.mark.parametrize("plant", [_without_up, _without_a])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_gradient_of_grouped_experts_is_found(
    plant: Callable[[StackedLora], StackedLora], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = ExpertsProduct.gradient

    def planted(self: ExpertsProduct, grad: torch.Tensor, x: torch.Tensor, *, for_input: bool) -> torch.Tensor | None:
        own = self if self.lora is None else replace(self, lora=plant(self.lora))
        return gradient(own, grad, x, for_input=for_input)

    shapes = Shapes(64, 96, 4, 2, 32, 1, 1e-6, True, True, dtype, "cpu", (EXPERTS,), experts=6, experts_of_row=2)
    found = []
    for is_planted in (False, True):
        if is_planted:
            monkeypatch.setattr(ExpertsProduct, "gradient", planted)
        verdicts = {path.case: judge(path, is_timed=False).fault for path in paths(asdict(shapes))}
        found.append([case for case, fault in verdicts.items() if fault])
    assert found == [[], [f"{rows} rows with a gradient" for rows in (1, 64, 65)]]


def test_who_waits_hears_which_path_is_tried() -> None:
    heard: list[str] = []
    shapes = Shapes(64, 96, 4, 2, 32, 1, 1e-6, True, True, "float32", "cpu", (LOGITS, OPTIMIZER))
    check_paths(shapes.source, is_timed=False, say=heard.append)
    assert heard[-1] == OPTIMIZER and set(heard) <= {LOGITS, OPTIMIZER}


def test_what_a_first_run_sets_up_is_no_fault_but_what_each_run_takes_is() -> None:
    """As the workspaces that torch gives to cuBLAS on the streams of a capture, 32 MiB each on an H100."""
    kept: list[torch.Tensor] = []

    def sets_up() -> list[torch.Tensor]:
        if not kept:
            kept.append(torch.ones(60 << 20))
        return [torch.ones(4)]

    def takes() -> list[torch.Tensor]:
        torch.ones(60 << 20)
        return [torch.ones(4)]

    found = [judge(FastPath("own", "", run, lambda: [torch.ones(4)], 0), is_timed=False) for run in (sets_up, takes)]
    assert found[0].fault is None and "it needed 2" in (found[1].fault or "")


def test_a_path_whose_time_is_its_price_is_not_judged_by_it() -> None:
    def slow() -> list[torch.Tensor]:
        time.sleep(0.02)
        return [torch.ones(4)]

    faults = [
        judge(FastPath("own", "", slow, lambda: [torch.ones(4)], 0, is_timed), is_timed=True).fault
        for is_timed in (True, False)
    ]
    assert "where plain operations take" in (faults[0] or "") and faults[1] is None


class _Crowded:
    """A sound path on a device that other programs use in the first `tries`, in which `what` happens."""

    def __init__(self, tries: int, what: Callable[[], object]) -> None:
        self.tries = 0.0
        self._crowded, self._what = tries, what

    def plain(self) -> list[torch.Tensor]:
        self.tries += 0.5  # once to warm up, and once timed
        return [torch.ones(4)]

    def fast(self) -> list[torch.Tensor]:
        if self.tries <= self._crowded:
            self._what()
        return [torch.ones(4)]


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _fail_to_allocate() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def _wait_for_others() -> None:
    time.sleep(0.02)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (_run_out_of_memory, "own: it ran out of memory with OutOfMemoryError: CUDA"),
        (_fail_to_allocate, "own: it ran out of memory with RuntimeError: CUDA error: CUBLAS"),
        (_wait_for_others, "where plain operations take"),
    ],
)
def test_a_fault_that_another_program_may_cause_is_tried_once_more_and_told_apart(
    what: Callable[[], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "TRY_AGAIN_S", 0.0)
    for tries, is_faulty in ((1, False), (2, True)):
        path = _Crowded(tries, what)
        verdict = judge(FastPath("path", "own", path.fast, path.plain, 0), is_timed=True)
        assert (verdict.fault is not None, verdict.is_passing, path.tries) == (is_faulty, is_faulty, 2)
    assert words in (verdict.fault or "") and "another program" in (verdict.remedy or "")


def test_a_fault_of_the_path_itself_is_final_at_once() -> None:
    def wrong_shared_memory() -> None:
        raise RuntimeError("out of resource: shared memory, Required: 82000, Hardware limit: 65536")

    path = _Crowded(1, wrong_shared_memory)
    verdict = judge(FastPath("path", "own", path.fast, path.plain, 0), is_timed=True)
    assert (verdict.fault or "").startswith("own: it raised RuntimeError: out of resource")
    assert path.tries == 1 and not verdict.is_passing and verdict.remedy is None


def test_plain_operations_that_fail_are_named_and_the_fast_path_is_not_blamed() -> None:
    def fail() -> list[torch.Tensor]:
        raise ValueError("no such operation")

    verdict = judge(FastPath("path", "own", lambda: [torch.ones(4)], fail, 0), is_timed=True)
    assert verdict.fault == "own: it was not compared, because plain operations raised ValueError: no such operation"
    assert not verdict.is_passing


def test_a_device_without_memory_costs_no_path_that_has_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "TRY_AGAIN_S", 0.0)
    source = PathSource("planted_paths", "paths_of_a_full_device", str(tmp_path / "marker"))
    full, sound = check_paths(source, is_timed=True, deadline_s=60)
    assert (full.name, sound.name, sound.fault, full.is_passing) == ("without plain memory", "sound", None, True)
    words = "256 rows: it was not compared, because plain operations ran out of memory with OutOfMemoryError: CUDA"
    assert (full.fault or "").startswith(words)


def test_the_log_says_what_to_do_about_a_fault_that_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "tied")
    verdicts = [Verdict(FLEX, "5 rows: it ran out of memory", is_passing=True), Verdict(OPTIMIZER, "it raised")]
    monkeypatch.setattr(devices, "check_paths", lambda *_, **__: verdicts)
    device = Device("cuda", None, gpu_kernels=True)
    device.check(read_decoder_config(ModelFolder(tmp_path).config), torch.bfloat16)
    passing, lasting = (record.getMessage() for record in caplog.records)
    assert "ran out of memory; another program on this GPU may have caused it: end that one" in passing
    assert "another program" not in lasting and "mint doctor gpu" in lasting


def test_every_path_but_the_batch_invariant_one_can_be_switched_off_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_has_triton", lambda: True)
    assert set(SETTING) == set(NAMES) - {INVARIANT} and tuple(SETTING.values()) == GPU_PATHS
    for off, expected in (((), "none"), (("fused", "capture", "flex"), "flex,fused")):
        device = Device("cuda", None, gpu_kernels=True, gpu_off=off)
        assert device.paths_off == expected
        assert set(device.switched_off.values()) == ({"MINT_GPU_OFF"} if off else set())
        assert device.fuses_optimizer
    assert not Device("cuda", None, gpu_kernels=True, gpu_off=("optimizer",)).fuses_optimizer
    assert not Device("cuda", None, gpu_kernels=False).fuses_optimizer
    monkeypatch.setattr(devices, "_has_triton", lambda: False)
    assert Device("cuda", None, gpu_kernels=True).paths_off == "fused"
    assert Device("cpu", None, gpu_kernels=True, gpu_off=("flex",)).paths_off is None
    with pytest.raises(ValidationError, match="which is none of logits, flex"):
        Settings(gpu_off="flex,flax")
    assert Settings(gpu_off=" flex, fused").gpu_off_list == ["flex", "fused"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the check runs")
def test_where_the_check_cannot_run_plain_operations_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_has_triton", lambda: True)
    write_model(tmp_path, "tied")
    device = Device("cuda", None, gpu_kernels=True, gpu_off=("flex",))
    device.check(read_decoder_config(ModelFolder(tmp_path).config), torch.bfloat16)
    assert device.paths_off == "flex,fused,logits,optimizer" and not device.fuses_optimizer
    assert "ended the process with status 1" in caplog.text and "mint doctor gpu" in caplog.text
    assert device.switched_off.pop(FLEX) == "MINT_GPU_OFF"  # and so it was not checked
    assert set(device.switched_off) == {LOGITS, TRITON, FUSED, CAPTURE, OPTIMIZER}


def _products(terms: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(terms)
    return torch.randn(64, terms, generator=generator).to(dtype), torch.randn(terms, 96, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("terms", [64, 1024, 12288])
def test_another_order_of_a_sum_passes_and_a_narrow_sum_does_not(terms: int, dtype: torch.dtype) -> None:
    x, weight = _products(terms, dtype)

    def in_order() -> list[torch.Tensor]:
        return [(x.double() @ weight.double()).to(dtype)]

    def split(parts: int, sums: torch.dtype) -> list[torch.Tensor]:
        total = torch.zeros(len(x), weight.shape[1], dtype=sums)
        for own, other in zip(x.tensor_split(parts, 1), weight.tensor_split(parts, 0), strict=True):
            total = (total.float() + own.float() @ other.float()).to(sums)
        return [total.to(dtype)]

    limit = rounding_limit(dtype, terms=terms)
    for parts in (1, 8, 61):  # split-k
        path = FastPath("split", "", lambda parts=parts: split(parts, torch.float32), in_order, limit)
        assert judge(path, is_timed=False).fault is None
    if dtype != torch.float16 and terms > 64:
        narrow = FastPath("narrow", "", lambda: split(terms // 8, torch.bfloat16), in_order, limit)
        assert "differs by" in (judge(narrow, is_timed=False).fault or "")


def test_factors_rounded_to_tf32_pass_where_they_may_be_and_fail_elsewhere() -> None:
    x, weight = _products(1024, torch.float32)

    def rounded(own: torch.Tensor) -> torch.Tensor:
        return ((own.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    for tf32, expected in ((True, True), (False, False)):
        limit = rounding_limit(torch.float32, terms=64 if not tf32 else 1024, tf32=tf32)
        path = FastPath("tf32", "", lambda: [rounded(x) @ rounded(weight)], lambda: [x @ weight], limit)
        assert (judge(path, is_timed=False).fault is None) is expected
