"""Triton's kernels, as far as they can be tested without a GPU: interpreted, and compiled for an H100."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted_kernels import FAULTS

from mint.engine.cuda.graph_step import FIRST_PAGE, SPLIT_PAGES
from mint.engine.cuda.self_check import PathSource, check_paths
from mint.engine.model.attention import PAGE_POSITIONS

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")


@pytest.mark.slow
def test_interpreted_they_compute_what_float64_says() -> None:
    file = Path(__file__).with_name("interpreted_kernels.py")
    command = [sys.executable, "-m", "pytest", str(file), "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_interpreted_they_pass_the_self_check_which_finds_every_planted_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    verdicts = check_paths(PathSource("planted_kernels", "paths", list(FAULTS)), is_timed=False, deadline_s=120)
    faults = {verdict.name: verdict.fault for verdict in verdicts}
    assert [faults.pop(f"sound in {dtype}") for dtype in ("float32", "float16")] == [None, None]
    assert list(faults) == list(FAULTS)
    found = {name for name, fault in FAULTS.items() if fault.words in (faults[name] or "")}
    assert found == FAULTS.keys(), faults


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100_without_spilling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found, fused, invariant = (
        importlib.import_module(f"mint.engine.cuda.{name}") for name in ("kernels", "fused_passes", "invariant_kernels")
    )
    widening = importlib.import_module("mint.engine.quantized.triton_widening")
    compiler, backend = importlib.import_module("triton.compiler"), importlib.import_module("triton.backends.compiler")
    attention = {"GROUPS": 2, "DIM": 128, "PAGE_POSITIONS": PAGE_POSITIONS, "SPLIT_PAGES": SPLIT_PAGES, "WIDTH": 128}
    tile = {
        "RANK": 16,
        "ROWS": found.ROWS_AT_ONCE,
        "COLUMNS": found.COLUMNS_AT_ONCE,
        "RANKS": 16,
        "SUMS": 8,
        "PRECISION": found.PRECISION,
    }
    heads = {"QUERY_HEADS": 16, "KV_HEADS": 8, "DIM": 128, "SIDE": 2, "PAGE_POSITIONS": PAGE_POSITIONS,
             "FIRST_PAGE": FIRST_PAGE, "BIASED": True, "NORMED": True, "RANK": 16, "ROWS": 16, "HALF": 64,
             "RANKS": 16, "SUMS": 4, "PRECISION": found.PRECISION}  # fmt: skip
    numbers = {"eps": "fp32", "scale": "fp32"} | dict.fromkeys(
        (
            "stride",
            "page_size",
            "count",
            "inner",
            "outputs",
            "width",
            "splits",
            "slot_size",
            "sum_size",
            "inputs_of_part",
            "ranks",
            "weight_row",
            "weight_column",
            "first_result",
            "rotated",
            "heads",
            "block",
            "code_row",
            "scale_row",
        ),
        "i32",
    )
    narrow = dict.fromkeys(("queries", "keys", "values", "narrow", "product"), "*bf16")
    bases = dict.fromkeys(("heads", "weight", "x"), "*bf16")
    # One of 8B's width, which no program may have to keep outside of its registers.
    passes = {
        fused._norm: {"ADDS": True, "WIDTH": 4096}, fused._norm_gradient: {"ADDS": True, "WIDTH": 4096},
        fused._swiglu: {"COLUMNS": fused.COLUMNS}, fused._swiglu_gradient: {"COLUMNS": fused.COLUMNS},
        fused._finish_heads: {"DIM": 128, "BIASED": True, "NORMED": True, "HEADS": fused.HEADS, "HALF": 64},
        fused._finish_heads_gradient: {"DIM": 128, "NORMED": True, "HEADS": fused.HEADS, "HALF": 64},
    }  # fmt: skip
    steps = {
        "_attend": {**attention, "SIDE": 2, "FIRST_PAGE": FIRST_PAGE, "SINGLE": False, "QUERIES": 16},
        "_merge": {**attention, "QUERIES": 2},
        "_norm": {"WIDTH": 1024},
        "_shrink": {"ROWS": 16, "RANKS": found.RANKS_AT_ONCE, "INPUTS": found.INPUTS_AT_ONCE,
                    "PRECISION": found.PRECISION},
        "_heads": heads, "_swiglu": tile, "_add": tile,
    }  # fmt: skip
    own_tiles = {
        invariant._product: {"ROWS": invariant.ROWS_AT_ONCE, "COLUMNS": invariant.COLUMNS_AT_ONCE,
                             "INPUTS": invariant.INPUTS_AT_ONCE},
        invariant._attend_packed: {"QUERY_HEADS": 16, "KV_HEADS": 8, "GROUPS": 2, "DIM": 128, "QUERIES": 16,
                                   "WIDTH": 128, "KEYS": invariant.KEYS_AT_ONCE},
    }  # fmt: skip
    widened = {widening._widen: {"EACH": 8, "BITS": 4, "INPUTS": widening.INPUTS_AT_ONCE}}
    kernels = {getattr(found, name): own for name, own in steps.items()} | passes | own_tiles | widened
    for function, sizes in kernels.items():
        types = {
            own: "constexpr"
            if own in sizes
            else {
                "inputs": "*i32",
                "slots": "*i32",
                "seen": "*i32",
                "codes": "*i32",
                **numbers,
                **narrow,
                **(bases if function in own_tiles else {}),
            }.get(own, "*fp32")
            for own in function.arg_names
        }
        constants = {(function.arg_names.index(own),): value for own, value in sizes.items()}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, own in enumerate(types.values())
            if own[0] == "*" or own == "i32"
        }
        source = compiler.ASTSource(fn=function, signature=types, constexprs=constants, attrs=aligned)
        compiled = compiler.compile(source, target=backend.GPUTarget("cuda", 90, 32))
        assert "ld.local" not in compiled.asm["ptx"], function
        assert compiled.asm["cubin"], function
