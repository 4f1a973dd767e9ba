"""The self-check of fast paths finds every planted fault, names it, and lets the sound paths be."""

from __future__ import annotations

from planted_paths import PLANTS

from mint.engine.cuda.fast_paths import EXPERTS, OPTIMIZER, Shapes
from mint.engine.cuda.self_check import PathSource, check_paths


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


def test_torch_s_fused_optimizer_and_grouped_products_pass_the_check() -> None:
    shapes = Shapes(64, 96, 4, 2, 32, 1, 1e-6, True, True, "float32", "cpu", (OPTIMIZER, EXPERTS))
    verdicts = check_paths(shapes.source, is_timed=False)
    assert [(verdict.name, verdict.fault) for verdict in verdicts] == [(EXPERTS, None), (OPTIMIZER, None)]
