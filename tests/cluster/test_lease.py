"""How long a process lives without its server, and whose orders it takes."""

from __future__ import annotations

import pytest

from mint.cluster.lifetime.lease import FIRST_LEASE_S, RENEW_S, ServerLease, SupersededError
from mint.config import Settings

LEASE_S = 120.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_is_over_when_nobody_has_renewed_it() -> None:
    clock = Clock()
    lease = ServerLease(1, LEASE_S, clock=clock)
    clock.now = FIRST_LEASE_S
    assert not lease.is_over
    assert lease.renew(1)
    clock.now += LEASE_S
    assert not lease.is_over
    clock.now += 1
    assert lease.is_over
    assert Settings().lease_s > 10 * RENEW_S


def test_the_highest_start_of_the_server_is_obeyed() -> None:
    clock = Clock()
    lease = ServerLease(3, LEASE_S, clock=clock)
    lease.require(3)
    assert lease.renew(4)
    lease.require(4)
    clock.now = LEASE_S
    assert not lease.renew(3)  # a server that was frozen, and wakes
    with pytest.raises(SupersededError, match="start 4 of the server has this process, not 3"):
        lease.require(3)
    clock.now += 1
    assert lease.is_over, "a server that was replaced keeps nothing alive"
