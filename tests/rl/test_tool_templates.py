"""An episode with tools works with the chat templates of the families, and sampled ids stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tool_templates import (
    AS_TEXT,
    FAMILIES,
    QUESTION,
    Calculations,
    calls_of,
    format_of,
    is_extended,
    play,
    rendered_whole,
    replies,
    special_tokens,
    structured_call,
    tokenizer_of,
)

from mint.errors import InvalidRequestError
from mint.rl import RLConfig
from mint.rl.adapter import MessageEnvAdapter
from mint.rl.message_env import Message, MessageEnv, MessageStepResult
from mint.rl.tasks.calculator import calculator
from mint.rl.tasks.chat_format import ChatFormat, warn_once
from mint.rl.training.datums import rollout_datums
from mint.types.tool_call_formats import SYNTAX


def tokenizer(name: str) -> Any:
    family = FAMILIES[name]
    return tokenizer_of(family.template, special_tokens(family), end=family.end)


def script(name: str, reasoning: str | None = None) -> list[str]:
    family = FAMILIES[name]
    said = family.reasoning if reasoning is None else reasoning
    return replies(family.written_as, reasoning=said, end=family.end, call_end=family.call_end)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="mint.chat"):
        yield caplog
    warn_once.cache_clear()


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_with_tools_works_with_the_template_of_a_family(name: str) -> None:
    family = FAMILIES[name]
    one = tokenizer(name)
    assert format_of(one) == family.written_as
    rollout = play(one, script(name))
    assert rollout.error is None
    assert (rollout.reward, rollout.tool_calls, rollout.stop_reason) == (1.0, 3, "env")
    assert [row["content"] for row in rollout.trace if row["role"] == "tool"] == ["7", "14", "2"]
    prompts = [one.decode(turn.prompt) for turn in rollout.turns]
    assert "Evaluate" in prompts[0] or "calculator" in prompts[0], "the policy is told its tools"
    assert "7" in prompts[1].removeprefix(prompts[0])
    assert is_extended(rollout) == family.kept
    assert (rollout.retokenized_turns == 0) == family.kept


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.kept])
def test_such_an_episode_trains_as_one_datum_of_what_was_sampled(name: str) -> None:
    one = tokenizer(name)
    rollout = play(one, script(name))
    (datum,) = rollout_datums(rollout, advantages_T=np.ones(len(rollout.tokens)))
    full = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    trained = [0.0, *datum.loss_fn_inputs["weights"].tolist()]
    sampled = [token for turn in rollout.turns for token in turn.tokens]
    assert [token for token, weight in zip(full, trained, strict=True) if weight] == sampled
    assert one.decode(sampled) == "".join(script(name))


STRUCTURED = [
    "Mistral v3, Nemo",
    "Mistral Tekken",
    "Llama 3.1 to 3.3",
    "Qwen 2.5 and 3, Hermes, Granite 4",
    "Phi-4-mini",
]
STRUCTURED += ["DeepSeek V3", "DeepSeek V3.1", "Llama 3.2 and 4, pythonic", "Qwen3-Coder, Qwen 3.5"]


@pytest.mark.parametrize("name", STRUCTURED)
def test_the_text_between_turns_is_that_of_a_conversation_with_structured_calls(name: str) -> None:
    """What a server renders from OpenAI's messages ends as the episode's prompt does, from the policy's reply on."""
    one, family = tokenizer(name), FAMILIES[name]
    rollout = play(one, script(name))
    arguments = AS_TEXT if name == "DeepSeek V3" else dict
    called = {"role": "assistant", "content": "", "tool_calls": [structured_call(0, "3 + 4", arguments)]}
    result = {"role": "tool", "name": "calculator", "tool_call_id": "call00000", "content": "7"}
    whole = rendered_whole(one, [QUESTION, called, result])
    mine = one.decode(rollout.turns[1].prompt)
    assert mine.rpartition(family.end)[0].endswith(calls_of(family.written_as, "3 + 4")) or mine.count(family.end) > 1
    tail = mine[len(one.decode([*rollout.turns[0].prompt, *rollout.turns[0].tokens])) :]
    assert tail
    assert whole.endswith(tail)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reply_that_was_cut_off_gets_the_end_that_the_template_writes(name: str) -> None:
    """Without an end token the next prompt has one; with one it has no second."""
    one, family = tokenizer(name), FAMILIES[name]
    chat = ChatFormat(one, [calculator.schema])
    start = [QUESTION]
    said = family.reasoning + calls_of(family.written_as, "3 + 4")
    result = [{"role": "tool", "name": "calculator", "content": "7"}]
    ended = one.encode(said + (family.call_end or family.end), add_special_tokens=False)
    prompt = chat.prompt(start)
    whole = chat.extend(start, result, prompt_P=prompt, tokens_T=ended)
    cut = chat.extend(start, result, prompt_P=prompt, tokens_T=ended[:-1])
    assert whole.kept == cut.kept
    assert one.decode(whole.prompt) == one.decode(cut.prompt)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_policy_reads_what_is_wrong_with_its_call(name: str) -> None:
    family = FAMILIES[name]
    one = tokenizer(name)
    wrong = calls_of(family.written_as, "3 + 4").replace("expression", "expresion")
    said = [f"{family.reasoning}{wrong}{family.call_end or family.end}", *script(name)]
    rollout = play(one, said)
    first, *_ = [row["content"] for row in rollout.trace if row["role"] == "tool"]
    assert first.startswith("error: expression: Field required")
    assert first.split(";")[0].removeprefix("error: ") in one.decode(rollout.turns[1].prompt).replace("\\n", "\n")
    assert (rollout.error, rollout.info["bad_arguments"]) == (None, 1)


