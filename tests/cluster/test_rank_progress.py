"""When a group says that one of its ranks is frozen or stuck."""

from __future__ import annotations

from mint.cluster.collectives.progress import Progress, Report, Watch

BOTH = (0, 1)


def watch() -> Watch:
    return Watch(2, silence_s=30, deadline_s=10, now=0.0)


def test_a_collective_is_a_step_and_the_rank_waits_in_it() -> None:
    progress = Progress()
    progress.advance()
    with progress.waiting():
        assert progress.report == Report(1, waits=True)
    assert progress.report == Report(2, waits=False)


def test_a_rank_that_takes_no_step_while_another_waits_is_stuck_after_the_deadline() -> None:
    own = watch()
    for now in (1.0, 6.0, 11.0):
        own.hear(0, Report(4, waits=True), now)
        own.hear(1, Report(7, waits=False), now)
    assert own.find_lost(BOTH, 11.0) is None
    reason = own.find_lost(BOTH, 12.0)
    assert reason is not None and reason.startswith("rank 1 is stuck")


def test_steps_of_a_rank_put_the_deadline_off() -> None:
    own = watch()
    for step, now in enumerate((1.0, 9.0, 18.0, 27.0)):
        own.hear(0, Report(4, waits=True), now)
        own.hear(1, Report(step, waits=False), now)
        assert own.find_lost(BOTH, now) is None


def test_nobody_waits_for_a_long_work_without_collectives() -> None:
    own = watch()
    for now in range(100):
        own.hear(0, Report(1, waits=False), now)
        own.hear(1, Report(1, waits=False), now)
        assert own.find_lost(BOTH, now) is None


def test_ranks_that_all_wait_are_stuck_also_if_one_has_ended_its_work() -> None:
    own = watch()
    own.hear(0, Report(1, waits=True), 1.0)
    own.hear(1, Report(1, waits=True), 1.0)
    reasons = {own.find_lost(working, 12.0) for working in (BOTH, (0,))}
    assert all(reason is not None and reason.startswith("all ranks wait for each other") for reason in reasons)


def test_a_rank_without_a_sign_of_life_is_frozen_and_one_that_has_ended_is_not() -> None:
    own = watch()
    own.hear(0, Report(1, waits=False), 25.0)
    assert own.find_lost(BOTH, 30.0) is None
    assert own.find_lost(BOTH, 31.0) == "rank 1 is silent since 31 s"
    assert own.find_lost((0,), 31.0) is None
