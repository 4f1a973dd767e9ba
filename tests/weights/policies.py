"""What a policy says of a text: by mint, and by PEFT and transformers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

import mint
from mint import types
from mint.models.registry import BUNDLED

TINY = BUNDLED["mint/tiny"]
TOKENS = np.random.default_rng(1).integers(3, 1000, 24).tolist()


def datum(tokens: list[int] = TOKENS) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def step(client: mint.TrainingClient, tokens: list[int] = TOKENS) -> str:
    """One step of training; the digest of the state that it led to."""
    client.forward_backward([datum(tokens)], "cross_entropy")
    return client.optim_step(types.AdamParams(learning_rate=5e-3)).result().state_digest or ""


def by_mint(service: mint.ServiceClient, path: str, tokens: list[int] = TOKENS) -> np.ndarray:
    sampler = service.create_sampling_client(model_path=path)
    return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:])


def by_torch(model: torch.nn.Module, tokens: list[int] = TOKENS) -> np.ndarray:
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens[:-1]])).logits[0].double()
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).numpy()


def load(folder: Path = TINY) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
