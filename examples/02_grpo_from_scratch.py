"""GRPO in one file over the SDK alone, with nothing of `mint.rl`. Copy it and change it.

    python examples/02_grpo_from_scratch.py

Each step samples a group of answers for every prompt, scores them with a reward of your own, centres the rewards within
each group, and takes one importance-sampling step. `run_grpo` (the next example) does the same, and adds held-out
evaluation, checkpoints, a log of the run, findings, and tolerance of failing graders.
"""

import random
from collections.abc import Sequence

import numpy as np

import mint
from mint import types

STEPS, BATCH_SIZE, GROUP_SIZE = 12, 16, 8
MAX_TOKENS, LEARNING_RATE, SEED = 8, 3e-3, 0


def draw_problem(rng: random.Random) -> tuple[str, str]:
    """A question as the bundled model knows it, and its answer."""
    left, right = rng.randrange(100), rng.randrange(100)
    return f"Q: What is {left} + {right}?\nA:", str(left + right)


def reward(response: str, answer: str) -> float:
    """1 for the answer and nothing else. Any function of your own will do."""
    return float(response.strip() == answer)


def make_datum(prompt: Sequence[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Position t predicts token t + 1. The prompt has weight, logprob and advantage 0."""
    tokens, sampled = [*prompt, *sequence.tokens], len(sequence.tokens)
    prefix = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [*prefix, *[1.0] * sampled],
            "logprobs": [*prefix, *sequence.logprobs],
            "advantages": [*prefix, *[advantage] * sampled],
        },
    )


rng = random.Random(SEED)
client = mint.ServiceClient()
trainer = client.create_lora_training_client(base_model="mint/tiny", rank=16, seed=SEED)
tokenizer = trainer.get_tokenizer()
adam = types.AdamParams(learning_rate=LEARNING_RATE)

for step in range(1, STEPS + 1):
    # 1. Sample from the current weights, all prompts at once.
    sampler = trainer.save_weights_and_get_sampling_client(name=f"step-{step}")
    problems = [draw_problem(rng) for _ in range(BATCH_SIZE)]
    prompts = [tokenizer.encode(question) for question, _ in problems]
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt),
            num_samples=GROUP_SIZE,
            sampling_params=types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=1000 * step + place),
        )
        for place, prompt in enumerate(prompts)
    ]

    # 2. Score each group and centre its rewards: an answer above the mean of its group becomes more likely.
    datums, all_rewards = [], []
    for (_, answer), prompt, future in zip(problems, prompts, futures, strict=True):
        sequences = future.result().sequences
        texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
        rewards_G = np.array([reward(text, answer) for text in texts])
        all_rewards.append(rewards_G)
        if rewards_G.std() > 0:  # a group of equal rewards has no signal
            advantages_G = (rewards_G - rewards_G.mean()).tolist()
            datums += [make_datum(prompt, *pair) for pair in zip(sequences, advantages_G, strict=True)]

    # 3. One step. Both requests are sent before either result is awaited.
    if datums:
        passed = trainer.forward_backward(datums, loss_fn="importance_sampling")
        stepped = trainer.optim_step(adam)
        passed.result()
        stepped.result()
    print(f"step {step:2d}   mean reward {np.mean(all_rewards):.3f}   {len(datums)} samples trained")
