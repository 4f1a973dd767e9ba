"""The ids of sessions, models, requests and samplers, the names of their files, and the seeds of samplers.

The id of everything in a session starts with the session's id. Where the user gave a seed, seeds depend on that seed
and on counters only, never on a random id.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass

_SEED_BITS = 63

_MAX_NUMBER = 2**63 - 1
"""The largest number of a request: it fits into a column of the journal."""


def new_session_id() -> str:
    """A new id that cannot be guessed."""
    return f"sess-{uuid.uuid4().hex}"


def keyed_session_id(owner: str, request_key: str) -> str:
    """The id of the session that a request with this random key opens. Only who knows the key can guess it."""
    digest = hashlib.sha256(f"{len(owner)} {owner} {request_key}".encode()).hexdigest()
    return f"sess-{digest[:32]}"


def model_id(session_id: str, number: int) -> str:
    """The id of a model; clients of this protocol compute it themselves."""
    return f"{session_id}:train:{number}"


def sampler_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def session_of(any_id: str) -> str:
    """The session that a model, sampler or request belongs to."""
    return any_id.split(":", 1)[0]


def request_id(target_id: str, number: int) -> str:
    """The id of request `number` of a model or of a sampler: the same for every copy of the request."""
    return f"{target_id}:{number}"


@dataclass(frozen=True)
class RequestId:
    """A request id in its parts: the id of a model or sampler, and the number of the request."""

    target_id: str
    number: int

    @property
    def is_sample(self) -> bool:
        return ":sample:" in self.target_id

    @classmethod
    def parse(cls, text: str) -> RequestId | None:
        """The parts of a request id; None if the text is none."""
        target_id, _, number = text.rpartition(":")
        if not (target_id and number.isascii() and number.isdigit() and len(number) <= len(str(_MAX_NUMBER))):
            return None
        return cls(target_id, int(number)) if int(number) <= _MAX_NUMBER else None


def file_stem(any_id: str) -> str:
    """A file name that users cannot influence and that reveals nothing."""
    return hashlib.sha256(any_id.encode()).hexdigest()[:32]


def seed_root(user_seed: int | None, sampler_number: int) -> str:
    """The text from which the seeds of a sampler's requests are derived; random if the user gave no seed."""
    return f"{uuid.uuid4().hex if user_seed is None else user_seed}/{sampler_number}"


def sample_seed(root: str, seq_id: int) -> int:
    """The seed of a sample request that has none of its own."""
    digest = hashlib.sha256(f"{root}/{seq_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)
