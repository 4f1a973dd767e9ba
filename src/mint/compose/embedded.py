"""Builds the service inside the caller's process from its settings: engine, service and application.

One service per data directory and process: several `ServiceClient`s share it, and its base models. The last one to
close stops it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mint.compose.cluster_engine import cluster_engine, external_engine, parallelism
from mint.compose.lost_device import guarded
from mint.config import Settings, allocator_is_set, read_settings, shorten_thread_spinning
from mint.engine.bases.lora_layers import lora_layers
from mint.engine.cpu.build import TESTED_HERE, NativeBuild
from mint.engine.memory.machine_memory import keep_freed_memory, memory_bytes
from mint.engine.protocol import Engine
from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.server.limits import ServerLimits, default_waiting_bytes

if TYPE_CHECKING:
    from mint.engine.reductions.division import Peers
    from mint.engine.torch_engine import TorchEngine

log = logging.getLogger("mint.embedded")

_lock = threading.Lock()
_running: dict[Hashable, EmbeddedService] = {}


class EmbeddedService:
    """A running service and its ASGI application."""

    def __init__(self, data_dir: Path, engine: Engine, settings: Settings, **options: Any) -> None:
        """Opens `data_dir` and starts to work; `options` are those of `Service`.

        If that fails, the service is stopped, and the engine has no processes any more.
        """
        with ExitStack() as opened:
            opened.callback(end_ranks, engine)
            try:
                from mint.server.all_routes import ROUTES  # deferred: starlette, which remote users lack
                from mint.server.http.app import create_app
                from mint.server.ops.readiness import Readiness
                from mint.server.service.service import Service
            except ImportError as error:
                raise _missing(error) from error
            self.data_dir = data_dir
            options = {"limits": limits_of(settings), "layers_of": lora_layers, **options}
            self.service = Service(engine, data_dir, aliases=settings.model_aliases, **options)
            opened.callback(self.service.stop)
            self.service.start()
            self.app = create_app(self.service, ROUTES, readiness=Readiness(self.service))
            opened.pop_all()  # `release` closes it
        self.users = 1
        self._engine = engine

    def release(self) -> None:
        """One user fewer; the last one stops the service."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            for key in [key for key, service in _running.items() if service is self]:
                del _running[key]
        self.service.stop()
        end_ranks(self._engine)


def open_embedded(*, data_dir: Path | None = None, engine: Engine | None = None, **options: Any) -> EmbeddedService:
    """The service of a data directory (None: `MINT_HOME`), started if it is not running.

    `engine` None is torch's; all callers in this process with the same settings share one service. With an engine or
    options of its own, a caller gets a service of its own.

    Raises:
        MissingExtraError: the `local` extra is not installed.
        JournalError: the directory cannot be used.
    """
    settings = read_settings()
    folder = (data_dir or settings.home_dir).expanduser().resolve()
    with _lock:
        if engine is not None or options:
            return EmbeddedService(folder, watched_engine(settings, _log_loss, engine), settings, **options)
        kernels = (settings.native, settings.instructions)
        cluster = (settings.cluster, settings.trainers, settings.samplers, settings.shard_base)
        cluster = (*cluster, settings.tensor_parallel, settings.expert_parallel, settings.reductions)
        samplers = (settings.sampler, settings.sampler_folder)
        own = _engine_settings(settings).items()
        key = (folder, settings.models, limits_of(settings), *kernels, *cluster, *samplers, *own)
        if key in _running:
            _running[key].users += 1
        else:
            _running[key] = EmbeddedService(folder, watched_engine(settings, _log_loss), settings)
        return _running[key]


def _log_loss(reason: str) -> None:
    log.critical("%s; every request fails from now on: end this program, and start it again", reason)


def limits_of(settings: Settings) -> ServerLimits:
    """The limits that the settings name; the others follow from the machine."""
    memory, reserve, loras = settings.model_memory_mib, settings.disk_reserve_mib, settings.lora_cache_mib
    return ServerLimits(
        model_memory_bytes=None if memory is None else memory << 20,
        disk_reserve_bytes=None if reserve is None else reserve << 20,
        waiting_bytes=default_waiting_bytes(memory_bytes()),
        max_unnamed_samplers=settings.unnamed_samplers,
        lora_cache_bytes=None if loras is None else loras << 20,
    )


