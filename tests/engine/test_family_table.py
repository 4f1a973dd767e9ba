"""Every family gives the numbers of transformers with PEFT; docs/families.md has the figures of the last run."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
import torch
import transformers
from family_measurements import FamilyFigures, measure_family
from generated_page import replace_part
from small_models import FAMILIES, OTHER_FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"


@pytest.mark.slow
def test_every_family_equals_transformers_with_peft(tmp_path: Path, native_folder: Path) -> None:
    figures = []
    for family in (*FAMILIES, *OTHER_FAMILIES):
        figures.append(measure_family(family, tmp_path / family, native_folder))
        shutil.rmtree(tmp_path / family)
    replace_part(PAGE, "families", _table(figures))
    assert {own.family for own in figures if own.implementation == "mint"} == FAMILIES.keys()
    for own in figures:
        assert own.logprob_difference <= 2e-5, own
        assert own.gradient_difference <= 2e-5, own
        assert own.greedy_equal == own.greedy_total, own


def _table(figures: Sequence[FamilyFigures]) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, PEFT {peft.__version__}"
    rows = [
        f"| `{own.family}` | {own.implementation} | {own.loras} | {own.logprob_difference:.1e} "
        f"| {own.gradient_difference:.1e} | {own.greedy_equal}/{own.greedy_total} "
        f"| {own.training_speed:.2f}× | {own.decoding_speed:.2f}× |"
        for own in figures
    ]
    return "\n".join(
        [
            f"{datetime.date.today()}, {versions}.",
            "",
            "| `model_type` | computed by | LoRAs | logprobs | gradients | greedy tokens | training | decoding |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
