"""Compiling the kernels in C: once for all runs, by two processes at once, and what happens where it cannot be done."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_models import write_model

from mint.config import Settings
from mint.engine import instruction_sets
from mint.engine.cpu import build as native_build
from mint.engine.cpu.build import COMPILERS, SOURCES, NativeBuild, sources_digest
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.instruction_sets import instruction_set, sets_of_processor
from mint.engine.memory.machine_memory import keep_freed_memory
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError, MissingExtraError

needs_compiler = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")

UNOPTIMIZED = (*native_build.FLAGS, "-O0")
"""Compiles in less time."""

FEW = SOURCES[:2]
"""Enough where not all sources are needed: each takes half a second."""


@pytest.fixture(autouse=True)
def _unoptimized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "FLAGS", UNOPTIMIZED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    """A folder of the test's own that has all libraries."""
    NativeBuild(folder).libraries()
    return shutil.copytree(folder, tmp_path / "native")


@needs_compiler
def test_they_are_compiled_once_and_need_no_compiler_afterwards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = NativeBuild(folder).libraries()
    assert libraries.keys() == {source.stem for source in SOURCES}
    assert sorted(folder.iterdir()) == sorted(libraries.values())  # and nothing else is left there
    monkeypatch.setattr(native_build, "COMPILERS", ())
    assert NativeBuild(folder).libraries() == libraries


@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from mint.engine.cpu import build;"
        f"build.FLAGS, build.SOURCES = {UNOPTIMIZED!r}, build.SOURCES[:{len(FEW)}];"
        "build.NativeBuild(Path(sys.argv[1])).libraries()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, tmp_path]) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list(tmp_path.iterdir())) == len(FEW)


@needs_compiler
def test_other_flags_give_other_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "SOURCES", FEW)
    before = set(NativeBuild(folder).libraries().values())
    monkeypatch.setattr(native_build, "FLAGS", (*UNOPTIMIZED, "-DOTHER"))
    assert not before & set(NativeBuild(folder).libraries().values())


@needs_compiler
def test_a_compiler_that_lacks_the_fastest_set_of_instructions_takes_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest, *others = sets_of_processor()
    if not others:
        pytest.skip("there is no other set")
    old, real = tmp_path / "oldcc", next(filter(None, map(shutil.which, COMPILERS)))
    old.write_text(f'#!/bin/sh\ncase "$*" in *{fastest.flags[-1]}*) exit 1;; esac\nexec {real} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(native_build, "COMPILERS", ("oldcc",))
    monkeypatch.setattr(native_build, "SOURCES", FEW)
    build = NativeBuild(tmp_path / "kernels")
    assert build.libraries().keys() == {source.stem for source in FEW}
    assert build.instructions == others[0]
    monkeypatch.undo()
    monkeypatch.setattr(native_build, "SOURCES", FEW)
    assert NativeBuild(tmp_path / "kernels").instructions == fastest  # after an upgrade


@needs_compiler
@pytest.mark.parametrize(
    "other", ["linux_aarch64_glibc", "linux_x86_64_musl", "darwin_arm64"], ids=["arm", "musl", "macos"]
)
def test_machines_of_two_kinds_share_a_folder_and_neither_takes_the_others_files(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "SOURCES", FEW)
    instructions = instruction_set("portable")  # the same flags on every machine
    own = NativeBuild(tmp_path, instructions=instructions.name).libraries()
    digest = sources_digest(instructions)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(native_build, "target_name", lambda: other)
        theirs = NativeBuild(tmp_path, instructions=instructions.name).libraries()
        assert sources_digest(instructions) == digest  # what a run records, so that it goes on
    assert not set(own.values()) & set(theirs.values())
    assert all(native_build.target_name() in library.name for library in own.values())
    assert all(other in library.name for library in theirs.values())
    monkeypatch.setattr(native_build, "COMPILERS", ())
    assert NativeBuild(tmp_path, instructions=instructions.name).libraries() == own


def test_the_name_of_this_machine_has_its_system_processor_and_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "confstr_names", {"CS_GNU_LIBC_VERSION": 2})
    assert native_build.target_name() == "linux_aarch64_glibc"
    monkeypatch.setattr(os, "confstr_names", {"CS_PATH": 0})
    assert native_build.target_name() == "linux_aarch64_musl"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert native_build.target_name() == "darwin_arm64"


@needs_compiler
def test_a_library_that_this_system_cannot_load_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = shutil.copy("/bin/sh", tmp_path / "threads.so")
    monkeypatch.setattr(NativeBuild, "libraries", lambda self: {"threads": Path(foreign)})
    with pytest.raises(MissingExtraError, match=rf"cannot be loaded.*Delete {tmp_path}"):
        NativeKernels(tmp_path)


