"""The training half of the matrix: passes, losses, the loop of each, optimizer, split requests, saving and loading.

Run inside a tinker SDK's own environment: imports nothing of mint.
"""

from __future__ import annotations

import asyncio
from typing import Any

import data as given
import numpy as np
from capability import Lab, Refused, case, must_refuse
from data import TOKENS, close, logprobs_of, loss_of, plain_datum, policy_datum, sft_datum

LEARNING_RATE = 5e-3


def step(lab: Lab, trainer: Any, datums: list[Any], loss: str = "cross_entropy", **config: float) -> Any:
    """One pass and one optimizer step, both submitted before either is awaited."""
    passed = trainer.forward_backward(datums, loss, config or None)
    stepped = trainer.optim_step(lab.types.AdamParams(learning_rate=LEARNING_RATE))
    output = passed.result()
    stepped.result()
    return output


@case("Training", "create_lora_training_client, get_info")
def create(lab: Lab) -> str:
    trainer = lab.trainer(rank=4)
    info = trainer.get_info()
    assert info.model_data.model_name == lab.base_model, info
    assert info.is_lora in (True, None) and info.lora_rank in (4, None), info
    assert trainer.model_id == info.model_id, (trainer.model_id, info.model_id)
    return f"rank {info.lora_rank}"


@case("Training", "create_lora_training_client with every parameter")
def create_fully(lab: Lab) -> None:
    trainer = lab.service.create_lora_training_client(
        base_model=lab.base_model,
        rank=8,
        seed=7,
        train_mlp=True,
        train_attn=False,
        train_unembed=False,
        user_metadata={"purpose": "matrix"},
    )
    assert loss_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result()) > 0


@case("Training", "get_tokenizer (training client)")
def tokenizer(lab: Lab) -> str:
    found = lab.trainer().get_tokenizer()
    text = "Hello, 12 worlds"
    assert found.decode(found.encode(text, add_special_tokens=False)) == text
    return f"{len(found)} tokens"


@case("Training", "forward")
def forward(lab: Lab) -> str:
    trainer = lab.trainer()
    output = trainer.forward([plain_datum(lab.types), sft_datum(lab.types)], "cross_entropy").result()
    logprobs = logprobs_of(output, 0)
    assert len(output.loss_fn_outputs) == 2 and logprobs.shape == (len(TOKENS) - 1,)
    close(loss_of(output), -logprobs.sum() - logprobs_of(output, 1)[2:].sum())
    return f"loss:sum {loss_of(output):.3f}"


@case("Training", "forward_backward cross_entropy: SFT lowers the loss")
def sft(lab: Lab) -> str:
    trainer = lab.trainer()
    losses = [loss_of(step(lab, trainer, [sft_datum(lab.types)])) for _ in range(6)]
    assert losses[-1] < 0.7 * losses[0], losses
    return f"loss {losses[0]:.2f} → {losses[-1]:.2f} in 6 steps"


def moved_policy(lab: Lab) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """A trainer, its logprobs, others that a sampler might have reported, and advantages of both signs."""
    trainer = lab.trainer()
    new = logprobs_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result())
    shift = np.linspace(-0.5, 0.5, new.size)
    advantages = np.where(np.arange(new.size) % 3 == 0, -0.5, 1.0)
    old = (new + shift).astype(np.float32).astype(np.float64)
    return trainer, new, old, advantages


@case("Losses", "importance_sampling")
def importance_sampling(lab: Lab) -> None:
    trainer, new, old, advantages = moved_policy(lab)
    output = step(lab, trainer, [policy_datum(lab.types, TOKENS, old, advantages)], "importance_sampling")
    close(loss_of(output), given.importance_sampling(new, old, advantages))


@case("Losses", "importance_sampling with weights beside it")
def weighted(lab: Lab) -> None:
    trainer, new, old, advantages = moved_policy(lab)
    weights = np.where(np.arange(new.size) < 4, 0.0, 1.0)
    datum = policy_datum(lab.types, TOKENS, old, advantages, weights=weights.astype(np.float32))
    output = step(lab, trainer, [datum], "importance_sampling")
    close(loss_of(output), given.importance_sampling(new, old, advantages * weights))


@case("Losses", "ppo")
def ppo(lab: Lab) -> None:
    trainer, new, old, advantages = moved_policy(lab)
    datum = policy_datum(lab.types, TOKENS, old, advantages)
    close(loss_of(trainer.forward_backward([datum], "ppo").result()), given.ppo(new, old, advantages))
    output = step(lab, trainer, [datum], "ppo", clip_low_threshold=0.9, clip_high_threshold=1.1)
    close(loss_of(output), given.ppo(new, old, advantages, 0.9, 1.1))


