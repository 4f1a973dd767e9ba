"""Ray on this machine: started for the processes of a cluster, stopped when the program ends; how values are sent."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import ray
from ray import cloudpickle

log = logging.getLogger(__name__)

RANK, REPLICA, MAX_PROCESSES = "mint_rank", "mint_replica", 64
"""The resources of which each rank and each replica takes one, and how much of each this machine offers."""

OBJECT_STORE_BYTES = 256 << 20
"""The memory that Ray may use for what processes send each other; what does not fit is written to the disk."""

SMALL_BYTES = 1 << 16
"""Smaller arrays are sent in one piece with what they are in."""

_starting = threading.Lock()


class RayStartError(RuntimeError):
    """Ray could not start on this machine."""


class InOnePiece:
    """A value that is pickled with its small arrays; it arrives as the value itself.

    Ray would keep each array apart, which takes five times as long for the many small arrays of a request. Large ones
    stay apart, so that they are not copied.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        apart: list[PickleBuffer] = []

        def is_small(buffer: PickleBuffer) -> bool:
            with memoryview(buffer) as view:
                if view.nbytes < SMALL_BYTES:
                    return True
            apart.append(buffer)
            return False

        pickled = cloudpickle.dumps(self._value, protocol=5, buffer_callback=is_small)
        return _unpickle, (pickled, apart)


def _unpickle(pickled: bytes, apart: Sequence[Any]) -> Any:
    return cloudpickle.loads(pickled, buffers=apart)


def start_ray() -> None:
    """Starts Ray on this machine, unless it runs already. Any thread may call.

    Raises:
        RayStartError: it could not start.
    """
    with _starting:
        if not ray.is_initialized():
            _start()


def first_line(error: Exception) -> str:
    """The reason in an error of Ray, which adds stacks to it."""
    return str(error).strip().partition("\n")[0]


def _start() -> None:
    started = threading.Event()
    failure: list[Exception] = []
    folder = tempfile.mkdtemp(prefix="mint-ray-")  # private, and short enough for names of sockets
    atexit.register(_stop_ray, folder)

    def start() -> None:
        try:
            ray.init(
                address="local",
                num_cpus=1,  # Ray starts as many workers at once; ranks and replicas have places of their own
                resources={RANK: MAX_PROCESSES, REPLICA: MAX_PROCESSES},
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
        except Exception as error:  # the boundary: Ray raises plain ones
            log.exception("Ray could not start")
            failure.append(error)
            return
        finally:
            started.set()
        threading.Event().wait()

    # On a thread that does not end: Linux ends Ray's processes with the thread that started them. Not on the main
    # thread: there, Ray replaces the program's handler of SIGTERM.
    threading.Thread(target=start, name="mint-ray", daemon=True).start()
    started.wait()
    if failure:
        raise RayStartError(f"Ray could not start: {first_line(failure[0])}") from failure[0]


def _stop_ray(folder: str) -> None:
    """Ends Ray's processes, and removes what they have written."""
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
