"""A wheel with compiled kernels needs no compiler, and has the kernels that a compiler would make here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mint.engine.cpu.build import COMPILERS

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler"),
]

BITS = """
import hashlib, sys
from pathlib import Path
import torch
import mint
from mint.engine.cpu.build import NativeBuild
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.operations import NativeOperations

torch.manual_seed(0)
build = NativeBuild(Path(sys.argv[1]))
places = build.libraries()
operations = NativeOperations(torch.float32, NativeKernels(build))
x = torch.randn(37, 96)
found = operations.swiglu(operations.matrix(torch.randn(128, 96)).product(x))
found = operations.rms_norm(found, torch.ones(64), 1e-6)[0]
print(Path(mint.__file__).parent)
print(places["products"].parent)
print(build.instructions.name, build.digest, hashlib.sha256(found.numpy().tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for this platform, built and unpacked; what it needs is that of this Python."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "-w", folder, ROOT],
        check=True,
        env={**os.environ, "MINT_PREBUILT_KERNELS": "1"},
    )
    (wheel,) = folder.glob("*.whl")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def run(arguments: list[str], site: Path, home: Path, path: str) -> str:
    environment = {"PYTHONPATH": str(site), "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "PATH": path}
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_without_a_compiler_it_trains_with_the_bits_of_kernels_that_are_compiled_here(
    site: Path, tmp_path: Path
) -> None:
    bare, own = tmp_path / "bare", tmp_path / "own"
    bare.mkdir()
    own.mkdir()
    nothing = str(tmp_path / "nothing")  # a PATH without a compiler
    folder, places, identity = run(["-c", BITS, "native"], site, bare, nothing).splitlines()
    assert folder.startswith(str(site)) and places.startswith(str(site))
    _, compiled, same = run(["-c", BITS, "native"], ROOT / "src", own, os.environ["PATH"]).splitlines()
    assert compiled == "native" and same == identity
    output = run(
        ["-c", "from mint.cli.main import app; app()", "demo", "math", "--yes", "--steps", "2"], site, bare, nothing
    )
    assert "C compiler" not in output
    assert not (bare / "cache" / "mint" / "native").exists()
