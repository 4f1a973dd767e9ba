"""Names that owners give to checkpoints, to sample from them by these names at `/v1`.

The names last until the process ends, as in vLLM. Reads no checkpoint.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from mint.errors import ConflictError, NotFoundError, QuotaExceededError

MAX_NAMES = 1024
"""Of one owner."""


@dataclass(frozen=True)
class NamedLora:
    """What a name stands for: the checkpoint at `path`, of this base model. `loaded_at` is in Unix seconds."""

    path: str
    base_model: str
    loaded_at: int


class LoraNames:
    """The checkpoint behind each owner's names. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loras: dict[str, dict[str, NamedLora]] = {}  # owner → name → checkpoint

    def find(self, owner: str, name: str) -> NamedLora | None:
        """The checkpoint behind a name; None if the owner has no such name."""
        with self._lock:
            return self._loras.get(owner, {}).get(name)

    def of(self, owner: str) -> dict[str, NamedLora]:
        """All names of an owner."""
        with self._lock:
            return dict(self._loras.get(owner, {}))

    def load(self, owner: str, name: str, lora: NamedLora, *, in_place: bool) -> None:
        """Gives a name to a checkpoint; with `in_place`, the name may have had another one.

        Raises:
            ConflictError: the name is taken.
            QuotaExceededError: the owner has too many names.
        """
        with self._lock:
            own = self._loras.setdefault(owner, {})
            if name in own and not in_place:
                remedy = "Unload it first, or pass load_inplace=true"
                raise ConflictError("is loaded already", field="lora_name", value=name, remedy=remedy)
            if name not in own and len(own) >= MAX_NAMES:
                problem = f"would be one more than {MAX_NAMES} names"
                raise QuotaExceededError(problem, field="lora_name", value=name, remedy="Unload another one")
            own[name] = lora

    def unload(self, owner: str, name: str) -> None:
        """Forgets a name.

        Raises:
            NotFoundError: the owner has no such name.
        """
        with self._lock:
            own = self._loras.get(owner, {})
            if name not in own:
                raise NotFoundError("is not loaded", field="lora_name", value=name, remedy="See GET /v1/models")
            del own[name]
            if not own:
                del self._loras[owner]
