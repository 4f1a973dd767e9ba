prompt_tokens = tokenizer.encode("Q: What is 3 + 5?\nA:")
result = sampling_client.sample(
    prompt=types.ModelInput.from_ints(tokens=prompt_tokens),
    num_samples=8,  # Sample 8 responses per prompt
    sampling_params=types.SamplingParams(
        max_tokens=16,
        temperature=0.8,  # Exploration; higher = more diversity
        stop_token_ids=[tokenizer.eos_token_id],
    ),
).result()

for seq in result.sequences:
    response_text = tokenizer.decode(seq.tokens)
    logprobs = seq.logprobs or [0.0] * len(seq.tokens)
