"""NF4 against bitsandbytes and PEFT. Needs a package index, and downloads 60 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, random_data, take_gradient, train
from small_models import write_model

from mint.engine.quantized.number_formats import quantize
from mint.engine.torch_engine import TorchEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PACKAGES = ("bitsandbytes==0.50.2", "accelerate==1.15.0", "psutil")

PEER = """
import sys
sys.path.append(sys.argv[1])
import bitsandbytes.functional as F
import numpy as np, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

given = np.load(sys.argv[3])
matrix = torch.from_numpy(given["matrix"])
codes, state = F.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=False)
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
base = AutoModelForCausalLM.from_pretrained(sys.argv[2], quantization_config=nf4, dtype=torch.float32)
names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=32, target_modules=names))
model.train()  # in eval mode, bitsandbytes rounds to bfloat16 on a CPU
found = {"matrix": F.dequantize_4bit(codes, state).numpy()}
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.from_numpy(given[name.removeprefix("base_model.model.").replace(".default", "")]))
tokens, targets = torch.from_numpy(given["tokens"]), torch.from_numpy(given["targets"])
logprobs = model(tokens[None]).logits[0].float().log_softmax(-1)[torch.arange(len(targets)), targets]
(-(logprobs * torch.from_numpy(given["weights"])).sum()).backward()
found["logprobs"] = logprobs.detach().numpy()
for name, parameter in model.named_parameters():
    if "lora_" in name:
        found[name.removeprefix("base_model.model.").replace(".default", "")] = parameter.grad.numpy()
np.savez(sys.argv[4], **found)
"""


def test_nf4_has_the_numbers_of_bitsandbytes_and_trains_as_peft_does(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "model"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), *PACKAGES]
    subprocess.run(install, check=True, timeout=600)
    write_model(folder, "untied", hidden_size=128, intermediate_size=192, head_dim=32, num_attention_heads=4)
    engine = TorchEngine(threads=2, device="cpu", quantize="nf4")
    engine.load_base("base", str(folder))
    lora = type(LORA)(rank=4, seed=7, train_attn=True, train_mlp=True, train_unembed=False)
    engine.create_model("m", "base", lora)
    train(engine, "m")
    data = random_data(3, count=1)[0]
    matrix = np.random.default_rng(0).normal(size=(320, 576)).astype(np.float32)
    arrays = {"matrix": matrix, "tokens": data.tokens, "targets": data.targets, "weights": data.weights}
    np.savez(tmp_path / "given.npz", **arrays, **engine.read_state("m").weights)
    ours = engine.forward_backward("m", [data], CROSS_ENTROPY).logprobs[0]
    gradient = take_gradient(engine, "m")
    places = [str(site), str(folder), str(tmp_path / "given.npz"), str(tmp_path / "found.npz")]
    peer = subprocess.run([sys.executable, "-c", PEER, *places], capture_output=True, text=True, check=False)
    assert peer.returncode == 0, peer.stderr[-3000:]
    theirs = np.load(tmp_path / "found.npz")

    own = quantize(torch.from_numpy(matrix), "nf4")
    assert own is not None and np.array_equal(own.widen().numpy(), theirs["matrix"])
    assert np.abs(ours - theirs["logprobs"]).max() <= 1e-4
    for name, expected in gradient.items():
        assert np.abs(theirs[name] - expected).max() <= 1e-3 * max(np.abs(expected).max(), 1e-3), name
