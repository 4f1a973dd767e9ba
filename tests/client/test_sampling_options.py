"""The sampling options of the SDK reach the engine, and both kinds of logprobs come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mint
from mint import types

PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mint.ServiceClient]:
    with mint.ServiceClient(data_dir=tmp_path_factory.mktemp("options")) as opened:
        yield opened


def draw(service: mint.ServiceClient, **options: Any) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=12, seed=3, stop=[], **options)
    return service.create_sampling_client(base_model="mint/tiny").sample(PROMPT, 4, params).result().sequences


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [40, 41, 42, 43]},
        {"min_p": 1.0},
        {"logit_bias": {50: 100.0}},
        {"frequency_penalty": 2.0, "logit_bias": {50: 8.0}},
        {"presence_penalty": 2.0, "logit_bias": {50: 8.0}},
        {"repetition_penalty": 50.0, "logit_bias": {50: 8.0}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_changes_what_is_drawn(service: mint.ServiceClient, options: dict[str, Any]) -> None:
    plain, changed = draw(service), draw(service, **options)
    assert [sequence.tokens for sequence in plain] != [sequence.tokens for sequence in changed]
    assert changed == draw(service, **options)
    if "allowed_token_ids" in options:
        assert {token for sequence in changed for token in sequence.tokens} <= {40, 41, 42, 43}
    if options == {"min_p": 1.0}:
        assert [sequence.tokens for sequence in changed] == [
            sequence.tokens for sequence in draw(service, temperature=0.0)
        ]
    if options == {"logit_bias": {50: 100.0}}:
        assert all(sequence.tokens == [50] * 12 for sequence in changed)


def test_no_end_comes_before_min_tokens(service: mint.ServiceClient) -> None:
    ends = {"stop_token_ids": [50], "logit_bias": {50: 100.0}}
    assert [sequence.tokens for sequence in draw(service, **ends)] == [[50]] * 4
    for sequence in draw(service, min_tokens=5, **ends):
        assert len(sequence.tokens) == 6 and sequence.tokens.index(50) == 5


def test_both_logprobs_come_back_and_one_mode_gives_each(service: mint.ServiceClient) -> None:
    options = {"temperature": 0.7, "min_p": 0.02, "frequency_penalty": 0.4}
    both = draw(service, logprobs_mode="both", **options)
    raw, processed = draw(service, **options), draw(service, logprobs_mode="processed", **options)
    assert [sequence.logprobs for sequence in both] == [sequence.logprobs for sequence in raw]
    assert [sequence.processed_logprobs for sequence in both] == [sequence.logprobs for sequence in processed]
    assert all(sequence.processed_logprobs is None for sequence in (*raw, *processed))
