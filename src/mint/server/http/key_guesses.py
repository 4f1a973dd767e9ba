"""Slows the guessing of API keys: an address that has sent many different wrong keys is refused for a while.

A wrong key that is sent again is no new guess, and a key that has worked from an address goes on working there, so that
neighbours behind one address cannot lock each other out. Memory is bounded. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mint.errors import OverloadedError
from mint.server.callers import Caller
from mint.server.store.keys import ApiKeys

MAX_GUESSES, GUESSES_WITHIN_S = 10, 60.0
"""So many different wrong keys may come from one address within this time."""

MAX_ADDRESSES = 4096
MAX_WORKING = 16_384
"""Addresses with guesses, and pairs of an address and a key that has worked there, that are remembered."""

IPV6_NETWORK_BITS = 64
"""One subscriber has all addresses of such a network."""


class GuardedKeys:
    """The API keys of a server, for senders who may be guessing. Any thread may call."""

    def __init__(self, keys: ApiKeys, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds."""
        self._keys = keys
        self._clock = clock
        self._lock = threading.Lock()
        self._guesses: OrderedDict[str, dict[bytes, float]] = OrderedDict()  # by network: digest of a key → when
        self._working: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def verify(self, key: str, address: str) -> Caller | None:
        """The holder of a key that was sent from `address`; None if there is no such key, or it was revoked.

        Raises:
            OverloadedError: too many different wrong keys have come from there; says when to try again.
            JournalError: the database cannot be read, so nothing is known of the key.
        """
        network = _network_of(address)
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        with self._lock:
            self._require_few_guesses(network, digest)
        caller = self._keys.verify(key)
        with self._lock:
            # Again, for other guesses may have been counted meanwhile: many sent at once learn no more than one by one.
            self._require_few_guesses(network, digest)
            if caller is None:
                self._guesses.setdefault(network, {})[digest] = self._clock()
                _trim(self._guesses, network, MAX_ADDRESSES)
            else:
                self._working[network, digest] = None
                _trim(self._working, (network, digest), MAX_WORKING)
        return caller

    def recall(self, key: str, address: str) -> Caller | None:
        """As `ApiKeys.recall`, for a key that has worked from this address."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        with self._lock:
            if (_network_of(address), digest) not in self._working:
                return None
        return self._keys.recall(key)

    def holder(self, key_id: str) -> Caller | None:
        """As `ApiKeys.holder`."""
        return self._keys.holder(key_id)

    def _require_few_guesses(self, network: str, digest: bytes) -> None:
        """Call it under the lock."""
        now = self._clock()
        recent = {each: at for each, at in self._guesses.get(network, {}).items() if now - at < GUESSES_WITHIN_S}
        if network in self._guesses:
            self._guesses[network] = recent
        if len(recent) < MAX_GUESSES or digest in recent or (network, digest) in self._working:
            return
        wait_s = min(recent.values()) + GUESSES_WITHIN_S - now
        raise OverloadedError(
            f"{MAX_GUESSES} different API keys that are not known here came from this address within a minute",
            remedy="Wait, then send the right key; the operator makes one with: mint keys create --owner NAME",
            retry_after_s=wait_s,
        )


def _network_of(address: str) -> str:
    """An IPv4 address itself, an IPv6 address's network; any other text (a Unix socket has none) as it is."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, IPV6_NETWORK_BITS), strict=False))
    return str(found)


def _trim(rows: OrderedDict[Any, Any], newest: object, limit: int) -> None:
    """Marks one as the newest, and forgets the oldest beyond `limit`."""
    rows.move_to_end(newest)
    while len(rows) > limit:
        rows.popitem(last=False)
