"""`make release`: builds what a release consists of into dist/, and checks it. Uploads nothing.

Builds the sdist and, from it, the wheel. Checks their metadata and contents. Installs the wheel into a bare environment
and tries it. Writes the bill of materials of a deployment, the notes of the version, and the checksums. Ends with
status 1 at the first check that fails.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MAX_BASE_MB = 80
"""What the files of the base install may take, bytecode included: no large dependency comes in unnoticed."""

SMOKE = """
from pathlib import Path
import mint
from mint.tokenizer import load_tokenizer
tokenizer = load_tokenizer(str(Path(mint.__file__).parent / "models" / "tiny"), "")
ids = tokenizer.apply_chat_template([{"role": "user", "content": "3 + 5 ="}], add_generation_prompt=True)
assert tokenizer.decode(ids).endswith("assistant\\n"), tokenizer.decode(ids)
assert mint.types.ModelInput.from_ints(ids).to_ints() == ids
"""


def main() -> None:
    version = read_version()
    notes = release_notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version)
    url = os.environ.get("REPOSITORY_URL")
    if not url:
        sys.exit("REPOSITORY_URL is not set. The package's links lead there: make release REPOSITORY_URL=https://…")
    DIST.mkdir(exist_ok=True)
    for old in DIST.iterdir():
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    [wheel], [sdist] = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    check_wheel(wheel, version, url)
    check_sdist(sdist)
    try_wheel(wheel, version)
    bill = DIST / f"mint-{version}.cdx.json"
    lock = ROOT / "constraints" / "deployment.txt"
    run(sys.executable, "-m", "cyclonedx_py", "requirements", str(lock), "--output-file", str(bill))
    (DIST / "release-notes.md").write_text(notes, "utf-8")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("\n".join(["", f"dist/ holds mint {version}. Nothing was uploaded.", *sums]))
    if "unreleased" in notes.splitlines()[0]:
        print("Before you tag it: CHANGELOG.md calls this version unreleased. Write its date there.")


def read_version() -> str:
    """The version of `pyproject.toml`, which that of the package must equal."""
    [version] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if f'VERSION = "{version}"' not in (ROOT / "src/mint/version.py").read_text():
        sys.exit(f"src/mint/version.py has another version than pyproject.toml ({version})")
    return version


def release_notes(changelog: str, version: str) -> str:
    """The section of a version, from its heading to the next version's."""
    found = re.search(rf"^## {re.escape(version)}\b.*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"CHANGELOG.md has no section {version}")
    return found[0].strip() + "\n"


def check_wheel(wheel: Path, version: str, url: str) -> None:
    """The wheel holds every file of src/mint that git knows, nothing else, and metadata that a package page needs."""
    known = subprocess.run(
        ["git", "ls-files", "-z", "src/mint"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    expected = {name.removeprefix("src/") for name in known if name}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        metadata = message_from_bytes(archive.read(f"mint-{version}.dist-info/METADATA"))
    held = {name for name in names if not name.startswith(f"mint-{version}.dist-info/")}
    require(held == expected, f"the wheel lacks {sorted(expected - held)} and adds {sorted(held - expected)}")
    require("mint/py.typed" in held, "the wheel has no py.typed")
    require(metadata["Version"] == version, f"the wheel is of version {metadata['Version']}")
    require(any(url in line for line in metadata.get_all("Project-URL", [])), "the wheel names no address")
    relative = re.findall(r"\]\((?![a-z]+:|#)([^)\s]+)\)", metadata.get_payload())
    require(not relative, f"the README of the wheel has relative links: {relative}")


def check_sdist(sdist: Path) -> None:
    """The sdist holds what a build and the tests need."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "scripts/package_metadata.py"}
    require(wanted <= names, f"the sdist lacks {sorted(wanted - names)}")


def try_wheel(wheel: Path, version: str) -> None:
    """Installs the wheel alone into a new environment, where the SDK and its tokenizer work; then the command line."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        run(sys.executable, "-m", "venv", folder)
        run(str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints/cpu.txt"), str(wheel))
        run(str(python), "-I", "-c", SMOKE)
        told = subprocess.run([python.with_name("mint"), "--version"], capture_output=True, text=True, check=True)
        require(told.stdout == f"mint {version}\n", f"mint --version says {told.stdout!r}")
        size_mb = installed_mb(Path(folder))
        print(f"the base install takes {size_mb:.0f} MB")
        require(size_mb <= MAX_BASE_MB, f"the base install takes {size_mb:.0f} MB, more than {MAX_BASE_MB}")
        run(str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints/cpu.txt"), f"{wheel}[cli]")
        run(str(python.with_name("mint")), "--help", quiet=True)


def installed_mb(environment: Path) -> float:
    """The size of the files of an environment's packages, without pip and setuptools, in MB (10^6 bytes)."""
    [packages] = environment.glob("lib/python*/site-packages")
    tools = ("pip", "setuptools", "_distutils_hack", "pkg_resources")
    files = (path for path in packages.rglob("*") if not path.relative_to(packages).parts[0].startswith(tools))
    return sum(path.lstat().st_size for path in files if path.is_file()) / 1e6


def require(fulfilled: bool, fault: str) -> None:
    if not fulfilled:
        sys.exit(f"make release: {fault}")


def run(*command: str, quiet: bool = False) -> None:
    ended = subprocess.run(command, stdout=subprocess.DEVNULL if quiet else None, check=False)
    require(ended.returncode == 0, f"{' '.join(command[:6])} ended with status {ended.returncode}")


if __name__ == "__main__":
    main()
