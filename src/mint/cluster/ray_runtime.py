"""Ray: started on this machine, or joined where it runs; which part of it a process takes; how values are sent."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, TypeVar

import ray
from ray import cloudpickle

from mint.cluster.lifetime.lease import Crew

log = logging.getLogger(__name__)

RANK, REPLICA, MAX_PROCESSES = "mint_rank", "mint_replica", 64
"""The resources of which each rank and each replica takes one, and how much of each this machine offers."""

OBJECT_STORE_BYTES = 256 << 20
"""The memory that Ray may use for what processes send each other; what does not fit is written to the disk."""

START_ATTEMPTS = 3
"""How often Ray is started before what needs it fails."""

LONGEST_FOLDER = 20
"""Characters. Ray's sockets lie in the folder for temporary files, at paths with 86 more, and Linux allows 107."""

SMALL_BYTES = 1 << 16
"""Smaller arrays are sent in one piece with what they are in."""

_starting = threading.Lock()
_joined: str | None = None
_folders: list[str] = []
"""The private folders in which Ray writes, one for each start on this machine."""


class RayStartError(RuntimeError):
    """Ray could not start on this machine, or does not answer at its address."""


@dataclass(frozen=True)
class Place:
    """Where the processes of a cluster run.

    `address` is `local` (a Ray of its own on this machine, which ends with the program), `auto` (the Ray in which this
    program runs, as a job or on a node) or `ray://HOST:PORT` (another one, by its client server). There, each process
    takes `cpus` processors. With a `crew`, processes of the cluster live on when this program ends, for a while.
    """

    address: str = "local"
    cpus: int = 1
    crew: Crew | None = None

    @property
    def is_local(self) -> bool:
        """Whether all processes are on this machine, and nobody else uses Ray."""
        return self.address == "local"

    def takes(self, kind: str) -> dict[str, float]:
        """What one process of a kind (`RANK`, `REPLICA`) takes of Ray's resources."""
        return {kind: 1} if self.is_local else {"CPU": self.cpus}

    def options(self, kind: str) -> dict[str, Any]:
        """The same as options of an actor."""
        if self.is_local:
            return {"num_cpus": 0, "resources": self.takes(kind)}
        return {"num_cpus": self.cpus}

    @property
    def incarnation(self) -> int:
        """Which start of the server this is; 0 where its processes end with it."""
        return 0 if self.crew is None else self.crew.incarnation

    def named(self, name: str) -> dict[str, Any]:
        """The options of an actor that is found again under this name, where processes live on."""
        return {} if self.crew is None else {"name": name, "lifetime": "detached"}

    def free(self, kind: str) -> int:
        """How many processes of a kind could start now."""
        available = ray.available_resources()
        return min(int(available.get(name, 0) // amount) for name, amount in self.takes(kind).items())


HERE = Place()


Method = TypeVar("Method", bound=Callable[..., Any])


def on_thread(name: str, *, has_answer: bool = True) -> Callable[[Method], Method]:
    """A method of an actor that one of the actor's further threads runs, that of this name."""
    return ray.method(concurrency_group=name, num_returns=1 if has_answer else 0)


class InOnePiece:
    """A value that is pickled with its small arrays; it arrives as the value itself.

    Ray would keep each array apart, which takes five times as long for the many small arrays of a request. Large ones
    stay apart, so that they are not copied.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    def is_small(self) -> bool:
        """Whether it is sent with a call at less cost than by the object store."""
        pickled, apart = self._pickled
        return not apart and len(pickled) < SMALL_BYTES

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, self._pickled

    @cached_property
    def _pickled(self) -> tuple[bytes, list[PickleBuffer]]:
        apart: list[PickleBuffer] = []

        def is_small(buffer: PickleBuffer) -> bool:
            with memoryview(buffer) as view:
                if view.nbytes < SMALL_BYTES:
                    return True
            apart.append(buffer)
            return False

        return cloudpickle.dumps(self._value, protocol=5, buffer_callback=is_small), apart


def _unpickle(pickled: bytes, apart: Sequence[Any]) -> Any:
    return cloudpickle.loads(pickled, buffers=apart)


def start_ray(place: Place) -> None:
    """Starts Ray on this machine or joins another one, unless that has been done. Any thread may call.

    Raises:
        RayStartError: it could not start, or does not answer.
    """
    global _joined
    with _starting:
        if not ray.is_initialized():
            _start(place)
            _joined = place.address
        elif place.address != _joined:
            raise RayStartError(f"this program uses Ray at {_joined}, so it cannot use it at {place.address}, too")


def new_folder() -> Path:
    """A private folder beside what Ray writes on this machine. It is removed when the program ends, at the latest."""
    return Path(tempfile.mkdtemp(prefix="mint-ranks-", dir=_folders[-1] if _folders else None))


def first_line(error: Exception) -> str:
    """The reason in an error of Ray, which adds stacks to it."""
    return str(error).strip().partition("\n")[0]


def _start(place: Place) -> None:
    started = threading.Event()
    failure: list[Exception] = []
    folder = _ray_folder() if place.is_local else None
    _folders.extend([] if folder is None else [folder])

    def begin() -> None:
        if folder is None:
            namespace = None if place.crew is None else place.crew.name
            ray.init(address=place.address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
        else:
            _start_here(folder)

    def start() -> None:
        try:
            if place.address.startswith("ray://"):  # Ray's client itself tries for half a minute to reach it
                begin()
            else:
                _repeat(begin)
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
        where = "Ray could not start" if place.is_local else f"no Ray answers at {place.address}"
        raise RayStartError(f"{where}: {first_line(failure[0])}") from failure[0]


def _repeat(begin: Callable[[], None]) -> None:
    """Starts Ray, and tries again: it gives up after 30 seconds, which on a busy machine are too few."""
    for _ in range(START_ATTEMPTS - 1):
        try:
            return begin()
        except Exception:  # the boundary: Ray raises plain ones
            log.exception("Ray could not start, and is tried again")
            ray.shutdown()
    return begin()


def _ray_folder() -> str:
    """A private folder for what Ray writes on this machine."""
    folder = tempfile.gettempdir()
    if len(folder) > LONGEST_FOLDER and Path("/tmp").is_dir():
        folder = "/tmp"
    return tempfile.mkdtemp(prefix="mint-ray-", dir=folder)


def _start_here(folder: str) -> None:
    ray.init(
        address="local",
        num_cpus=1,  # Ray starts as many workers at once; ranks and replicas have places of their own
        resources={RANK: MAX_PROCESSES, REPLICA: MAX_PROCESSES},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        # Ray opens its folder to all users, so it lies in a private one.
        _temp_dir=f"{folder}/ray",
    )


@atexit.register  # not when Ray starts: a session that was opened before must close first
def _leave_ray() -> None:
    """Ends Ray's processes, and removes what they have written; another's Ray goes on."""
    ray.shutdown()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
