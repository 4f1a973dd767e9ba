"""The named places of the service at which a fault can strike, and where in the code they are.

The service knows nothing of them. `injection` wraps the functions that are named here, in a process that `mint chaos`
has started, so they cost nothing in any other process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mint.types import SampleResponse

FOLDERS = ("snapshots", "checkpoints", "published", "instances", "tmp")


@dataclass(frozen=True)
class FaultPoint:
    """A place before or after a function, or in the middle of an iterator that it returns.

    `kind_of` reads the kind of operation (or of file) from the function's arguments; None takes the operation that this
    thread is at.
    """

    name: str
    target: str  # module:qualified name
    when: Literal["before", "after", "midway"]
    kind_of: Callable[..., str | None] | None = None
    happens_in_recovery: bool = False


@dataclass(frozen=True)
class FollowedCall:
    """A function within which a thread is at one kind of operation."""

    target: str
    kind_of: Callable[..., str]


def resolve(target: str) -> tuple[Any, str, Callable[..., Any]]:
    """The module or class that holds the function of a target, the function's name there, and the function.

    Raises:
        AttributeError, ModuleNotFoundError: there is none; the table is out of date.
    """
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name, getattr(owner, name)


def file_kind(path: Path) -> str | None:
    """The kind of a file in a data directory: its folder, or `journal`; None for any other file."""
    if path.name.startswith("journal.sqlite3"):
        return "journal"
    return next((part for part in reversed(path.parts) if part in FOLDERS), None)


def _kind_of_result(_call: Any, _result: Any, kind: type) -> str:
    return "sample" if kind is SampleResponse else "training"


def _kind_of_handle(handle: int) -> str | None:
    try:
        return file_kind(Path(f"/proc/self/fd/{handle}").readlink())
    except OSError:
        return None


_SERVICE = "mint.server.service"
_SUBMIT = f"{_SERVICE}.training_requests:TrainingRequests.submit"
_OPEN_SESSION = f"{_SERVICE}.session_lifetime:SessionLifetime.create"
_MAKE_SAMPLER = f"{_SERVICE}.sampling_sessions:SamplingSessions.create"
_ACCEPT_SAMPLE = f"{_SERVICE}.sampling_requests:SamplingRequests.accept"
_WORKER = "mint.server.worker"
_STORE = "mint.server.store"

FAULT_POINTS = (
    # A request is accepted.
    FaultPoint("before_accept", _SUBMIT, "before"),
    FaultPoint("accepted_not_synced", f"{_STORE}.journal:Journal.add_job", "after"),
    FaultPoint("after_accept_before_reply", _SUBMIT, "after"),
    FaultPoint("session_opened_before_reply", _OPEN_SESSION, "after", lambda *_: "create_session"),
    FaultPoint("sampler_made_before_reply", _MAKE_SAMPLER, "after", lambda *_: "sampler"),
    FaultPoint("sample_accepted_before_reply", _ACCEPT_SAMPLE, "after", lambda *_: "sample"),
    # It runs.
    FaultPoint("before_exec", f"{_WORKER}.trainer:Trainer.run", "before"),
    FaultPoint("mid_microbatch", "mint.engine.training_pass:_backward", "after"),
    FaultPoint("before_sampling", f"{_WORKER}.samplers:Samplers.job", "before", lambda *_: "sample"),
    FaultPoint("mid_sampling", f"{_WORKER}.sampling_batch:SamplingBatch.step", "after", lambda *_: "sample"),
    FaultPoint("after_exec_before_commit", f"{_WORKER}.trainer:Trainer.run", "after"),
    FaultPoint("after_commit", f"{_STORE}.journal:Journal.finish_job", "after"),
    FaultPoint("before_result_reply", "mint.server.http.protocol_routes:_respond_result", "before", _kind_of_result),
    # Its state is saved.
    FaultPoint("snapshot_open", f"{_WORKER}.snapshots:write_snapshot", "before"),
    FaultPoint("snapshot_before_commit", f"{_WORKER}.snapshots:Snapshots.save", "after"),
    FaultPoint("after_snapshot", f"{_WORKER}.snapshots:sync_file", "after", lambda *_: "snapshots"),
    FaultPoint("mid_write", "mint.models.tensor_files:_parts", "midway"),
    FaultPoint("before_fsync", "os:fsync", "before", _kind_of_handle),
    FaultPoint("after_fsync", "os:fsync", "after", _kind_of_handle),
    FaultPoint("before_rename", "pathlib:Path.replace", "before", lambda _old, new: file_kind(Path(new))),
    FaultPoint("renamed_not_synced", "pathlib:Path.replace", "after", lambda _old, new: file_kind(Path(new))),
    FaultPoint("checkpoint_before_manifest", f"{_STORE}.checkpoint_folders:write_manifest", "before"),
    FaultPoint("checkpoint_before_commit", f"{_STORE}.checkpoint_folders:write_checkpoint", "after"),
    FaultPoint("published_before_commit", f"{_WORKER}.trainer:Trainer._publish", "after"),
    FaultPoint("before_publication", f"{_WORKER}.trainer:Trainer._publish", "before"),
    # Files leave, come and go.
    FaultPoint("before_export", "mint.server.http.file_routes:open_file", "before"),
    FaultPoint("mid_export", "mint.server.service.archives:_tar", "midway"),
    FaultPoint("before_upload", "mint.server.service.uploads:_store", "before"),
    FaultPoint("upload_before_commit", f"{_STORE}.checkpoint_catalog:CheckpointCatalog.add", "before"),
    FaultPoint("upload_before_reply", "mint.server.service.uploads:_store", "after"),
    FaultPoint("gc_between_row_and_unlink", f"{_STORE}.obsolete:_remove", "before"),
    FaultPoint("after_unlink", f"{_STORE}.obsolete:_remove", "after"),
    # A process starts.
    FaultPoint("before_migration", f"{_STORE}.database:Database._migrate", "before", lambda *_: "schema"),
    FaultPoint("after_migration", f"{_STORE}.database:Database._migrate", "after", lambda *_: "schema"),
    FaultPoint("before_adoption", f"{_STORE}.journal:Journal.adopt_sessions", "before", lambda *_: "sessions", True),
    FaultPoint("after_adoption", f"{_STORE}.journal:Journal.adopt_sessions", "after", lambda *_: "sessions", True),
    FaultPoint("before_restore", f"{_WORKER}.recovery:Recovery.restore", "before", None, True),
    FaultPoint("snapshot_read", f"{_WORKER}.recovery:Recovery._load_snapshot", "after", None, True),
    FaultPoint("during_replay", f"{_WORKER}.recovery:Recovery._replay", "after", None, True),
    FaultPoint("after_restore", f"{_WORKER}.recovery:Recovery.restore", "after", None, True),
)

OPERATIONS = (
    FollowedCall(_SUBMIT, lambda _service, _caller, kind, *_: kind),
    FollowedCall(f"{_WORKER}.trainer:Trainer.run", lambda _trainer, job: job.kind),
    FollowedCall(f"{_WORKER}.worker:Worker._commit", lambda _worker, job, _outcome: job.kind),
    FollowedCall(f"{_WORKER}.recovery:Recovery._replay", lambda _recovery, job: job.kind),
    FollowedCall("mint.server.service.service:import_checkpoint", lambda *_: "upload"),
    FollowedCall("mint.server.http.file_routes:open_file", lambda *_: "download"),
)
"""The outermost functions of the kinds of operation."""
