"""SFT: completions alone are trained on, the held-out loss falls, and RL takes over from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mint
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.math import MathAdapter
from mint.recipes.sft import SFTConfig, run_sft
from mint.recipes.supervised import Demonstration, batch_places, completion_datum, reply_ids
from mint.rl import RLConfig, run_grpo
from mint.runs.log import RunLog

pytestmark = pytest.mark.learns


def demonstrations(tokenizer: object, problems: list[Problem]) -> list[Demonstration]:
    adapter = MathAdapter()
    return [Demonstration(adapter.make_prompt(each, tokenizer), f" {each.answer}") for each in problems]


@pytest.mark.parametrize(("prompt", "completion"), [([5, 6, 7], [8, 9]), ([5], [8])])
def test_only_the_completion_has_weight(prompt: list[int], completion: list[int]) -> None:
    datum = completion_datum(prompt, completion)
    targets, weights = (datum.loss_fn_inputs[name].data for name in ("target_tokens", "weights"))
    assert datum.model_input.to_ints() == [*prompt, *completion][:-1]
    assert [target for target, weight in zip(targets, weights, strict=True) if weight] == completion
    assert set(weights) <= {0.0, 1.0}


def test_an_epoch_visits_every_demonstration_once_and_each_epoch_in_its_own_order() -> None:
    epochs = [[place for step in steps for place in batch_places(10, 4, step, 0)] for steps in ((1, 2, 3), (4, 5, 6))]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]


def test_the_held_out_loss_falls_and_rl_starts_where_sft_ended(tmp_path: Path) -> None:
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
        shown = demonstrations(tokenizer, draw_problems(0, 512, heldout=False))
        heldout = demonstrations(tokenizer, draw_problems(0, 128, heldout=True))
        config = SFTConfig(run_dir=tmp_path / "sft", epochs=1, save_every=20)
        result = run_sft(shown, heldout, config, service_client=service)

        assert result.after.loss[0] < result.before.loss[0]
        assert result.before.accuracy[2] < result.after.accuracy[1], "the intervals overlap"
        rows = RunLog(tmp_path / "sft").read("evaluations.jsonl")
        assert [(row["when"], row["metric"]) for row in rows] == [
            ("before", "loss"),
            ("before", "accuracy"),
            ("after", "loss"),
            ("after", "accuracy"),
        ]
        steps = RunLog(tmp_path / "sft").read("metrics.jsonl")
        assert [row["step"] for row in steps] == list(range(1, 33))
        assert np.mean([row["train/loss"] for row in steps[-8:]]) < np.mean([row["train/loss"] for row in steps[:8]])

        rl = RLConfig(
            base_model="mint/tiny",
            init_from=result.checkpoint,
            steps=0,
            heldout_size=128,
            max_tokens=8,
            run_dir=tmp_path / "rl",
        )
        started = run_grpo(MathAdapter(heldout_size=128), rl, service_client=service)
        assert started.heldout_before[0.0].mean == result.after.accuracy[0]


def test_a_prompt_that_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
        shown = demonstrations(tokenizer, draw_problems(0, 8, heldout=False))
        leaked = [Demonstration(shown[3].prompt, " another answer")]
        with pytest.raises(mint.errors.InvalidRequestError, match="shares 1 prompts with the held-out set"):
            run_sft(shown, leaked, SFTConfig(run_dir=tmp_path / "sft"), service_client=service)
        with pytest.raises(mint.errors.InvalidRequestError, match="is empty"):
            run_sft([], shown, SFTConfig(run_dir=tmp_path / "sft"), service_client=service)


def test_a_reply_ends_with_the_end_of_turn(tmp_path: Path) -> None:
    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
    assert tokenizer.decode(reply_ids(" 42", tokenizer)) == " 42<|im_end|>"
