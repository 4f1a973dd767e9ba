"""Who asks: the owner that a key stands for, and what is allowed to them. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field

LOCAL_OWNER = "local"
"""The owner of what is made without keys: in this process, or by a server that asks for none. Also in the schema."""


@dataclass(frozen=True)
class Quotas:
    """Bounds of one owner; None is no bound of their own. Each is checked where the thing is made or accepted."""

    max_sessions: int | None = None
    max_models: int | None = None
    max_waiting_requests: int | None = None
    max_checkpoint_bytes: int | None = None


@dataclass(frozen=True)
class Caller:
    """The sender of a request. What others own does not exist for them."""

    owner: str
    key_id: str | None = None
    quotas: Quotas = field(default_factory=Quotas)


LOCAL = Caller(LOCAL_OWNER)
"""The caller where no keys are asked for."""
