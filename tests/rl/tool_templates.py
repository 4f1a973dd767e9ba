"""Chat templates of the families, written for these tests from what their publishers document, and episodes with them.

Each has what matters for tools: how a call and a result look, which messages are refused, and what is dropped. The
system prompts are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripted_policy import TINY, ScriptedPolicy, roll_out
from transformers import PreTrainedTokenizerFast

from mint.rl.adapter import MessageEnvAdapter
from mint.rl.rollout import Rollout
from mint.rl.tasks.calculator import calculator
from mint.rl.tasks.tool_env import ToolEnv
from mint.types.tool_call_formats import MARKUP, SYNTAX, ToolCall, ToolCallFormat, render_tool_calls, tool_call_format

QUESTION = {"role": "user", "content": "What is 3 + 4, and twice that?"}


def chatml(call: str, result: str, *, tools: str = "{{ tools | tojson }}", end: str = "<|im_end|>\n") -> str:
    """Messages between `<|im_start|>` and `end`, with `call` for each call and `result` for each result."""
    return (
        "{% if tools %}<|im_start|>system\n" + tools + end + "{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}" + result + "{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set c = c.function %}" + call + "{% endfor %}" + end + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


RESPONSE = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
JSON_CALL = '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)

LLAMA = """\
{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}\
{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}\
{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>{% elif m.role == 'tool' %}\
<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

LLAMA4 = """\
{% for m in messages %}{% if m.tool_calls %}<|header_start|>assistant<|header_end|>

<|python_start|>{{ m.content }}<|python_end|>{% for c in m.tool_calls %}\
{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|eot|>\
{% elif m.role == 'tool' %}<|header_start|>ipython<|header_end|>

{{ m.content | tojson }}<|eot|>{% else %}<|header_start|>{{ m.role }}<|header_end|>

{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m.content }}<|eot|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""

PYTHONIC = """\
{% if tools %}<|header_start|>system<|header_end|>

Write [func_name1(param1=value1), func_name2(...)] {{ tools | tojson }}<|eot|>{% endif %}\
{% for m in messages %}{% if m.tool_calls %}<|header_start|>assistant<|header_end|>

{{ m.content }}[{% for c in m.tool_calls %}{% set c = c.function %}{{ c.name }}(\
{% for k, v in c.arguments.items() %}{{ k }}="{{ v }}"{% if not loop.last %}, {% endif %}\
{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|eot|>\
{% elif m.role == 'tool' %}<|header_start|>ipython<|header_end|>

{{ m.content | tojson }}<|eot|>{% else %}<|header_start|>{{ m.role }}<|header_end|>

{{ m.content }}<|eot|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""


def mistral(call: str, opening: str, closing: str, result: str) -> str:
    """Refuses ids that are not nine characters long, and turns that do not alternate; drops text beside calls."""
    return (
        "{{ bos_token }}{% set ns = namespace(index=0) %}{% for m in messages %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
        "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
        "{{ raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}" + opening + "{% for t in m.tool_calls %}{% set c = t.function %}"
        "{% if t.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        + call
        + "{% endfor %}"
        + closing
        + "{{ eos_token }}{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        + result
        + "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}"
    )


MISTRAL_V3 = mistral(
    '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "{{ t.id }}"}'
    "{% if not loop.last %}, {% endif %}",
    "[TOOL_CALLS][",
    "]",
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
)
MISTRAL_TEKKEN = mistral(
    "[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ t.id }}[ARGS]{{ c.arguments | tojson }}",
    "",
    "",
    "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]",
)
MISTRAL_PLAIN_ROLES = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user, system and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

HARMONY = """\
{% if tools %}<|start|>developer<|message|># Tools {{ tools | tojson }}<|end|>{% endif %}\
{% set last = namespace(name=none) %}{% for m in messages %}{% if m.tool_calls %}\
{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}\
{% if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>\
{% endif %}{% set c = m.tool_calls[0].function %}{% set last.name = c.name %}\
<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>\
{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}\
{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% set last.name = none %}\
{% elif m.role == 'tool' %}{% if last.name is none %}\
{{ raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}\
{% endif %}\
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>\
{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


def deepseek(call: str, results: str, *, prompt: str = "", history: str = "") -> str:
    """Describes no tools; nothing opens a turn after results. `prompt` opens replies, `history` old ones."""
    return (
        "{{ bos_token }}{% set ns = namespace(first=true) %}"
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜>"
        + history
        + "{% endif %}"
        "{% if m.tool_calls %}{{ m.content }}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{% set c = c.function %}"
        "{% if not loop.first and LINE_BREAK %}{{ '\\n' }}{% endif %}" + call + "{% endfor %}"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "{% elif m.role == 'assistant' %}{{ m.content }}<｜end▁of▁sentence｜>{% endif %}"
        "{% if m.role == 'tool' %}" + results + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}" + prompt + "{% endif %}"
    )


V3_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ c.name + '\\n```json\\n' + c.arguments + '\\n```' }}<｜tool▁call▁end｜>"
)
V3_RESULTS = (
    "{% if messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% else %}{{ '\\n' }}{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"
)
DEEPSEEK_V3 = deepseek(V3_CALL, V3_RESULTS).replace("LINE_BREAK", "true")
DEEPSEEK_R1 = deepseek(V3_CALL, V3_RESULTS, prompt="<think>\n").replace("LINE_BREAK", "true")
DEEPSEEK_V31 = deepseek(
    "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>",
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
    history="</think>",
).replace("LINE_BREAK", "false")

KIMI = """\
{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}\
{% for m in messages %}{% if m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}
{{ m.content }}<|im_end|>{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}\
{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}\
<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}\
<|tool_calls_section_end|>{% endif %}<|im_end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

GLM = """\
[gMASK]<sop>{% if tools %}<|system|>{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}\
<|user|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>{% set said = m.content %}{% set thought = '' %}\
{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}\
{% set said = said.split('</think>')[-1] %}{% endif %}
<think>{{ thought }}</think>{% if said.strip() %}
{{ said.strip() }}{% endif %}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}\
{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

GLM4 = """\
[gMASK]<sop>{% if tools %}<|system|>
{{ tools | tojson }}{% endif %}{% for m in messages %}\
{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}

{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

GRANITE3 = """\
{% if tools %}<|start_of_role|>system<|end_of_role|>To call a tool, write <|tool_call|> and a JSON list.<|end_of_text|>
<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>
{% endif %}{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

PHI4_MINI = """\
{% if tools %}<|system|><|tool|>{{ tools | tojson }}<|/tool|><|end|>{% endif %}{% for m in messages %}\
{% if m.role == 'tool' %}<|tool_response|>{{ m.content | tojson }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}\
{% for c in m.tool_calls or [] %}<|tool_call|>{{ c.function | tojson }}<|/tool_call|>{% endfor %}<|end|>{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """\
{% for m in messages %}{% if m.role == 'system' %}<|im_start|>system<|im_sep|>{{ m.content }}<|im_end|>\
{% elif m.role == 'user' %}<|im_start|>user<|im_sep|>{{ m.content }}<|im_end|>\
{% elif m.role == 'assistant' %}<|im_start|>assistant<|im_sep|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"""

GEMMA3 = """\
{{ bos_token }}{% set prefix = '' %}{% if messages[0].role == 'system' %}\
{% set prefix = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}{% for m in messages %}\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if loop.first %}{{ prefix }}{% endif %}{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
GEMMA2 = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + GEMMA3

SMOLLM3 = chatml(
    "", "<|im_start|>user\n{{ m.content }}<|im_end|>\n", tools="{{ xml_tools | tojson }}<tool_call>"
).replace("{% if tools %}", "{% if xml_tools %}")

COMMAND = """\
<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ (tools or []) | tojson }}<|END_OF_TURN_TOKEN|>\
{% set ns = namespace(calls=0, results=0) %}{% for m in messages %}{% if m.role == 'tool' %}\
<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ ns.results }} {{ m.content | tojson }}\
{% set ns.results = ns.results + 1 %}<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>{% elif m.tool_calls %}\
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if m.tool_plan %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|>\
{% endif %}<|START_ACTION|>[{% for c in m.tool_calls %}
    {"tool_call_id": "{{ ns.calls }}", "tool_name": "{{ c.function.name }}", "parameters": \
{{ c.function.arguments | tojson }}}{% set ns.calls = ns.calls + 1 %}{% if not loop.last %},{% endif %}{% endfor %}
]<|END_ACTION|><|END_OF_TURN_TOKEN|>{% elif m.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>\
<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% else %}\
<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template with the tokens that end a reply and a call, and what models of the family say before a call."""

    template: str
    written_as: ToolCallFormat
    end: str = "<|im_end|>"
    call_end: str = ""
    reasoning: str = ""
    kept: bool = True


FAMILIES: dict[str, Family] = {
    "Qwen 2.5 and 3, Hermes, Granite 4": Family(chatml(JSON_CALL, RESPONSE), "hermes"),
    "Qwen 3, thinking": Family(chatml(JSON_CALL, RESPONSE), "hermes", reasoning="<think>\nhm\n</think>\n\n"),
    "Qwen3-Coder, Qwen 3.5": Family(chatml(XML_CALL, RESPONSE), "qwen_coder"),
    "SmolLM3": Family(SMOLLM3, "hermes", reasoning="<think>\nhm\n</think>\n"),
    "Llama 3.1 to 3.3": Family(LLAMA, "llama", "<|eot_id|>"),
    "Llama 4": Family(LLAMA4, "llama", "<|eot|>"),
    "Llama 3.2 and 4, pythonic": Family(PYTHONIC, "pythonic", "<|eot|>"),
    "Mistral v3, Nemo": Family(MISTRAL_V3, "mistral", "</s>"),
    "Mistral Tekken": Family(MISTRAL_TEKKEN, "mistral_named", "</s>"),
    "Mistral v7 without tools": Family(MISTRAL_PLAIN_ROLES, "hermes", "</s>"),
    "GPT-OSS": Family(
        HARMONY,
        "harmony",
        "<|return|>",
        "<|call|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
    ),
    "DeepSeek V3": Family(DEEPSEEK_V3, "deepseek_v3", "<｜end▁of▁sentence｜>"),
    "DeepSeek R1": Family(
        DEEPSEEK_R1, "deepseek_v3", "<｜end▁of▁sentence｜>", reasoning="hm\n</think>\n\n", kept=False
    ),
    "DeepSeek V3.1": Family(DEEPSEEK_V31, "deepseek_v31", "<｜end▁of▁sentence｜>"),
    "Kimi K2": Family(KIMI, "kimi"),
    "GLM-4.5": Family(GLM, "glm", "<|user|>", "<|observation|>", "\n<think>hm</think>\n"),
    "GLM-4": Family(GLM4, "glm4", "<|user|>", "<|observation|>"),
    "Granite 3": Family(GRANITE3, "granite", "<|end_of_text|>"),
    "Phi-4-mini": Family(PHI4_MINI, "phi4_mini", "<|end|>"),
    "Phi-4": Family(PHI4, "hermes"),
    "Gemma 2": Family(GEMMA2, "hermes", "<end_of_turn>"),
    "Gemma 3": Family(GEMMA3, "hermes", "<end_of_turn>"),
    "Command R7B": Family(
        COMMAND, "command", "<|END_OF_TURN_TOKEN|>", reasoning="<|START_THINKING|>hm<|END_THINKING|>"
    ),
}


def tokenizer_of(template: str, special: Sequence[str], *, end: str) -> Any:
    """The bundled vocabulary with special tokens of a family, and its template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*special, end})})
    tokenizer.add_special_tokens({"eos_token": end, "bos_token": "<BOS>"})
    tokenizer.chat_template = template
    return tokenizer


