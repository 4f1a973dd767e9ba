"""Virtual environments with other people's SDKs, made from the registry once and kept: `~/.mint/peers`.

torch, which only some cases need, is installed once; every environment sees it through a `.pth` file.
`MINT_COMPAT_HOME` names another folder for all of them. Knows nothing of what is run there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.compare.environments import STAMP_FILE, PeerEnvironment, run

VERSIONS = ("0.6.0", "0.18.0", "0.22.0", "0.24.1", "0.25.0", "0.30.4", "0.38.0")
"""Of the public tinker SDK: oldest and newest, MinT's pin (0.22), and where the protocol changed."""

UNDECLARED = {"0.18.0": ("orjson",)}
"""What a version imports without declaring it."""

COOKBOOK = "tinker-cookbook==0.6.1"
COOKBOOK_REQUIREMENTS = (
    "tinker==0.38.0",
    "aiohttp>=3.9",
    "blobfile>=3",
    "chz>=0.4",
    "cloudpickle>=3",
    "datasets>=2.14",
    *("marimo>=0.23.8", "matplotlib>=3.7"),
    "math-verify",
    "pillow>=10",
    "pylatexenc",
    "pyrage>=1.4",
    "rich>=13",
    "safetensors>=0.4",
    "sympy",
    "tabulate",
    "termcolor>=2",
    "textarena>=0.7.4",
    "tiktoken>=0.12",
    "transformers>=5.17,<6",
)
"""All that it, its tutorials, and its recipes `math_rl` and `multiplayer_rl` declare but tml-renderers, which only its
renderers for Thinking Machines' own models import; and tabulate, which one of its checks needs."""

TOOLKIT = "mindlab-toolkit==0.2.0"
"""MinT's own package over tinker 0.22.0."""


MINT_FILES_REQUIREMENTS = (
    TOOLKIT,
    "transformers>=4.50,<5",  # preference_chat.py expects a list of `apply_chat_template`, which is a dictionary in 5
    *("numpy>=2", "jinja2>=3.1.6", "pyarrow>=23.0.1", "datasets>=3.0", "orjson>=3.10", "six>=1.17", "tqdm>=4.66"),
    *("cn2an>=0.5.23", "jieba>=0.42.1", "nltk>=3.9", "opencc-python-reimplemented>=0.1.7", "pypinyin>=0.55.0"),
    *("python-Levenshtein>=0.27.0", "rouge-chinese>=1.0.3", "timeout-decorator>=0.5.0"),
)
"""What MinT's public scripts and experiments ask for, but for the version of tinker, which is the toolkit's."""

CLIENTS: dict[str, tuple[str, ...]] = {
    "openai 3": ("openai==3.54.0",),
    "openai 2": ("openai==2.54.0",),
    "litellm": ("litellm==1.106.2", "mcp"),  # mcp: not declared, and imported where tools are used
    "instructor": ("instructor==1.17.0",),
    "langchain": ("langchain==1.4.7", "langchain-openai==1.7.3"),
    "lm-eval": ("lm_eval[api]==0.4.13", "transformers>=5.17,<6"),
    "inspect-ai": ("inspect-ai==0.3.285", "openai>=3,<4"),
    "verifiers": ("verifiers==0.4.0", "uv"),  # uv: with it vf-eval starts its agents
    "openai-agents": ("openai-agents==0.24.0", "openai==3.54.0"),
    "anthropic": ("anthropic==2.12.0",),
}
"""Clients of OpenAI's and Anthropic's protocols, each in an environment of its own."""


def peers_home() -> Path:
    """Where environments are kept between runs."""
    return Path(os.environ.get("MINT_COMPAT_HOME", "~/.mint/peers")).expanduser()


@dataclass(frozen=True)
class SdkEnvironment:
    """A virtual environment in `folder` that holds `requirements` (and, without what they ask for in turn,
    `without_dependencies`)."""

    folder: Path
    requirements: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def ensure(self, torch_python: Path | None = None) -> Path:
        """Installs what is missing, and returns the interpreter; torch, if it is wanted, comes from the environment of
        `torch_python`."""
        wanted = [*self.requirements, *self.without_dependencies, *([str(torch_python)] if torch_python else [])]
        stamp = self.folder / STAMP_FILE
        if stamp.exists() and json.loads(stamp.read_text()) == wanted:
            return self.python
        if self.folder.exists():
            shutil.rmtree(self.folder)
        run([sys.executable, "-m", "venv", str(self.folder)])
        if torch_python is not None:
            site = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
            (self.folder / site / "shared-torch.pth").write_text(f"{torch_python.parent.parent / site}\n")
        self._install(self.requirements)
        if self.without_dependencies:
            self._install(("--no-deps", *self.without_dependencies))
        stamp.write_text(json.dumps(wanted))
        return self.python

    def _install(self, what: Sequence[str]) -> None:
        run([str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what])


def torch_python() -> Path:
    """The interpreter of the environment that has torch, the same build as here."""
    environment = PeerEnvironment(peers_home() / "torch", torch_version=torch.__version__, requirements=("numpy>=2",))
    return environment.ensure(lambda _text: None)


def sdk_python(version: str) -> Path:
    """The interpreter of an environment with one version of the public tinker SDK."""
    requirements = (f"tinker=={version}", "numpy>=2", *UNDECLARED.get(version, ()))
    return SdkEnvironment(peers_home() / f"tinker-{version}", requirements).ensure(torch_python())


def cookbook_python() -> Path:
    """The interpreter of an environment with the public tinker-cookbook."""
    environment = SdkEnvironment(peers_home() / "tinker-cookbook", COOKBOOK_REQUIREMENTS, (COOKBOOK,))
    return environment.ensure(torch_python())


def cookbook_source() -> Path:
    """The folder of the cookbook's source distribution, which has the tutorials: the installed package has not."""
    folder = peers_home() / f"{COOKBOOK.replace('==', '-')}-source"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        download = ("download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(partial), COOKBOOK)
        run([str(cookbook_python()), "-m", "pip", "--disable-pip-version-check", *download])
        [archive] = partial.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(partial, filter="data")
        [unpacked] = (path for path in partial.iterdir() if path.is_dir())
        unpacked.rename(folder)
        shutil.rmtree(partial)
    return folder


def toolkit_python() -> Path:
    """The interpreter of an environment with MinT's own package."""
    requirements = (TOOLKIT, "numpy>=2", "transformers>=5.17,<6")
    return SdkEnvironment(peers_home() / "mindlab-toolkit", requirements).ensure(torch_python())


def mint_files_python() -> Path:
    """The interpreter of an environment for MinT's own public files."""
    return SdkEnvironment(peers_home() / "mint-files", MINT_FILES_REQUIREMENTS).ensure(torch_python())


def client_python(name: str) -> Path:
    """The interpreter of an environment with one of `CLIENTS`."""
    return SdkEnvironment(peers_home() / name.replace(" ", "-"), CLIENTS[name]).ensure()
