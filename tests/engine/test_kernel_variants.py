"""The tests of the kernels in C pass for every set of instructions that this processor has, and under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mint.engine.cpu.build import COMPILERS
from mint.engine.instruction_sets import SETS, instruction_set
from mint.errors import InvalidRequestError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler"),
]

HERE = Path(__file__).parent
KERNEL_TESTS = (
    "test_native.py",
    "test_native_products.py",
    "test_native_attention.py",
    "test_native_heads.py",
    "test_native_mlp.py",
    "test_quantized.py",
    "test_draw.py",
)
STEP_TESTS = ("test_recorded_step.py", "test_delta_net.py", "test_experts.py")


def run(
    variant: str, files: tuple[str, ...], *, plugin: str = "kernel_variant", only: str = "", **environment: str
) -> str:
    """Runs the tests with this variant in another process; its output."""
    own = {"MINT_TEST_KERNELS": variant, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "2"}
    # -s: what a sanitizer writes as it ends the process would be lost with what pytest has captured
    options = ["-s", "-p", plugin, "-p", "no:cacheprovider", "-m", "not slow", "-k", only]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(
        [*command, *(str(HERE / file) for file in files)],
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("name", [own.name for own in SETS if own.name != "neon"])
def test_every_set_of_instructions_computes_what_the_references_do(name: str) -> None:
    try:
        instruction_set(name)
    except InvalidRequestError:
        pytest.skip("this processor does not have them")
    run(name, (*KERNEL_TESTS, *STEP_TESTS))


def _sanitizer(name: str) -> str | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip() if Path(found.stdout.strip()).is_absolute() else None


def test_no_kernel_reads_or_writes_out_of_bounds_or_does_what_c_leaves_undefined() -> None:
    libraries = [_sanitizer(name) for name in ("libasan.so", "libubsan.so")]
    if None in libraries:
        pytest.skip("the compiler has no sanitizers")
    # Python itself leaks what it keeps until its end.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    run("sanitized", (*KERNEL_TESTS, *STEP_TESTS), LD_PRELOAD=" ".join(filter(None, libraries)), **options)


def test_a_write_out_of_bounds_would_be_found(tmp_path: Path) -> None:
    libraries = [_sanitizer(name) for name in ("libasan.so", "libubsan.so")]
    if None in libraries:
        pytest.skip("the compiler has no sanitizers")
    (tmp_path / "test_planted.py").write_text(
        "import torch\n"
        "from mint.engine.cpu.kernels import NativeKernels\n"
        "def test_planted(tmp_path):\n"
        "    rows = NativeKernels(tmp_path).libraries['row_copies']\n"
        "    x = torch.zeros(2, 16)\n"
        "    rows.copy_rows(2, 0, x=x, bytes=4 * 16, out=torch.zeros(1, 16))\n"
    )
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        run(
            "sanitized",
            (str(tmp_path / "test_planted.py"),),
            LD_PRELOAD=" ".join(filter(None, libraries)),
            ASAN_OPTIONS="detect_leaks=0",
        )


def test_the_kernels_for_64_bit_arm_compute_what_the_references_do_in_an_emulator() -> None:
    """Not the recorded steps, and not the widest products: an emulator is slow."""
    if not shutil.which("aarch64-linux-gnu-gcc") or not any(map(shutil.which, ("qemu-aarch64", "qemu-aarch64-static"))):
        pytest.skip("install gcc-aarch64-linux-gnu and qemu-user-static")
    tests = [
        "norms",
        "gelu",
        "swiglu",
        "bias_is",
        "biased",
        "gated",
        "columns",
        "finished",
        "32-float",
        "32-bfloat",
        "alone",
        "stays_so",
        "gradient_of_attention",
        "turned",
        "threads_changes",
        "(float64_and_a_row and not 1040)",
        "draws",
        "greedy",
        "possible",
        "mask",
        "(products_are_sums and not 4128)",
        "(numbers_of_the_codes and (48-64 or 112-128) and 1])",
        "gets_lost",
    ]
    run(
        "neon",
        ("test_native.py", "test_native_products.py", "test_quantized.py", "test_draw.py"),
        plugin="emulated_kernels",
        only=" or ".join(tests),
    )
