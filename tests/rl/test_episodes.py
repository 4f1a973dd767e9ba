"""Episodes of many turns: the sampled ids stay as they are, limits have names, and faults stay where they happen."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_policy import END, ScriptedPolicy, roll_out, says, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mint
from mint.errors import InvalidRequestError, PromptTooLongError, RequestFailedError
from mint.rl.adapter import MessageEnvAdapter
from mint.rl.message_env import Message, MessageEnv, MessageStepResult
from mint.rl.reward import UnsupportedError
from mint.rl.rollout import Rollout
from mint.rl.rollouts.episodes import EpisodeLimits
from mint.rl.seeds import mix_seed
from mint.rl.tasks.chat_format import ChatFormat, check_template
from mint.rl.training.datums import rollout_datums
from mint.types import SamplingParams

ASK = [{"role": "user", "content": "Go on."}]
OPENING = "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "<|im_end|>\n" + OPENING

QWEN_LIKE = """\
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last_user %}
        {%- set content = content.split('</think>')[-1].lstrip() %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Strips the reasoning from replies before the last user message."""

TRIMMING = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n\n' + m.content | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
"""Begins with a BOS token, trims every message, and has no new line after the end token."""

PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""No end token at all."""


class Chatty(MessageEnv):
    """Says "Go on." until it has heard enough, and pays a little for each message."""

    def __init__(self, turns: int, following: Sequence[Message] = ASK, *, slow: Callable[[], Any] = bool) -> None:
        self.left, self.following, self.slow = turns, following, slow

    def initial_observation(self) -> Sequence[Message]:
        return ASK

    def step(self, message: Message) -> MessageStepResult:
        self.slow()
        self.left -= 1
        return MessageStepResult(
            0.25, self.left == 0, self.following if self.left else (), {"said": 0.25}, {"messages": 1}
        )

    def cut_off(self, reason: str) -> MessageStepResult:
        return MessageStepResult(-0.5, parts={reason: -0.5})


@dataclass
class Adapter(MessageEnvAdapter):
    """Makes its environments with a function."""

    make: Callable[[Any], Any] = lambda _: Chatty(3)
    made: list[Any] = field(default_factory=list)

    def build_dataset(self) -> Sequence[str]:
        return [""]

    def make_env(self, item: Any) -> Any:
        env = self.make(item)
        self.made.append(env)
        return env


def only(groups: Any) -> Rollout:
    (rollout,) = [rollout for group in groups for rollout in group.rollouts]
    return rollout


def assert_tokens_in_tokens_out(rollout: Rollout, said: list[list[int]]) -> None:
    """The datum is the first prompt and then, bit for bit, what was sampled and what the template puts between."""
    assert [turn.tokens for turn in rollout.turns] == said
    assert rollout.retokenized_turns == 0
    (datum,) = rollout_datums(rollout, advantages_T=np.ones(len(rollout.tokens)))
    full = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    trained = [0.0, *datum.loss_fn_inputs["weights"].tolist()]
    assert [token for token, weight in zip(full, trained, strict=True) if weight] == [t for turn in said for t in turn]
    for earlier, later in zip(rollout.turns, rollout.turns[1:], strict=False):
        past = [*earlier.prompt, *earlier.tokens]
        assert later.prompt[: len(past)] == past


def pieces(*texts: str) -> list[int]:
    """Each text encoded by itself: the merges across their borders are not made."""
    return [token for text in texts for token in tiny_tokenizer().encode(text)]


LOWER_HALF = tiny_tokenizer().convert_tokens_to_ids("Ã")
"""The first byte of a letter of two, without the second."""

AWKWARD = {
    "a word in other pieces": pieces("The an", "swer", " is", " 1", "2."),
    "single letters": pieces(*"The answer is"),
    "half a letter": [*pieces("is "), LOWER_HALF, *pieces("x"), LOWER_HALF],
    "doubled spaces": pieces("  The ", " ", " answer", "  "),
    "spaces at the edges": pieces(" ", "\n", "12", "\n", " "),
    "compact JSON": pieces('<tool_call>{"name":"calculator","arguments":{"expression":"1+1"}}</tool_call>'),
    "markup inside": pieces("<tool_call>", "<|im_start|>", "user\n", "</tool_response>"),
    "nothing": [],
}


@pytest.mark.parametrize("tokens", AWKWARD.values(), ids=AWKWARD.keys())
@pytest.mark.parametrize("ended", [True, False], ids=["end token", "no end token"])
@pytest.mark.parametrize("template", [None, QWEN_LIKE, TRIMMING, PLAIN], ids=["tiny", "qwen", "trim", "plain"])
def test_sampled_ids_are_never_tokenized_again(tokens: list[int], ended: bool, template: str | None) -> None:
    said = [*tokens, END] if ended else tokens or pieces(".")
    policy = ScriptedPolicy(lambda _: said)
    rollout = only(roll_out(policy, Adapter(), tokenizer=tiny_tokenizer(template)))
    assert rollout.stop_reason == "env"
    assert_tokens_in_tokens_out(rollout, policy.said)


def test_the_awkward_texts_are_awkward() -> None:
    tokenizer = tiny_tokenizer()
    again = [tokenizer.encode(tokenizer.decode(tokens)) == tokens for tokens in AWKWARD.values()]
    assert again.count(False) >= 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1023), min_size=1, max_size=12), min_size=3, max_size=3))
