"""Versions of weights: each under a name of its own, kept in one vector, forgotten by replicas once."""

from __future__ import annotations

import numpy as np
import pytest
from engine_data import LORA

from mint.cluster.versions import Versions, packed, unpacked
from mint.errors import NotFoundError


def _weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in (("a", (3, 4)), ("b", ()), ("c", (0, 2)))
    }


def test_weights_come_back_from_one_vector_bit_for_bit() -> None:
    weights = _weights(1)
    layout, vector = packed(weights)
    assert vector.dtype == np.float32 and vector.shape == (13,)
    found = unpacked(layout, vector)
    assert list(found) == list(weights)
    assert all(found[name].shape == own.shape and np.array_equal(found[name], own) for name, own in weights.items())


def test_an_id_stands_for_the_newest_version_and_the_older_ones_are_gone_once() -> None:
    stored: list[np.ndarray] = []
    versions = Versions(lambda vector: stored.append(vector) or len(stored))
    versions.add("policy", "base", LORA, _weights(1))
    first = versions.of("policy", "base")
    assert first.size_bytes == 52 and first.stored == 1 and versions.take_gone() == []
    versions.add("policy", "base", LORA, _weights(2))
    second = versions.of("policy", "base")
    assert second.name != first.name and second.stored == 2 and len(versions) == 1
    assert versions.is_current(second) and not versions.is_current(first)
    assert versions.take_gone() == [first.name] and versions.take_gone() == []
    versions.drop("policy")
    versions.drop("policy")
    assert versions.take_gone() == [second.name] and len(versions) == 0


def test_weights_that_are_unknown_or_of_another_base_are_not_found() -> None:
    versions = Versions(lambda vector: vector)
    versions.add("policy", "base", LORA, _weights(1))
    for weights_id, base in (("policy", "other"), ("other", "base")):
        with pytest.raises(NotFoundError, match="published weights"):
            versions.of(weights_id, base)
