"""The rows of the tables. Times are seconds since the epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mint.server.callers import LOCAL_OWNER


@dataclass(frozen=True)
class SessionRow:
    """A session; `ended_at` is None while it lives.

    `suspended_s` is how long a service has been running while the session was suspended; None if it is not.
    """

    session_id: str
    instance_id: str
    user_metadata: dict[str, Any] | None
    last_seen: float
    ended_at: float | None = None
    owner: str = LOCAL_OWNER
    details: dict[str, Any] | None = None
    created_at: float | None = None
    suspended_s: float | None = None


@dataclass(frozen=True)
class ModelRow:
    """A model; `base_model`, `lora`, … are None until its first job is done, `applied_seq` is its last finished job."""

    model_id: str
    session_id: str
    base_model: str | None = None
    lora: dict[str, Any] | None = None
    seed_given: bool | None = None
    effective: dict[str, Any] | None = None
    applied_seq: int = -1
    diverged: str | None = None


@dataclass(frozen=True)
class RunRow:
    """What stays known of a model after its session: a training run. `base_model` is None until the model is made."""

    run_id: str
    session_id: str
    owner: str
    created_at: float
    last_request_at: float
    base_model: str | None = None
    lora: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class JobRow:
    """One request; `status` is pending, done or failed, `result` the body of its answer, `payload` None once pruned.

    `result` is None before the end of the request, and of a pass again long after it.

    `micro_batching` is how the engine fitted a pass into memory, so that a replay computes the same bits.
    """

    model_id: str
    seq_id: int
    kind: str
    payload: bytes | None
    sha256: str
    status: str = "pending"
    result: bytes | None = None
    digest: str | None = None
    attempts: int = 0
    encoding: str = "application/json"
    micro_batching: dict[str, Any] | None = None


@dataclass(frozen=True)
class SnapshotRow:
    """The state of a model right after job `seq_id`, in `file`."""

    model_id: str
    seq_id: int
    file: str
    digest: str


@dataclass(frozen=True)
class CheckpointRow:
    """A named checkpoint; `kind` is weights, sampler_weights or external_weights.

    `expired_s` is how long a service has been running since it found the checkpoint expired; None if it has not.
    """

    model_id: str
    kind: str
    name: str
    folder: str
    created_at: float
    owner: str = LOCAL_OWNER
    public: bool = False
    expires_at: float | None = None
    size_bytes: int | None = None
    user_metadata: dict[str, Any] | None = None
    expired_s: float | None = None


@dataclass(frozen=True)
class SamplerRow:
    """A sampling session. `weights_id` None is the base model; `file` holds weights published without a name, by
    `model_id`."""

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    weights_id: str | None
    file: str | None
    lora: dict[str, Any] | None
    seed_root: str
    model_id: str | None = None
