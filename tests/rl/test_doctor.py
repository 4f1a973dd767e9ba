"""The doctor names the right lever: six tasks with one known fault each, on the real model, and the decision alone."""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import mint
from mint.recipes.chat import ChatAdapter
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.math import MathAdapter
from mint.rl import Group, Reward, RLAdapter, RLConfig, Rollout, Turn
from mint.rl.analysis.doctor import Examination, examine, longer_gain
from mint.rl.analysis.planner import GROUP_SIZES
from mint.rl.analysis.task_verdict import decide

CONFIG = RLConfig(base_model="mint/tiny", group_size=8, batch_size=16, max_tokens=8, temperature=1.0)


class Arithmetic(MathAdapter):
    """A question format that the model half knows; the subclasses spoil one thing each."""

    def __init__(self) -> None:
        super().__init__(heldout_size=16, train_size=64)


class TooHard(Arithmetic):
    def make_prompt(self, item: Problem, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"Q: What is the square of {item.a + 10} plus {item.b}?\nA:")

    def compute_reward(self, response: str, item: Problem) -> float:
        return float(response.strip() == str((item.a + 10) ** 2 + item.b))


class Saturated(Arithmetic):
    """The clean format, which the model was pre-trained on to the end."""

    def make_prompt(self, item: Problem, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"{item.expression} =")


class ConstantReward(Arithmetic):
    def compute_reward(self, response: str, item: Problem) -> float:
        return 0.5


class AcceptsAnything(Arithmetic):
    def compute_reward(self, response: str, item: Problem) -> float:
        return 1.0


class FailingGrader(Arithmetic):
    def compute_reward(self, response: str, item: Problem) -> float:
        raise LookupError("no reference answer")


class Unscorable(Arithmetic):
    """A reward that has nothing to do with the completion: another each time."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def compute_reward(self, response: str, item: Problem) -> float:
        self.draws += 1
        return (self.draws * 0.618) % 1.0


class FixedReplyPays(Arithmetic):
    """Partial credit for being near, so generous that one reply said to every prompt earns more than trying."""

    def compute_reward(self, response: str, item: Problem) -> float:
        text = response.strip()
        near = 1 - abs(int(text) - item.value) / 400 if text.isdecimal() else 0.0
        return max(0.0, near) if len(text) == 1 else 0.3 * max(0.0, near)


class Clipped(Arithmetic):
    """Answers of two or three digits need more than the one token that `max_tokens` allows."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mint.ServiceClient]:
    with mint.ServiceClient(data_dir=tmp_path_factory.mktemp("service")) as client:
        yield client


def examined(task: RLAdapter, service: mint.ServiceClient, **settings: Any) -> Examination:
    return examine(task, CONFIG.changed(**settings), service_client=service, prompts=24, samples=8)


