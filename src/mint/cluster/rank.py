"""One rank: a process with an engine that runs each pass together with the other ranks.

All ranks hold the same models and do the same work in the same order. `groups` makes a Ray actor of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed.distributed_c10d as dist

from mint.cluster.answers import Answer, portable
from mint.cluster.collectives.parallelism import Parallelism
from mint.cluster.collectives.progress import Progress, Report
from mint.cluster.lifetime.adoption import remove_group
from mint.cluster.lifetime.lease import Crew, ServerLease
from mint.cluster.processes import Process, free_port, interface_of, loopback, node_address
from mint.cluster.ray_runtime import InOnePiece, on_thread
from mint.cluster.sums import Ranks
from mint.config import use_interface
from mint.engine.protocol import Engine
from mint.engine.reductions.division import PeerFailedError, Peers
from mint.errors import MintError

log = logging.getLogger(__name__)

OpenEngine = Callable[[Peers], Engine]
"""Makes the engine of a rank, whose passes run with the given peers. It is called in the rank's process."""

Work = Callable[[Engine], Any]
"""A function that a rank calls with its engine. The rank answers with the value that it returns."""


class Rank:
    """A rank, in a process of its own."""

    def __init__(
        self,
        open_engine: OpenEngine,
        parallelism: Parallelism,
        *,
        crew: Crew | None = None,
        group: str = "",
    ) -> None:
        """`parallelism` says how the ranks divide the work. With a `crew`, the rank lives on without its server, until
        its lease is over; then it gives back the place of its `group`."""
        self._lease: ServerLease | None = None
        if crew is not None:
            self._lease = ServerLease(crew.incarnation, crew.lease_s, on_end=partial(remove_group, group))
            self._lease.watch()
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._progress = Progress()
        self._parallelism = parallelism

    def meeting(self) -> str:
        """Where all ranks of a group on several machines meet: an address of this process."""
        return f"tcp://{node_address()}:{free_port()}"

    def join(self, rank: int, world: int, meeting: str) -> Answer:
        """Joins the group of all ranks, which meet in a file (`file://…`) or at an address of the first one, and makes
        the engine: the answer is the `Process`."""
        try:
            interface = loopback() if meeting.startswith("file:") else interface_of(node_address())
            if interface is not None:
                use_interface(interface)
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
            self._engine = self._open_engine(Ranks(self._parallelism, self._progress))
        except Exception as error:  # the boundary, as in `run`
            log.exception("the rank could not start")
            return Answer(error=portable(error))
        return Answer(Process.of_this_actor())

    def reset(self, incarnation: int) -> Answer:
        """Forgets all models, after what runs now: a new start of the server has taken the rank over. The answer is the
        `Process`.

        Raises:
            SupersededError: a later start has.
        """
        self._require(incarnation)
        forget_all = getattr(self._engine, "forget_all", None)
        if forget_all is None:
            return Answer(error=RuntimeError("the rank has no engine that can be taken over"))
        forget_all()
        return Answer(Process.of_this_actor())

    def run(self, work: Work, *, keeps_value: bool, incarnation: int = 0) -> InOnePiece:
        """Does the work; its value is left out of the `Answer` if nobody needs that of this rank.

        Raises:
            SupersededError: another start of the server has this rank.
        """
        self._require(incarnation)
        return InOnePiece(self._run(work, keeps_value=keeps_value))

    def _require(self, incarnation: int) -> None:
        if self._lease is not None:
            self._lease.require(incarnation)

    @on_thread("health")
    def renew(self, incarnation: int) -> bool:
        """See `ServerLease.renew`."""
        return self._lease is not None and self._lease.renew(incarnation)

    def _run(self, work: Work, *, keeps_value: bool) -> Answer:
        assert self._engine is not None, "the rank has not joined"
        try:
            value = work(self._engine)
        except Exception as error:  # the boundary: what is raised here is raised where the group was called
            if not isinstance(error, (MintError, PeerFailedError)):
                log.exception("the work failed on this rank")
            return Answer(error=portable(error))
        return Answer(value if keeps_value else None)

    @on_thread("health")
    def progress(self) -> Report:
        """How far this rank is. Another thread than that of `run` answers, unless the process is frozen."""
        return self._progress.report
