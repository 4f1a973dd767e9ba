"""The processes of a cluster: on which machine each is, and how one is ended that does not answer any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network interface (`man 7 netdevice`)."""


@dataclass(frozen=True)
class Process:
    """A process of an actor: its id, the node of Ray that it belongs to, and the `space` in which the id is known."""

    pid: int
    node: str
    space: str

    @classmethod
    def of_this_actor(cls) -> Process:
        """The process that calls."""
        return cls(os.getpid(), ray.get_runtime_context().get_node_id(), pid_space())


def pid_space() -> str:
    """What processes have in common that know each other by their ids: the machine, and in it the container."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}-{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def end_process(actor: Any, process: Process | None) -> None:
    """Ends an actor at once, also a frozen one, which does not read what Ray sends it.

    `process` None: it has not said yet where it is.
    """
    if process is not None:
        if process.space == pid_space():
            kill(process.pid)
        else:
            where = NodeAffinitySchedulingStrategy(process.node, soft=False)
            with contextlib.suppress(RayError, ValueError):  # the node is gone, and the process with it
                ray.remote(num_cpus=0, max_retries=0)(kill).options(scheduling_strategy=where).remote(process.pid)
    with contextlib.suppress(RayError):
        ray.kill(actor)


def kill(pid: int) -> None:
    """Ends a process of this machine; one that has ended is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def node_address() -> str:
    """The IPv4 address of this node, as the other nodes know it."""
    return ray.util.get_node_ip_address()


def loopback() -> str:
    """The network interface of this machine alone."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(own.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