def test_any_ids_at_all_stay_as_they_are(turns: list[list[int]]) -> None:
    replies = iter(turns)
    policy = ScriptedPolicy(lambda _: next(replies))
    assert_tokens_in_tokens_out(only(roll_out(policy, Adapter())), turns)


def test_a_hot_model_s_ids_stay_as_they_are() -> None:
    """mint/tiny at temperature 4: other merges than the tokenizer's, halves of letters, everything."""
    service = mint.ServiceClient()
    sampler = service.create_sampling_client(base_model="mint/tiny")
    params = SamplingParams(max_tokens=12, temperature=4.0, seed=1)
    endless = EpisodeLimits(max_turns=3)
    adapter = Adapter(lambda _: Ignoring(3))
    groups = roll_out(sampler, adapter, group_size=8, params=params, limits=endless, timeout_s=60)
    tokenizer = tiny_tokenizer()
    rollouts = groups[0].rollouts
    assert any(tokenizer.encode(tokenizer.decode(turn.tokens)) != turn.tokens for r in rollouts for turn in r.turns)
    for rollout in rollouts:
        assert_tokens_in_tokens_out(rollout, [turn.tokens for turn in rollout.turns])
        full = [*rollout.turns[-1].prompt, *rollout.turns[-1].tokens]
        logprobs = sampler.compute_logprobs(mint.types.ModelInput.from_ints(full)).result()
        for turn in rollout.turns:
            read = logprobs[len(turn.prompt) : len(turn.prompt) + len(turn.tokens)]
            assert np.abs(np.array(read, dtype=float) - np.array(turn.logprobs)).max() < 1e-4
    service.close()


class Ignoring(Chatty):
    """Goes on even where the model was cut off."""

    def cut_off(self, reason: str) -> MessageStepResult:
        return MessageStepResult(0.0)


