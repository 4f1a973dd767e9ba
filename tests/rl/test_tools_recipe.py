"""The tools recipes: a held-out set that is disjoint by construction, and rewards that only the right way earns."""

from __future__ import annotations

import json

import pytest
from scripted_policy import roll_out, says, tiny_tokenizer

import mint
from mint.recipes.datasets.arithmetic import is_heldout
from mint.recipes.datasets.calculator_questions import SHORT_SYSTEM, TOOLS_SYSTEM
from mint.recipes.tools import DEMO, FACTS, CalculatorQuestion, SearchAdapter, ToolsAdapter
from mint.rl import run_grpo
from mint.rl.rollout import Rollout
from mint.rl.tasks.tool_env import Costs


def play(adapter: ToolsAdapter | SearchAdapter, sample: object, *replies: str) -> Rollout:
    ((rollout,),) = [group.rollouts for group in roll_out(says(*replies), adapter, items=[sample])]
    return rollout


def call(**arguments: str) -> str:
    name = "calculator" if "expression" in arguments else "search"
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_no_held_out_operands_are_ever_trained_on_whatever_the_seed() -> None:
    for seed in range(2):
        heldout = ToolsAdapter(seed=seed).build_heldout()
        trained = ToolsAdapter(seed=seed + 1).build_dataset()
        assert len(heldout) == 512
        assert all(is_heldout(question.problem) for question in heldout)
        assert not any(is_heldout(question.problem) for question in trained)
        assert len({question.described for question in heldout}) == 2


def test_the_prompts_are_those_that_the_bundled_model_was_trained_on() -> None:
    for question in ToolsAdapter(heldout_size=2).build_heldout():
        rollout = play(ToolsAdapter(), question, "I think it is 4.")
        system = TOOLS_SYSTEM if question.described else SHORT_SYSTEM
        assert tiny_tokenizer().decode(rollout.turns[0].prompt) == (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.fixture
def question() -> CalculatorQuestion:
    return ToolsAdapter(heldout_size=1).build_heldout()[0]


def test_the_right_number_after_a_call_is_a_success(question: CalculatorQuestion) -> None:
    problem = question.problem
    rollout = play(ToolsAdapter(), question, call(expression=problem.expression), f"The answer is {problem.answer}.")
    assert (rollout.reward, rollout.parts, rollout.tool_calls) == (1.0, {"outcome": 1.0}, 1)
    assert f"<tool_response>{problem.answer}</tool_response>" in tiny_tokenizer().decode(rollout.turns[1].prompt)


@pytest.mark.parametrize(("reply", "reward"), [("It is {wrong}.", 0.0), ("It is {right} or {wrong}.", 0.0), ("No.", 0)])
def test_anything_but_the_right_number_alone_earns_nothing(
    question: CalculatorQuestion, reply: str, reward: float
) -> None:
    right = question.problem.value
    assert play(ToolsAdapter(), question, reply.format(right=right, wrong=right + 1)).reward == reward


def test_an_expression_that_is_none_costs_a_violation_and_can_be_mended(question: CalculatorQuestion) -> None:
    problem = question.problem
    replies = (call(expression="three and four"), call(expression=problem.expression), f"It is {problem.answer}.")
    rollout = play(ToolsAdapter(), question, *replies)
    assert rollout.reward == pytest.approx(0.8)
    assert rollout.parts == {"violation_cost": -0.2, "outcome": 1.0}


@pytest.mark.parametrize("fact", FACTS)
def test_a_search_shows_the_answer_and_a_guess_earns_nothing(fact: tuple[str, str]) -> None:
    question, answer = fact
    searched = play(SearchAdapter(), fact, call(query=question), f"It is {answer}.")
    assert searched.reward == pytest.approx(0.95)
    assert any(answer in row["content"] for row in searched.trace if row["role"] == "tool")
    assert play(SearchAdapter(), fact, f"It is {answer}.").reward == 0.0
    echoed = f'<tool_call>{{"name": "{answer}", "arguments": {{}}}}</tool_call>'
    assert play(SearchAdapter(), fact, echoed, f"It is {answer}.").parts["outcome"] == 0.0


def test_the_bundled_model_calls_the_calculator_about_every_second_time_and_calling_pays() -> None:
    service = mint.ServiceClient()
    sampler = service.create_sampling_client(base_model=DEMO.base_model)
    adapter = ToolsAdapter(heldout_size=24)
    samples = adapter.build_heldout()
    groups = roll_out(sampler, adapter, items=samples, group_size=4, timeout_s=60)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    calls = sum(rollout.tool_calls for rollout in rollouts) / len(rollouts)
    assert 0.3 < calls < 0.8
    assert {(rollout.error, rollout.retokenized_turns) for rollout in rollouts} == {(None, 0)}
    called, guessed = ([r.reward for r in rollouts if bool(r.tool_calls) == kind] for kind in (True, False))
    assert sum(called) / len(called) > 0.8 > 0.2 > sum(guessed) / len(guessed)
    service.close()


@pytest.mark.slow
def test_calls_that_cost_more_than_they_bring_are_given_up() -> None:
    adapter = ToolsAdapter(costs=Costs(per_call=1.5, at_most=2.0))
    result = run_grpo(adapter, DEMO.changed(steps=10, heldout_size=64))
    calls = [json.loads(line)["rollouts/tool_calls_mean"] for line in (result.run_dir / "metrics.jsonl").open()]
    assert calls[0] > 0.3
    assert calls[-1] < calls[0] / 2