@needs_compiler
def test_their_digest_is_that_of_instructions_flags_and_sources_but_for_comments(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = NativeKernels(folder)
    before = kernels.digest
    assert kernels.instructions == instruction_set().name and re.fullmatch("[0-9a-f]{12}", before)
    assert sources_digest(instruction_set("portable")) != sources_digest(instruction_set())
    copies = [Path(shutil.copy(source, tmp_path)) for source in SOURCES]
    monkeypatch.setattr(native_build, "SOURCES", copies)
    copies[0].write_text("/* another\n   comment */\n\n" + copies[0].read_text())
    assert sources_digest(instruction_set()) == before
    copies[0].write_text(copies[0].read_text() + "\nint another;")
    assert sources_digest(instruction_set()) != before
    monkeypatch.setattr(native_build, "SOURCES", SOURCES)
    monkeypatch.setattr(native_build, "FLAGS", (*UNOPTIMIZED, "-DOTHER"))
    assert sources_digest(instruction_set()) != before


def test_instructions_that_the_processor_does_not_have_are_refused_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    avx2 = next(own for own in instruction_sets.SETS if own.name == "avx2")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(instruction_sets, "_features", lambda: avx2.features)
    assert instruction_set().name == "avx2"
    with pytest.raises(InvalidRequestError, match=r"MINT_INSTRUCTIONS.*avx512.*choose one of avx2, portable"):
        instruction_set("avx512")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert instruction_set().name == "neon"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert instruction_set().name == "portable"


@needs_compiler
def test_a_compiler_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "FLAGS", ("-no-such-flag",))
    with pytest.raises(MissingExtraError, match="no-such-flag"):
        NativeBuild(tmp_path).libraries()
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(native_build, "COMPILERS", (str(slow),))
    monkeypatch.setattr(native_build, "COMPILE_SECONDS", 0.2)
    with pytest.raises(MissingExtraError, match="did not end in"):
        NativeBuild(tmp_path / "kept").libraries()


def _cut_off(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:-2000])


def _flip_a_bit(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def _link(library: Path) -> None:
    library.rename(library.with_suffix(".elsewhere"))
    library.symlink_to(library.with_suffix(".elsewhere"))


@needs_compiler
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_cut_off, "its content is not what was compiled"),
        (_flip_a_bit, "its content is not what was compiled"),
        (_link, "it is not a file"),
        (lambda library: library.chmod(0o777), "others can write it"),
    ],
)
def test_a_library_that_somebody_changed_is_compiled_again(
    own_folder: Path, change: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = NativeBuild(own_folder).libraries()
    sound = before["threads"].read_bytes()
    change(before["threads"])
    with caplog.at_level(logging.WARNING):
        after = NativeBuild(own_folder).libraries()
    assert after.keys() == before.keys() and after["threads"].read_bytes() == sound
    lines = [record.getMessage() for record in caplog.records if record.name == "mint.kernels"]
    assert [str(before["threads"]) in line and reason in line for line in lines] == [True]


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_user_is_not_loaded(own_folder: Path) -> None:
    library = NativeBuild(own_folder).libraries()["threads"]
    inode = library.stat().st_ino
    os.chown(library, 12345, -1)
    assert NativeBuild(own_folder).libraries()["threads"].stat().st_ino != inode
    os.chown(own_folder, 12345, -1)
    with pytest.raises(MissingExtraError, match=r"belongs to user 12345.*not to 0.*XDG_CACHE_HOME"):
        NativeBuild(own_folder).libraries()


@needs_compiler
def test_others_lose_the_right_to_write_into_the_folder(own_folder: Path) -> None:
    own_folder.chmod(0o777)
    NativeBuild(own_folder).libraries()
    assert own_folder.stat().st_mode & 0o777 == 0o755


@needs_compiler
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingExtraError, match="file/native"):
        NativeBuild(tmp_path / "file" / "native").libraries()


def test_without_a_compiler_an_engine_that_need_not_have_them_says_so_and_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_build, "COMPILERS", ("no-such-compiler",))
    write_model(tmp_path / "base", "tied", hidden_size=64, intermediate_size=96, head_dim=32)
    with pytest.raises(MissingExtraError, match="C compiler"):
        TorchEngine(device="cpu", native=tmp_path)
    with caplog.at_level(logging.WARNING):
        engine = TorchEngine(device="cpu", native=NativeBuild(tmp_path, required=False))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "C compiler" in caplog.text
    assert engine.load_base("base", str(tmp_path / "base")).settings["attention"] == "torch"


def test_they_are_kept_where_the_user_s_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert Settings().kernels_dir == Path("/somewhere/mint/native")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert Settings().kernels_dir == Path("~/.cache/mint/native").expanduser()


_STEPS = """
import ctypes, resource, sys
from mint.engine.memory.machine_memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
def step():
    places = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(4 << 20))) for _ in range(20)]
    for place in places:
        libc.memset(place, 1, ctypes.c_size_t(4 << 20))
    for place in places:
        libc.free(place)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_taken_again_without_page_faults() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    faults = {
        mode: int(subprocess.run([sys.executable, "-c", _STEPS, mode], capture_output=True, check=True).stdout)
        for mode in ("keep", "default")
    }
    assert faults["keep"] < 100 < faults["default"]
