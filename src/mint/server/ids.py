"""How things are named: sessions, models, requests, samplers, files; and the seeds that follow from names.

Pure. Every name of what a session owns starts with the session's id, so that whose it is can be read from it. No
random id ever enters a seed where the user gave one: seeds follow from the user's seed and from counters alone.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass

_SEED_BITS = 63


def new_session_id() -> str:
    """A name that nobody can guess."""
    return f"sess-{uuid.uuid4().hex}"


def model_id(session_id: str, number: int) -> str:
    """The id that clients of this protocol compute themselves."""
    return f"{session_id}:train:{number}"


def sampler_id(session_id: str, number: int) -> str:
    """The id of a sampling session."""
    return f"{session_id}:sample:{number}"


def session_of(identity: str) -> str:
    """The session that a model, sampler or request belongs to."""
    return identity.split(":", 1)[0]


def request_id(owner: str, number: int) -> str:
    """The id of request `number` of a model or of a sampler: the same for every copy of the request."""
    return f"{owner}:{number}"


@dataclass(frozen=True)
class RequestName:
    """What a request id says."""

    owner: str
    number: int

    @property
    def is_sample(self) -> bool:
        """Whether the owner is a sampler."""
        return ":sample:" in self.owner

    @classmethod
    def parse(cls, identity: str) -> RequestName | None:
        """None where the text is no request id."""
        owner, _, number = identity.rpartition(":")
        return cls(owner, int(number)) if owner and number.isascii() and number.isdigit() else None


def file_stem(identity: str) -> str:
    """A file name that says nothing and cannot be steered by users."""
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def seed_root(user_seed: int | None, sampler_number: int) -> str:
    """What the seeds of a sampler's requests start from; random where the user gave no seed."""
    return f"{uuid.uuid4().hex if user_seed is None else user_seed}/{sampler_number}"


def sample_seed(root: str, seq_id: int) -> int:
    """The seed of one sample request that names none."""
    digest = hashlib.sha256(f"{root}/{seq_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)
