"""llama.cpp's own converters, from its sources in the registry: a model folder, or an adapter, to a GGUF file."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare.environments import LLAMA_REQUIREMENTS, PeerEnvironment, run
from tests.compat.sdk_environments import peers_home

SOURCE = LLAMA_REQUIREMENTS[0]
"""Its source distribution carries llama.cpp with the converters and the gguf package."""

RUN = """
import runpy, sys
root, script, *sys.argv[1:] = sys.argv[1:]
sys.path[:0] = [root, root + "/gguf-py"]
from conversion import base
# the converter knows tokenizers by a hash of what they do; that of mint/tiny is not in its list, Qwen's are
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
runpy.run_path(f"{root}/{script}", run_name="__main__")
"""


def llama_cpp_python() -> Path:
    """The interpreter of an environment with llama.cpp, compiled here: ten minutes of CPU time, once."""
    return PeerEnvironment(peers_home() / "llama", None, LLAMA_REQUIREMENTS).ensure(print)


@dataclass(frozen=True)
class Converters:
    """llama.cpp's sources, and a folder with what its converters import besides."""

    root: Path
    site: Path

    def model(self, folder: Path, output: Path, *, dtype: str) -> Path:
        """A model folder as a GGUF file; `dtype` is f16 or f32."""
        return self._convert("convert_hf_to_gguf.py", output, str(folder), "--outtype", dtype)

    def lora(self, folder: Path, base: Path, output: Path) -> Path:
        """A PEFT folder as a GGUF file in float32; `base` is the folder of its base model."""
        return self._convert("convert_lora_to_gguf.py", output, str(folder), "--base", str(base), "--outtype", "f32")

    def _convert(self, script: str, output: Path, *arguments: str) -> Path:
        env = {"PYTHONPATH": str(self.site), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", RUN, str(self.root), script, *arguments, "--outfile", str(output)]
        done = subprocess.run(command, timeout=300, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and output.exists(), done.stderr[-3000:]
        return output


def get_converters(folder: Path) -> Converters:
    """Downloads the sources into `folder`."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    run([*pip, "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder), SOURCE])
    run([*pip, "install", "--target", str(folder / "site"), "sentencepiece"])
    wanted = ("/convert_hf_to_gguf.py", "/convert_lora_to_gguf.py", "/conversion/", "/gguf-py/")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        inside = [
            member for member in archive.getmembers() if any(f"llama.cpp{part}" in member.name for part in wanted)
        ]
        archive.extractall(folder, members=inside, filter="data")
    return Converters(next(folder.glob("*/vendor/llama.cpp")), folder / "site")