def metaspace_tokenizer() -> Any:
    """A SentencePiece-like tokenizer: decoding drops the leading space, so that decode and encode are no inverses."""
    texts = ["▁", "H", "A", "V", "I", "N", "G", "HAV", "ING", "▁HAVING", "▁HAV", "AVI", "VING", "HA"]
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = {text: place for place, text in enumerate(dict.fromkeys(["<s>", "</s>", *texts, *letters, "\n"]))}
    merges = [("H", "A"), ("HA", "V"), ("I", "N"), ("IN", "G")]
    vocabulary |= {"IN": len(vocabulary)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = (
        "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize("split", [["HAV", "ING"], ["H", "AVI", "N", "G"], ["▁HAV", "ING"], ["▁", "▁", "HA", "VING"]])
def test_having_stays_split_as_it_was_said(split: list[str]) -> None:
    tokenizer = metaspace_tokenizer()
    said = [*tokenizer.convert_tokens_to_ids(split), tokenizer.eos_token_id]
    assert tokenizer.encode(tokenizer.decode(said[:-1]), add_special_tokens=False) != said[:-1]
    policy = ScriptedPolicy(lambda _: said)
    rollout = only(roll_out(policy, Adapter(), tokenizer=tokenizer))
    assert_tokens_in_tokens_out(rollout, policy.said)
    last = [*rollout.turns[-1].prompt, *rollout.turns[-1].tokens]
    assert last.count(tokenizer.bos_token_id) == 1
    assert last.count(tokenizer.eos_token_id) == 6


@pytest.mark.parametrize("ended", [True, False])
def test_the_text_between_turns_is_the_template_s_own(ended: bool) -> None:
    """The end token is there once, whether the policy said it or was stopped before; the new line after it, too."""
    said = [*pieces("Yes."), *([END] if ended else [])]
    rollout = only(roll_out(ScriptedPolicy(lambda _: said), Adapter()))
    assert tiny_tokenizer().decode(rollout.turns[-1].prompt) == OPENING + "Yes." + BETWEEN + "Yes." + BETWEEN


def test_a_stop_string_that_occurs_in_the_template_does_not_hide_the_end_token() -> None:
    rollout = only(roll_out(ScriptedPolicy(lambda _: pieces("Yes.", "\n")), Adapter()))
    assert tiny_tokenizer().decode(rollout.turns[1].prompt) == OPENING + "Yes.\n" + BETWEEN


def test_a_template_that_rewrites_the_past_starts_a_new_prefix_and_is_counted() -> None:
    said = [*pieces("<think>\nhm\n</think>\n\nYes."), END]
    rollout = only(roll_out(ScriptedPolicy(lambda _: said), Adapter(), tokenizer=tiny_tokenizer(QWEN_LIKE)))
    assert rollout.retokenized_turns == 2
    assert tiny_tokenizer().decode(rollout.turns[-1].prompt) == OPENING + "Yes." + BETWEEN + "Yes." + BETWEEN
    datums = rollout_datums(rollout, advantages_T=np.arange(len(rollout.tokens)))
    assert len(datums) == 3
    assert [datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in datums] == [len(said)] * 3


REOPENING = """\
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if '</think>' in content and KEEPS %}
        {%- set content = '<think>\\n' + content.split('</think>')[0].split('<think>')[-1].strip() + '\\n</think>\\n\\n'
            + content.split('</think>')[-1].lstrip() %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPENED' }}{% endif %}"""
"""Opens the reasoning itself when it asks for a reply, and closes it, too, where reasoning is turned off."""


@pytest.mark.parametrize(
    ("keeps", "opened", "said", "retokenized"),
    [
        ("true", "<think>\\n", "hm\n</think>\n\nYes.", 0),
        ("false", "<think>\\n", "hm\n</think>\n\nYes.", 2),
        ("true", "<think>\\n\\n</think>\\n\\n", "Yes.", 2),
    ],
)
def test_reasoning_that_the_template_opens_is_kept_if_the_template_keeps_it(
    keeps: str, opened: str, said: str, retokenized: int
) -> None:
    tokenizer = tiny_tokenizer(REOPENING.replace("KEEPS", keeps).replace("OPENED", opened))
    policy = ScriptedPolicy(lambda _: [*pieces(said), END])
    rollout = only(roll_out(policy, Adapter(), tokenizer=tokenizer))
    assert rollout.retokenized_turns == retokenized
    assert [turn.tokens for turn in rollout.turns] == policy.said
    datums = rollout_datums(rollout, advantages_T=np.ones(len(rollout.tokens)))
    assert len(datums) == 1 + retokenized


def test_the_check_of_a_template_names_what_it_rewrites() -> None:
    assert check_template(tiny_tokenizer()) is None
    found = check_template(tiny_tokenizer(QWEN_LIKE))
    assert found is not None
    assert (found.severity, found.numbers) == ("info", {"changed": 1.0, "refused": 0.0})
    assert "a reasoning block, then a user" in found.evidence
    shouting = tiny_tokenizer(
        "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}\n{% endfor %}"
    )
    found = check_template(shouting)
    assert found is not None
    assert found.severity == "warning"
    with pytest.raises(InvalidRequestError, match="chat_template"):
        check_template(PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()._tokenizer))


def test_replies_keep_their_markup_and_lose_their_end_token() -> None:
    chat = ChatFormat(tiny_tokenizer())
    assert chat.reply([*pieces("<tool_call>{}</tool_call>"), END]) == "<tool_call>{}</tool_call>"
    assert chat.reply(pieces("<tool_call>{}</tool_call>")) == "<tool_call>{}</tool_call>"
    assert chat.reply([END]) == ""


# --- groups, seeds, requests --------------------------------------------------------------------------------------


def test_the_first_turn_of_a_group_is_one_request_and_later_turns_have_their_own_seeds() -> None:
    policy = says("One.", "Two.", "Three.")
    (group, other) = roll_out(policy, Adapter(), items=["a", "b"], group_size=3)
    # episodes go on by themselves, in any order
    assert sorted(params.seed for _, count, params in policy.requests if count == 3) == [0, 1]
    later = [params.seed for _, count, params in policy.requests if count == 1]
    expected = [mix_seed(seed, index, turn) for turn in (1, 2) for seed in (0, 1) for index in range(3)]
    assert sorted(later) == sorted(expected)
    assert group.prompt == other.prompt == tiny_tokenizer().encode(OPENING)
    assert [rollout.text for rollout in group.rollouts] == ["One.\nTwo.\nThree."] * 3
    assert [rollout.reward for rollout in group.rollouts] == [0.75] * 3


def test_episodes_that_open_differently_are_still_sampled() -> None:
    class Moody(Chatty):
        def initial_observation(self) -> Sequence[Message]:
            return [{"role": "user", "content": f"Number {len(adapter.made)}."}]

    adapter = Adapter(lambda _: Moody(1))
    policy = says("Yes.")
    (group,) = roll_out(policy, adapter, group_size=3, timeout_s=5)
    assert sum(count for _, count, _ in policy.requests) == 3
    assert all(rollout.reward == 0.25 for rollout in group.rollouts)


def test_the_same_seed_gives_the_same_episodes() -> None:
    service = mint.ServiceClient()
    sampler = service.create_sampling_client(base_model="mint/tiny")
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=7)
    one, again = (roll_out(sampler, Adapter(), group_size=4, params=params, timeout_s=60) for _ in range(2))
    assert [r.turns for r in one[0].rollouts] == [r.turns for r in again[0].rollouts]
    assert len({tuple(r.tokens) for r in one[0].rollouts}) > 1
    service.close()


