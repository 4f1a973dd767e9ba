"""A group of ranks as Ray actors: starts them in one placement group, gives work to all, notices who is lost.

A group lives as long as all its ranks. If one is lost, the others wait for it in a collective, so the whole group is
ended (`RankLostError`).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mint.cluster.answers import Answer
from mint.cluster.collectives.parallelism import ALIKE, Parallelism
from mint.cluster.collectives.progress import Watch
from mint.cluster.lifetime.adoption import adopt_ranks, new_group, rank_name
from mint.cluster.lifetime.lease import Crew, SupersededError
from mint.cluster.processes import Process, end_process
from mint.cluster.rank import OpenEngine, Rank, Work
from mint.cluster.ray_runtime import HERE, RANK, InOnePiece, Place, RayStartError, first_line, new_folder, start_ray
from mint.engine.reductions.division import PeerFailedError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""The longest time in which the ranks of a group start: each loads torch, and joins the others."""

PLACE_TIMEOUT_S = 20.0
"""How long the ranks of a group wait for processors in a Ray that others use, too. Then fewer of them start."""

HEARTBEAT_S = 2.0
"""How often the ranks are asked for a sign of life while they work."""

SILENCE_S = 30.0
"""A rank is frozen if it gives no sign of life for so long. The thread that gives it computes nothing."""

DEADLINE_S = 30.0
"""The ranks are stuck if one waits for others, and none takes a step for so long: a layer, or a collective."""


ADOPT_S = 60.0
"""How long ranks that were left behind may take to end the pass that they are in. New ones start faster."""


class RankLostError(RuntimeError):
    """A rank has died or is frozen, and the group has been ended."""