@case("Losses", "cispo")
def cispo(lab: Lab) -> None:
    trainer, new, old, advantages = moved_policy(lab)
    datum = policy_datum(lab.types, TOKENS, old, advantages)
    output = step(lab, trainer, [datum], "cispo", clip_low_threshold=0.8, clip_high_threshold=1.2)
    close(loss_of(output), given.cispo(new, old, advantages))


@case("Losses", "dro")
def dro(lab: Lab) -> None:
    trainer, new, old, advantages = moved_policy(lab)
    output = step(lab, trainer, [policy_datum(lab.types, TOKENS, old, advantages)], "dro", beta=0.05)
    close(loss_of(output), given.dro(new, old, advantages))


@case("Losses", "gspo", needs="loss:gspo")
def gspo(lab: Lab) -> None:
    trainer, new, old, advantages = moved_policy(lab)
    mask = np.where(np.arange(new.size) < 2, 0.0, 1.0)
    datum = policy_datum(lab.types, TOKENS, old, advantages, sequence_ratio_mask=mask.astype(np.float32))
    output = step(lab, trainer, [datum], "gspo", clip_low_threshold=0.8, clip_high_threshold=1.2)
    close(loss_of(output), given.gspo(new, old, advantages, mask))


@case("Losses", "stable_reinforce", needs="loss:stable_reinforce")
def stable_reinforce(lab: Lab) -> None:
    trainer, new, old, advantages = moved_policy(lab)
    datum = policy_datum(lab.types, TOKENS, old, advantages)
    output = trainer.forward_backward([datum], "stable_reinforce").result()
    close(loss_of(output), given.stable_reinforce(new, old, advantages))
    output = step(lab, trainer, [datum], "stable_reinforce", kl_coeff=0.5)
    close(loss_of(output), given.stable_reinforce(new, old, advantages, 0.5))


def with_spans(lab: Lab, datum: Any, sequence_id: str, prompt: int, sampled: int) -> Any:
    """The datum, with the spans of the prompt and of the sampled tokens."""
    of_prompt, of_sample = lab.types.PromptProvenanceSpan, lab.types.SampledProvenanceSpan
    return datum.with_provenance(
        model_input=[
            of_prompt(sequence_id=sequence_id, length=prompt),
            of_sample(sequence_id=sequence_id, length=sampled - 1),
        ],
        loss_fn_inputs=[
            of_prompt(sequence_id=sequence_id, offset=1, length=prompt - 1),
            of_sample(sequence_id=sequence_id, length=sampled),
        ],
    )


def grpo(lab: Lab, loss: str, *, spans: bool = False) -> str:
    """Sample, reward, advantages, loss, step: the share of even tokens must rise, and q must be the trainer's p.

    With `spans`, the sampler records stability information, and every datum says what of it was sampled.
    """
    recording = {"record_stability_info": True} if spans else {}
    trainer = lab.trainer()
    prompt = TOKENS[:4]
    rewards: list[float] = []
    worst = 0.0
    for turn in range(5):
        sampler = trainer.save_weights_and_get_sampling_client(name=f"step-{turn}", **recording)
        response = sampler.sample(
            prompt=lab.types.ModelInput.from_ints(prompt),
            num_samples=8,
            sampling_params=lab.types.SamplingParams(max_tokens=8, temperature=1.0, seed=turn, stop=[]),
        ).result()
        scores = np.array([np.mean([token % 2 == 0 for token in row.tokens]) for row in response.sequences])
        rewards.append(float(scores.mean()))
        advantages = scores - scores.mean()
        datums = []
        for row, advantage in zip(response.sequences, advantages, strict=True):
            before = [0.0] * (len(prompt) - 1)
            tokens = [*prompt, *row.tokens]
            values = [*before, *[float(advantage)] * len(row.tokens)]
            datum = policy_datum(lab.types, tokens, [*before, *row.logprobs], values)
            datums.append(with_spans(lab, datum, row.sequence_id, len(prompt), len(row.tokens)) if spans else datum)
        output = step(lab, trainer, datums, loss)
        for index, row in enumerate(response.sequences):
            difference = logprobs_of(output, index)[len(prompt) - 1 :] - np.asarray(row.logprobs)
            worst = max(worst, float(np.abs(difference).max()))
    assert worst < 1e-3, f"sampler and trainer differ by {worst}"
    assert max(rewards[-2:]) > rewards[0], rewards
    return f"reward {rewards[0]:.2f} → {max(rewards[-2:]):.2f}; |p − q| ≤ {worst:.1e}"


