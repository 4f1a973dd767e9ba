"""A grammar that takes long: its own sequences wait for their masks, and nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from engine_data import LORA, job, train
from waiting import HANG_S, wait_until

from mint.engine.drawing.token_masks import MaskTable, packed
from mint.engine.protocol import LogitRules, SampleJob, SampleResult
from mint.engine.torch_engine import TorchEngine

VOCAB = 97


class CountingGrammar:
    """Token i of a text is i modulo 3; `advanced` is called with each state before it goes on."""

    ends = frozenset({1})

    def __init__(self, advanced: Callable[[CountingGrammar], None] = lambda _: None) -> None:
        self._advanced = advanced
        self.count = 0

    def start(self) -> CountingGrammar:
        return CountingGrammar(self._advanced)

    def allowed(self, bits: np.ndarray) -> None:
        bits[:] = packed(np.arange(3 + self.count % 3, VOCAB, 3), VOCAB)

    def advance(self, token: int) -> None:
        assert token % 3 == self.count % 3
        self._advanced(self)
        self.count += 1


class Gate:
    """Holds every text of a grammar at its fourth token until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, state: CountingGrammar) -> None:
        if state.count == 3:
            assert self.opened.wait(HANG_S)


@pytest.fixture
def engine(engine: TorchEngine) -> TorchEngine:
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    engine.publish("m", "w")
    return engine


def bits(result: SampleResult) -> list[tuple[bytes, bytes]]:
    assert result.error is None
    return [(sample.tokens.tobytes(), sample.logprobs.tobytes()) for sample in result.samples]


def sampled(rules: LogitRules | None, scope: str, seed: int) -> SampleJob:
    return job([3, 4, 5], weights_id="w", num_samples=3, max_tokens=12, rules=rules, cache_scope=scope, seed=seed)


def test_others_are_sampled_while_the_masks_of_a_grammar_are_not_there(engine: TorchEngine) -> None:
    alone = [
        bits(engine.sample([sampled(rules, scope, seed)])[0])
        for rules, scope, seed in [(LogitRules(grammar=CountingGrammar()), "a", 1), (None, "b", 2)]
    ]
    gate = Gate()
    batch = engine.open_batch()
    batch.add("slow", sampled(LogitRules(grammar=CountingGrammar(gate)), "a", 1))
    batch.add("quick", sampled(None, "b", 2))
    results: dict[str, SampleResult] = {}
    while "quick" not in results:
        results |= batch.step()
    assert "slow" not in results
    gate.opened.set()
    while batch.keys:
        results |= batch.step()
    assert [bits(results["slow"]), bits(results["quick"])] == alone


def table(*grammars: CountingGrammar) -> MaskTable:
    made = MaskTable()
    for slot, grammar in enumerate(grammars):
        made.open(slot, None, grammar, VOCAB)
    return made


def test_sequences_that_took_less_time_so_far_have_their_masks_first() -> None:
    order: list[str] = []

    def quick(state: CountingGrammar) -> None:
        order.append("quick")

    def slow(state: CountingGrammar) -> None:
        order.append("slow")
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass

    masks = table(CountingGrammar(slow), CountingGrammar(quick))
    slots = np.arange(2)
    for token in (0, 1, 2):
        masks.advance(slots, np.full(2, token))
        assert masks.ready(slots, None).all()
    assert order == ["slow", "quick", "quick", "slow", "quick", "slow"]


def test_a_slot_that_another_sequence_has_got_does_not_go_on_by_the_token_of_the_one_before() -> None:
    gate = Gate()
    masks = table(CountingGrammar(gate), CountingGrammar())
    for token in (0, 1, 2):
        masks.advance(np.arange(2), np.full(2, token))
        assert masks.ready(np.arange(2), None).all()
    masks.advance(np.arange(2), np.zeros(2, np.int64))  # the thread is held at slot 0
    masks.close(1)
    masks.open(1, None, CountingGrammar(), VOCAB)
    gate.opened.set()
    assert masks.ready(np.arange(2), None).all()
    assert masks.read(np.array([1]))[0].tobytes() == packed(np.arange(3, VOCAB, 3), VOCAB).tobytes()


def test_an_error_of_a_grammar_reaches_who_waits_for_its_mask() -> None:
    def fail(state: CountingGrammar) -> None:
        raise RuntimeError("the grammar failed")

    masks = table(CountingGrammar(fail))
    masks.advance(np.array([0]), np.array([0]))
    with pytest.raises(RuntimeError, match="the grammar failed"):
        masks.ready(np.array([0]), None)


def test_waiting_ends_after_its_time() -> None:
    gate = Gate()
    masks = table(CountingGrammar(gate), CountingGrammar())
    for token in (0, 1, 2):
        masks.advance(np.array([0]), np.array([token]))
        assert masks.ready(np.array([0]), None).all()
    masks.advance(np.array([0]), np.array([0]))
    assert masks.ready(np.arange(2), 0.001).tolist() == [False, True]
    gate.opened.set()
    wait_until(lambda: masks.ready(np.array([0]), 0.001).all())
