"""Continues prompts with vLLM and prints the answers: `python run_vllm.py SPEC`, in vLLM's own environment.

SPEC is a JSON file: `model`, a folder; `lora`, a PEFT folder, or null; its `rank`; `prompts`, token ids; `new_tokens`.
The last line printed is JSON: `version`, and `answers`, for each prompt the tokens and their logprobs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm  # ty: ignore[unresolved-import]
from vllm.lora.request import LoRARequest  # ty: ignore[unresolved-import]


def main() -> None:
    """Answers the spec."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    folder: str | None = spec["lora"]
    engine = vllm.LLM(
        model=spec["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        **({"enable_lora": True, "max_lora_rank": spec["rank"]} if folder else {}),
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=spec["new_tokens"], logprobs=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in spec["prompts"]]
    lora = LoRARequest("trained", 1, folder) if folder else None
    answers = []
    for request in engine.generate(prompts, params, lora_request=lora):
        own = request.outputs[0]
        logprobs = [at[token].logprob for token, at in zip(own.token_ids, own.logprobs, strict=True)]
        answers.append((list(own.token_ids), logprobs))
    print(json.dumps({"version": vllm.__version__, "answers": answers}))


if __name__ == "__main__":
    main()
