"""Samples keep to a schema, an expression or a grammar, and their logprobs stay those of the policy."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mint
from mint import types
from mint.errors import InvalidRequestError
from mint.models.registry import BUNDLED
from mint.server.grammars import compiler, trial
from mint.server.grammars.compiler import FORCED_CHARACTERS, compile_grammar
from mint.server.grammars.trial import try_grammar

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
ARITHMETIC = """start: sum
sum: NUMBER ("+" NUMBER)*
NUMBER: /[1-9][0-9]?/"""
GBNF = 'root ::= "yes" | "no" [a-c]'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mint.ServiceClient]:
    with mint.ServiceClient(data_dir=tmp_path_factory.mktemp("structured")) as opened:
        yield opened


@pytest.fixture(scope="module")
def sampler(service: mint.ServiceClient) -> mint.SamplingClient:
    return service.create_sampling_client(base_model="mint/tiny")


def draw(sampler: mint.SamplingClient, count: int = 8, **options: Any) -> list[types.SampledSequence]:
    wanted = types.StructuredOutputs(**options.pop("wanted"))
    params = types.SamplingParams(**{"max_tokens": 120, "seed": 1, **options}, structured_outputs=wanted)
    return sampler.sample(types.ModelInput.from_ints([5, 6, 7]), count, params).result().sequences


def texts(sampler: mint.SamplingClient, sequences: list[types.SampledSequence]) -> list[str]:
    """Of the sequences that ended by themselves."""
    tokenizer = sampler.get_tokenizer()
    return [tokenizer.decode(each.tokens[:-1]) for each in sequences if each.stop_reason == "stop"]


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "age", "kind"}
        and isinstance(value["name"], str) and len(value["name"]) <= 8
        and type(value["age"]) is int and 0 <= value["age"] <= 99
        and value["kind"] in ("cat", "dog")
    )  # fmt: skip


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"json_schema": SCHEMA}, fits_schema),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": "[ab]{3}-[0-9]+"}, re.compile("[ab]{3}-[0-9]+").fullmatch),
    "choice": ({"choice": ["left", 'r"ight', "[up]"]}, {"left", 'r"ight', "[up]"}.__contains__),
    "Lark": ({"grammar": ARITHMETIC}, re.compile(r"[1-9][0-9]?(\+[1-9][0-9]?)*").fullmatch),
    "GBNF": ({"grammar": GBNF}, {"yes", "noa", "nob", "noc"}.__contains__),
}


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.0}, {"temperature": 1.5, "top_k": 40}, {"ignore_eos": True}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_keeps_to_its_grammar(sampler: mint.SamplingClient, kind: str, settings: dict[str, Any]) -> None:
    wanted, fits = KINDS[kind]
    ended = texts(sampler, draw(sampler, wanted=wanted, **settings))
    assert ended or kind == "json_object"  # which may go on for ever
    assert all(fits(text) for text in ended)


def test_the_logprobs_are_the_policys_and_the_processed_ones_those_of_the_draw(
    service: mint.ServiceClient, sampler: mint.SamplingClient
) -> None:
    wanted = {"choice": ["a", "b"]}
    prompt = types.ModelInput.from_ints([5, 6, 7])
    tokenizer = sampler.get_tokenizer()
    [ends] = {sequence.tokens[-1] for sequence in draw(sampler, wanted=wanted)}
    for sequence in draw(sampler, 16, wanted=wanted, logprobs_mode="both"):
        scored = sampler.compute_logprobs(prompt.append_tokens(sequence.tokens)).result()[3:]
        assert sequence.logprobs == scored
        assert sequence.processed_logprobs is not None and sequence.processed_logprobs[-1] == 0.0
        # The draw is the policy's distribution over the tokens that may come next.
        other = tokenizer.encode("b" if tokenizer.decode(sequence.tokens[:1]) == "a" else "a")
        beside = sampler.compute_logprobs(prompt.append_tokens(other)).result()[3]
        expected = float(sequence.logprobs[0] - _log_sum(sequence.logprobs[0], beside))
        assert sequence.tokens[1] == ends and abs(sequence.processed_logprobs[0] - expected) < 1e-4


def _log_sum(*logprobs: float) -> float:
    return float(np.logaddexp.reduce(logprobs))


def test_a_constrained_sample_is_the_same_in_any_company(sampler: mint.SamplingClient) -> None:
    alone = draw(sampler, 1, wanted={"json_schema": SCHEMA})
    together = [
        sampler.sample(
            types.ModelInput.from_ints([5, 6, 7]),
            1,
            types.SamplingParams(
                max_tokens=120, seed=seed, structured_outputs=types.StructuredOutputs(json_schema=SCHEMA)
            ),
        )
        for seed in (3, 1, 2)
    ]
    plain = sampler.sample(types.ModelInput.from_ints([9, 8]), 4, types.SamplingParams(max_tokens=30, seed=1))
    assert together[1].result().sequences == alone and len(plain.result().sequences) == 4


@pytest.mark.parametrize(
    ("wanted", "field", "problem"),
    [
        ({}, "structured_outputs", "is ambiguous"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs", "is ambiguous"),
        ({"regex": "(a"}, "structured_outputs.regex", "unclosed group"),
        ({"json_schema": {"type": "objekt"}}, "structured_outputs.json_schema", "Invalid type"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "structured_outputs.json_schema", "uniqueItems"),
        ({"choice": []}, "structured_outputs.choice", "is empty"),
        ({"grammar": "start: other"}, "structured_outputs.grammar", "other"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar", "cannot be"),
        ({"regex": "a" * 300_000}, "structured_outputs.regex", "300000 characters"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(
    sampler: mint.SamplingClient, wanted: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(problem)) as refused:
        draw(sampler, 1, wanted=wanted)
    assert refused.value.field == field and refused.value.remedy


LINKS = 5_500
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "a chain of references": (
        {
            "json_schema": {
                "$ref": "#/$defs/d0",
                "$defs": {
                    **{f"d{link}": {"$ref": f"#/$defs/d{link + 1}"} for link in range(LINKS)},
                    f"d{LINKS}": {"type": "string"},
                },
            }
        },
        "too deep a recursion",
    ),
    "a chain of rules": (
        {"grammar": "start: a0\n" + "".join(f"a{link}: a{link + 1}\n" for link in range(18_000)) + 'a18000: "x"'},
        "too deep a recursion",
    ),
    "a large divisor": ({"json_schema": {"type": "integer", "multipleOf": 1_000_003}}, "more than 0.5 s"),
    "many optional parts": ({"regex": "[ab]?" * 16_000}, "more than"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_grammar_that_takes_too_much_to_compile_is_refused_and_the_service_goes_on(
    sampler: mint.SamplingClient, name: str
) -> None:
    """The first two overflow the stack of llguidance's compiler, the others hold a thread for seconds to minutes."""
    wanted, reason = TOO_MUCH[name]
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=f"it takes {reason}.*Make it smaller"):
            draw(sampler, 1, wanted=wanted)
    assert len(draw(sampler, 2, wanted={"choice": ["a"]})) == 2