class RankGroup:
    """The ranks of one group. One thread at a time uses it."""

    def __init__(
        self,
        open_engine: OpenEngine,
        world: int,
        *,
        place: Place = HERE,
        silence_s: float = SILENCE_S,
        deadline_s: float = DEADLINE_S,
        parallelism: Parallelism = ALIKE,
    ) -> None:
        """Starts `world` ranks, or fewer if there is no room for so many; returns when all have joined. Starts Ray
        first, if it does not run. `parallelism` says how they divide the work, also if there are fewer than wanted.

        Raises:
            RankLostError: a rank has died as it started, or there is no room for one.
            Exception: what an engine has raised as it was made.
        """
        self.wanted = world
        self._silence_s = silence_s
        self._deadline_s = deadline_s
        self._processes: list[Process] = []
        self._ranks: list[Any] = []
        self._incarnation = place.incarnation
        self._folder: Path | None = None
        try:
            start_ray(place)
            if place.crew is not None and self._adopt(place.crew, world):
                return
            name, self._placement = _place(place, world, parallelism.step(world))
        except RayStartError as error:
            raise RankLostError(str(error)) from error
        self._folder = new_folder() if place.is_local else None
        self.world = world = self._placement.bundle_count
        # A thread gives signs of life, beside the one that works.
        remote = ray.remote(**place.options(RANK), max_restarts=0, concurrency_groups={"health": 1})(Rank)
        where = PlacementGroupSchedulingStrategy(self._placement)
        given = {"crew": place.crew, "group": name}
        for rank in range(world):
            named = {} if place.crew is None else place.named(rank_name(place.crew, name, rank, world))
            actor = remote.options(scheduling_strategy=where, **named)
            self._ranks.append(actor.remote(open_engine, parallelism, **given))
        try:
            if self._folder is not None:
                meeting = f"file://{self._folder / 'store'}"
            else:
                meeting = ray.get(self._ranks[0].meeting.remote(), timeout=START_TIMEOUT_S)
            joining = [own.join.remote(rank, world, meeting) for rank, own in enumerate(self._ranks)]
            answers = ray.get(joining, timeout=START_TIMEOUT_S)
        except RayError as error:  # also that the time is over
            self._lose(f"a rank could not start: {str(error).strip().splitlines()[-1]}", error)
        for answer in answers:
            if answer.error is not None:
                self.close()
                raise answer.error
        self._processes = [answer.value for answer in answers]
        log.info("%d ranks train together: processes %s", world, ", ".join(map(str, self.pids)))

    def _adopt(self, crew: Crew, world: int) -> bool:
        """Takes over the ranks that an earlier start of the server has left, with their bases alone; False if there are
        none."""
        found = adopt_ranks(crew, world)
        if found is None:
            return False
        name, self._ranks = found
        self._placement = get_placement_group(name)
        self.world = world
        try:  # they may be in the middle of a pass whose result nobody wants
            answers = ray.get([own.reset.remote(crew.incarnation) for own in self._ranks], timeout=ADOPT_S)
        except RayError as error:
            log.warning("ranks that were left behind cannot be taken over: %s", first_line(error))
            answers = []
        if not answers or any(answer.error is not None for answer in answers):
            self.close()
            self._ranks = []
            return False
        self._processes = [answer.value for answer in answers]
        log.info("%d ranks are taken over: processes %s", world, ", ".join(map(str, self.pids)))
        return True

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, each as it is known on its machine."""
        return [own.pid for own in self._processes]

    def run(self, work: Work) -> Any:
        """Does the work on every rank; returns the value of the first one.

        Raises:
            RankLostError: a rank has died, is frozen or stuck, or has failed where others have not: the group is ended.
            Exception: what all ranks have raised; the group can go on.
        """
        return self._values(work, every=False)[0]

    def run_for_all(self, work: Work) -> list[Any]:
        """Same as `run`; returns the values of all ranks."""
        return self._values(work, every=True)

    def close(self) -> None:
        """Ends all ranks at once, also frozen ones."""
        known = self._processes or [None] * len(self._ranks)
        for actor, process in zip(self._ranks, known, strict=True):
            end_process(actor, process)
        remove_placement_group(self._placement)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _values(self, work: Work, *, every: bool) -> list[Any]:
        piece = InOnePiece(work)
        sent = piece if piece.is_small else ray.put(piece)  # once for all ranks
        running = [
            own.run.remote(sent, keeps_value=every or own is self._ranks[0], incarnation=self._incarnation)
            for own in self._ranks
        ]
        answers = self._wait(running)
        errors = [answer.error for answer in answers if answer.error is not None]
        if not errors:
            return [answer.value for answer in answers]
        first = next((error for error in errors if not isinstance(error, PeerFailedError)), errors[0])
        if len(errors) < self.world:  # some ranks hold now what others do not
            self._lose(f"the work failed on {len(errors)} of {self.world} ranks: {first}", first)
        raise first

    def _wait(self, running: Sequence[Any]) -> list[Answer]:
        """The answers of all ranks."""
        watch = Watch(self.world, silence_s=self._silence_s, deadline_s=self._deadline_s, now=time.monotonic())
        asked: dict[Any, int] = {}  # reference → rank
        waiting = list(running)
        try:
            while waiting:
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=HEARTBEAT_S)
                if not waiting:
                    break
                ray.get([reference for reference in running if reference not in waiting])  # raises if a rank has died
                alive, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
                for reference in alive:
                    watch.hear(asked.pop(reference), ray.get(reference), time.monotonic())
                working = [rank for rank, reference in enumerate(running) if reference in waiting]
                reason = watch.find_lost(working, time.monotonic())
                if reason is not None:
                    self._lose(f"{reason}; the processes of the ranks are {', '.join(map(str, self.pids))}")
                for rank in set(range(self.world)) - set(asked.values()):
                    asked[self._ranks[rank].progress.remote()] = rank
            return ray.get(list(running))
        except SupersededError as error:
            self._ranks, self._processes = [], []  # they are not this server's any more: they live on
            raise RankLostError(f"another server has taken the ranks over: {first_line(error)}") from error
        except RayError as error:
            self._lose(f"a rank has died: {first_line(error)}", error)

    def _lose(self, reason: str, error: Exception | None = None) -> NoReturn:
        self.close()
        raise RankLostError(reason) from error


def _place(place: Place, world: int, step: int) -> tuple[str, Any]:
    """A name for a group, and a placement group for `world` ranks, or for as many as there is room for, in multiples of
    `step`.

    Raises:
        RankLostError: there is no room for one.
    """
    while True:
        name = new_group()
        placement = placement_group([place.takes(RANK)] * world, strategy="PACK", **place.named(name))
        if placement.wait(PLACE_TIMEOUT_S):
            return name, placement
        remove_placement_group(placement)
        fewer = min(world - 1, place.free(RANK)) // step * step
        if fewer < 1:
            needed = "a rank" if step == 1 else f"{step} ranks, which start together"
            raise RankLostError(f"Ray has no {place.takes(RANK)} free for {needed}")
        log.warning("there is no room for %d ranks, so %d train together; the results are the same", world, fewer)
        world = fewer
