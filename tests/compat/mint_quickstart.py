"""Every call that MinT's public scripts make, in the order of its quickstart: SFT, RL, saved states, chat.

It stands for those scripts where they cannot be fetched; `test_mint_files.py` compares the calls.

`python mint_quickstart.py` in a folder whose `.env` has MINT_BASE_URL and MINT_API_KEY; prints one JSON line.
"""

from __future__ import annotations

import json
import os

from dotenv import load_dotenv

import mint
from mint import types

load_dotenv(".env")  # after the import, as MinT's scripts do

BASE_MODEL = os.environ.get("MINT_BASE_MODEL", "mint/tiny")
RANK = int(os.environ.get("MINT_LORA_RANK", "16"))


def process_sft_example(example: dict[str, str], tokenizer) -> types.Datum:
    prompt = tokenizer.encode(f"Question: {example['question']}\nAnswer:", add_special_tokens=True)
    completion = [*tokenizer.encode(f" {example['answer']}", add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + completion
    weights = [0] * (len(prompt) - 1) + [1] * len(completion)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def sft(training_client, tokenizer) -> list[float]:
    examples = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 9)]
    data = [process_sft_example(example, tokenizer) for example in examples]
    losses = []
    for _ in range(6):
        forwarded = training_client.forward_backward(data, loss_fn="cross_entropy")
        training_client.optim_step(types.AdamParams(learning_rate=2e-3)).result()
        losses.append(forwarded.result().metrics["loss:sum"])
    return losses


def rl(service_client, training_client, tokenizer) -> list[float]:
    prompt = tokenizer.encode("Question: Say a number.\nAnswer:")
    means = []
    for step in range(4):
        sampling_client = training_client.save_weights_and_get_sampling_client(name=f"rl-step-{step}")
        response = sampling_client.sample(
            prompt=types.ModelInput.from_ints(tokens=prompt),
            num_samples=8,
            sampling_params=types.SamplingParams(
                max_tokens=8, temperature=1.0, seed=step, stop=["\n"], stop_token_ids=[tokenizer.eos_token_id]
            ),
        ).result()
        rewards = [float("1" in tokenizer.decode(row.tokens)) for row in response.sequences]
        means.append(sum(rewards) / len(rewards))
        if len(set(rewards)) == 1:
            continue  # no signal in this group
        data = []
        for row, reward in zip(response.sequences, rewards, strict=True):
            pad = [0.0] * (len(prompt) - 1)
            tokens = prompt + list(row.tokens)
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "weights": pad + [1.0] * len(row.tokens),
                        "logprobs": pad + list(row.logprobs),
                        "advantages": pad + [reward - means[-1]] * len(row.tokens),
                    },
                )
            )
        training_client.forward_backward(data, loss_fn="importance_sampling").result()
        training_client.optim_step(types.AdamParams(learning_rate=2e-3)).result()
    return means


def chat(sampling_client, tokenizer) -> int:
    """The number of tokens of a reply to a message in the model's chat template."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True))
    assert len(prompt) > len(tokenizer.encode("Why is the sky blue?"))
    response = sampling_client.sample(
        prompt=types.ModelInput.from_ints(tokens=prompt),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=[tokenizer.eos_token_id]),
    ).result()
    return len(response.sequences[0].tokens)


def main() -> None:
    base_url = os.environ.get("MINT_BASE_URL")
    service_client = mint.ServiceClient(base_url=base_url) if base_url else mint.ServiceClient()
    names = [row.model_name for row in service_client.get_server_capabilities().supported_models]
    assert BASE_MODEL in names, names

    def new_client():
        return service_client.create_lora_training_client(
            base_model=BASE_MODEL, rank=RANK, train_mlp=True, train_attn=True, train_unembed=True
        )

    training_client = new_client()
    tokenizer = training_client.get_tokenizer()
    assert tokenizer.vocab_size > 0
    losses = sft(training_client, tokenizer)
    sft_path = training_client.save_state(name="sft-final").result().path
    resumed = new_client()
    resumed.load_state(sft_path).result()
    means = rl(service_client, resumed, tokenizer)
    path = resumed.save_weights_for_sampler(name="rl-final").result().path
    tokens = chat(service_client.create_sampling_client(model_path=path), tokenizer)
    again = service_client.create_training_client_from_state_with_optimizer(sft_path)
    losses += sft(again, tokenizer)
    print(json.dumps({"losses": losses, "rewards": means, "sft": sft_path, "rl": path, "tokens": tokens}))


if __name__ == "__main__":
    main()
