"""Loras as folders in PEFT's format, from which external samplers read them: they are told a path, not the weights."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path

from mint.cluster.external.lora_archive import write_archive
from mint.cluster.versions import Version, unpacked
from mint.engine.protocol import LORA_ALPHA
from mint.errors import NotFoundError
from mint.models.peft_format import write_peft


class LoraFolders:
    """A folder for each version of weights, below one that the samplers can read under the same path."""

    def __init__(self, shared: Path | None = None) -> None:
        """`shared` None: a temporary folder, for samplers on this machine."""
        if shared is not None:
            shared.mkdir(parents=True, exist_ok=True)
        self.prefix = f"mint-{uuid.uuid4().hex[:8]}"
        """The names of all loras of this process begin with it: several servers may use one sampler."""
        self._folder = Path(tempfile.mkdtemp(prefix="loras-", dir=shared))
        self._folder.chmod(0o755)  # the sampler may run as another user
        self._versions: dict[str, Version] = {}

    def name(self, version: Version) -> str:
        """The name of a version at the samplers."""
        return f"{self.prefix}-{version.name}"

    def write(self, version: Version) -> Path:
        """The folder of a version, written if it is not there."""
        name = self.name(version)
        self._versions[name] = version
        folder = self._folder / name
        if not folder.exists():
            unfinished = folder.with_suffix(f".{uuid.uuid4().hex[:8]}")
            unfinished.mkdir()
            weights = unpacked(version.layout, version.stored)
            write_peft(unfinished, weights, rank=version.lora.rank, alpha=LORA_ALPHA, base_model=version.base)
            try:
                unfinished.rename(folder)
            except OSError:  # another thread was faster
                shutil.rmtree(unfinished, ignore_errors=True)
        return folder

    def archive(self, name: str) -> bytes:
        """A lora that is written, for a sampler that cannot read the folder. Any thread may ask.

        Raises:
            NotFoundError: there is none of this name.
        """
        version = self._versions.get(name)
        if version is None:
            raise NotFoundError("is no lora that a sampler needs", field="name", value=name)
        return write_archive(version)

    def remove(self, name: str) -> None:
        """Removes the folder of a lora; unknown names are fine."""
        self._versions.pop(name, None)
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def close(self) -> None:
        """Removes all folders."""
        shutil.rmtree(self._folder, ignore_errors=True)
