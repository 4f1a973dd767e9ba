"""The shift, the mask, the alignment: exactly what the policy said is trained, wherever it was said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mint
from mint.rl.rollout import Rollout, Turn
from mint.rl.training.datums import policy_datum, rollout_datums
from mint.types import AdamParams, Datum

TOKENS = st.lists(st.integers(3, 900), min_size=1, max_size=6)


@pytest.mark.parametrize(("prompt", "completion"), [([5], [6]), ([1, 2, 3], [4]), ([1], [2, 3, 4]), ([9, 8], [7, 6])])
def test_a_datum_is_the_seed_s_datum(prompt: list[int], completion: list[int]) -> None:
    logprobs = [-0.1 * (i + 1) for i in range(len(completion))]
    advantages = np.linspace(-1, 1, len(completion))
    datum = policy_datum(prompt, completion, logprobs_T=logprobs, advantages_T=advantages)
    full, prefix = prompt + completion, len(prompt) - 1
    assert datum.model_input.to_ints() == full[:-1]
    inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == full[1:]
    assert inputs["weights"] == [0.0] * prefix + [1.0] * len(completion)
    assert inputs["logprobs"] == pytest.approx([0.0] * prefix + logprobs)
    assert inputs["advantages"] == pytest.approx([0.0] * prefix + advantages.tolist())
    assert len({len(values) for values in inputs.values()}) == 1


def test_the_weight_multiplies_the_loss_weights_alone() -> None:
    one, half = (
        policy_datum([1, 2], [3, 4], logprobs_T=[-1.0, -2.0], advantages_T=np.array([0.5, 0.5]), weight=weight)
        for weight in (1.0, 0.25)
    )
    assert half.loss_fn_inputs["weights"].tolist() == [0.0, 0.25, 0.25]
    assert half.loss_fn_inputs["advantages"] == one.loss_fn_inputs["advantages"]


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Some turns extend the one before, some begin afresh."""
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 5))):
        past = [*turns[-1].prompt, *turns[-1].tokens] if turns and draw(st.booleans()) else []
        tokens = draw(TOKENS)
        logprobs = [-float(draw(st.integers(1, 99))) / 8 for _ in tokens]
        turns.append(Turn([*past, *draw(TOKENS)], tokens, logprobs))
    return Rollout(turns=turns, text="", stop_reason="env")


def joined(datums: list[Datum], name: str) -> list[float]:
    """One column of the trained positions, in order."""
    return [
        value
        for datum in datums
        for value, weight in zip(
            datum.loss_fn_inputs[name].tolist(), datum.loss_fn_inputs["weights"].tolist(), strict=True
        )
        if weight
    ]


@given(rollouts())
def test_the_trained_targets_are_the_sampled_tokens_in_order(rollout: Rollout) -> None:
    advantages = np.arange(1, len(rollout.tokens) + 1) / 4
    datums = rollout_datums(rollout, advantages_T=advantages, weight=0.5)
    assert joined(datums, "target_tokens") == rollout.tokens
    assert joined(datums, "logprobs") == rollout.logprobs
    assert joined(datums, "advantages") == advantages.tolist()
    for datum in datums:
        columns = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        assert set(columns["weights"]) <= {0.0, 0.5}
        unsaid = columns["weights"] == 0
        assert not columns["logprobs"][unsaid].any()
        assert not columns["advantages"][unsaid].any()


@given(rollouts())
def test_turns_that_extend_one_another_are_one_datum_and_others_begin_a_new_one(rollout: Rollout) -> None:
    datums = rollout_datums(rollout, advantages_T=np.ones(len(rollout.tokens)))
    begins = [
        later.prompt[: len(earlier.prompt) + len(earlier.tokens)] != [*earlier.prompt, *earlier.tokens]
        for earlier, later in zip(rollout.turns, rollout.turns[1:], strict=False)
    ]
    assert len(datums) == 1 + sum(begins)
    last = [*rollout.turns[-1].prompt, *rollout.turns[-1].tokens]
    assert datums[-1].model_input.to_ints() == last[:-1]


def test_what_the_policy_did_not_say_moves_no_weight() -> None:
    """Garbage in the columns of tool and prompt tokens leaves the update's bits as they are."""
    turns = [
        Turn([1, 40, 41, 42], [50, 51, 2], [-1.0, -2.0, -0.5]),
        Turn([1, 40, 41, 42, 50, 51, 2, 60, 61, 62], [70, 2], [-3.0, -0.25]),
    ]
    (clean,) = rollout_datums(
        Rollout(turns=turns, text="", stop_reason="env"), advantages_T=np.array([1.0, 1, 1, -1, -1])
    )
    unsaid = clean.loss_fn_inputs["weights"].to_numpy() == 0
    assert unsaid.tolist() == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 2
    columns = {name: tensor.to_numpy() for name, tensor in clean.loss_fn_inputs.items()}
    garbage = {
        **columns,
        "logprobs": np.where(unsaid, -37.5, columns["logprobs"]),
        "advantages": np.where(unsaid, 1e6, columns["advantages"]),
    }
    dirty = Datum(model_input=clean.model_input, loss_fn_inputs=garbage)
    shifted = {**columns, "advantages": np.where(unsaid, columns["advantages"], columns["advantages"] + 1)}
    other = Datum(model_input=clean.model_input, loss_fn_inputs=shifted)
    service = mint.ServiceClient()
    for loss in ("importance_sampling", "ppo", "dro"):
        digests = []
        for datum in (clean, dirty, other):
            trainer = service.create_lora_training_client(base_model="mint/tiny", rank=2, seed=5)
            trainer.forward_backward([datum], loss)
            digests.append(trainer.optim_step(AdamParams(learning_rate=1e-3)).result().state_digest)
        assert digests[0] == digests[1] != digests[2], loss
    service.close()
