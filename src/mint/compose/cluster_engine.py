"""Makes the engine of `--cluster`: ranks that train, on this machine or in a Ray cluster, and replicas or this process
that sample. And that of `--sampler`: model servers sample."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import mint
from mint.cluster.collectives.parallelism import Parallelism
from mint.config import Settings, prepare_ray
from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.server.identity import count_start

if TYPE_CHECKING:
    from mint.cluster.engine import ClusterEngine
    from mint.cluster.external.engine import ExternalEngine
    from mint.cluster.lifetime.lease import Crew
    from mint.engine.protocol import Engine
    from mint.engine.reductions.division import Peers
    from mint.engine.torch_engine import TorchEngine

MICRO_BATCH_ROWS = 1024
"""The rows of a micro-batch unless the settings say them: for every number of ranks the same, and so are the bits.

Eight ranks are busy from about 8,000 rows of a request on. benchmarks/LOG.md has what smaller ones cost one rank.
"""


HEAD_PATIENCE_S = 20.0
"""How long a Ray cluster may take to answer at its address: its head may be starting beside this server."""


class OpenTorchEngine(Protocol):
    """`embedded.torch_engine`."""

    def __call__(self, settings: Settings, *, peers: Peers | None = None, cache_sharers: int = 1) -> TorchEngine: ...


def cluster_engine(settings: Settings, open_engine: OpenTorchEngine, *, data_dir: Path | None = None) -> ClusterEngine:
    """The engine of a cluster. With the data directory of a server, its processes in another's Ray live on for a while
    when the server dies, and its next start takes them over.

    Raises:
        MissingExtraError: the `local` or the `cluster` extra is not installed.
        InvalidRequestError: this machine has a GPU, for which this was never run; or nothing answers at the address of
            the Ray cluster.
    """
    if find_spec("ray") is None:
        raise MissingExtraError("several processes need ray", remedy=install_command("local,cluster"))
    assert settings.cluster is not None, "nobody asks for a cluster"
    _require_answer(settings.cluster)
    prepare_ray(settings.cluster)
    rows = settings.micro_batch_rows or MICRO_BATCH_ROWS
    # Ranks and replicas get neither the key for a server nor that of a judge.
    own = settings.model_copy(update={"micro_batch_rows": rows, "api_key": None, "judge_api_key": None})
    engine = open_engine(own)
    if engine.uses_gpu:
        raise InvalidRequestError(
            "trains on CPUs alone so far, and this machine has a GPU",
            field="cluster",
            value=settings.cluster,
            remedy="Leave it out; or set MINT_DEVICE=cpu to train on the CPU",
        )
    crew = None if data_dir is None or settings.cluster == "local" else _crew(own, data_dir)
    make_record = logging.getLogRecordFactory()
    from mint.cluster.engine import ClusterEngine  # deferred: ray, which takes seconds to import
    from mint.cluster.ray_runtime import Place

    logging.setLogRecordFactory(make_record)  # Ray's adds a field to every line of this process's log
    return ClusterEngine(
        engine,
        partial(_process_engine, own, open_engine, max(1, settings.samplers) if settings.cluster == "local" else 1),
        settings.trainers,
        samplers=settings.samplers,
        place=Place(settings.cluster, cpus=settings.threads, crew=crew),
        deadline_s=settings.collective_timeout_s,
        parallelism=parallelism(settings),
    )


def _require_answer(cluster: str) -> None:
    """Checks that something listens at the address of a Ray cluster. Ray itself asks when the first model is made, and
    takes minutes to give up.

    Raises:
        InvalidRequestError: nothing does.
    """
    address = urlsplit(cluster)
    if address.scheme != "ray":
        return
    give_up_at = time.monotonic() + HEAD_PATIENCE_S
    while True:
        try:
            with socket.create_connection((address.hostname or "", address.port or 0), timeout=HEAD_PATIENCE_S):
                return
        except OSError as error:
            if time.monotonic() > give_up_at:
                raise InvalidRequestError(
                    f"is an address at which no Ray answers ({error})",
                    field="cluster",
                    value=cluster,
                    remedy="Start Ray there (ray start --head --ray-client-server-port=PORT), or correct the address",
                ) from error
        time.sleep(0.5)


def parallelism(settings: Settings) -> Parallelism:
    """How the processes that train divide the work.

    Raises:
        InvalidRequestError: two of the settings exclude each other.
    """
    return Parallelism(
        shards=settings.shard_base,
        tensor_parallel=settings.tensor_parallel,
        experts=settings.expert_parallel,
        reductions=settings.reductions,
    )


def _crew(settings: Settings, data_dir: Path) -> Crew:
    """The processes of this server. A start takes over only those with the same settings and the same code."""
    from mint.cluster.lifetime.lease import Crew

    identity = count_start(data_dir)
    kind = hashlib.sha256(settings.model_dump_json(exclude={"home"}).encode())
    package = Path(mint.__file__).parent
    for room in ("cluster", "engine"):
        for file in sorted((package / room).rglob("*.py")):
            kind.update(file.read_bytes())
    return Crew(f"mint-{identity.data_id}", identity.number, kind.hexdigest()[:16], settings.lease_s)


def _process_engine(settings: Settings, open_engine: OpenTorchEngine, cache_sharers: int, peers: Peers) -> TorchEngine:
    """The engine of one rank or replica; called in its process."""
    return open_engine(settings, peers=peers, cache_sharers=cache_sharers)


def external_engine(settings: Settings, trainer: Engine) -> ExternalEngine:
    """`trainer`, which samples at the addresses that the settings name.

    Raises:
        InvalidRequestError: one of them is on another machine, and no folder is named that both see.
    """
    from mint.client.connection.http_transport import LOOPBACK  # deferred: most runs need none of it
    from mint.cluster.external.engine import ExternalEngine
    from mint.cluster.external.samplers import ExternalSamplers

    addresses = settings.sampler_addresses
    folder = settings.sampler_folder
    far = [address for address in addresses if urlsplit(address).hostname not in LOOPBACK]
    if far and folder is None:
        raise InvalidRequestError(
            "is on another machine, and is told where loras lie as a path",
            field="sampler",
            value=", ".join(far),
            remedy="Name a folder on a disk that both have under the same path: --sampler-folder DIR",
        )
    folder = None if folder is None else folder.expanduser().resolve()
    samplers = ExternalSamplers(addresses, api_key=settings.sampler_api_key, shared=folder)
    return ExternalEngine(trainer, samplers)