def test_a_long_text_that_is_forced_has_the_tokens_of_a_text_tokenized_whole(sampler: mint.SamplingClient) -> None:
    rng = random.Random(0)
    text = " ".join(rng.choice(["the", "cats", "and", "12", "+", "Which", "equals"]) for _ in range(200))
    (sample,) = draw(sampler, 1, wanted={"choice": [text]}, max_tokens=700)
    assert len(text) > 2 * FORCED_CHARACTERS
    assert sample.tokens[:-1] == sampler.get_tokenizer().encode(text, add_special_tokens=False)


def test_any_number_of_choices_may_be_given(sampler: mint.SamplingClient) -> None:
    choices = [f"{number} cats" for number in range(3000)]
    assert set(texts(sampler, draw(sampler, wanted={"choice": choices}))) <= set(choices)


def test_requests_that_bring_the_same_new_grammar_at_once_wait_for_one_trial(sampler: mint.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=40, structured_outputs=types.StructuredOutputs(regex="(new|grammar){2,9}"))
    sent = [sampler.sample(types.ModelInput.from_ints([5, number]), 1, params) for number in range(5, 25)]
    assert all(len(each.result().sequences) == 1 for each in sent)


def test_compiled_grammars_are_kept_for_each_owner_alone() -> None:
    folder = BUNDLED["mint/tiny"]
    wanted = types.StructuredOutputs(choice=["a word that nobody else asks for"])
    compile_grammar(wanted, folder, [0], 512, owner="alice")
    hits = compiler._compiled.cache_info().hits
    compile_grammar(wanted, folder, [0], 512, owner="alice")
    assert compiler._compiled.cache_info().hits == hits + 1
    compile_grammar(wanted, folder, [0], 512, owner="bob")
    assert compiler._compiled.cache_info().hits == hits + 1


def test_what_is_remembered_of_tried_grammars_takes_little_memory() -> None:
    wanted = types.StructuredOutputs(regex="a" * 200_000 + "(")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(10):
            with pytest.raises(InvalidRequestError, match="cannot be compiled"):
                try_grammar(wanted, BUNDLED["mint/tiny"], owner=f"owner {number}")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000
    assert trial._waiting == {}


def test_another_process_compiles_a_grammar_again_and_allows_the_same_tokens() -> None:
    wanted = types.StructuredOutputs(choice=["yes", "no"])
    grammar = compile_grammar(wanted, BUNDLED["mint/tiny"], [0], 512, owner="alice")
    compile_again, arguments = grammar.__reduce__()  # what a pickle of it holds
    sent = compile_again(*arguments)
    assert sent.ends == grammar.ends
    masks = [np.zeros(64, np.uint8) for _ in range(2)]
    for mask, own in zip(masks, (grammar, sent), strict=True):
        own.start().allowed(mask)
    assert masks[0].any() and np.array_equal(*masks)


AMBIGUOUS = 'start: s\ns: s s | s s s | "a" | "b" | "ab" | "aa"'
"""Compiles in no time; each of its tokens takes more than the one before."""


@pytest.mark.parametrize(
    "options",
    [
        {"wanted": {"regex": "(a{1000}){1000}"}},
        {"wanted": {"regex": "ab"}, "min_tokens": 50},
        {"wanted": {"regex": "a"}, "allowed_token_ids": [5]},
        {"wanted": {"grammar": AMBIGUOUS}, "min_tokens": 400, "max_tokens": 500},
    ],
)
def test_rules_that_exclude_every_token_are_the_callers_mistake(
    sampler: mint.SamplingClient, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.*(exclude every token|takes more than)"):
        draw(sampler, 1, **options)
    assert len(draw(sampler, 2, wanted={"choice": ["a"]})) == 2


def test_a_grammar_with_special_tokens_can_name_them(sampler: mint.SamplingClient, tmp_path: Path) -> None:
    [sequence] = draw(sampler, 1, wanted={"grammar": 'start: <[3]> "x" <[4]>'})
    assert sequence.tokens[0] == 3 and sequence.tokens[-2] == 4
