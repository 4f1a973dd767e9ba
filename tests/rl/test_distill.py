"""On-policy distillation: the estimate is the reverse KL, it falls, and a foreign tokenizer is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mint
from mint.recipes.datasets.arithmetic import draw_problems
from mint.recipes.distill import DistillConfig, run_distill, score
from mint.recipes.sft import SFTConfig, run_sft
from mint.recipes.supervised import Demonstration
from mint.runs.log import RunLog

pytestmark = pytest.mark.learns


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mint.ServiceClient]:
    with mint.ServiceClient(data_dir=tmp_path_factory.mktemp("service")) as client:
        yield client


@pytest.fixture(scope="module")
def teacher(service: mint.ServiceClient, tmp_path_factory: pytest.TempPathFactory) -> mint.SamplingClient:
    """The bundled model after some supervised arithmetic."""
    tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
    shown = [
        Demonstration(tokenizer.encode(each.question), f" {each.answer}")
        for each in draw_problems(0, 512, heldout=False)
    ]
    config = SFTConfig(run_dir=tmp_path_factory.mktemp("sft") / "run", epochs=1)
    return service.create_sampling_client(run_sft(shown, [], config, service_client=service).sampler_checkpoint)


def prompts(teacher: mint.SamplingClient, count: int, *, heldout: bool) -> list[list[int]]:
    return [teacher.get_tokenizer().encode(each.question) for each in draw_problems(1, count, heldout=heldout)]


@pytest.mark.slow
def test_the_reverse_kl_to_the_teacher_falls_on_held_out_prompts(
    service: mint.ServiceClient, teacher: mint.SamplingClient, tmp_path: Path
) -> None:
    config = DistillConfig(run_dir=tmp_path / "run", steps=8, max_tokens=8)
    trained, heldout = prompts(teacher, 256, heldout=False), prompts(teacher, 96, heldout=True)
    result = run_distill(trained, heldout, teacher, config, service_client=service)
    assert result.after[2] < result.before[1], (result.before, result.after)
    rows = RunLog(tmp_path / "run").read("metrics.jsonl")
    assert len(rows) == 8
    assert np.mean([row["train/reverse_kl"] for row in rows[-3:]]) < np.mean(
        [row["train/reverse_kl"] for row in rows[:3]]
    )


def test_a_student_that_is_the_teacher_has_a_reverse_kl_of_zero(teacher: mint.SamplingClient, tmp_path: Path) -> None:
    config = DistillConfig(run_dir=tmp_path)
    scored = score(teacher, teacher, prompts(teacher, 4, heldout=True), config, seeds=range(4))
    assert max(float(np.abs(each.reverse_kl).max()) for each in scored) <= 1e-5


def test_a_teacher_with_another_tokenizer_is_refused(
    service: mint.ServiceClient, teacher: mint.SamplingClient, tmp_path: Path
) -> None:
    class Foreign:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    class ForeignTeacher:
        def get_model_path(self) -> None:
            return None

        def get_tokenizer(self) -> Foreign:
            return Foreign()

        def get_base_model(self) -> str:
            return "elsewhere/other"

    config = DistillConfig(run_dir=tmp_path / "run")
    with pytest.raises(mint.errors.InvalidRequestError, match=r"elsewhere/other: has another tokenizer"):
        run_distill([[1, 2]], [], ForeignTeacher(), config, service_client=service)  # ty: ignore[invalid-argument-type]
