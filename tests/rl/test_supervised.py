"""SFT, DPO and distillation: settings are checked, and a killed run resumes to the same bits."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mint
from mint.cli.recipes.recipe_runs import print_report, teacher_sampler
from mint.errors import InvalidRequestError
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.distill import DistillConfig, DistillResult, run_distill
from mint.recipes.dpo import DPOConfig, DPOResult, Preference, run_dpo
from mint.recipes.math import MathAdapter
from mint.recipes.sft import SFTConfig, SFTResult, run_sft
from mint.recipes.supervised import Demonstration, SupervisedConfig, completion_datum
from mint.rl import RLConfig, run_grpo
from mint.runs.log import RunLog
from mint.runs.reader import RunReader
from mint.types import AdamParams

RECIPES = ("sft", "dpo", "distill")
NUMBERS = ("train/loss", "train/pair_loss", "train/margin", "train/reverse_kl", "optim/grad_norm", "learning_rate")

Result = SFTResult | DPOResult | DistillResult


@pytest.mark.parametrize(
    ("config", "fields", "refusal"),
    [
        (SFTConfig, {"learning_rate": "fast"}, r"SFTConfig\.learning_rate = fast"),
        (SFTConfig, {"batch_size": -3}, r"SFTConfig\.batch_size = -3"),
        (SFTConfig, {"epoch": 3}, r"SFTConfig\.epoch = 3: .*Did you mean epochs\?"),
        (DPOConfig, {"rank": "x"}, r"DPOConfig\.rank = x"),
        (DPOConfig, {"beta": 0.0}, r"DPOConfig\.beta = 0"),
        (DistillConfig, {"group_size": 0}, r"DistillConfig\.group_size = 0"),
        (SFTConfig, {"epochs": "3"}, r"SFTConfig\.epochs = 3: .*not str\. Give an integer, at least 1"),
        (DistillConfig, {"temperature": float("nan")}, r"DistillConfig\.temperature = nan"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(
    config: type[SupervisedConfig], fields: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(InvalidRequestError, match=refusal):
        config(**fields)


def problems(count: int, *, heldout: bool) -> list[Problem]:
    return [each for each in draw_problems(0, 2 * count, heldout=heldout) if each.value >= 20][:count]


def train(
    recipe: str,
    data_dir: Path,
    run_dir: Path,
    *,
    resume: bool = False,
    on_progress: Callable[[str, dict[str, Any]], None] | None = None,
) -> Result:
    """A small run of a recipe; of six steps, saved after every second."""
    shared: dict[str, Any] = {"run_dir": run_dir, "batch_size": 4, "save_every": 2}
    with mint.ServiceClient(data_dir=data_dir) as service:
        tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
        ask = tokenizer.encode
        trained, heldout = problems(12, heldout=False), problems(4, heldout=True)
        options: dict[str, Any] = {"service_client": service, "resume": resume, "on_progress": on_progress}
        if recipe == "sft":
            shown, kept = (
                [Demonstration(ask(each.question), f" {each.answer}") for each in side] for side in (trained, heldout)
            )
            return run_sft(shown, kept, SFTConfig(epochs=2, **shared), **options)
        if recipe == "dpo":
            pairs, kept_pairs = (
                [Preference(ask(each.question), f" {each.answer}", f" {each.value - 10}") for each in side]
                for side in (trained, heldout)
            )
            return run_dpo(pairs, kept_pairs, DPOConfig(epochs=2, learning_rate=2e-3, **shared), **options)
        # The student begins with other weights than the teacher's: its lora was trained by SFT.
        student = (data_dir / "student.txt").read_text()
        prompts, kept_prompts = ([ask(each.question) for each in side] for side in (trained, heldout))
        config = DistillConfig(steps=6, group_size=2, max_tokens=6, init_from=student, **shared)
        teacher = service.create_sampling_client(base_model="mint/tiny")
        return run_distill(prompts, kept_prompts, teacher, config, **options)


def train_and_die(recipe: str, data_dir: Path, run_dir: Path) -> None:
    """Kills its own process after the fifth step, one step after the last checkpoint."""

    def on_progress(event: str, fields: Mapping[str, Any]) -> None:
        if event == "step" and fields["step"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    train(recipe, data_dir, run_dir, on_progress=on_progress)


def next_digest(data_dir: Path, checkpoint: str) -> str | None:
    """The state after one more step from a checkpoint: equal for equal weights and moments."""
    with mint.ServiceClient(data_dir=data_dir) as service:
        trainer = service.create_training_client_from_state_with_optimizer(checkpoint)
        trainer.forward_backward([completion_datum([5, 6, 7], [8, 9])], "cross_entropy").result()
        return trainer.optim_step(AdamParams(learning_rate=1e-3)).result().state_digest


@pytest.mark.restarts
@pytest.mark.parametrize(
    "recipe", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "distill"))]
)
def test_a_killed_run_resumes_to_the_same_bits(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_THREADS", "1")
    data_dir, whole, killed = tmp_path / "service", tmp_path / "whole", tmp_path / "killed"
    data_dir.mkdir()
    if recipe == "distill":
        (data_dir / "student.txt").write_text(train("sft", data_dir, tmp_path / "student").checkpoint)
    expected = train(recipe, data_dir, whole)
    child = multiprocessing.get_context("spawn").Process(target=train_and_die, args=(recipe, data_dir, killed))
    child.start()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL
    assert RunReader(killed).summary().state == "died"

    with pytest.raises(InvalidRequestError, match="resume=True"):
        train(recipe, data_dir, killed)
    steps: list[int] = []
    resumed = train(
        recipe,
        data_dir,
        killed,
        resume=True,
        on_progress=lambda event, fields: steps.append(fields["step"]) if event == "step" else None,
    )
    assert steps == [5, 6], "from the checkpoint of step 4"
    assert (resumed.before, resumed.after) == (expected.before, expected.after)
    assert next_digest(data_dir, resumed.checkpoint) == next_digest(data_dir, expected.checkpoint)

    def logged(folder: Path) -> list[dict[str, Any]]:
        rows = RunLog(folder).read("metrics.jsonl")
        return [{name: row[name] for name in ("step", *NUMBERS) if name in row} for row in rows]

    assert logged(killed) == logged(whole)
    assert RunLog(killed).read("evaluations.jsonl") == RunLog(whole).read("evaluations.jsonl")
    summary = RunReader(killed).summary()
    assert (summary.state, summary.step, summary.steps) == ("finished", 6, 6)
    again = train(recipe, data_dir, killed, resume=True)
    assert (again.checkpoint, again.after) == (resumed.checkpoint, resumed.after), "there is nothing left to do"


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    config = SFTConfig(run_dir=tmp_path / "run", epochs=1)
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        run_sft([Demonstration([5, 6], " 7")], [], config, service_client=service)
        with pytest.raises(InvalidRequestError, match="another value of `data`"):
            run_sft([Demonstration([5, 6], " 8")], [], config, service_client=service, resume=True)


def test_a_resume_without_a_folder_is_refused_and_not_a_new_run(tmp_path: Path) -> None:
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        with pytest.raises(InvalidRequestError, match=r"resume = True: needs the folder of the run.*--run-dir"):
            run_sft([Demonstration([5, 6], " 7")], [], SFTConfig(), service_client=service, resume=True)
        grpo = RLConfig(base_model="mint/tiny", steps=0)
        with pytest.raises(InvalidRequestError, match=r"resume = True: needs the folder of the run.*--run-dir"):
            run_grpo(MathAdapter(), grpo, service_client=service, resume=True)


def test_a_run_is_not_resumed_with_another_teacher(tmp_path: Path) -> None:
    config = DistillConfig(run_dir=tmp_path / "run", steps=1, group_size=1, max_tokens=2)
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        trainer = service.create_lora_training_client(base_model="mint/tiny", rank=4)
        one, other = (
            service.create_sampling_client(trainer.save_weights_for_sampler(name=name).result().path)
            for name in ("one", "other")
        )
        run_distill([[5, 6]], [], one, config, service_client=service)
        again = service.create_sampling_client(one.get_model_path())
        run_distill([[5, 6]], [], again, config, service_client=service, resume=True)
        for teacher in (other, service.create_sampling_client(base_model="mint/tiny")):
            with pytest.raises(InvalidRequestError, match="another value of `teacher`"):
                run_distill([[5, 6]], [], teacher, config, service_client=service, resume=True)


@pytest.mark.parametrize("teacher", ["foo", "mint://nowhere/sampler_weights/x"])
def test_a_teacher_that_does_not_exist_is_refused_as_the_teacher(teacher: str, tmp_path: Path) -> None:
    with (
        mint.ServiceClient(data_dir=tmp_path / "service") as service,
        pytest.raises(mint.MintError, match=f"^teacher = {teacher}"),
    ):
        teacher_sampler(service, teacher)


def test_data_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    sft, dpo, distill = (kind(run_dir=tmp_path) for kind in (SFTConfig, DPOConfig, DistillConfig))
    teacher: Any = None
    wrong: Any = "text"
    with pytest.raises(InvalidRequestError, match=r"training set = text: is not a list.*Demonstration\(prompt"):
        run_sft(wrong, [], sft)
    with pytest.raises(InvalidRequestError, match=r"held-out set\[0\] = text: is not a Preference, but a str"):
        run_dpo([Preference([5], "a", "b")], [wrong], dpo)
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\] = text: is not a list, but a str.*token ids"):
        run_distill([[5], wrong], [], teacher, distill)


def test_without_held_out_items_there_are_no_scores(tmp_path: Path) -> None:
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        config = SFTConfig(run_dir=tmp_path / "run", epochs=1)
        result = run_sft([Demonstration([5, 6], " 7")], [], config, service_client=service)
    assert (result.before, result.after) == (None, None)
    shown = Console(record=True, width=200)
    print_report(shown, asdict(result))
    assert shown.export_text().count("nothing is held out") == 2


def test_the_run_folder_says_what_took_effect_on_the_server(tmp_path: Path) -> None:
    train("sft", tmp_path / "data", tmp_path / "run")
    effective = RunReader(tmp_path / "run").effective()
    assert effective["implementation"] == "mint"
    with mint.ServiceClient(data_dir=tmp_path / "data") as service:
        fresh = service.create_lora_training_client(base_model="mint/tiny", rank=effective["rank"])
        assert effective.keys() == fresh.get_info().effective.keys()