MALFORMED = {
    "Qwen 2.5 and 3, Hermes, Granite 4": "<tool_call>{</tool_call>",
    "Qwen3-Coder, Qwen 3.5": "<tool_call><function=calculator><parameter=expression>1</function></tool_call>",
    "Llama 3.1 to 3.3": '<function=calculator>{"expression": </function>',
    "Llama 3.2 and 4, pythonic": '[calculator(expression="1 + 1)]',
    "Mistral v3, Nemo": '[TOOL_CALLS][{"name": "calculator"',
    "Mistral Tekken": "[TOOL_CALLS]calculator[ARGS]{",
    "GPT-OSS": "<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{",
    "DeepSeek V3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{<｜tool▁call▁end｜>",
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>calculator<|tool_call_end|>",
    "GLM-4.5": "\n<think>hm</think>\n<tool_call>calculator<arg_key>expression</tool_call>",
    "Granite 3": "<|tool_call|>[{",
    "Phi-4-mini": "<|tool_call|>[{<|/tool_call|>",
    "Gemma 3": "<tool_call>{</tool_call>",
    "Command R7B": "<|START_ACTION|>[{<|END_ACTION|>",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_answered_and_its_tokens_stay(name: str) -> None:
    family = FAMILIES[name]
    rollout = play(tokenizer(name), [MALFORMED[name] + (family.call_end or family.end), *script(name)])
    assert rollout.error is None
    assert rollout.info["malformed_call"] == 1
    first, *_ = [row["content"] for row in rollout.trace if row["role"] == "tool"]
    assert first.startswith("error: ")
    assert is_extended(rollout)


@pytest.mark.parametrize(("name", "kept"), [("Mistral v3, Nemo", False), ("Llama 3.1 to 3.3", True), ("Kimi K2", True)])
def test_words_before_a_call_stay_where_the_template_shows_them(name: str, kept: bool) -> None:
    """Mistral's template drops them from the history: then the conversation is rendered anew, and that is counted."""
    rollout = play(tokenizer(name), script(name, "Let me see. "))
    assert (rollout.reward, rollout.tool_calls) == (1.0, 3)
    assert is_extended(rollout) == kept
    assert (rollout.retokenized_turns == 0) == kept


class Asks(MessageEnv):
    """An environment of a user's own, whose results have no ids."""

    tools = (calculator.schema,)

    def initial_observation(self) -> Sequence[Message]:
        return [QUESTION]

    def step(self, message: Message) -> MessageStepResult:
        self.seen = [call["id"] for call in message.get("tool_calls", ())]
        results = [{"role": "tool", "content": "7"} for _ in self.seen]
        return MessageStepResult(1.0 if not results else 0.0, episode_done=not results, next_messages=results)


class AsksTask(MessageEnvAdapter):
    def build_dataset(self) -> Sequence[str]:
        return [""]

    def make_env(self, item: str) -> MessageEnv:
        return Asks()


@pytest.mark.parametrize("name", FAMILIES)
def test_results_without_ids_get_those_of_their_calls(name: str) -> None:
    rollout = play(tokenizer(name), script(name), AsksTask())
    assert (rollout.error, rollout.reward) == (None, 1.0)
    ids = [call["id"] for row in rollout.trace for call in row.get("tool_calls", ())]
    assert len(ids) == 3
    assert name.startswith(("Kimi", "Command")) or ids == ["call00000", "call00001", "call00002"]


def test_a_tool_gets_the_id_that_mistral_wrote() -> None:
    said = ['[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "1"}, "id": "Zz9Zz9Zz9"}]</s>', "No.</s>"]
    rollout = play(tokenizer("Mistral v3, Nemo"), said)
    (result,) = [row for row in rollout.trace if row["role"] == "tool"]
    assert result["tool_call_id"] == "Zz9Zz9Zz9"
    assert '"call_id": "Zz9Zz9Zz9"' in tokenizer("Mistral v3, Nemo").decode(rollout.turns[1].prompt)


def test_the_setting_names_another_format(warnings: pytest.LogCaptureFixture) -> None:
    one = tokenizer("Qwen 2.5 and 3, Hermes, Granite 4")
    said = replies("llama", end="<|im_end|>")
    unread = play(one, said)
    assert (unread.tool_calls, unread.reward) == (0, 0.0)
    assert [message.split(",")[0] for message in warnings.messages] == [
        "a reply seems to hold a tool call in the format llama"
    ], "once, and by name"
    assert play(one, said, tool_call_format="llama").reward == 1.0
    assert RLConfig(tool_call_format="llama").tool_call_format == "llama"
    with pytest.raises(InvalidRequestError, match="tool_call_format"):
        RLConfig(tool_call_format="lama")  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("name", ["Gemma 2", "Gemma 3", "Phi-4", "DeepSeek V3", "Mistral v7 without tools"])
def test_tools_that_a_template_does_not_describe_are_described(name: str, warnings: pytest.LogCaptureFixture) -> None:
    one = tokenizer(name)
    text = one.decode(ChatFormat(one, [calculator.schema]).prompt([QUESTION]))
    assert '"name": "calculator"' in text
    assert "write its name and its arguments as here" in text
    assert any("does not describe tools" in message for message in warnings.messages)
    assert "calculator" not in one.decode(ChatFormat(one).prompt([QUESTION]))


def test_an_answer_in_json_is_graded_as_one() -> None:
    rollout = play(tokenizer("Llama 3.1 to 3.3"), ['{"name": "14", "parameters": {}}<|eot_id|>'])
    assert (rollout.tool_calls, rollout.stop_reason, len(rollout.turns)) == (0, "env", 1)


def test_a_final_text_of_gpt_oss_has_no_marks() -> None:
    seen: list[str] = []

    class Graded(Calculations):
        def make_env(self, item: str) -> Any:
            env = super().make_env(item)
            env._grade = lambda text, given: float(not seen.append(text))
            return env

    said = ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 14.<|return|>"]
    assert play(tokenizer("GPT-OSS"), said, Graded()).reward == 1.0
    assert seen == ["It is 14."]


def test_each_family_has_a_format_with_a_syntax() -> None:
    assert {family.written_as for family in FAMILIES.values()} == set(SYNTAX)