def watched_engine(
    settings: Settings,
    on_lost: Callable[[str], None],
    engine: Engine | None = None,
    *,
    data_dir: Path | None = None,
) -> Engine:
    """The given engine, or the one that the settings ask for; `on_lost` as in `guarded`, `data_dir` as in
    `cluster_engine`."""
    if engine is not None:
        return guarded(engine, on_lost)
    trainer = _trainer(settings, on_lost, data_dir)
    return external_engine(settings, trainer) if settings.sampler.strip(" ,") else trainer


def _trainer(settings: Settings, on_lost: Callable[[str], None], data_dir: Path | None) -> Engine:
    if settings.cluster is not None:
        return cluster_engine(settings, torch_engine, data_dir=data_dir)
    if settings.tensor_parallel is not None and settings.tensor_parallel > 1:
        raise InvalidRequestError(
            "processes can compute each layer together in a cluster alone",
            field="MINT_TENSOR_PARALLEL",
            value=settings.tensor_parallel,
            remedy="Set MINT_CLUSTER=local (--cluster local); or give 1, which has the same bits",
        )
    own = torch_engine(settings)
    return guarded(own, on_lost) if own.uses_gpu else own  # a CPU cannot be lost


def end_ranks(engine: Engine) -> None:
    """Ends the processes that an engine has, if it has any."""
    close = getattr(engine, "close", None)
    if close is not None:
        close()


def torch_engine(settings: Settings, *, peers: Peers | None = None, cache_sharers: int = 1) -> TorchEngine:
    """The engine that computes on this machine; `peers` run its passes with it.

    `cache_sharers` processes divide the memory for caches.

    Raises:
        MissingExtraError: the `local` extra is not installed.
    """
    shorten_thread_spinning()
    if not allocator_is_set():
        keep_freed_memory()
    native = _start_native_build(settings)  # before torch: the compiler runs while torch is loaded
    try:
        from mint.engine.torch_engine import TorchEngine  # deferred: torch takes seconds to import
    except ImportError as error:
        raise _missing(error) from error
    given: dict[str, Any] = {**_engine_settings(settings), "cache_sharers": cache_sharers}
    if peers is not None:
        given["peers"] = peers
    return TorchEngine(native=native, gpu_kernels=settings.native is not False, **given)


def _start_native_build(settings: Settings) -> NativeBuild | None:
    """Starts to compile the C kernels, if they are wanted; they are required only if the settings ask for them."""
    wanted = TESTED_HERE if settings.native is None else settings.native
    if not wanted:
        return None
    return NativeBuild(settings.kernels_dir, required=settings.native is True, instructions=settings.instructions)


def _engine_settings(settings: Settings) -> dict[str, Any]:
    """The arguments of `TorchEngine` that were set; it has defaults for the others."""
    given = {
        "dtype": settings.dtype,
        "quantize": settings.quantize,
        "threads": settings.threads,
        "kv_cache_bytes": None if settings.kv_cache_mib is None else settings.kv_cache_mib << 20,
        "recompute": settings.recompute,
        "offload_activations": settings.offload_activations,
        "batch_invariant": settings.batch_invariant,
        "gpu_off": tuple(settings.gpu_off_list) or None,
        "device": settings.device,
        "micro_batch_rows": settings.micro_batch_rows,
        **parallelism(settings).engine_settings,
    }
    return {name: value for name, value in given.items() if value is not None}


def _missing(error: ImportError) -> MissingExtraError:
    package = error.name if isinstance(error, ModuleNotFoundError) else None
    needed = (
        f"a package that does not load ({error})"
        if package is None
        else f"the package {package}, which is not installed"
    )
    return MissingExtraError(
        f"running models on this machine needs {needed}",
        remedy=f"{install_command('local')}, or set MINT_BASE_URL to a server",
    )
