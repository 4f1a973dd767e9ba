"""A run ends with the same state digest on every number of ranks, also if the number changes in the middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_models import write_model

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from clusters import cluster, grpo_step, open_model, torch_engine

from mint.cluster.collectives.parallelism import Parallelism
from mint.engine.protocol import ModelsLostError

pytestmark = pytest.mark.slow

STEPS = 50
DIVISIONS = {
    "replicated": Parallelism(),
    "sharded": Parallelism(shards=True),
    "experts divided": Parallelism(experts=True),
}
SIZES = {12: 1, 25: 4, 38: 2}
"""The numbers of ranks, from these steps on."""
Digests = Callable[[str, str], list[str]]
FAMILIES = ("qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        write_model(folder, "tied", family=family)
    return folders


@pytest.fixture(scope="module")
def of_one_process(folders: dict[str, Path]) -> Digests:
    """The digests of all steps in one process, by dtype and family."""
    digests: dict[tuple[str, str], list[str]] = {}

    def run(dtype: str, family: str) -> list[str]:
        if (dtype, family) not in digests:
            engine, folder = torch_engine(dtype=dtype), folders[family]
            open_model(engine, folder)
            digests[dtype, family] = [grpo_step(engine, folder, step) for step in range(STEPS)]
        return digests[dtype, family]

    return run


@pytest.mark.parametrize("division", list(DIVISIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
def test_50_steps_of_grpo_end_with_one_digest(
    folders: dict[str, Path], of_one_process: Digests, trainers: int, dtype: str, division: str
) -> None:
    engine = cluster(trainers, dtype=dtype, parallelism=DIVISIONS[division])
    for family, folder in folders.items():
        open_model(engine, folder)
        found = [grpo_step(engine, folder, step) for step in range(STEPS)]
        assert found == of_one_process(dtype, family)
        assert len(set(found)) == STEPS
    engine.close()


@pytest.mark.parametrize("division", list(DIVISIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_ranks_may_change_in_the_middle(
    folders: dict[str, Path], of_one_process: Digests, family: str, dtype: str, division: str
) -> None:
    engine, folder = cluster(3, dtype=dtype, parallelism=DIVISIONS[division]), folders[family]
    open_model(engine, folder)
    found = []
    for step in range(STEPS):
        if step in SIZES:
            state = engine.read_state("m")
            engine.resize(trainers=SIZES[step])
            with pytest.raises(ModelsLostError):
                engine.clear_gradient("m")
            open_model(engine, folder)
            engine.write_state("m", state)
        found.append(grpo_step(engine, folder, step))
        if step in SIZES:
            assert len(engine.processes) == SIZES[step]
    engine.close()
    assert found == of_one_process(dtype, family)
