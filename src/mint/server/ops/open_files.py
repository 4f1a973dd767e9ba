"""The limit on open files of a server's process: each client that waits holds a connection, and each one is a file."""

from __future__ import annotations

import resource

from mint.errors import InvalidRequestError

MIN_OPEN_FILES = 256
"""A server needs 17 at rest and some 30 for the files and processes of requests; the others are for connections."""

SPARE_FILES = 128
"""Files that idle connections leave to everything else."""

MAX_OPEN_FILES = 65_536


def require_open_files() -> int:
    """How many files the process may open once `raise_open_files` was called.

    Raises:
        InvalidRequestError: too few for a server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _wanted(soft, hard)
    if limit < MIN_OPEN_FILES:
        raise InvalidRequestError(
            f"open files are too few for a server, which needs {MIN_OPEN_FILES}",
            field="ulimit -n",
            value=limit,
            remedy=f"Raise the hard limit: ulimit -Hn {MIN_OPEN_FILES} in the shell that starts it, LimitNOFILE= of "
            "systemd, or --ulimit nofile= of docker",
        )
    return limit


def raise_open_files() -> None:
    """Raises the soft limit, which is usually 1,024, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _wanted(soft, hard) != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_wanted(soft, hard), hard))


def max_connections() -> int:
    """How many connections may be open before idle ones are closed."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES


def _wanted(soft: int, hard: int) -> int:
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else max(soft, most)