@case("Loops", "GRPO loop: importance_sampling")
def grpo_importance_sampling(lab: Lab) -> str:
    return grpo(lab, "importance_sampling")


@case("Loops", "GRPO loop: ppo")
def grpo_ppo(lab: Lab) -> str:
    return grpo(lab, "ppo")


@case("Loops", "GRPO loop: cispo")
def grpo_cispo(lab: Lab) -> str:
    return grpo(lab, "cispo")


@case("Loops", "GRPO loop: dro")
def grpo_dro(lab: Lab) -> str:
    return grpo(lab, "dro")


@case(
    "Loops",
    "GRPO loop: stable_reinforce, with record_stability_info and provenance spans",
    needs="types.Datum.with_provenance",
)
def grpo_stable_reinforce(lab: Lab) -> str:
    return grpo(lab, "stable_reinforce", spans=True)


@case("Loops", "forward_backward_custom: a DPO loss falls")
def custom(lab: Lab) -> str:
    import torch  # deferred: the SDK needs it only here

    trainer = lab.trainer()
    chosen, rejected = plain_datum(lab.types, TOKENS), plain_datum(lab.types, TOKENS[::-1])
    reference = trainer.forward([chosen, rejected], "cross_entropy").result()
    reference_sums = [float(logprobs_of(reference, index).sum()) for index in (0, 1)]

    losses: list[float] = []

    def dpo(_data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        margins = [row.sum() - reference_sums[index] for index, row in enumerate(logprobs)]
        loss = -torch.nn.functional.logsigmoid(0.5 * (margins[0] - margins[1]))
        losses.append(float(loss.detach()))
        return loss, {"margin:sum": float((margins[0] - margins[1]).detach())}

    for _ in range(4):
        output = trainer.forward_backward_custom([chosen, rejected], dpo).result()
        trainer.optim_step(lab.types.AdamParams(learning_rate=1e-3)).result()
        assert "margin:sum" in output.metrics
    assert abs(losses[0] - float(np.log(2))) < 1e-3 and losses[-1] < 0.8 * losses[0], losses
    return f"loss {losses[0]:.3f} → {losses[-1]:.3f} in 4 steps"


def summed(lab: Lab, parts: list[list[Any]]) -> float:
    """The loss of one datum after one step on the gradients of `parts`, one call each."""
    trainer = lab.trainer(seed=3)
    for part in parts:
        assert len(trainer.forward_backward(part, "cross_entropy").result().loss_fn_outputs) == len(part)
    trainer.optim_step(lab.types.AdamParams(learning_rate=LEARNING_RATE)).result()
    return loss_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result())


@case("Training", "a call of more than 1024 datums is split, its gradients add up")
def many_datums(lab: Lab) -> None:
    datums = [plain_datum(lab.types, [40 + n % 40, 50 + n % 7, 60 + n % 11]) for n in range(1100)]
    close(summed(lab, [datums]), summed(lab, [datums[:550], datums[550:]]), tolerance=1e-3)


