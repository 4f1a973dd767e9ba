"""A client of a server: train there, sample over the network, and take the weights home in PEFT's format.

    mint serve &
    MINT_BASE_URL=http://127.0.0.1:8500 python examples/05_server_and_export.py [FOLDER]

A server that listens on other addresses needs a key: set MINT_API_KEY. Without MINT_BASE_URL the same program runs the
service in this process; no line of it changes.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import mint
from mint import types
from mint.compose.export import export_checkpoint

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "adapter"

client = mint.ServiceClient()
print("server:", os.environ.get("MINT_BASE_URL", "in this process"))
print("models:", [model.model_name for model in client.get_server_capabilities().supported_models])

# Two steps of training; the requests go over the network, the arithmetic happens on the server.
trainer = client.create_lora_training_client(base_model="mint/tiny", rank=8, seed=0)
tokenizer = trainer.get_tokenizer()
tokens = tokenizer.encode("Q: What is 6 + 1?\nA: seven\n")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
)
for _ in range(2):
    trainer.forward_backward([datum], loss_fn="cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()

# A checkpoint is a name on the server. Any client with access can sample from it or train on.
checkpoint = trainer.save_weights_for_sampler(name="example").result().path
assert checkpoint is not None  # a save with a name always has a path
print("checkpoint:", checkpoint)
sampler = client.create_sampling_client(model_path=checkpoint)
sampled = sampler.sample(
    prompt=types.ModelInput.from_ints(tokenizer.encode("Q: What is 6 + 1?\nA:")),
    num_samples=2,
    sampling_params=types.SamplingParams(max_tokens=8, temperature=1.0, seed=0),
).result()
for sequence in sampled.sequences:
    print(f"sample: {tokenizer.decode(sequence.tokens)!r}   mean logprob {np.mean(sequence.logprobs):.2f}")

# The same as `mint export CHECKPOINT --format peft --output FOLDER`.
export_checkpoint(checkpoint, output=folder, format="peft")
print("exported:", sorted(path.name for path in folder.iterdir()))