def test_rewards_parts_and_facts_add_up_over_the_turns() -> None:
    rollout = only(roll_out(says("a", "b", "c"), Adapter(), policy_step=9))
    assert (rollout.reward, rollout.parts, rollout.info) == (0.75, {"said": 0.75}, {"messages": 3})
    assert rollout.policy_step == 9


# --- limits --------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only in `tick`, 0.04 s for the thread that calls it."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __call__(self) -> float:
        return getattr(self._local, "now", 0.0)

    def tick(self) -> None:
        self._local.now = self() + 0.04


@pytest.mark.parametrize(
    ("limits", "max_tokens", "reason", "turns"),
    [
        (EpisodeLimits(max_turns=2), 64, "max_turns", 2),
        (EpisodeLimits(max_turns=9), 3, "length", 1),
        (EpisodeLimits(max_turns=9, max_tokens=12), 64, "max_episode_tokens", 2),
        (EpisodeLimits(max_turns=9, max_tokens=16), 64, "max_episode_tokens", 2),
        (EpisodeLimits(max_turns=9, wall_time_s=0.07), 64, "wall_time", 2),
    ],
)
def test_each_limit_has_its_stop_reason(limits: EpisodeLimits, max_tokens: int, reason: str, turns: int) -> None:
    """A reply is 8 tokens, and the environment takes 0.04 s to answer."""
    said = [*pieces("The answer is 12."), END]
    policy = ScriptedPolicy(lambda _: said)
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    assert len(said) == 8
    clock = Clock()
    adapter = Adapter(lambda _: Chatty(5, slow=clock.tick))
    rollout = only(roll_out(policy, adapter, limits=limits, params=params, call_clock=clock))
    assert (rollout.stop_reason, len(rollout.turns), rollout.truncated) == (reason, turns, True)
    assert rollout.parts[reason] == -0.5
    assert len(rollout.tokens) <= (limits.max_tokens or 999)


def test_the_wall_time_of_an_episode_does_not_count_its_neighbours() -> None:
    limits = EpisodeLimits(max_turns=9, wall_time_s=0.09)
    clock = Clock()
    adapter = Adapter(lambda _: Chatty(2, slow=clock.tick))
    (group,) = roll_out(says("Yes.", "Yes."), adapter, group_size=16, limits=limits, call_clock=clock)
    assert {rollout.stop_reason for rollout in group.rollouts} == {"env"}


def test_a_full_context_cuts_the_episode_off_and_keeps_what_was_said() -> None:
    answers = iter([[*pieces("Yes."), END], PromptTooLongError("is too long")])
    rollout = only(roll_out(ScriptedPolicy(lambda _: next(answers)), Adapter()))
    assert (rollout.stop_reason, len(rollout.turns), rollout.reward) == ("max_episode_tokens", 1, -0.25)


# --- faults --------------------------------------------------------------------------------------------------------


