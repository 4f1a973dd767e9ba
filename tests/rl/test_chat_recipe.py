"""The chat task: the prompts that the model was trained on, a rubric that no fixed sentence wins, a judge on top."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

import mint
from mint.errors import InvalidRequestError
from mint.recipes.chat import DEMO, ChatAdapter
from mint.recipes.datasets.chat_questions import PAIRS, RUBRIC, THINGS, ChatQuestion, is_heldout_pair, questions
from mint.rl import run_grpo
from mint.rl.reward import Reward
from mint.rl.tasks.judges import ComparisonVerdict, PairwiseJudge
from mint.rl.tasks.penalties import verbosity
from mint.runs.log import RunLog
from scripts.tiny.chat_skill import TRAINED_PAIRS, chat_document, chat_tasks, good_reply, message_prompt

FOX = ChatQuestion("Do you like the {}?", THINGS[0])


def test_held_out_pairs_are_87_and_never_in_the_training_set_or_the_corpus() -> None:
    adapter = ChatAdapter(seed=3)
    heldout, training = adapter.build_heldout(), adapter.build_dataset()
    assert len(heldout) == 2 * 87
    assert len(heldout) + len(training) == 2 * len(PAIRS)
    assert not {adapter.item_key(each) for each in heldout} & {adapter.item_key(each) for each in training}
    assert {(each.message, each.thing) for each in training} == set(TRAINED_PAIRS)
    heldout_texts = {message.format(thing.name) for message, thing in PAIRS if is_heldout_pair(message, thing)}
    rng = random.Random(0)
    assert not any(text in chat_document(rng).text for _ in range(500) for text in heldout_texts)


def test_the_chat_template_gives_the_ids_that_the_model_was_trained_on() -> None:
    with mint.ServiceClient() as service:
        tokenizer = service.create_sampling_client(base_model="mint/tiny").get_tokenizer()
    adapter = ChatAdapter()
    for question in questions(heldout=True):
        assert adapter.make_prompt(question, tokenizer) == tokenizer.encode(message_prompt(question))


def test_a_good_reply_earns_one_and_each_fault_costs_its_part() -> None:
    rng = random.Random(0)
    for thing in THINGS:
        for _ in range(8):
            assert RUBRIC(good_reply(thing, rng), ChatQuestion("Tell me about the {}.", thing)).value == 1.0
    assert RUBRIC("The fox is a quick animal", FOX).parts == {
        "names_thing": 0.3, "fitting": 0.3, "length": 0.2, "ending": 0.0, "no_repeats": 0.1,
    }  # fmt: skip
    assert RUBRIC("It is fine.", FOX).value == pytest.approx(0.2)
    assert RUBRIC("", FOX).value == pytest.approx(0.1)
    assert RUBRIC("Well, the fox is the fox and it is quick and so on and so on and so on.", FOX).value < 0.75


def test_no_fixed_sentence_wins_even_with_the_name_copied_in() -> None:
    for template in ("The {} is a quick animal.", "I like the {} very much today."):
        replies = [(template.format(thing.name), ChatQuestion("Tell me about the {}.", thing)) for thing in THINGS]
        assert sum(RUBRIC(*pair).value == 1.0 for pair in replies) < 0.2 * len(THINGS)


def test_probe_and_recipe_score_alike() -> None:
    for task in chat_tasks(0, 20):
        question = next(each for each in questions(heldout=True) if message_prompt(each) == task.prompt)
        reply = good_reply(question.thing, random.Random(1))
        assert task.grade(reply) == ChatAdapter().compute_reward(reply, question).value == 1.0


def test_without_a_judge_replies_are_scored_alone() -> None:
    assert ChatAdapter().compute_group_rewards(["x", "y"], FOX) is None


def test_with_a_judge_the_reward_is_both_by_name() -> None:
    def likes_quick(prompt: str, a: str, b: str) -> ComparisonVerdict:
        return "a" if "quick" in a else "b" if "quick" in b else "tie"

    judge = PairwiseJudge(likes_quick)
    adapter = ChatAdapter(judge=judge, judge_share=0.25)
    replies = ["The fox is quick and belongs to the forest.", "The fox is an animal for the forest."]
    answered = adapter.compute_group_rewards(replies, FOX)
    assert answered is not None
    first, second = asyncio.run(_collect(answered))
    adapter.close()
    assert isinstance(first, Reward)
    assert isinstance(second, Reward)
    assert (first.value, second.value) == pytest.approx((1.0, 0.75))
    assert first.parts["judge"] == pytest.approx(0.25)
    assert first.parts["fitting"] == pytest.approx(0.75 * 0.3)
    assert second.info["rubric"] == 1.0
    assert second.info["judge_flip_rate"] == 0.0
    with pytest.raises(InvalidRequestError):
        ChatAdapter(judge_share=0)


async def _collect(answered: Any) -> Any:
    return await answered


def test_penalties_come_off_the_rubric_and_off_the_judge() -> None:
    judge = PairwiseJudge(lambda prompt, a, b: "tie")
    adapter = ChatAdapter(judge=judge, judge_share=1.0, penalties={"verbosity": verbosity(5, slope=0.1)})
    reply = "The fox is a quick animal."
    assert adapter.compute_reward(reply, FOX).parts["verbosity"] == pytest.approx(-0.1)
    (reward,) = asyncio.run(_collect(adapter.compute_group_rewards([reply], FOX)))
    adapter.close()
    assert reward.value == pytest.approx(0.4)
    assert reward.parts["judge"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_judge_with_a_hidden_length_bias_teaches_without_length_running_away(seed: int, tmp_path: Path) -> None:
    asked = {question.text: question for side in (False, True) for question in questions(heldout=side)}

    def biased(prompt: str, a: str, b: str) -> ComparisonVerdict:
        first, second = (RUBRIC(reply, asked[prompt]).value + 0.02 * len(reply.split()) for reply in (a, b))
        return "a" if first > second - 0.05 else "b"  # and the first place, where it cannot tell

    judge = PairwiseJudge(biased)
    adapter = ChatAdapter(seed=seed, judge=judge, judge_share=1.0, penalties={"verbosity": verbosity(9, slope=0.1)})
    result = run_grpo(adapter, DEMO.changed(seed=seed, run_dir=tmp_path / "run"))
    lengths = [step["rollouts/mean_length"] for step in RunLog(tmp_path / "run").read("metrics.jsonl")]
    assert sum(lengths[-3:]) / sum(lengths[:3]) < 1.3
    assert result.heldout_after[1.0].low > result.heldout_before[1.0].high
    assert judge.statistics.length_correlation > 0.3
    assert judge.statistics.alarm is not None
