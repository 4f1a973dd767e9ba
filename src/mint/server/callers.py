"""Who sends a request: the owner that a key stands for, and the owner's quotas. Values only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from mint.errors import InvalidRequestError, QuotaExceededError
from mint.server.limits import MAX_SNAPSHOTS, MAX_WAITING_REQUESTS
from mint.types.sampling import LogprobsMode

MAX_COUNT = 1_000_000
MAX_STORED_BYTES = 1 << 60

_SENSIBLE = {
    "max_sessions": (1, MAX_COUNT),
    "max_models": (0, MAX_COUNT),
    "max_waiting_requests": (1, MAX_WAITING_REQUESTS),
    "max_checkpoint_bytes": (0, MAX_STORED_BYTES),
    "max_journal_bytes": (1 << 20, MAX_STORED_BYTES),
    "max_snapshot_bytes": (0, MAX_STORED_BYTES),
}
"""The least and the greatest value of each quota. An owner without models can sample, and one without checkpoints can
train; without a session, a request or room in the journal an owner can do nothing."""

LOCAL_OWNER = "local"
"""The owner of what is made without keys: in this process, or by a server without keys. The schema has it, too."""


@dataclass(frozen=True)
class Quotas:
    """Limits of one owner; None is no limit. Each is checked where the thing is made or accepted."""

    max_sessions: int | None = None
    max_models: int | None = None
    max_waiting_requests: int | None = None
    max_checkpoint_bytes: int | None = None
    max_journal_bytes: int | None = None
    max_snapshot_bytes: int | None = None

    def with_defaults(self, defaults: Quotas) -> Quotas:
        """These quotas, and those of `defaults` where there is none."""
        return Quotas(
            **{name: getattr(defaults, name) if value is None else value for name, value in asdict(self).items()}
        )

    def require_sensible(self) -> None:
        """Checks that each quota has a value that can be meant.

        Raises:
            InvalidRequestError: one is negative, too large to limit anything, or zero where nothing could be done.
        """
        for name, (least, greatest) in _SENSIBLE.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= greatest:
                remedy = f"Give {least:,} to {greatest:,}, or leave it out for the server's default"
                if value == 0:
                    remedy += "; to end a key: mint keys revoke KEY_ID"
                raise InvalidRequestError("is no limit that can be used", field=name, value=value, remedy=remedy)

    def require_session(self, used: int) -> None:
        """Checks that one more session may be opened, while `used` are open.

        Raises:
            QuotaExceededError: the quota is used up.
        """
        if self.max_sessions is not None and used >= self.max_sessions:
            raise QuotaExceededError(
                f"the limit of {self.max_sessions} open sessions is reached",
                field="max_sessions",
                value=used + 1,
                remedy="Close one (ServiceClient.close), or ask the operator for more (mint keys update)",
            )

    def require_model(self, used: int) -> None:
        """Checks that one more model may be created, while `used` exist.

        Raises:
            QuotaExceededError: the quota is used up.
        """
        if self.max_models is not None and used >= self.max_models:
            raise QuotaExceededError(
                f"the limit of {self.max_models} models is reached",
                field="max_models",
                value=used + 1,
                remedy="Unload one or close its ServiceClient, or ask the operator for more (mint keys update)",
            )

    def require_snapshots(self, used_bytes: int, needed_bytes: int) -> None:
        """Checks that a new model may have snapshots of so many bytes, while those of other models have `used_bytes`.

        Raises:
            QuotaExceededError: together that is more than the quota.
        """
        if self.max_snapshot_bytes is not None and used_bytes + needed_bytes > self.max_snapshot_bytes:
            raise QuotaExceededError(
                f"bytes of the disk are for the snapshots of your models, and {used_bytes} are taken by models that "
                f"you have; {MAX_SNAPSHOTS} snapshots of this one need {needed_bytes} more",
                field="max_snapshot_bytes",
                value=self.max_snapshot_bytes,
                remedy="End a session that you no longer need (mint sessions list, mint sessions end), choose a lower "
                "rank, or ask the operator for more (mint keys update)",
            )

    def save_error(self, used_bytes: int, size_bytes: int = 1) -> InvalidRequestError | None:
        """The error if no further checkpoint of this size may be saved, else None; checkpoints of `used_bytes` exist.

        Without a size: whether any may be saved.
        """
        if self.max_checkpoint_bytes is None or used_bytes + size_bytes <= self.max_checkpoint_bytes:
            return None
        needed = f", and {size_bytes} more are needed" if size_bytes > 1 else ""
        return InvalidRequestError(
            f"checkpoint quota exceeded: {used_bytes} bytes used{needed}",
            field="max_checkpoint_bytes",
            value=self.max_checkpoint_bytes,
            remedy="Delete checkpoints (mint checkpoints delete), or ask the operator for more (mint keys update)",
        )


@dataclass(frozen=True)
class Caller:
    """The sender of a request. Other owners' objects give 404.

    `logprobs_mode` is that of samples whose request names none; None is the server's.
    """

    owner: str
    key_id: str | None = None
    quotas: Quotas = field(default_factory=Quotas)
    logprobs_mode: LogprobsMode | None = None


LOCAL = Caller(LOCAL_OWNER)
"""The caller of a server that asks for no keys."""
