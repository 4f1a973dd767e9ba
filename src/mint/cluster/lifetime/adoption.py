"""Finds ranks and replicas that an earlier start of the server has left behind, in a Ray that outlives it, and takes
them over. Those that it cannot use are ended.

A process of the same code and settings keeps its base models, and nothing else: models and versions of weights come
from the journal again, as after any restart. So what is taken over saves time, and decides no result.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Never

import ray
from ray.exceptions import RayError
from ray.util import get_placement_group, list_named_actors, remove_placement_group

from mint.cluster.lifetime.lease import RENEW_S, Crew
from mint.cluster.ray_runtime import RANK, REPLICA, Place, start_ray

log = logging.getLogger(__name__)

CLAIM_S = 10.0
"""How long processes that were left behind have to answer."""


def new_group() -> str:
    """A name for a group of ranks that no other one has."""
    return uuid.uuid4().hex


def rank_name(crew: Crew, group: str, rank: int, world: int) -> str:
    """Under which name Ray knows a rank."""
    return f"{RANK}.{crew.kind}.{group}.{rank}.{world}"


def replica_name(crew: Crew) -> str:
    """A name for a replica that no other one has."""
    return f"{REPLICA}.{crew.kind}.{uuid.uuid4().hex}"


def keep_renewing(crew: Crew, place: Place) -> Never:
    """Tells all ranks and replicas of a data directory that its server lives, those that were left behind, too. Without
    this they end."""
    actors: dict[str, Any] = {}
    while True:
        try:
            start_ray(place)
            found = {**_left_behind(RANK, actors), **_left_behind(REPLICA, actors)}
            for actor in found.values():
                actor.renew.remote(crew.incarnation)
            actors = found
        except (RayError, RuntimeError, OSError, ValueError) as error:  # the next round tries again
            log.warning("the leases of ranks and replicas were not renewed: %s", error)
        time.sleep(RENEW_S)


def adopt_ranks(crew: Crew, world: int) -> tuple[str, list[Any]] | None:
    """The name of a whole group of `world` ranks that was left behind, and its actors in order; None if there is none.
    All others that were left behind are ended."""
    groups: dict[str, dict[int, Any]] = {}
    usable: set[str] = set()
    for name, actor in _left_behind(RANK).items():
        _, kind, group, rank, size = name.split(".")
        groups.setdefault(group, {})[int(rank)] = actor
        if kind == crew.kind and int(size) == world:
            usable.add(group)
    found: tuple[str, list[Any]] | None = None
    for group, ranks in groups.items():
        claimed = _claim(crew, list(ranks.values()))
        if claimed is None:  # a later start of the server has them
            continue
        if found is None and group in usable and len(claimed) == world:
            found = group, [ranks[rank] for rank in range(world)]
            continue
        _end(ranks.values())
        remove_group(group)
    return found


def adopt_replicas(crew: Crew) -> list[Any]:
    """The actors of the replicas that were left behind and can be used; the others are ended."""
    found: list[Any] = []
    for name, actor in _left_behind(REPLICA).items():
        claimed = _claim(crew, [actor])
        if claimed is None:  # as above
            continue
        if len(claimed) == 1 and name.split(".")[1] == crew.kind:
            found.append(actor)
        else:
            _end([actor])
    return found


def remove_group(group: str) -> None:
    """Gives back what a group of ranks has taken of the cluster."""
    with contextlib.suppress(RayError, ValueError):
        remove_placement_group(get_placement_group(group))


def _left_behind(kind: str, known: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The actors of a kind by name; `known` are some of them."""
    found: dict[str, Any] = {}
    for name in list_named_actors():
        if name.startswith(f"{kind}."):
            with contextlib.suppress(ValueError, RayError):  # it has ended meanwhile
                found[name] = known[name] if name in known else ray.get_actor(name)
    return found


def _claim(crew: Crew, actors: Sequence[Any]) -> list[Any] | None:
    """Those of some actors that obey this start of the server from now on; None if a later start has them."""
    asked = {actor.renew.remote(crew.incarnation): actor for actor in actors}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=CLAIM_S)
    claimed = []
    for reference in ready:
        with contextlib.suppress(RayError):
            if not ray.get(reference):
                return None
            claimed.append(asked[reference])
    return claimed


def _end(actors: Any) -> None:
    for actor in actors:
        with contextlib.suppress(RayError):
            ray.kill(actor)
