"""`mint doctor gpu`: the self-check of the fast paths on this machine's GPU, as a report to send.

The widths are those of Qwen3-0.6B; at load, a base model is checked with its own.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from mint.engine.cuda.fast_paths import NAMES, TRITONS, Shapes
from mint.engine.cuda.self_check import Verdict, check_paths
from mint.errors import InvalidRequestError

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class GpuReport:
    """What was found on a GPU; `machine` by name, `verdicts` of each dtype."""

    machine: dict[str, str]
    verdicts: dict[str, list[Verdict]]

    @property
    def faults(self) -> int:
        """How many paths have failed."""
        return sum(verdict.fault is not None for found in self.verdicts.values() for verdict in found)


def check_gpu(version: str, say: Callable[[str], None]) -> GpuReport:
    """Runs the self-check of mint `version`; some minutes, where torch and Triton compile for the first
    time. `say` hears what
    is tried.

    Raises:
        InvalidRequestError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise InvalidRequestError(
            f"is not in this machine, or torch {torch.__version__} does not see it",
            field="device",
            value="cuda",
            remedy="Look at nvidia-smi or rocm-smi, and install a build of torch for it. On an Apple GPU "
            "(MINT_DEVICE=mps) mint runs torch's plain operations, which need no check",
        )
    has_triton = find_spec("triton") is not None
    names = [name for name in NAMES if has_triton or name not in TRITONS]
    verdicts = {}
    for dtype in DTYPES:
        source = Shapes.usual(dtype, "cuda", names).source
        verdicts[dtype] = check_paths(source, is_timed=True, say=lambda name, dtype=dtype: say(f"{dtype}: {name}"))
    return GpuReport(_machine(version, has_triton=has_triton), verdicts)


def _machine(version: str, *, has_triton: bool) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "GPU": f"{properties.name}, {properties.total_memory >> 20} MiB",
        "capability": f"{properties.major}.{properties.minor}",
        "mint": version,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, HIP {torch.version.hip or 'none'}",
        "Triton": "there" if has_triton else "not installed",
        "system": f"{platform.platform()}, Python {platform.python_version()}",
    }
