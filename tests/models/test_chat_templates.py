"""Each family's chat template, in short with its real special tokens, comes out as the family defines it: through
mint's tokenizer, as ids, and over several turns of a rollout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from mint.models.folder import ModelFolder
from mint.rl.tasks.chat_format import ChatFormat, check_template
from mint.tokenizer import load_tokenizer, token_bytes, tokenizer_files
from mint.tokenizer.model_tokenizer import ModelTokenizer

QWEN_25 = """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
QWEN_3 = """
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA_3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: ' }}
{{- date_string | default('26 Jul 2024') + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
QWENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMAS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tokens": QWENS, "eos": "<|im_end|>", "template": QWEN_25, "class": "Qwen2Tokenizer"},
    "qwen3": {"tokens": QWENS, "eos": "<|im_end|>", "template": QWEN_3, "class": "Qwen2Tokenizer"},
    "llama": {"tokens": LLAMAS, "eos": "<|eot_id|>", "template": LLAMA_3, "class": "PreTrainedTokenizerFast",
              "bos": "<|begin_of_text|>"},
}  # fmt: skip
DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
LLAMA_HEAD = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)

ASKED = [{"role": "user", "content": "What is 3 + 4?"}]
TOLD = [{"role": "system", "content": "Be brief."}, *ASKED]
GONE_ON = [*TOLD, {"role": "assistant", "content": "7 \u2014 of course"}, {"role": "user", "content": "Und 4 · 5?"}]
EXPECTED = {
    ("qwen2", 0): f"<|im_start|>system\n{DEFAULT}<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n",
    ("qwen2", 1): "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n",
    ("qwen3", 0): "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n",
    ("llama", 0): f"{LLAMA_HEAD}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhat is 3 + 4?<|eot_id|>",
    ("llama", 2): f"{LLAMA_HEAD}Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhat is 3 + 4?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n7 \u2014 of course<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nUnd 4 · 5?<|eot_id|>",
}
CONVERSATIONS = [ASKED, TOLD, GONE_ON]
ASKS = {
    "qwen2": "<|im_start|>assistant\n",
    "qwen3": "<|im_start|>assistant\n",
    "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.fixture(params=[(family, place) for family in FAMILIES for place in ("jinja", "json")], ids="-".join)
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A family and a folder with its tokenizer (bytes as letters, no merges), the template in either place."""
    family, place = request.param
    facts = FAMILIES[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in facts["tokens"]])
    if "bos" in facts:  # text by itself begins with it; a template has written it already
        first = [(facts["bos"], tokenizer.token_to_id(facts["bos"]))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{facts['bos']} $A", special_tokens=first)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": facts["class"], "eos_token": facts["eos"], "pad_token": facts["tokens"][0],
              "clean_up_tokenization_spaces": False}  # fmt: skip
    config |= {"bos_token": facts["bos"]} if "bos" in facts else {}
    if place == "json":
        config["chat_template"] = facts["template"]
    else:
        (tmp_path / "chat_template.jinja").write_text(facts["template"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokenizer.token_to_id(token) for token in (facts["tokens"][0], facts["eos"])]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return family, tmp_path


@pytest.mark.parametrize("load", [lambda folder: load_tokenizer(str(folder), "unused"), ModelTokenizer])
def test_a_conversation_is_written_as_the_family_defines_it(
    chat: tuple[str, Path], load: Callable[[Path], Any]
) -> None:
    family, folder = chat
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for index, conversation in enumerate(CONVERSATIONS):
        for ask in (False, True):
            text = ours.apply_chat_template(conversation, tokenize=False, add_generation_prompt=ask)
            assert text == theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=ask)
            if (family, index) in EXPECTED:
                assert text == EXPECTED[family, index] + (ASKS[family] if ask else "")
            ids = ours.apply_chat_template(conversation, add_generation_prompt=ask, return_dict=False)
            assert ids == theirs.apply_chat_template(conversation, add_generation_prompt=ask, return_dict=False)
            table = token_bytes(folder)
            assert b"".join(table[token] for token in ids).decode() == text
            ends = [place for place, token in enumerate(ids) if token == ours.eos_token_id]
            assert ids.count(ours.bos_token_id) == (family == "llama")
            assert len(ends) == text.count(FAMILIES[family]["eos"]) >= len(conversation)


def test_the_end_of_a_turn_ends_sampling_and_later_turns_keep_the_sampled_ids(chat: tuple[str, Path]) -> None:
    family, folder = chat
    tokenizer = load_tokenizer(str(folder), "unused")
    assert tokenizer.eos_token_id in ModelFolder(folder).eos_token_ids
    rollout = ChatFormat(tokenizer)
    prompt = rollout.prompt(TOLD)
    assert prompt.count(tokenizer.bos_token_id) == (family == "llama")
    said = [*tokenizer.encode("It is 7.", add_special_tokens=False), tokenizer.eos_token_id]
    assert rollout.reply(said) == "It is 7."
    following = [{"role": "user", "content": "Thanks."}]
    extension = rollout.extend(TOLD, following, prompt_P=prompt, tokens_T=said)
    further = extension.prompt
    assert extension.kept and further[: len(prompt) + len(said)] == [*prompt, *said]
    conversation = [*TOLD, {"role": "assistant", "content": "It is 7."}, *following]
    assert further == rollout.prompt(conversation)


def test_what_a_template_rewrites_is_known(chat: tuple[str, Path]) -> None:
    """Qwen3's drops the reasoning of past turns; the others keep every reply."""
    family, folder = chat
    finding = check_template(load_tokenizer(str(folder), "unused"))
    assert (finding is not None and "reasoning" in finding.evidence) == (family == "qwen3")


def test_the_template_goes_with_the_tokenizer_to_a_client(chat: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = chat
    away = tmp_path / "away"
    away.mkdir()
    for name, text in tokenizer_files(folder).items():
        (away / name).write_text(text)
    here, there = (load_tokenizer(str(place), "unused") for place in (folder, away))
    assert here.apply_chat_template(GONE_ON, return_dict=False) == there.apply_chat_template(GONE_ON, return_dict=False)
