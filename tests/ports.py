"""Ports that a test may close and open again, as a server does that is started anew."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 12_000, 32_000
"""Below those that a system gives to outgoing connections: one of them might take a port while it is closed."""


def free_port() -> int:
    """One that nothing listens on; each call draws another."""
    drawn = random.SystemRandom()
    while True:
        port = drawn.randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
