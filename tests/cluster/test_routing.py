"""Which replica gets a job: its lora, its prompt, then the load; in the memory of each; better than other rules."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.serving.routing import arrivals, policies, simulate
from mint.cluster.routing import BLOCK, LORA_SEQUENCES, Needs, ReplicaState, beginnings, route

PROMPT = np.arange(4 * BLOCK)


def _states(count: int, *, limit_bytes: int = 100) -> dict[int, ReplicaState]:
    return {number: ReplicaState(limit_bytes) for number in range(count)}


def test_the_lora_comes_before_the_prompt_and_the_prompt_before_the_load() -> None:
    states = _states(3)
    keys = beginnings("a", "me", PROMPT)
    states[1].add(Needs(2, "a", 10))
    states[2].add(Needs(1, "b", 10, keys))
    assert route(states, Needs(1, "a", 10, keys)) == 1
    assert route(states, Needs(1, None, 0, keys)) == 2
    assert route(states, Needs(1, "c", 10)) == 0


def test_a_lora_that_is_asked_for_a_lot_comes_to_several_replicas() -> None:
    states = _states(3)
    needs = Needs(4, "hot", 10)
    for _ in range(30):
        number = route(states, needs)
        assert number is not None
        states[number].add(needs)
    assert all("hot" in state.loras for state in states.values())
    counts = [state.sequences for state in states.values()]
    assert max(counts) - min(counts) <= LORA_SEQUENCES + 4


def test_beginnings_are_shared_within_a_lora_and_a_scope_alone() -> None:
    own = beginnings("a", "me", PROMPT)
    assert len(own) == 4 and beginnings("a", "me", PROMPT[: 3 * BLOCK - 1]) == own[:2]
    other = PROMPT.copy()
    other[-1] += 1
    assert beginnings("a", "me", other)[:3] == own[:3] and beginnings("a", "me", other)[3] != own[3]
    assert not set(own) & {*beginnings("b", "me", PROMPT), *beginnings("a", "you", PROMPT)}


def test_the_share_of_a_prompt_ends_where_it_differs_and_old_beginnings_are_forgotten() -> None:
    state = ReplicaState(100, known_blocks=6)
    state.add(Needs(1, None, 0, beginnings(None, "", PROMPT)))
    other = np.concatenate([PROMPT[: 2 * BLOCK], PROMPT[: 2 * BLOCK]])
    assert state.cached_share(Needs(1, None, 0, beginnings(None, "", other))) == 0.5
    state.add(Needs(1, None, 0, beginnings(None, "", PROMPT + 1)))
    assert state.cached_share(Needs(1, None, 0, beginnings(None, "", PROMPT))) == 0.5
    assert state.cached_share(Needs(1)) == 1.0


def test_no_replica_holds_more_loras_than_fit_and_those_of_running_jobs_stay() -> None:
    rng = np.random.default_rng(0)
    states = _states(3, limit_bytes=100)
    held: dict[int, set[str]] = {number: set() for number in states}
    running: list[tuple[int, Needs]] = []
    waited = 0
    for _ in range(3000):
        if running and rng.random() < 0.4:
            number, needs = running.pop(int(rng.integers(len(running))))
            states[number].end(needs)
        lora = int(rng.integers(30))
        needs = Needs(1, f"lora-{lora}", 10 + lora)
        found = route(states, needs)
        if found is None:
            waited += 1
            continue
        removed = states[found].add(needs)
        assert not set(removed) & {own.lora for number, own in running if number == found}
        held[found] = held[found] - set(removed) | {needs.lora or ""}
        assert held[found] == set(states[found].loras) and states[found].lora_bytes <= 100
        running.append((found, needs))
    assert waited and len(running) > 3


def test_a_lora_beyond_the_limit_is_sampled_alone() -> None:
    states = _states(1, limit_bytes=100)
    small, large = Needs(1, "small", 60), Needs(1, "large", 300)
    assert states[0].add(small) == []
    assert route(states, large) is None
    states[0].end(small)
    assert route(states, large) == 0 and states[0].add(large) == ["small"]
    assert route(states, small) is None


def test_a_forgotten_lora_frees_its_memory_and_its_jobs_may_still_end() -> None:
    state = ReplicaState(100)
    needs = Needs(1, "a", 80)
    state.add(needs)
    assert state.forget("a") and not state.forget("a") and state.has_room(Needs(1, "b", 80))
    state.end(needs)
    assert state.sequences == 0 and state.lora_bytes == 0


@pytest.mark.parametrize("load", [0.7, 0.85])
def test_a_thousand_loras_are_found_more_often_than_by_turns_or_by_load_alone(load: float) -> None:
    jobs = arrivals(4000, replicas=8, load=load, seed=3)
    found = {name: simulate(jobs, policy, replicas=8) for name, policy in policies().items()}
    own = found.pop("routing")
    assert all(len(outcome.waits_s) == len(jobs) for outcome in (own, *found.values()))
    for other in found.values():
        assert own.lora_hits > other.lora_hits + 0.15
        assert own.prompt_hits > other.prompt_hits + 0.1
        assert own.wait_s(50) < other.wait_s(50) and own.wait_s(99) < other.wait_s(99)
