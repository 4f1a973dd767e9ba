"""The rows of the tables. Times are seconds since the epoch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mint.errors import DamagedDataError
from mint.server.callers import LOCAL_OWNER

FINISHED = ("done", "failed")
"""The values of `JobRow.status` of a request that has a result."""

ENCODINGS = ("application/json", "application/x-protobuf")
"""The values of `JobRow.encoding`: the media types of `mint.wire.Encoding`, which the store does not import."""

REPLAY_ACCEPTED = "accepted"
"""The request is replayed, and may give other bits than were acknowledged."""

REPLAY_LOST = "lost"
"""The request is not replayed: it counts as failed, though its client has its result."""

BASE_NUMBERS = {
    "dtype": "MINT_DTYPE",
    "quantization": "MINT_QUANTIZE",
    "attention": "MINT_NATIVE",
    "instructions": "MINT_INSTRUCTIONS",
    "gpu_off": "MINT_GPU_OFF",
    "tensor_chunks": "MINT_TENSOR_PARALLEL",
    "reductions": "MINT_REDUCTIONS",
}
"""Keys of `ModelRow.effective` that decide a base model's numbers, and the variables that set them."""

INVARIANT = "batch-invariant"
"""The attention of the batch-invariant mode on a GPU."""

_KERNELS = {
    "torch": "0 (torch's kernels)",
    "native": "1 (mint's kernels)",
    "flex": "1 (mint's kernels)",
    INVARIANT: "1 (mint's kernels)",
}
"""The value of MINT_NATIVE, by the attention that took effect: with one come all kernels of its maker."""

STATE_BYTES = "state_bytes"
"""Key of `ModelRow.effective`: the size of a model's weights and moments, and so of one snapshot."""

REMEDY = "Look at the disk, restore a backup, or load a checkpoint into a new model"


def payload_sha256(kind: str, payload: bytes) -> str:
    """The checksum of a request."""
    return hashlib.sha256(kind.encode() + b"\0" + payload).hexdigest()


def with_message_sha256(sha256: str, message: bytes) -> str:
    """The checksum of a request in protobuf, which spells one message in many ways: with that of the message as mint
    spells it. It tells a repeated request from another one when the payload is gone."""
    return f"{sha256}:{hashlib.sha256(message).hexdigest()}"


def result_sha256(
    status: str,
    result: bytes,
    digest: str | None,
    micro_batching: dict[str, Any] | None,
    replay: str | None = None,
) -> str:
    """The checksum of what became of a request."""
    chosen = () if replay is None else (replay,)
    return _sha256(status, hashlib.sha256(result).hexdigest(), digest, micro_batching, *chosen)


def settings_sha256(base_model: str | None, lora: dict[str, Any] | None, seed_given: bool | None) -> str:
    """The checksum of what decides a new model's bits."""
    return _sha256(base_model, lora, seed_given)


def base_numbers(effective: Mapping[str, Any] | None) -> dict[str, str] | None:
    """The variables that decide a base model's numbers, and the values that took effect; None if not known.

    Without `MINT_NATIVE` if the model runs in transformers, which has no kernels to choose; without `MINT_INSTRUCTIONS`
    where no kernels in C compute, and `MINT_GPU_OFF` where those of a GPU do not, or where an older mint wrote the row.
    """
    if effective is None or "dtype" not in effective:
        return None
    values = {name: effective.get(name) or "none" for name in BASE_NUMBERS}
    values["attention"] = _KERNELS.get(values["attention"])
    # Without the digest of the kernels' sources: a newer mint may have other kernels, as a newer torch has. Where their
    # bits differ, a replay finds it.
    values["instructions"] = effective.get("instructions")
    values["gpu_off"] = effective.get("gpu_off")
    if values["gpu_off"] is not None and effective.get("implementation") == "mint":
        values["attention"] = _KERNELS["flex"]  # also where this path alone is off
    if effective.get("tensor_chunks"):  # any number of processes has these bits
        values["tensor_chunks"] = f"1 ({effective['tensor_chunks']} chunks)"
    values["reductions"] = effective.get("reductions") or "exact"
    if values["reductions"] != "exact":
        values["reductions"] += f" ({effective.get('same_digest_on')})"
    found = {BASE_NUMBERS[name]: value for name, value in values.items() if value is not None}
    if effective.get("attention") in ("flex", INVARIANT):
        found["MINT_BATCH_INVARIANT"] = "1" if effective["attention"] == INVARIANT else "0"
    return found


