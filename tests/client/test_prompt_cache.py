"""`prompt_cache_hit_tokens` says how much of a prompt an earlier request had computed, over both encodings."""

from __future__ import annotations

from pathlib import Path

import mint
from mint import types, wire

PROMPT = types.ModelInput.from_ints([5 + number % 900 for number in range(300)])
GREEDY = types.SamplingParams(max_tokens=2, temperature=0.0, stop=[])


def test_a_repeated_prompt_is_reported_as_cached_and_a_new_one_is_not(tmp_path: Path) -> None:
    with mint.ServiceClient(data_dir=tmp_path) as client:
        sampler = client.create_sampling_client(base_model="mint/tiny")
        first = sampler.sample(PROMPT, 4, GREEDY).result()
        again = sampler.sample(PROMPT, 1, GREEDY).result()
        longer = sampler.sample(PROMPT.append_tokens([7] * 20), 1, GREEDY).result()
        other = sampler.sample(types.ModelInput.from_ints([9] * 300), 1, GREEDY).result()
    assert first.prompt_cache_hit_tokens == 0
    assert 256 <= again.prompt_cache_hit_tokens < PROMPT.length  # the last token is computed again
    assert longer.prompt_cache_hit_tokens >= again.prompt_cache_hit_tokens
    assert other.prompt_cache_hit_tokens == 0
    assert again.sequences[0] == first.sequences[0]


def test_the_number_survives_the_wire_and_makes_no_difference_between_samples() -> None:
    sequence = types.SampledSequence([5], [-0.5], "length")
    cached = types.SampleResponse([sequence], prompt_cache_hit_tokens=7)
    for encoding in wire.Encoding:
        read = wire.decode(types.SampleResponse, wire.encode(cached, encoding), encoding)
        assert read.prompt_cache_hit_tokens == 7
    assert cached == types.SampleResponse([sequence])
