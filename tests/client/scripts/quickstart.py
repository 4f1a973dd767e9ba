"""From supervised steps to reinforcement learning, as MinT's quickstart goes; the settings are in a `.env` file."""

import os
import random

from dotenv import load_dotenv

import mint
from mint import types

load_dotenv()
BASE_MODEL = os.environ.get("MINT_BASE_MODEL", "Qwen/Qwen3-0.6B")
RANK = int(os.environ.get("MINT_LORA_RANK", "16"))

service_client = mint.ServiceClient()
training_client = service_client.create_lora_training_client(
    base_model=BASE_MODEL, rank=RANK, seed=1, train_mlp=True, train_attn=True, train_unembed=True
)
tokenizer = training_client.get_tokenizer()


def example(question, answer):
    prompt = tokenizer.encode(question, add_special_tokens=True)
    completion = tokenizer.encode(answer, add_special_tokens=False)
    tokens = prompt + completion
    weights = [0] * (len(prompt) - 1) + [1] * len(completion)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


for _step in range(2):
    batch = [example(f"Q: {a} * {b}\nA:", f" {a * b}\n") for a, b in [(3, 4), (5, 6)]]
    forward_backward = training_client.forward_backward(batch, loss_fn="cross_entropy")
    training_client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print("SFT loss", forward_backward.result().metrics["loss:sum"])
sft_path = training_client.save_state(name="sft").result().path
print("SFT saved", sft_path)

rl_client = service_client.create_training_client_from_state(sft_path)
trained = 0
for step in range(2):
    sampling_client = rl_client.save_weights_and_get_sampling_client(name=f"rl-{step}")
    prompt = tokenizer.encode("Q: 3 * 4\nA:")
    result = sampling_client.sample(
        prompt=types.ModelInput.from_ints(prompt),
        num_samples=4,
        sampling_params=types.SamplingParams(
            max_tokens=4, temperature=1.0, stop_token_ids=tokenizer.encode("\n", add_special_tokens=False)
        ),
    ).result()
    rewards = [random.Random(str(sequence.tokens)).random() for sequence in result.sequences]
    mean = sum(rewards) / len(rewards)
    datums = []
    for sequence, reward in zip(result.sequences, rewards, strict=True):
        full = prompt + sequence.tokens
        before = [0.0] * (len(prompt) - 1)
        datums.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens=full[:-1]),
                loss_fn_inputs={
                    "target_tokens": full[1:],
                    "weights": before + [1.0] * len(sequence.tokens),
                    "logprobs": before + sequence.logprobs,
                    "advantages": before + [reward - mean] * len(sequence.tokens),
                },
            )
        )
    try:
        rl_client.forward_backward(datums, loss_fn="importance_sampling").result()
        rl_client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    except (mint.ConflictError, mint.BadRequestError) as error:
        raise SystemExit(f"refused: {error.category} {error}") from error
    trained += len(datums)
path = rl_client.save_weights_for_sampler(name="rl-final").result().path
answer = service_client.create_sampling_client(model_path=path).sample(
    types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=2)
)
print("RL datums", trained, "sampled", len(answer.result().sequences[0].tokens))
