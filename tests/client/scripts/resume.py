"""A loop that goes on where an earlier one was cut off: `MINT_RESUME_PATH` names its last state."""

import os

from dotenv import load_dotenv

import mint
from mint import types

load_dotenv()
STEPS = 6
service_client = mint.ServiceClient()
resume_path = os.environ.get("MINT_RESUME_PATH")
if resume_path:
    training_client = service_client.create_training_client_from_state_with_optimizer(resume_path)
    first = int(resume_path.rsplit("-", 1)[1]) + 1
else:
    training_client = service_client.create_lora_training_client(base_model="mint/tiny", rank=4, seed=1)
    first = 0
for step in range(first, STEPS):
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2 + step]), loss_fn_inputs={"target_tokens": [2 + step, 3]}
    )
    training_client.forward_backward([datum], "cross_entropy")
    stepped = training_client.optim_step(types.AdamParams(learning_rate=1e-3))
    saved = training_client.save_state(name=f"step-{step}").result().path
    print(step, stepped.result().state_digest, saved, flush=True)