class Faulty(Chatty):
    """Fails in the way that it is told to."""

    def __init__(self, fault: str) -> None:
        super().__init__(2)
        self.fault = fault

    def initial_observation(self) -> Sequence[Message]:
        if self.fault == "opening":
            raise ValueError("no data")
        return ["Go on."] if self.fault == "opens with nonsense" else ASK  # type: ignore[list-item]

    def step(self, message: Message) -> Any:
        if self.fault == "step":
            raise ZeroDivisionError
        if self.fault == "hang":
            threading.Event().wait()
        if self.fault == "nothing":
            return None
        if self.fault == "unsupported":
            raise UnsupportedError("no engine here")
        if self.fault == "infinite":
            return MessageStepResult(float("inf"))
        if self.fault == "wrong parts":
            return MessageStepResult(1.0, parts={"a": 0.5})
        if self.fault == "nonsense":
            return MessageStepResult(0.0, episode_done=False, next_messages=[{"role": 7}])
        if self.fault == "arguments in another order":
            return MessageStepResult(0.0, {}, False, ASK)  # type: ignore[arg-type]
        if self.fault == "words as parts":
            return MessageStepResult(0.0, parts={"a": "b"})  # type: ignore[dict-item]
        return super().step(message)


FAULTS = {
    "make_env": "KeyError",
    "opening": "ValueError: no data",
    "opens with nonsense": "is no message",
    "step": "ZeroDivisionError",
    "hang": "no answer within",
    "nothing": "MessageStepResult",
    "unsupported": "no engine here",
    "infinite": "finite",
    "wrong parts": "add up",
    "nonsense": "is no message",
    "arguments in another order": "MessageStepResult.episode_done = {}: is no bool",
    "words as parts": "TypeError",
}


def test_a_fault_costs_its_own_episode_and_no_other() -> None:
    def make(fault: str) -> Any:
        if fault == "make_env":
            raise KeyError(fault)
        return Faulty(fault)

    groups = roll_out(says("Yes.", "Yes."), Adapter(make), items=[*FAULTS, "none"], timeout_s=0.5)
    rollouts = [only([group]) for group in groups]
    assert [rollout.reward for rollout in rollouts] == [None] * len(FAULTS) + [0.5]
    for rollout, (fault, words) in zip(rollouts, FAULTS.items(), strict=False):
        assert words in (rollout.error or ""), fault
        assert rollout.stop_reason == ("env" if fault == "infinite" else "error")
        assert rollout.timed_out == (fault == "hang")
        assert rollout.unsupported == (fault == "unsupported")
        json.dumps(rollout.trace)
    assert all(group.error is None for group in groups)


def test_a_fault_within_a_group_leaves_the_others_their_group() -> None:
    lock, made = threading.Lock(), iter(["step", "none", "hang", "none"])

    def make(_: Any) -> Any:
        with lock:
            return Faulty(next(made))

    (group,) = roll_out(says("Yes.", "Yes."), Adapter(make), group_size=4, timeout_s=0.5)
    assert sorted(rollout.reward or 0 for rollout in group.rollouts) == [0, 0, 0.5, 0.5]
    assert len(group.graded) == 2


def test_a_reward_outside_the_declared_range_is_an_error_that_names_the_task() -> None:
    adapter = Adapter()
    adapter.reward_range = (0.0, 0.5)
    rollout = only(roll_out(says("a", "b", "c"), adapter))
    assert rollout.reward is None
    assert "Adapter" in (rollout.error or "")


def test_a_group_that_cannot_be_sampled_is_an_error_of_that_group_alone() -> None:
    class Named(Chatty):
        def __init__(self, name: str) -> None:
            super().__init__(1)
            self.name = name

        def initial_observation(self) -> Sequence[Message]:
            return [{"role": "user", "content": self.name}]

    def reply(prompt: list[int]) -> Any:
        bad = "bad" in tiny_tokenizer().decode(prompt)
        return RequestFailedError("out of memory") if bad else [*pieces("Yes."), END]

    bad, good = roll_out(ScriptedPolicy(reply), Adapter(Named), items=["bad", "good"], group_size=2)
    assert (bad.error, bad.rollouts) == ("out of memory", [])
    assert [rollout.reward for rollout in good.rollouts] == [0.25, 0.25]


def test_a_later_turn_that_cannot_be_sampled_costs_its_episode() -> None:
    answers = iter([[*pieces("Yes."), END], RequestFailedError("out of memory")])
    rollout = only(roll_out(ScriptedPolicy(lambda _: next(answers)), Adapter()))
    assert (rollout.reward, rollout.error, rollout.stop_reason) == (None, "RequestFailedError: out of memory", "error")


