"""Continues prompts with llama.cpp and prints the answers: `python run_llama_cpp.py SPEC`, in its own environment.

SPEC is a JSON file: `model`, a GGUF file; `lora`, a GGUF file with a lora, or null; `prompts`, token ids; `new_tokens`.
The last line printed is JSON: `answers`, for each prompt the tokens and their logprobs.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp as llama  # ty: ignore[unresolved-import]
import numpy as np

POSITIONS = 256
FLOAT32 = 0
"""ggml's number of the type."""


class Model:
    """A model with its lora, and a context for one sequence."""

    def __init__(self, path: str, lora: str | None) -> None:
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = POSITIONS
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.type_k = parameters.type_v = FLOAT32
        parameters.flash_attn_type = 0  # off: on a CPU it computes in float16
        self._context = llama.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot open {path}")
        if lora is not None:
            adapter = llama.llama_adapter_lora_init(self._model, lora.encode())
            if not adapter:
                raise SystemExit(f"llama.cpp cannot load {lora}")
            adapters = (llama.llama_adapter_lora_p_ctypes * 1)(adapter)
            llama.llama_set_adapters_lora(self._context, adapters, 1, (ctypes.c_float * 1)(1.0))
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def continuation(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """The most probable tokens, one after the other, and their logprobs."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        tokens: list[int] = []
        logprobs: list[float] = []
        given = prompt
        for _ in range(count):
            logits = self._last_logits(given).astype(np.float64)
            token = int(logits.argmax())
            tokens.append(token)
            logprobs.append(float(logits[token] - np.logaddexp.reduce(logits)))
            given = [token]
        return tokens, logprobs

    def _last_logits(self, tokens: list[int]) -> np.ndarray:
        array = (llama.llama_token * len(tokens))(*tokens)
        if llama.llama_decode(self._context, llama.llama_batch_get_one(array, len(tokens))) != 0:
            raise SystemExit("llama.cpp could not decode")
        found = llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, (self._vocabulary,)).copy()


def main() -> None:
    """Answers the spec."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    llama.llama_backend_init()
    model = Model(spec["model"], spec["lora"])
    answers = [model.continuation(prompt, spec["new_tokens"]) for prompt in spec["prompts"]]
    print(json.dumps({"answers": answers}))


if __name__ == "__main__":
    main()
