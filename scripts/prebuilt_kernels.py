"""Hook of hatchling: puts compiled kernels into the wheel, so that no compiler is needed where it is installed.

Only with `MINT_PREBUILT_KERNELS=1`, as cibuildwheel's configuration in pyproject.toml has it. Such a wheel is for one
platform and any Python, because the kernels know nothing of Python.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernels(BuildHookInterface):
    """Compiles the kernels for every set of instructions of this kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it writes the wheel."""
        if self.target_name != "wheel" or os.environ.get("MINT_PREBUILT_KERNELS") != "1":
            return
        source = Path(self.root) / "src"
        sys.path.insert(0, str(source))
        from mint.engine.cpu.build import PREBUILT, prebuild

        self._made = tempfile.TemporaryDirectory()
        for library in prebuild(Path(self._made.name)):
            place = PREBUILT.relative_to(source) / library.relative_to(self._made.name)
            build_data["force_include"][str(library)] = str(place)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after it has written the wheel."""
        if hasattr(self, "_made"):
            self._made.cleanup()