def special_tokens(family: Family) -> list[str]:
    """Those of a family: its ends, and the marks in its template that are no words between angle brackets."""
    marks = [mark for mark in MARKUP if mark in family.template and not mark.startswith(("<tool_call", "</tool_call"))]
    return [mark for mark in (*marks, family.end, family.call_end) if mark]


class Calculations(MessageEnvAdapter):
    """3 + 4, twice that, and a third call; the answer is 14."""

    def build_dataset(self) -> Sequence[str]:
        return [""]

    def make_env(self, item: str) -> ToolEnv:
        return ToolEnv([QUESTION], [calculator], lambda text, given: float("14" in text and len(given) == 3))


def calls_of(written_as: ToolCallFormat, *expressions: str) -> str:
    """Calls of the calculator, as a model writes them."""
    return render_tool_calls([ToolCall("calculator", {"expression": one}) for one in expressions], written_as)


def replies(written_as: ToolCallFormat, *, reasoning: str = "", end: str, call_end: str = "") -> list[str]:
    """One call, two in parallel (one after the other where a reply has one only), and the answer."""
    steps = [["3 + 4"], ["7 * 2"], ["1 + 1"]] if SYNTAX[written_as].between is None else [["3 + 4"], ["7 * 2", "1 + 1"]]
    turns = [f"{reasoning}{calls_of(written_as, *step)}{call_end or end}" for step in steps]
    answer = "<|channel|>final<|message|>It is 14." if written_as == "harmony" else "It is 14."
    return [*turns, f"{reasoning}{answer}{end}"]


