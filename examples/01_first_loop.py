"""Supervised fine-tuning by hand: the model learns four facts from examples.

    python examples/01_first_loop.py

Everything runs in this process, on the bundled model. The loop has two requests: `forward_backward` adds up the
gradient of a loss, `optim_step` changes the weights.
"""

import mint
from mint import types

FACTS = {
    "Q: What is 3 + 5?\nA:": " eight\n",
    "Q: What is 2 + 2?\nA:": " four\n",
    "Q: What is 9 - 8?\nA:": " one\n",
    "Q: What is 4 + 3?\nA:": " seven\n",
}
STEPS = 20

client = mint.ServiceClient()
trainer = client.create_lora_training_client(base_model="mint/tiny", rank=16, seed=0)
tokenizer = trainer.get_tokenizer()


def make_datum(question: str, answer: str) -> types.Datum:
    """Position t of the input predicts token t + 1. Only the tokens of the answer have weight."""
    prompt, reply = tokenizer.encode(question), tokenizer.encode(answer)
    tokens = prompt + reply
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply),
        },
    )


def answers() -> list[str]:
    """What the model answers now, taking the likeliest token each time."""
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=["\n"])
    futures = [
        sampler.sample(types.ModelInput.from_ints(tokenizer.encode(question)), num_samples=1, sampling_params=params)
        for question in FACTS
    ]
    return [tokenizer.decode(future.result().sequences[0].tokens).strip() for future in futures]


data = [make_datum(question, answer) for question, answer in FACTS.items()]
trained_tokens = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data)

print("before:", answers())
for step in range(1, STEPS + 1):
    # Send both requests before waiting for either: the server runs them in order, without a pause between them.
    passed = trainer.forward_backward(data, loss_fn="cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=2e-3))
    loss = passed.result().metrics["loss:sum"] / trained_tokens
    stepped.result()
    if step % 5 == 0:
        print(f"step {step:2d}   loss per token {loss:.3f}")
print("after:", answers())
