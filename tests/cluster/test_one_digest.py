"""A run ends with the same state digest on every number of ranks, also if the number changes in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import write_model

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from clusters import cluster, grpo_step, open_model, torch_engine

pytestmark = pytest.mark.slow

STEPS = 50
FAMILIES = ("qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        write_model(folder, "tied", family=family)
    return folders


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_50_steps_of_grpo_end_with_one_digest(folders: dict[str, Path], dtype: str) -> None:
    expected: dict[str, list[str]] = {}
    middle = {}
    for family, folder in folders.items():
        engine = torch_engine(dtype=dtype)
        open_model(engine, folder)
        expected[family] = []
        for step in range(STEPS):
            if step == STEPS // 2:
                middle[family] = engine.read_state("m")
            expected[family].append(grpo_step(engine, folder, step))
    assert len({digest for digests in expected.values() for digest in digests}) == 2 * STEPS
    for trainers in (1, 2, 3, 4):
        engine = cluster(trainers, dtype=dtype)
        for family, folder in folders.items():
            open_model(engine, folder)
            assert [grpo_step(engine, folder, step) for step in range(STEPS)] == expected[family], (trainers, family)
        engine.close()


def test_the_number_of_ranks_may_change_in_the_middle(folders: dict[str, Path]) -> None:
    folder = folders["qwen3"]
    alone = torch_engine()
    open_model(alone, folder)
    expected = [grpo_step(alone, folder, step) for step in range(9)]
    state, found = None, []
    for start, trainers in ((0, 3), (3, 1), (6, 2)):
        engine = cluster(trainers)
        open_model(engine, folder)
        if state is not None:
            engine.write_state("m", state)
        found += [grpo_step(engine, folder, step) for step in range(start, start + 3)]
        state = engine.read_state("m")
        engine.close()
    assert found == expected