@pytest.mark.parametrize(
    ("task", "settings", "verdict"),
    [
        (Arithmetic(), {}, "go"),
        (TooHard(), {}, "sft_first"),
        (Saturated(), {}, "saturated"),
        (ConstantReward(), {}, "reward_constant"),
        (AcceptsAnything(), {}, "reward_constant"),
        (FailingGrader(), {}, "unlearnable"),
        (Unscorable(), {}, "unlearnable"),
        (FixedReplyPays(), {}, "reward_constant"),
        (Clipped(), {"max_tokens": 2}, "truncated"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RLAdapter) else None,
)
def test_each_task_gets_the_lever_that_fits_it(
    task: RLAdapter, settings: dict[str, Any], verdict: str, service: mint.ServiceClient
) -> None:
    found = examined(task, service, **settings)
    assert found.verdict == verdict, found.lines()
    assert found.reason
    assert found.remedy


def test_the_examination_says_what_it_rests_on(service: mint.ServiceClient) -> None:
    began = time.perf_counter()
    found = examined(Arithmetic(), service)
    seen, took = found.evidence, time.perf_counter() - began
    assert (seen.prompts, seen.samples, sum(seen.pass_histogram)) == (24, 8, 24)
    assert seen.success[1] < seen.success[0] < seen.success[2]
    assert set(seen.informative) == set(GROUP_SIZES)
    assert list(seen.informative.values()) == sorted(seen.informative.values())  # a larger group informs more often
    assert 0 < seen.reward_seconds <= seen.reward_seconds_max < took
    assert found.to_dict()["evidence"]["informative"]["8"] == seen.informative[8]
    assert any("informative" in line for line in found.lines())


def test_the_examination_starts_from_the_checkpoint_that_the_run_would_start_from(service: mint.ServiceClient) -> None:
    trainer = service.create_lora_training_client("mint/tiny", rank=4, seed=0)
    tokenizer = trainer.get_tokenizer()
    mute = [tokenizer.encode(problem.question) for problem in draw_problems(0, 32, heldout=False)]
    end = tokenizer.eos_token_id
    data = [
        mint.types.Datum(
            model_input=mint.types.ModelInput.from_ints(prompt),
            loss_fn_inputs={"target_tokens": [*prompt[1:], end], "weights": [0.0] * (len(prompt) - 1) + [1.0]},
        )
        for prompt in mute
    ]
    for _ in range(8):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(mint.types.AdamParams(learning_rate=1e-2)).result()
    checkpoint = trainer.save_state("mute").result().path
    assert examined(Arithmetic(), service, init_from=checkpoint).verdict == "sft_first"


def test_partial_credit_counts_as_a_signal_unless_it_is_scraps(service: mint.ServiceClient) -> None:
    class Near(Arithmetic):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def compute_reward(self, response: str, item: Problem) -> float:
            text = response.strip()
            return self.scale * (1 - min(1.0, abs(int(text) - item.value) / 100)) if text.isdecimal() else 0.0

    slope, scraps = examined(Near(0.9), service), examined(Near(0.05), service)
    assert (slope.verdict, slope.evidence.success[0]) == ("go", 0.0)
    assert slope.evidence.informative[4] > 0.5
    assert scraps.verdict == "sft_first"


class Scaled(Arithmetic):
    """Right answers earn `full`, wrong ones nothing."""

    def __init__(self, full: float) -> None:
        super().__init__()
        self.full = full

    def compute_reward(self, response: str, item: Problem) -> float:
        return self.full * super().compute_reward(response, item).value


def test_rewards_that_never_reach_success_reward_carry_the_signal_that_they_have(service: mint.ServiceClient) -> None:
    scaled, usual = examined(Scaled(0.8), service), examined(Scaled(1.0), service)
    assert scaled.verdict == "go", scaled.lines()
    assert scaled.evidence.success[0] == 0.0
    assert scaled.evidence.informative == usual.evidence.informative
    assert "no completion succeeded, the mean reward is" in scaled.reason
    assert any("set success_reward to 0.8 in the task" in note for note in scaled.notes), scaled.notes
    assert not any("success_reward" in note for note in usual.notes)


def test_two_rewards_above_success_reward_carry_the_signal_that_they_have(service: mint.ServiceClient) -> None:
    class Generous(Scaled):
        success_reward = 0.0

    assert examined(Generous(1.0), service).evidence.informative == examined(Scaled(1.0), service).evidence.informative


def test_a_judge_that_sees_no_difference_is_not_called_a_hard_task(service: mint.ServiceClient) -> None:
    class Indifferent(Arithmetic):
        def compute_group_rewards(self, responses: Sequence[str], item: Problem) -> list[float]:
            return [0.5 for _ in responses]

    assert examined(Indifferent(), service).verdict == "reward_constant"


def test_a_cut_off_that_more_tokens_do_not_cure_is_not_blamed_on_the_limit(service: mint.ServiceClient) -> None:
    seen = examined(Clipped(), service, max_tokens=2).evidence
    assert decide(seen)[0] == "truncated"
    verdict, reason, _ = decide(
        replace(seen, enough_tokens=None, longest_tried=1024, informative=dict.fromkeys(GROUP_SIZES, 0.05))
    )
    assert verdict == "sft_first"
    assert "nearly as many at 1024: the model does not end its replies" in reason


def test_a_longer_limit_that_pays_hardly_more_is_not_the_lever(service: mint.ServiceClient) -> None:
    seen = examined(Clipped(), service, max_tokens=2).evidence
    assert seen.longer_gain[0] > 0.3
    assert seen.longer_limit_pays
    assert not replace(seen, longer_gain=(0.05, 0.02, 0.08)).longer_limit_pays


def test_what_a_longer_limit_earns_is_counted_over_all_prompts() -> None:
    """Two of eight prompts are cut off; a longer limit raises their reward from 0 to 1: by a quarter over all."""

    def group(place: int, *, reward: float, truncated: bool) -> Group:
        ended = "length" if truncated else "stop"
        return Group(place, place, [1], [Rollout([Turn([1], [2], [-0.5])], "x", ended, reward=reward)])

    class Longer:
        asked: Sequence[int] = ()

        def groups(self, indices: Sequence[int], completions: int, *, max_tokens: int) -> list[Group]:
            self.asked = indices
            return [group(place, reward=1.0, truncated=False) for place in indices]

    prober: Any = Longer()
    seen = [group(place, reward=0.0, truncated=place % 4 == 0) for place in range(8)]
    gain, low, high = longer_gain(prober, seen, 1, 64)
    assert prober.asked == [0, 4], "the others end before the limit, so that a longer one changes nothing"
    assert gain == 0.25 and low < 0.25 < high


def test_a_longer_limit_that_pays_no_more_is_not_the_lever(service: mint.ServiceClient) -> None:
    class Product(Arithmetic):
        def make_prompt(self, item: Problem, tokenizer: Any) -> list[int]:
            return tokenizer.encode(f"What is {item.a + 10} * {item.b + 10}?")

        def compute_reward(self, response: str, item: Problem) -> float:
            return float(response.strip() == str((item.a + 10) * (item.b + 10)))

    found = examined(Product(), service, max_tokens=4)
    assert found.evidence.truncated > 0.25
    assert found.verdict == "sft_first", found.lines()


def test_a_few_successes_are_enough_to_start_from(service: mint.ServiceClient) -> None:
    """RL took such a task from 0.01 to 0.72 in 24 steps."""
    seen = examined(Arithmetic(), service).evidence
    rare = dict(zip(GROUP_SIZES, (0.05, 0.07, 0.09, 0.1, 0.12, 0.13, 0.15), strict=True))
    assert decide(replace(seen, success=(0.02, 0.0, 0.04), mean=(0.02, 0.0, 0.04), informative=rare))[0] == "go"


def test_a_coin_is_no_reward(service: mint.ServiceClient) -> None:
    class Coin(Arithmetic):
        """Thrown for each answer to an item and each time that it is graded; the order of grading does not matter."""

        def __init__(self) -> None:
            super().__init__()
            self.times = Counter[tuple[str, str]]()

        def compute_reward(self, response: str, item: Problem) -> float:
            asked = (repr(item), response)
            self.times[asked] += 1
            return float(random.Random(f"{asked} {self.times[asked]}").random() < 0.5)

    assert examined(Coin(), service).verdict == "unlearnable"


def test_a_task_that_may_compare_but_does_not_is_examined_for_a_constant_answer(service: mint.ServiceClient) -> None:
    class Curt(ChatAdapter):
        def compute_reward(self, response: str, item: Any) -> Reward:
            return Reward(float(0 < len(response) <= 12))

    found = examine(Curt(), CONFIG.changed(max_tokens=32), service_client=service, prompts=32, samples=8)
    assert not found.evidence.relative
    assert found.verdict == "reward_constant", found.lines()


class Wordy(Arithmetic):
    """The model's replies to a chat take some thirty tokens, and only a whole one can be right."""

    def make_prompt(self, item: Problem, tokenizer: Any) -> list[int]:
        message = {"role": "user", "content": "Tell me about the fox."}
        return list(
            tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def compute_reward(self, response: str, item: Problem) -> float:
        return float(response.endswith(".") and item.value % 2 == len(response) % 2)


def test_replies_that_need_sixteen_times_the_limit_are_called_truncated_with_that_limit(
    service: mint.ServiceClient,
) -> None:
    found = examined(Wordy(), service, max_tokens=2)
    assert found.verdict == "truncated", found.lines()
    assert found.evidence.enough_tokens in (32, 128)
    assert f"max_tokens to {found.evidence.enough_tokens}" in found.remedy


class YesOrNo(Arithmetic):
    """A balanced choice between a low and a high digit: `1` to every prompt is right in half of the cases."""

    def compute_reward(self, response: str, item: Problem) -> float:
        text = response.strip()
        return float(len(text) == 1 and text.isdecimal() and (int(text) < 5) == (item.a % 2 == 0))


def test_a_constant_answer_that_earns_more_than_the_model_is_refused_on_a_balanced_task(
    service: mint.ServiceClient,
) -> None:
    found = examine(YesOrNo(), CONFIG, service_client=service, prompts=64, samples=8)
    assert 0.3 < found.evidence.fixed_reward[0] < 0.7
    assert found.verdict == "reward_constant", found.lines()


def test_a_guess_that_was_right_once_is_not_called_a_constant_answer(service: mint.ServiceClient) -> None:
    seen = examined(Arithmetic(), service).evidence
    assert seen.fixed_reward[0] < 0.2
    lucky = replace(seen, mean=(0.05, 0.0, 0.1), fixed_reward=(0.2, 0.06, 0.4))
    assert not lucky.fixed_reply_pays


def test_a_reply_that_pays_everywhere_is_no_danger_where_no_completion_earns_anything(
    service: mint.ServiceClient,
) -> None:
    seen = examined(TooHard(), service).evidence
    trap = replace(seen, fixed_reward=(0.3, 0.2, 0.4))
    assert seen.lowest == seen.highest == 0.0
    assert decide(trap)[0] == "sft_first"
    assert decide(replace(trap, highest=1.0, mean=(0.01, 0.0, 0.02)))[0] == "reward_constant"


@pytest.mark.parametrize(("wrong_at_random", "verdict"), [(0.1, "go"), (0.2, "unlearnable")])
def test_a_grader_that_is_wrong_in_a_fifth_of_the_cases_is_too_noisy(
    wrong_at_random: float, verdict: str, service: mint.ServiceClient
) -> None:
    drawn = random.Random(0)

    class Flipped(Arithmetic):
        def compute_reward(self, response: str, item: Problem) -> Reward:
            right = super().compute_reward(response, item).value
            return Reward(1 - right if drawn.random() < wrong_at_random else right)

    found = examine(Flipped(), CONFIG, service_client=service, prompts=64, samples=8)
    assert found.verdict == verdict, found.lines()


def test_a_task_that_one_reply_surely_solves_better_is_not_called_solved(service: mint.ServiceClient) -> None:
    seen = examined(Arithmetic(), service).evidence
    nearly = replace(seen, success=(0.91, 0.85, 0.97), mean=(0.91, 0.85, 0.97))
    assert decide(replace(nearly, fixed_reward=(1.0, 0.98, 1.0)))[0] == "reward_constant"
    assert decide(replace(nearly, fixed_reward=(0.93, 0.87, 0.99)))[0] == "saturated"


class HashOfTheReply(Arithmetic):
    """A coin for each reply to each question, the same whenever it is graded."""

    def compute_reward(self, response: str, item: Problem) -> float:
        return float(zlib.crc32(f"{response} {item.question}".encode()) % 2)


def test_a_reward_that_does_not_ask_for_a_reply_that_fits_is_refused(service: mint.ServiceClient) -> None:
    seen = examined(HashOfTheReply(), service)
    assert seen.verdict == "reward_constant"
    assert seen.evidence.misplaced_reward > 0.3
    assert "replies to other prompts earn" in seen.reason


def test_replies_that_fit_earn_surely_more_at_their_own_prompt(service: mint.ServiceClient) -> None:
    evidence = examined(Arithmetic(), service).evidence
    assert evidence.own_gain is not None
    assert evidence.own_gain[1] > 0.2
    assert not evidence.any_prompt_pays


def test_successes_that_replies_to_other_prompts_have_as_often_are_lucky(service: mint.ServiceClient) -> None:
    seen = examined(Arithmetic(), service).evidence
    guesses = replace(
        seen, success=(0.03, 0.0, 0.06), mean=(0.03, 0.0, 0.06), fixed_reward=(0.05, 0.02, 0.08),
        misplaced_reward=0.04, own_gain=(-0.01, -0.03, 0.02), informative=dict.fromkeys(GROUP_SIZES, 0.2),
    )  # fmt: skip
    verdict, reason, remedy = decide(guesses)
    assert verdict == "sft_first" and "Fine-tune on demonstrations" in remedy
    assert "replies to other prompts earn 0.040, so that these successes may be lucky" in reason
    assert decide(replace(guesses, own_gain=(0.03, 0.01, 0.05)))[0] == "go"


class OnePrompt(Arithmetic):
    """The same question again and again."""

    def build_dataset(self) -> Sequence[Problem]:
        return list(super().build_dataset())[:1] * 32


def test_with_one_prompt_there_is_no_other_prompt_to_compare_with(service: mint.ServiceClient) -> None:
    evidence = examined(OnePrompt(), service).evidence
    assert (evidence.own_gain, evidence.any_prompt_pays) == (None, False)


def test_a_reply_that_earns_scraps_everywhere_is_named_where_nothing_else_earns(service: mint.ServiceClient) -> None:
    seen = examined(TooHard(), service).evidence
    scraps = replace(
        seen,
        success=(0.0, 0.0, 0.05),
        mean=(0.001, 0.0, 0.002),
        fixed_reward=(0.06, 0.05, 0.07),
        informative=dict.fromkeys(GROUP_SIZES, 0.11),
    )
    assert decide(scraps)[0] == "reward_constant"
    without_signal = replace(scraps, informative=dict.fromkeys(GROUP_SIZES, 0.0))
    assert decide(without_signal)[0] == "sft_first", "there is nothing that RL could follow"
    nothing = replace(without_signal, mean=(0.0, 0.0, 0.01), lowest=0.0, highest=0.0, fixed_reward=(0.0, 0.0, 0.0))
    verdict, reason, _ = decide(nothing)
    assert verdict == "sft_first"
    assert f"none of {seen.prompts * seen.samples} completions succeeded (95 %: at most 5.0%)" in reason
    assert "every one earned 0" in reason and "partial credit" not in reason
    assert decide(replace(scraps, fixed_reward=(0.004, -0.004, 0.012)))[0] == "sft_first"


def test_a_larger_group_is_advised_only_where_it_gives_more(service: mint.ServiceClient) -> None:
    hopeless, hard = examined(TooHard(), service), examined(Arithmetic(), service, group_size=4)
    note = next(note for note in hopeless.notes if "expected to give a signal" in note)
    assert hopeless.evidence.better_size is None
    assert note.endswith("of the groups")
    assert hard.evidence.better_size == 16


def test_an_empty_dataset_is_refused(service: mint.ServiceClient) -> None:
    class Empty(Arithmetic):
        def build_dataset(self) -> list[Problem]:
            return []

    with pytest.raises(mint.errors.InvalidRequestError, match="is empty"):
        examined(Empty(), service)