def _sha256(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


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
    settings_sha256: str | None = None

    def verify(self) -> None:
        """Compares the settings with their checksum, which a row of an older mint does not have; checks the rest.

        Raises:
            DamagedDataError: they differ, or another column has a value that it cannot have.
        """
        found = settings_sha256(self.base_model, self.lora, self.seed_given)
        if self.settings_sha256 not in (None, found):
            raise DamagedDataError(
                f"the settings of model {self.model_id} in the journal are damaged: their checksum differs",
                remedy=REMEDY,
            )
        if not isinstance(self.applied_seq, int):
            raise self._damaged(f"applied_seq is {self.applied_seq!r}, and must be a whole number")
        if not self.model_id.startswith(f"{self.session_id}:"):
            raise self._damaged(f"its session is {self.session_id!r}, which does not fit its id")

    def verify_finished(self, job: JobRow) -> None:
        """Checks that a finished request of this model can have finished.

        Raises:
            DamagedDataError: it cannot: a status, a checksum or `applied_seq` is damaged.
        """
        if job.seq_id > self.applied_seq:
            raise self._damaged(
                f"request {job.seq_id} ({job.kind}) is {job.status}, but the last finished request is "
                f"{self.applied_seq} (applied_seq)"
            )
        # An older mint wrote no checksums, neither of settings nor of results.
        is_sealed = self.settings_sha256 is not None and job.status == "done"
        if is_sealed and job.result_sha256 is None and job.replay != REPLAY_LOST:
            raise self._damaged(f"request {job.seq_id} ({job.kind}) is done and has no checksum")

    def _damaged(self, what: str) -> DamagedDataError:
        return DamagedDataError(f"the journal is damaged: of model {self.model_id}, {what}", remedy=REMEDY)


@dataclass(frozen=True)
class TrainingRunRow:
    """A training run: the record of a model, which stays after its session has ended.

    `base_model` is None until the model is made.
    """

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
    """One request; `status` is pending, done or failed, `result` the body of its answer, `payload` None once pruned or
    failed.

    `result` is None before the end of the request, and of a pass again long after it.

    `micro_batching` is how the engine fitted a pass into memory, so that a replay computes the same bits.

    `replay` is what an operator has decided about the replay of a finished request: `REPLAY_ACCEPTED`, `REPLAY_LOST`,
    or None: it must give what was acknowledged.
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
    result_sha256: str | None = None
    replay: str | None = None

    @property
    def message_sha256(self) -> str | None:
        """That of `with_message_sha256`; None if the request was JSON, could not be read, or came to an older mint."""
        return self.sha256.partition(":")[2] or None

    def verify(self) -> None:
        """Compares payload and result, as far as they are kept, with their checksums; checks the other columns.

        A row of an older mint has no checksum of the result.

        Raises:
            DamagedDataError: one of them differs, or another column has a value that it cannot have.
        """
        self._verify_values()
        payload, result = self.payload, self.result
        if payload is not None and not (
            isinstance(payload, bytes) and payload_sha256(self.kind, payload) == self.sha256.partition(":")[0]
        ):
            raise self._damaged("the payload", "its checksum differs")
        if result is None or self.result_sha256 is None:
            return
        if not (  # a damaged file may hold a value of any type
            isinstance(result, bytes)
            and result_sha256(self.status, result, self.digest, self.micro_batching, self.replay) == self.result_sha256
        ):
            raise self._damaged("the result", "its checksum differs")

    def _verify_values(self) -> None:
        """No checksum covers these columns, or not for as long as the row is kept."""
        if self.status not in ("pending", *FINISHED):
            raise self._damaged("the status", f"{self.status!r} is none that a request can have")
        if self.status == "pending" and (self.result is not None or self.result_sha256 is not None):
            raise self._damaged("the status", "it is pending, and the request has a result")
        if self.status == "failed" and self.result is None:
            raise self._damaged("the status", "it is failed, and the request has no error")
        if self.encoding not in ENCODINGS:
            raise self._damaged("the encoding", f"{self.encoding!r} is none that a request can have")
        if not isinstance(self.attempts, int):
            raise self._damaged("the number of attempts", f"{self.attempts!r} is no whole number")

    def _damaged(self, what: str, reason: str) -> DamagedDataError:
        return DamagedDataError(
            f"{what} of request {self.seq_id} ({self.kind}) of {self.model_id} in the journal is damaged: {reason}",
            remedy=REMEDY,
        )


def passes_without_effect(jobs: Iterable[JobRow]) -> set[int]:
    """The numbers of the passes whose gradient a later failed pass has cleared before a step could use it.

    `jobs` are finished requests of one model, in order. A replay leaves these passes out, so their payloads need not be
    kept: the failed pass clears the gradient there, too.
    """
    cleared: set[int] = set()
    waiting: list[int] = []  # passes since the last step or load that took effect
    for job in jobs:
        took_effect = job.status == "done" and job.replay != REPLAY_LOST
        if job.kind in ("forward_backward", "missing") and not took_effect:
            cleared.update(waiting)
            waiting.clear()
        elif job.kind == "forward_backward":
            waiting.append(job.seq_id)
        elif job.kind in ("optim_step", "load_weights") and took_effect:
            waiting.clear()
    return cleared


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
    sha256: str | None = None

    def sealed(self) -> SamplerRow:
        """The same row with its checksum."""
        return replace(self, sha256=self._checksum())

    def verify_checksum(self) -> None:
        """Compares the row with its checksum; one of an older mint has none.

        Raises:
            DamagedDataError: they differ.
        """
        if self.sha256 not in (None, self._checksum()):
            raise DamagedDataError(
                f"the sampler {self.sampler_id} in the journal is damaged: its checksum differs", remedy=REMEDY
            )

    def _checksum(self) -> str:
        values = vars(self)
        return _sha256(*(values[name] for name in sorted(values) if name != "sha256"))
