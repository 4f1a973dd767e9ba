"""The tokenizer of an environment without transformers gives what transformers gives: ids, texts, conversations."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mint.errors import InvalidRequestError, MissingExtraError, NotFoundError
from mint.models.registry import BUNDLED
from mint.tokenizer import load_tokenizer, token_pieces
from mint.tokenizer.chat_template import render_conversation
from mint.tokenizer.model_tokenizer import ModelTokenizer
from mint.tokenizer.prompt_ids import PromptIds

TINY = BUNDLED["mint/tiny"]
CORPUS = [
    "The quick brown fox doesn't jump over 1,234 lazy dogs. It is theirs, and I'm sure!",
    "def f(x):\n    return {'a': x + 1}\n\n\n",
    "Größe, naïve café, Ελληνικά, русский, 中文字符, 日本語, 🙂👍🏽 and tabs\tand   spaces",
]
TEMPLATE = """
{%- if tools %}{{- 'tools ' + tools | tojson + '\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|turn|>assistant\\n' }}{% generation %}{{ message.content | trim }}{{ '<|end|>' }}{% endgeneration %}
    {%- elif message.role == 'nobody' %}{{- raise_exception('nobody may speak') }}
    {%- else %}{{- '<|turn|>' + message.role + '\\n' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{%- endif %}
"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 3 + 4?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Und 4 · 5?", "name": None}],
    [{"role": "user", "content": "<|end|> \n "}, {"role": "assistant", "content": " seven \n"}],
]


def byte_level(folder: Path) -> dict[str, Any]:
    """As GPT-2, Qwen and Llama 3: bytes as letters, and a token that begins every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|turn|>", "<|end|>"])
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[begin])
    tokenizer.enable_truncation(8)  # as some folders on the hub have; transformers switches both off
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    return {
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "add_bos_token": False,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": True,
        "chat_template": TEMPLATE,
        "additional_special_tokens": ["<|turn|>"],
        "image_token": "<|image|>",
    }


def sentencepiece(folder: Path) -> dict[str, Any]:
    """As Llama 2 and Gemma: spaces as letters, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    added = {"600": {"content": "<|turn|>", "special": True}, "601": {"content": "<|end|>", "lstrip": True}}
    return {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "added_tokens_decoder": added,
        "extra_special_tokens": {"audio_token": "<|audio|>"},
    }