def wide_datum(lab: Lab, seed: int, length: int, width: int) -> Any:
    """Soft targets: `width` (N, K) of them at every position."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(30, 200, length).tolist()
    targets = rng.integers(30, 200, (length, width))
    weights = rng.random((length, width)).astype(np.float32) / width
    return lab.types.Datum(
        model_input=lab.types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": lab.types.TensorData.from_numpy(targets),
            "weights": lab.types.TensorData.from_numpy(weights),
        },
    )


@case("Training", "a call of more than 5 MB is split")
def many_bytes(lab: Lab) -> None:
    datums = [wide_datum(lab, seed, 200, 100) for seed in range(30)]
    whole = lab.trainer().forward(datums, "cross_entropy").result()
    assert len(whole.loss_fn_outputs) == 30
    half = lab.trainer().forward(datums[:15], "cross_entropy").result()
    other = lab.trainer().forward(datums[15:], "cross_entropy").result()
    close(loss_of(whole), loss_of(half) + loss_of(other))


@case("Training", "targets of shape (N, K)")
def soft_targets(lab: Lab) -> None:
    trainer = lab.trainer()
    first = step(lab, trainer, [wide_datum(lab, 1, 12, 4)])
    assert logprobs_of(first).size == 48
    assert loss_of(step(lab, trainer, [wide_datum(lab, 1, 12, 4)])) < loss_of(first)


@case("Training", "sparse (CSR) targets from 2-D tensors", needs="types.TensorData.from_torch_sparse")
def sparse_targets(lab: Lab) -> None:
    import torch  # deferred: sparse tensors are torch's

    targets = torch.zeros(6, 30, dtype=torch.int64)
    weights = torch.zeros(6, 30)
    for position in range(6):
        targets[position, :2] = torch.tensor([50 + position, 90 - position])
        weights[position, :2] = torch.tensor([0.75, 0.25])
    sparse = lab.types.Datum(
        model_input=lab.types.ModelInput.from_ints(TOKENS[:6]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    dense = lab.types.Datum(
        model_input=lab.types.ModelInput.from_ints(TOKENS[:6]),
        loss_fn_inputs={
            "target_tokens": lab.types.TensorData.from_numpy(targets[:, :2].numpy().copy()),
            "weights": lab.types.TensorData.from_numpy(weights[:, :2].numpy().copy()),
        },
    )
    trainer = lab.trainer()
    close(
        loss_of(trainer.forward([sparse], "cross_entropy").result()),
        loss_of(trainer.forward([dense], "cross_entropy").result()),
    )


@case("Training", "optim_step with every parameter")
def adam(lab: Lab) -> str:
    trainer = lab.trainer()
    settings: dict[str, float] = {"learning_rate": LEARNING_RATE, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8}
    if "grad_clip_norm" in lab.types.AdamParams.model_fields:
        settings |= {"weight_decay": 0.01, "grad_clip_norm": 0.5}
    trainer.forward_backward([plain_datum(lab.types)], "cross_entropy").result()
    metrics = trainer.optim_step(lab.types.AdamParams(**settings)).result().metrics or {}
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    return ", ".join(sorted(metrics))


@case("Training", "optim_step with another optimizer (dimuon)", needs="types.DimuonParams")
def dimuon(lab: Lab) -> None:
    trainer = lab.trainer()
    trainer.forward_backward([plain_datum(lab.types)], "cross_entropy").result()
    call = trainer.optim_step
    raise Refused(must_refuse(lambda: call(lab.types.DimuonParams(learning_rate=0.1)).result(), words="dimuon"))


@case("Training", "async: every step of a loop with await")
def asynchronous(lab: Lab) -> str:
    async def loop() -> list[float]:
        trainer = await lab.service.create_lora_training_client_async(base_model=lab.base_model, rank=8, seed=1)
        losses = []
        for _ in range(3):
            passed = await trainer.forward_backward_async([plain_datum(lab.types)], "cross_entropy")
            stepped = await trainer.optim_step_async(lab.types.AdamParams(learning_rate=LEARNING_RATE))
            losses.append(loss_of(await passed.result_async()))
            await stepped
        saved = await (await trainer.save_state_async("async")).result_async()
        assert saved.path.startswith("tinker://")
        sampler = await trainer.save_weights_and_get_sampling_client_async(name="async")
        params = lab.types.SamplingParams(max_tokens=4)
        response = await sampler.sample_async(lab.types.ModelInput.from_ints(TOKENS), 2, params)
        assert len(response.sequences) == 2
        assert len(await sampler.compute_logprobs_async(lab.types.ModelInput.from_ints(TOKENS))) == len(TOKENS)
        return losses

    losses = asyncio.run(loop())
    assert losses[-1] < losses[0]
    return f"loss {losses[0]:.2f} → {losses[-1]:.2f}"


@case("Training", "clients as futures: .result() and await on create_*", needs="ServiceClient.create_custom_loss")
def clients_as_futures(lab: Lab) -> None:
    trainer = lab.trainer().result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    assert sampler.sample(lab.types.ModelInput.from_ints(TOKENS), 1, lab.types.SamplingParams(max_tokens=2)).result()

    async def loop() -> None:
        other = await lab.service.create_lora_training_client(base_model=lab.base_model, rank=8)
        assert (await other.forward([plain_datum(lab.types)], "cross_entropy")).metrics

    asyncio.run(loop())


def trained_and_saved(lab: Lab, name: str, **options: Any) -> tuple[Any, str, list[float]]:
    """A trainer two steps in, the path of its state there, and the losses of its next two steps."""
    trainer = lab.trainer()
    for _ in range(2):
        step(lab, trainer, [plain_datum(lab.types)])
    path = trainer.save_state(name, **options).result().path
    return trainer, path, [loss_of(step(lab, trainer, [plain_datum(lab.types)])) for _ in range(2)]


def go_on(lab: Lab, trainer: Any) -> list[float]:
    return [loss_of(step(lab, trainer, [plain_datum(lab.types)])) for _ in range(2)]


@case("Checkpoints", "save_state, load_state")
def load_state(lab: Lab) -> None:
    trainer, path, losses = trained_and_saved(lab, "a")
    assert path.startswith("tinker://") and path.endswith("/weights/a"), path
    trainer.load_state(path).result()
    assert go_on(lab, trainer)[0] == losses[0]


@case("Checkpoints", "load_state_with_optimizer continues with the same bits")
def load_with_optimizer(lab: Lab) -> str:
    trainer, path, losses = trained_and_saved(lab, "b")
    trainer.load_state_with_optimizer(path).result()
    assert go_on(lab, trainer) == losses
    return "the same bits"


@case("Checkpoints", "create_training_client_from_state")
def from_state(lab: Lab) -> None:
    _trainer, path, losses = trained_and_saved(lab, "c")
    assert go_on(lab, lab.service.create_training_client_from_state(path))[0] == losses[0]


@case(
    "Checkpoints",
    "create_training_client_from_state_with_optimizer continues with the same bits",
    needs="ServiceClient.create_training_client_from_state_with_optimizer",
)
def from_state_with_optimizer(lab: Lab) -> str:
    _trainer, path, losses = trained_and_saved(lab, "d")
    assert go_on(lab, lab.service.create_training_client_from_state_with_optimizer(path)) == losses
    return "the same bits"


@case("Checkpoints", "save_state with a TTL", needs="TrainingClient.save_state(ttl_seconds)")
def save_with_ttl(lab: Lab) -> None:
    _trainer, path, _losses = trained_and_saved(lab, "e", ttl_seconds=7200)
    found = [row for row in lab.rest().list_user_checkpoints().result().checkpoints if row.tinker_path == path]
    assert found and found[0].expires_at is not None, found


@case("Checkpoints", "save_state with overwrite", needs="TrainingClient.save_state(overwrite)")
def save_again(lab: Lab) -> None:
    trainer, path, _losses = trained_and_saved(lab, "f")
    assert trainer.save_state("f", overwrite=True).result().path == path


@case("Checkpoints", "save_state with user_metadata", needs="TrainingClient.save_state(user_metadata)")
def save_with_metadata(lab: Lab) -> None:
    _trainer, path, _losses = trained_and_saved(lab, "g", user_metadata={"step": "2"})
    found = [row for row in lab.rest().list_user_checkpoints().result().checkpoints if row.tinker_path == path]
    assert found and found[0].user_metadata == {"step": "2"}, found


@case("Checkpoints", "save_weights_for_sampler, create_sampling_client(model_path)")
def named_sampler(lab: Lab) -> None:
    trainer = lab.trainer()
    step(lab, trainer, [plain_datum(lab.types)])
    path = trainer.save_weights_for_sampler("s1").result().path
    assert path.endswith("/sampler_weights/s1"), path
    expected = logprobs_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result())
    for sampler in (lab.service.create_sampling_client(model_path=path), trainer.create_sampling_client(path)):
        measured = sampler.compute_logprobs(lab.types.ModelInput.from_ints(TOKENS)).result()
        assert measured[0] is None and np.allclose(measured[1:], expected, atol=1e-3)


@case("Checkpoints", "save_weights_and_get_sampling_client (ephemeral)")
def ephemeral(lab: Lab) -> None:
    trainer = lab.trainer()
    prompt = lab.types.ModelInput.from_ints(TOKENS)
    before = trainer.save_weights_and_get_sampling_client(name="x").compute_logprobs(prompt).result()
    step(lab, trainer, [plain_datum(lab.types)])
    after = trainer.save_weights_and_get_sampling_client(name="x").compute_logprobs(prompt).result()
    expected = logprobs_of(trainer.forward([plain_datum(lab.types)], "cross_entropy").result())
    assert np.allclose(after[1:], expected, atol=1e-3) and not np.allclose(after[1:], before[1:], atol=1e-2)


@case("Checkpoints", "inflight sampler weights", needs="TrainingClient.save_weights_and_get_sampling_client(kind)")
def inflight(lab: Lab) -> None:
    call = lab.trainer().save_weights_and_get_sampling_client
    raise Refused(must_refuse(lambda: call(kind="inflight").result(), words="inflight"))