def play(tokenizer: Any, said: Sequence[str], adapter: MessageEnvAdapter | None = None, **others: Any) -> Rollout:
    """An episode in which the policy says these texts, in order."""
    texts = iter(said)
    policy = ScriptedPolicy(lambda prompt: tokenizer.encode(next(texts), add_special_tokens=False))
    ((rollout,),) = [
        group.rollouts for group in roll_out(policy, adapter or Calculations(), tokenizer=tokenizer, **others)
    ]
    return rollout


def is_extended(rollout: Rollout) -> bool:
    """Whether each prompt begins with the earlier prompt and, token for token, what was sampled."""
    return all(
        later.prompt[: len(earlier.prompt) + len(earlier.tokens)] == [*earlier.prompt, *earlier.tokens]
        for earlier, later in zip(rollout.turns, rollout.turns[1:], strict=False)
    )


def format_of(tokenizer: Any) -> ToolCallFormat:
    """The format that template and vocabulary name."""
    return tool_call_format(tokenizer.chat_template, tokenizer.get_added_vocab())


def rendered_whole(tokenizer: Any, conversation: Sequence[dict[str, Any]], **variables: Any) -> str:
    """A conversation as the template writes it, without `ChatFormat`."""
    return tokenizer.apply_chat_template(
        conversation, tools=[calculator.schema], tokenize=False, add_generation_prompt=True, **variables
    )


Arguments = Callable[[dict[str, Any]], Any]


def structured_call(number: int, expression: str, arguments: Arguments = dict) -> dict[str, Any]:
    """A call as an entry of `tool_calls`; `arguments` may be `json.dumps`."""
    function = {"name": "calculator", "arguments": arguments({"expression": expression})}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


AS_TEXT: Arguments = json.dumps
