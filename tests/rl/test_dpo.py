"""DPO: the loss against its closed form and finite differences, and held-out pairs in the right order more often."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import mint
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.dpo import DPOConfig, Preference, preference_loss, run_dpo
from mint.recipes.supervised import completion_datum
from mint.runs.log import RunLog

pytestmark = pytest.mark.learns

BETA = 0.3


def test_the_loss_and_its_gradient_are_the_closed_form() -> None:
    data = [completion_datum([1, 2, 3], reply) for reply in ([4, 5], [6], [7], [8, 9, 10])]
    generator = torch.Generator().manual_seed(0)
    rows = [
        (-3 * torch.rand(len(datum.loss_fn_inputs["weights"]), generator=generator)).requires_grad_() for datum in data
    ]
    reference = [-2.5, -1.0, -0.3, -4.0]
    loss, metrics = preference_loss(reference, BETA)(data, rows)
    loss.backward()

    replies = [float(row.detach()[2:].sum()) for row in rows]  # two prompt targets before the reply
    gains = np.subtract(replies, reference)
    margins = BETA * (gains[::2] - gains[1::2])
    assert float(loss.detach()) == pytest.approx(float(np.log1p(np.exp(-margins)).sum()), abs=1e-6)
    assert metrics["pair_loss"] == pytest.approx(float(loss.detach()) / 2)
    assert metrics["pair_accuracy"] == np.mean([replies[0] > replies[1], replies[2] > replies[3]])
    for place, row in enumerate(rows):  # d/d log π(c) = −β σ(−margin), and + for the rejected
        expected = BETA / (1 + math.exp(margins[place // 2])) * (-1 if place % 2 == 0 else 1)
        assert row.grad is not None
        assert row.grad[2:].tolist() == pytest.approx([expected] * (len(row) - 2), abs=1e-6)
        assert row.grad[:2].tolist() == [0.0, 0.0]


def test_the_loss_stays_finite_for_margins_of_thousands() -> None:
    data = [completion_datum([1], [2]), completion_datum([1], [3])]
    rows = [torch.tensor([value], requires_grad=True) for value in (-1e4, 0.0)]
    loss, _ = preference_loss([0.0, 0.0], 1.0)(data, rows)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1e4)
    assert [row.grad.item() for row in rows if row.grad is not None] == [-1.0, 1.0]


def test_held_out_pairs_are_put_in_the_right_order_more_often(tmp_path: Path) -> None:
    def preferences(problems: list[Problem]) -> list[Preference]:
        # The wrong reply is the model's own systematic slip: a ten too few.
        return [
            Preference(tokenizer.encode(each.question), f" {each.answer}", f" {each.value - 10}")
            for each in problems
            if each.value >= 20
        ]

    with mint.ServiceClient(data_dir=tmp_path / "service") as service:
        tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
        trained = preferences(draw_problems(0, 640, heldout=False))
        heldout = preferences(draw_problems(0, 256, heldout=True))
        config = DPOConfig(run_dir=tmp_path / "dpo", learning_rate=1e-3)
        result = run_dpo(trained, heldout, config, service_client=service)
    assert result.before.loss[0] == pytest.approx(math.log(2), abs=1e-6)
    assert result.after.loss[2] < result.before.loss[0]
    assert result.before.accuracy[2] < result.after.accuracy[1], (result.before, result.after)
    rows = RunLog(tmp_path / "dpo").read("metrics.jsonl")
    assert rows[0]["train/pair_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert rows[0]["train/margin"] == pytest.approx(0.0, abs=1e-4)
