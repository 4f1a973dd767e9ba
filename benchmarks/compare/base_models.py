"""Random base models and adapters that all sides load, kept below a folder and written once for each shape and seed.

An adapter has random A and random B, so that it changes what is computed; it lies there as a PEFT folder and as the
archive of one. Knows nothing of who loads them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.compare.shapes import GrpoShape
from benchmarks.compare.turns import Say
from mint.models.peft_format import write_peft
from mint.models.random_base import ModelShape, write_random_base

FORMAT = 1
"""Raised whenever the same shape and seed are written differently."""

B_DEVIATION = 0.01


@dataclass(frozen=True)
class Adapter:
    """A PEFT folder, and a .tar.gz of its files."""

    folder: Path
    archive: Path


def base_model_folder(home: Path, shape: ModelShape, *, seed: int, say: Say) -> Path:
    """The folder of the base model of this shape and seed, written now if it is not there."""

    def write(folder: Path) -> None:
        say(f"writing a base model of {shape.block_parameters + shape.unembedding_parameters:,} parameters")
        write_random_base(folder, shape, seed=seed)

    return _written_once(home / "bench" / "bases", {"shape": asdict(shape), "seed": seed, "format": FORMAT}, write)


def adapter_files(home: Path, shape: GrpoShape, *, seed: int, base_name: str) -> Adapter:
    """An adapter for that base on all seven linear layers, of the shape's rank and alpha."""

    def write(folder: Path) -> None:
        weights = _lora(shape, np.random.default_rng(seed))
        write_peft(folder / "peft", weights, rank=shape.rank, alpha=shape.alpha, base_model=base_name)
        with tarfile.open(folder / "peft.tar.gz", "w:gz", compresslevel=1) as archive:
            for file in sorted((folder / "peft").iterdir()):
                archive.add(file, file.name)

    about = {"shape": asdict(shape.model), "rank": shape.rank, "alpha": shape.alpha, "seed": seed, "base": base_name}
    folder = _written_once(home / "bench" / "adapters", about | {"format": FORMAT}, write)
    return Adapter(folder / "peft", folder / "peft.tar.gz")


def _written_once(parent: Path, about: dict[str, object], write: Callable[[Path], None]) -> Path:
    """The folder that stands for `about`: written beside its place and then renamed, so that it is whole if it is
    there."""
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=6).hexdigest()
    folder = parent / digest
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=parent))
    try:
        write(unfinished)
        (unfinished / "about.json").write_text(json.dumps(about))
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    return folder


def _lora(shape: GrpoShape, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A as for a new lora, B normal: name -> array, [rank, inputs] and [outputs, rank]."""
    weights: dict[str, np.ndarray] = {}
    for layer in range(shape.model.layers):
        for linear, (outputs, inputs) in shape.model.linears.items():
            module, bound = f"model.layers.{layer}.{linear}", inputs**-0.5
            drawn = rng.uniform(-bound, bound, (shape.rank, inputs))
            weights[f"{module}.lora_A.weight"] = drawn.astype(np.float32)
            weights[f"{module}.lora_B.weight"] = rng.normal(0, B_DEVIATION, (outputs, shape.rank)).astype(np.float32)
    return weights