def word_pieces(folder: Path) -> dict[str, Any]:
    """As BERT: lower case, pieces of words, spaces that decoding cleans up; written by an older transformers."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "special_tokens_map.json").write_text(json.dumps({**names, "mask_token": {"content": "[MASK]"}}))
    (folder / "added_tokens.json").write_text(json.dumps({"<|later|>": 900}))
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "with " + TEMPLATE}]
    return {
        "clean_up_tokenization_spaces": True,
        "chat_template": named,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }


KINDS: dict[str, Callable[[Path], dict[str, Any]] | None] = {
    "tiny": None,
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "word_pieces": word_pieces,
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = KINDS[request.param]
    if make is None:
        return TINY
    made = tmp_path_factory.mktemp(request.param)
    (made / "tokenizer_config.json").write_text(json.dumps(make(made)))
    return made


@pytest.fixture
def ours(folder: Path) -> ModelTokenizer:
    return ModelTokenizer(folder)


@pytest.fixture
def theirs(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def random_texts(theirs: Any, count: int = 200) -> list[str]:
    """Characters of many scripts, pieces of the corpus, and special tokens in between."""
    draw = random.Random(7)
    characters = "".join(CORPUS) + "".join(map(chr, range(32, 127))) + "\u0000\u200b\ufffd\U0001f469\u200d\U0001f4bb"
    words = [*" ".join(CORPUS).split(" "), *theirs.get_added_vocab()]
    return ["", " ", "\n\n"] + [
        "".join(draw.choice([draw.choice(characters), f" {draw.choice(words)}"]) for _ in range(draw.randrange(1, 40)))
        for _ in range(count)
    ]


def test_a_text_has_the_same_ids(ours: ModelTokenizer, theirs: Any) -> None:
    texts = random_texts(theirs)
    for text in texts:
        for special in (True, False):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
        assert ours.tokenize(text) == theirs.tokenize(text)
        assert ours(text) == dict(theirs(text))
    assert ours(texts) == dict(theirs(texts))
    whole = ours(texts, return_offsets_mapping=True, add_special_tokens=False)
    assert whole == dict(theirs(texts, return_offsets_mapping=True, add_special_tokens=False))
    assert whole.input_ids is whole["input_ids"]


def test_ids_have_the_same_text(ours: ModelTokenizer, theirs: Any) -> None:
    draw = random.Random(3)
    rows = [[draw.randrange(len(theirs)) for _ in range(draw.randrange(0, 30))] for _ in range(200)]
    rows += [theirs.encode(text) for text in CORPUS]
    for skip in (False, True):
        for clean in (None, False, True):
            wanted = [theirs.decode(row, skip_special_tokens=skip, clean_up_tokenization_spaces=clean) for row in rows]
            assert [ours.decode(row, skip, clean) for row in rows] == wanted
            assert ours.batch_decode(rows, skip_special_tokens=skip, clean_up_tokenization_spaces=clean) == wanted
        assert [ours.convert_ids_to_tokens(row, skip) for row in rows] == [
            theirs.convert_ids_to_tokens(row, skip) for row in rows
        ]
    for row in rows:
        tokens = theirs.convert_ids_to_tokens(row)
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
        assert ours.convert_tokens_to_string(tokens) == theirs.convert_tokens_to_string(tokens)
        assert token_pieces(ours, row) == token_pieces(theirs, row)
    assert ours.decode(5) == theirs.decode(5)
    assert ours.convert_tokens_to_ids("no such token") == theirs.convert_tokens_to_ids("no such token")
    assert ours.convert_ids_to_tokens(10**6) is theirs.convert_ids_to_tokens(10**6) is None


def test_arrays_and_lists_of_lists_are_decoded(ours: ModelTokenizer, theirs: Any) -> None:
    numpy = pytest.importorskip("numpy")
    ids = theirs.encode(CORPUS[0])
    for form in (numpy.array(ids), tuple(ids), numpy.array([ids, ids]), [ids, ids[:3]], [ids]):
        assert ours.decode(form) == theirs.decode(form)


def test_it_has_the_same_vocabulary_and_special_tokens(ours: ModelTokenizer, theirs: Any) -> None:
    for name in (
        *("vocab_size", "special_tokens_map", "all_special_tokens", "all_special_ids", "added_tokens_encoder"),
        *("model_max_length", "padding_side", "model_input_names", "chat_template", "name_or_path", "is_fast"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("bos_token_id", "eos_token_id", "unk_token_id", "sep_token_id", "pad_token_id", "cls_token_id"),
        *("mask_token_id", "extra_special_tokens", "vocab"),
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("image_token", "image_token_id", "audio_token", "audio_token_id"):
        assert getattr(ours, name, None) == getattr(theirs, name, None), name
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab() and bool(ours)
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    for place, token in theirs.added_tokens_decoder.items():
        assert ours.added_tokens_decoder[place].content == token.content
        assert ours.added_tokens_decoder[place].special == token.special, token


def test_a_special_token_can_be_set_by_its_text_and_by_its_id(ours: ModelTokenizer, theirs: Any) -> None:
    for tokenizer in (ours, theirs):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(3)
        tokenizer.mask_token_id = 4
    assert (ours.pad_token_id, ours.mask_token) == (theirs.pad_token_id, theirs.mask_token) == (3, ours.mask_token)
    assert ours.special_tokens_map == theirs.special_tokens_map


TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"tools": TOOLS}])
def test_a_conversation_is_rendered_alike(
    conversation: list[dict[str, Any]], options: dict[str, Any], ours: ModelTokenizer, theirs: Any
) -> None:
    before = copy.deepcopy(conversation)
    text = ours.apply_chat_template(conversation, tokenize=False, **options)
    assert text == theirs.apply_chat_template(conversation, tokenize=False, **options)
    plain = theirs.apply_chat_template(conversation, return_dict=False, **options)
    ids = ours.apply_chat_template(conversation, **options)
    assert isinstance(ids, PromptIds) and ids == plain
    assert ours.apply_chat_template(conversation, return_dict=False, **options) == plain
    whole = ours.apply_chat_template(conversation, return_dict=True, **options)
    assert whole == dict(theirs.apply_chat_template(conversation, return_dict=True, **options))
    batch = [conversation, CONVERSATIONS[0]]
    assert ours.apply_chat_template(batch, **options) == dict(theirs.apply_chat_template(batch, **options))
    assert conversation == before


def test_an_answer_that_has_begun_is_gone_on_with(ours: ModelTokenizer, theirs: Any) -> None:
    conversation = [*CONVERSATIONS[0], {"role": "assistant", "content": "It is"}]
    options = {"continue_final_message": True, "tokenize": False}
    text = ours.apply_chat_template(conversation, **options)
    assert text == theirs.apply_chat_template(conversation, **options)
    assert text.endswith("It is")


@dataclasses.dataclass
class Said:
    role: str
    content: str


TEMPLATES = {
    "json": "{{ {'b': [1, none, true], 'a': 'é<&>'} | tojson(indent=2, sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "namespace": "{% set n = namespace(count=0) %}{% for m in messages %}{% set n.count = n.count + 1 %}{% endfor %}"
    "{{ n.count }}",
    "dict": "{{ dict(a=1, **{'b': 2}) }} {{ dict([('x', 1)]) }}",
    "variables": "{{ enable_thinking is defined and enable_thinking }} {{ bos_token }} {{ documents }} {{ tools }}",
    "white space": "{% if true %}\n  a\n  {% endif %}\n b {#- note -#}  c\n",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "missing": "{{ messages[0].name is defined }} {{ nothing }}.",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_means_what_it_means_to_transformers(template: str) -> None:
    ours, theirs = ModelTokenizer(TINY), PreTrainedTokenizerFast.from_pretrained(TINY)
    spoken: list[list[Any]] = [
        *CONVERSATIONS,
        [{"role": "user", "content": "x", "reasoning": "why"}],
        [{"role": "user", "content": "x", "thinking": "why", "reasoning_content": "because"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "image": object()}]}],
    ]
    for conversation in spoken:
        for options in ({}, {"enable_thinking": True, "documents": [{"title": "t", "text": "é"}]}):
            options |= {"chat_template": template, "tokenize": False}
            assert ours.apply_chat_template(conversation, **options) == theirs.apply_chat_template(
                conversation, **options
            )


def test_messages_may_be_objects_of_several_kinds() -> None:
    numpy = pytest.importorskip("numpy")
    message = Said("user", "hi")
    assert render_conversation("{{ messages[0].content }}", [message]) == "hi"
    shown = render_conversation(
        "{{ messages[0].content | tojson }}", [{"role": "user", "content": (numpy.float32(2),)}]
    )
    assert shown == "[2.0]"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ raise_exception('no') }}",
        "{% for %}",
    ],
)
def test_a_hostile_template_reaches_nothing(template: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        print(render_conversation(template, CONVERSATIONS[0]))


def test_a_template_can_refuse_a_conversation(ours: ModelTokenizer) -> None:
    ours.chat_template = TEMPLATE
    with pytest.raises(jinja2.TemplateError, match="nobody may speak"):
        ours.apply_chat_template([{"role": "nobody", "content": "x"}])


@pytest.mark.parametrize(
    ("conversation", "options", "message"),
    [
        ([], {}, "holds no message"),
        (["hello"], {}, "holds a message that is no dictionary"),
        ([{"role": "user"}], {"continue_final_message": True}, "without text to go on with"),
        (CONVERSATIONS[0], {"continue_final_message": True, "add_generation_prompt": True}, "Pass one of them"),
        (CONVERSATIONS[0], {"continue_final_message": True, "chat_template": "silence"}, "does not show"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused(
    conversation: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ModelTokenizer(TINY).apply_chat_template(conversation, **options)


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = ModelTokenizer(TINY)
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequestError, match="chat_template"):
        tokenizer.apply_chat_template(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one("a", return_tensors="pt"),
        lambda one: one(["a", "b c"], padding=True),
        lambda one: one.encode("a b c", truncation=True, max_length=2),
        lambda one: one.apply_chat_template(CONVERSATIONS[0], return_tensors="np"),
        lambda one: one.apply_chat_template(CONVERSATIONS[0], tools=[len]),
    ],
)
def test_what_only_transformers_can_do_is_refused_with_its_name(call: Callable[[Any], Any]) -> None:
    with pytest.raises(MissingExtraError, match=r"needs transformers.*pip install transformers"):
        call(ModelTokenizer(TINY))
    with pytest.raises(AttributeError, match=r"push_to_hub.*pip install transformers"):
        _ = ModelTokenizer(TINY).push_to_hub


def test_text_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="is no text"):
        ModelTokenizer(TINY).encode(b"bytes")  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301
def test_a_copy_encodes_and_renders_alike(copied: Callable[[Any], Any]) -> None:
    tokenizer = ModelTokenizer(TINY)
    other = copied(tokenizer)
    assert other.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])
    assert other.apply_chat_template(CONVERSATIONS[0]) == tokenizer.apply_chat_template(CONVERSATIONS[0])


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed: importing it raises."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("mint.tokenizer.loading._TOKENIZERS", {})


@pytest.mark.usefixtures("without_transformers")
def test_without_transformers_a_model_has_this_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(TINY), "mint/tiny")
    assert isinstance(tokenizer, ModelTokenizer) and load_tokenizer(str(TINY), "mint/tiny") is tokenizer
    assert tokenizer.decode(tokenizer.encode("3 + 5 = 8")) == "3 + 5 = 8"
    with pytest.raises(NotFoundError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(tmp_path), "mint/tiny")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path), "mint/tiny")


DAMAGED = {
    "no vocabulary": ("tokenizer.json", "{}"),
    "no object": ("tokenizer.json", "[]"),
    "a list as configuration": ("tokenizer_config.json", "[]"),
    "a number as class": ("tokenizer_config.json", '{"tokenizer_class": 5}'),
    "a text as length": ("tokenizer_config.json", '{"model_max_length": "x"}'),
    "too deep": ("tokenizer_config.json", "[" * 100_000),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_an_error_that_names_the_folder(case: str, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    name, text = DAMAGED[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequestError, match="tokenizer that cannot be loaded") as caught:
        load_tokenizer(str(tmp_path), "mint/tiny")
    assert str(tmp_path) in str(caught.value) and caught.value.remedy


@pytest.mark.usefixtures("without_transformers")
def test_a_name_of_the_hub_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(NotFoundError, match="nobody/nothing"):
        load_tokenizer("", "nobody/nothing")
    snapshot = tmp_path / "models--lab--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).write_bytes((TINY / name).read_bytes())
    tokenizer = load_tokenizer("", "lab/model")
    assert tokenizer.name_or_path == "lab/model" and tokenizer.eos_token == "<|im_end|>"