# --- async, trace -------------------------------------------------------------------------------------------------


def test_environments_may_be_async() -> None:
    class Later(Chatty):
        async def initial_observation(self) -> Sequence[Message]:  # type: ignore[override]
            await asyncio.sleep(0)
            return ASK

        async def step(self, message: Message) -> MessageStepResult:  # type: ignore[override]
            await asyncio.sleep(0)
            return super().step(message)

    assert only(roll_out(says("a", "b"), Adapter(lambda _: Later(2)))).reward == 0.5


@dataclass
class Closing(Chatty):
    """Notes that it was closed; `fault` says in which method it raises."""

    fault: str = ""
    closed: int = 0

    def __post_init__(self) -> None:
        super().__init__(2)

    def initial_observation(self) -> Sequence[Message]:
        if self.fault == "opening":
            raise ValueError("no opening")
        return super().initial_observation()

    def step(self, message: Message) -> MessageStepResult:
        if self.fault == "step":
            raise ValueError("no step")
        return super().step(message)

    async def close(self) -> None:
        self.closed += 1
        if self.fault == "close":
            raise ValueError("cannot close")


@pytest.mark.parametrize("fault", ["", "opening", "step", "close"])
def test_every_environment_is_closed_once_whatever_ended_its_episode(fault: str) -> None:
    adapter = Adapter(lambda _: Closing(fault))
    groups = roll_out(says("a", "b"), adapter, group_size=2)
    assert [env.closed for env in adapter.made] == [1, 1]
    for rollout in groups[0].rollouts:
        assert (rollout.error is None) == (fault in ("", "close"))
        assert (rollout.trace[-1]["content"] == "close(): ValueError: cannot close") == (fault == "close")


def test_environments_are_closed_when_their_group_cannot_be_sampled_or_a_limit_ends_them() -> None:
    failing = Adapter(lambda _: Closing())
    (group,) = roll_out(ScriptedPolicy(lambda _: RequestFailedError("down")), failing, group_size=2)
    assert group.error is not None
    cut = Adapter(lambda _: Closing())
    assert only(roll_out(says("a"), cut, limits=EpisodeLimits(max_turns=1))).stop_reason == "max_turns"
    assert [env.closed for env in (*failing.made, *cut.made)] == [1, 1, 1]


def test_the_trace_holds_every_message_with_its_time_and_only_json() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    result = {"role": "tool", "content": "a tree", "trace": {"ms": 0.25, "seen": {1, 2}}}
    rollout = only(roll_out(says(call, "A tree."), Adapter(lambda _: Chatty(2, [result]))))
    rows = json.loads(json.dumps(rollout.trace))
    assert [row["role"] for row in rows] == ["user", "assistant", "tool", "assistant"]
    assert [row["turn"] for row in rows] == [0, 1, 1, 2]
    assert all(row["ms"] >= 0 for row in rows)
    called = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": 3}}}
    assert rows[1]["tool_calls"] == [called]
    assert (rows[2]["content"], rows[2]["ms"], rows[2]["seen"]) == ("a tree", 0.25, "{1, 2}")
    assert "a tree" in tiny_tokenizer().decode(rollout.turns[1].prompt)
    assert "seen" not in tiny_tokenizer().decode(rollout.turns[1].prompt)


def test_the_template_is_given_the_tools_of_the_environment() -> None:
    class Tooled(Chatty):
        tools = ({"type": "function", "function": {"name": "look"}},)

    rollout = only(roll_out(says("Yes."), Adapter(lambda _: Tooled(1))))
    assert '"name": "look"' in tiny_tokenizer().decode(rollout.turns[0].prompt)


def test_the_rewards_of_turns_are_kept_and_add_up() -> None:
    class Pays(MessageEnv):
        def __init__(self) -> None:
            self.steps = 0

        def initial_observation(self) -> Sequence[Message]:
            return [{"role": "user", "content": "Go."}]

        def step(self, message: Message) -> MessageStepResult:
            self.steps += 1
            more = [{"role": "user", "content": "On."}]
            return MessageStepResult(self.steps / 4, episode_done=False, next_messages=more)

        def cut_off(self, reason: str) -> MessageStepResult:
            return MessageStepResult(-0.5)

    limits = EpisodeLimits(max_turns=3)
    rollout = only(roll_out(says("a", "b", "c"), Adapter(lambda _: Pays()), limits=limits))
    assert (rollout.reward, rollout.turn_rewards) == (1.0, [0.25, 0.5, 0.25])
