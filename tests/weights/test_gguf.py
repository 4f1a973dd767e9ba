"""llama.cpp's own converter reads a gguf-ready export, and what it writes is the policy that mint samples from."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from policies import by_mint, by_torch, step

import mint
from mint.compose.export import export_checkpoint

SOURCE = "llama-cpp-python==0.3.36"
"""Its source distribution carries llama.cpp with the converter and the gguf package."""

CONVERT = """
import runpy, sys
root, folder, target = sys.argv[1:]
sys.path[:0] = [root, root + "/gguf-py"]
from conversion import base
# the converter knows tokenizers by a hash of what they do; that of mint/tiny is not in its list, Qwen's are
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", target, "--outtype", "f16"]
runpy.run_path(root + "/convert_hf_to_gguf.py", run_name="__main__")
"""
READ = """
import sys
import numpy as np
root, source, target = sys.argv[1:]
sys.path[:0] = [root + "/gguf-py"]
from gguf import GGUFReader
reader = GGUFReader(source)
arrays = {tensor.name: np.array(tensor.data).astype(np.float32) for tensor in reader.tensors}
np.savez(target, tie=np.array("output.weight" not in arrays), **arrays)
"""
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
"""llama.cpp's names of a layer's parts, and transformers'."""


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True, timeout=600)


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """llama.cpp's sources, and a folder with what its converter imports besides."""
    folder = tmp_path_factory.mktemp("llama")
    _pip("download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder), SOURCE)
    _pip("install", "--target", str(folder / "site"), "sentencepiece")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        wanted = ("/convert_hf_to_gguf.py", "/conversion/", "/gguf-py/")
        inside = [
            member for member in archive.getmembers() if any(f"llama.cpp{part}" in member.name for part in wanted)
        ]
        archive.extractall(folder, members=inside, filter="data")
    return next(folder.glob("*/vendor/llama.cpp")), folder / "site"


@pytest.mark.slow
@pytest.mark.parametrize("train_unembed", [True, False])
def test_the_converter_of_llama_cpp_writes_the_same_policy(
    tmp_path: Path, llama_cpp: tuple[Path, Path], train_unembed: bool
) -> None:
    root, site = llama_cpp
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(
            base_model="mint/tiny", rank=8, seed=1, train_unembed=train_unembed
        )
        for _ in range(3):
            step(client)
        path = client.save_state("trained").result().path
        ours = by_mint(service, path)
    export_checkpoint(path, output=tmp_path / "ready", format="gguf-ready")
    env = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    gguf, arrays = str(tmp_path / "model.gguf"), str(tmp_path / "arrays.npz")
    for script, source, target in ((CONVERT, str(tmp_path / "ready"), gguf), (READ, gguf, arrays)):
        subprocess.run([sys.executable, "-c", script, str(root), source, target], check=True, timeout=300, env=env)
    found = np.load(arrays)
    assert bool(found["tie"]) == (not train_unembed)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "ready"), dtype=torch.float32
    )
    model.load_state_dict(_as_transformers(found), strict=False)
    np.testing.assert_allclose(by_torch(model), ours, atol=0.02)


def _as_transformers(found: np.lib.npyio.NpzFile) -> dict[str, torch.Tensor]:
    state = {"model.embed_tokens.weight": found["token_embd.weight"], "model.norm.weight": found["output_norm.weight"]}
    state["lm_head.weight"] = found["output.weight" if "output.weight" in found else "token_embd.weight"]
    for name in found.files:
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            state[f"model.layers.{layer}.{NAMES[part]}.weight"] = found[name]
    return {name: torch.from_numpy(array) for name, array in state.items()}
