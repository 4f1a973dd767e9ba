"""What mint does in one step of each comparison, written with the public SDK as its documentation has it.

Knows nothing of turns or clocks, except that a GRPO step notes when its parts end.
"""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import mint
from benchmarks.compare.contenders import BENCH_BASE
from mint import types

LOSS_SETTINGS = {"trained_only": 1.0}
"""Logprobs of completions alone, as the other sides compute them."""


class _Loop:
    """A training client, and the probe's logprob under its weights."""

    training: mint.TrainingClient

    def __init__(self, spec: dict[str, Any], *, base_url: str | None) -> None:
        self.spec = spec
        self.service = mint.ServiceClient(base_url=base_url)
        self.sampling_params = types.SamplingParams(max_tokens=spec["max_tokens"], temperature=1.0, stop=[])
        self.adam_params = types.AdamParams(
            learning_rate=spec["learning_rate"], beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
        )

    def ready(self) -> dict[str, Any]:
        """Facts of the model, and the probe's logprob before training."""
        effective = self.training.get_info().effective
        return {
            "probe_logprob": self.probe("before"),
            "trained_parameters": effective["trainable_parameters"],
            "dtype": effective["dtype"],
            "threads": effective["threads"],
        }

    def finished(self) -> dict[str, Any]:
        """The probe's logprob after training, and versions."""
        versions = {"mint": mint.__version__, "torch": importlib.metadata.version("torch")}
        kernels = self.training.get_info().effective["attention"]
        return {"probe_logprob": self.probe("after"), "versions": versions | {"kernels": kernels}}

    def probe(self, name: str) -> float:
        """The policy's logprob of a fixed sequence: shows that the base is the same, and that training changes it."""
        return self._score(self.training.save_weights_and_get_sampling_client(name=f"probe-{name}"))

    def _score(self, sampler: mint.SamplingClient) -> float:
        logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(self.spec["probe_tokens"])).result()
        return sum(logprob for logprob in logprobs if logprob is not None)

    def _train_uploaded_adapter(self) -> None:
        uploaded = self.service.create_rest_client().upload_checkpoint(
            self.spec["adapter_archive"], base_model=BENCH_BASE, name="bench"
        )
        self.training = self.service.create_training_client_from_state(uploaded.result().path)

    def _prompts(self, index: int) -> list[Any]:
        first = index * self.spec["prompts_per_step"]
        found: list[Any] = self.spec["prompts"][first : first + self.spec["prompts_per_step"]]
        return found

    def _sample(self, sampler: mint.SamplingClient, prompts: list[list[int]]) -> list[list[types.SampledSequence]]:
        futures = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(prompt),
                num_samples=self.spec["group_size"],
                sampling_params=self.sampling_params,
            )
            for prompt in prompts
        ]
        return [future.result().sequences for future in futures]


class SampleLoop(_Loop):
    """Samples from one adapter, all prompts at once."""

    def __init__(self, spec: dict[str, Any], *, base_url: str | None) -> None:
        super().__init__(spec, base_url=base_url)
        self._train_uploaded_adapter()
        self.sampler = self.training.save_weights_and_get_sampling_client(name="sample")
        self.latest: tuple[list[int], types.SampledSequence] | None = None

    def ready(self) -> dict[str, Any]:
        """Also the probe's logprob under the base alone."""
        base = self.service.create_sampling_client(base_model=BENCH_BASE)
        return super().ready() | {"base_probe_logprob": self._score(base)}

    def step(self, index: int) -> dict[str, Any]:
        """Prompts to samples with their logprobs."""
        prompts = self._prompts(index)
        groups = self._sample(self.sampler, prompts)
        self.latest = (prompts[0], groups[0][0])
        lengths = [len(sequence.tokens) for group in groups for sequence in group]
        return {"completion_lengths": lengths, "tokens": sum(lengths)}

    def finished(self) -> dict[str, Any]:
        """Also the largest difference between a sample's logprobs and those of the same tokens as a prompt."""
        assert self.latest is not None, "no step was made"
        prompt, sample = self.latest
        scored = self.sampler.compute_logprobs(types.ModelInput.from_ints(prompt + sample.tokens)).result()
        differences = [
            abs(own - (again or 0.0)) for own, again in zip(sample.logprobs, scored[len(prompt) :], strict=True)
        ]
        return super().finished() | {"sample_logprob_error": max(differences)}


class TrainLoop(_Loop):
    """Gradient and optimizer step on sequences that the spec gives."""

    def __init__(self, spec: dict[str, Any], *, base_url: str | None) -> None:
        super().__init__(spec, base_url=base_url)
        self._train_uploaded_adapter()

    def step(self, index: int) -> dict[str, Any]:
        """Both requests are sent before the first answer is awaited."""
        size = self.spec["group_size"]
        first = index * self.spec["prompts_per_step"] * size
        datums = []
        for place, prompt in enumerate(self._prompts(index)):
            for row in range(first + place * size, first + (place + 1) * size):
                completion = self.spec["completions"][row]
                behaviour = [self.spec["behaviour_logprob"]] * len(completion)
                datums.append(make_datum(prompt, completion, behaviour, self.spec["advantages"][row]))
        passed = self.training.forward_backward(datums, "importance_sampling", LOSS_SETTINGS)
        stepped = self.training.optim_step(self.adam_params)
        return {
            "loss": passed.result().metrics["loss:sum"],
            "gradient_norm": stepped.result().metrics["grad_norm"],
            "tokens": sum(datum.model_input.length + 1 for datum in datums),
        }


class GrpoLoop(_Loop):
    """One training client and the loop around it."""

    def __init__(self, spec: dict[str, Any], *, base_url: str | None) -> None:
        super().__init__(spec, base_url=base_url)
        self.training = self.service.create_lora_training_client(
            base_model=BENCH_BASE,
            rank=spec["rank"],
            seed=spec["seed"],
            train_mlp=True,
            train_attn=True,
            train_unembed=False,
        )
        self.tokenizer = self.training.get_tokenizer()

    def step(self, index: int) -> dict[str, Any]:
        """Sample, reward, centre, train: the step as the documentation writes it."""
        parts = PartTimer()
        sampler = self.training.save_weights_and_get_sampling_client(name=f"grpo-{index}")
        parts.end("save")
        prompts = [self.tokenizer.encode(text) for text in self._prompts(index)]
        groups = self._sample(sampler, prompts)
        self.tokenizer.batch_decode([sequence.tokens for group in groups for sequence in group])
        parts.end("sample")
        datums = [datum for prompt, group in zip(prompts, groups, strict=True) for datum in self.datums(prompt, group)]
        parts.end("datums")
        self.training.forward_backward(datums, "importance_sampling", LOSS_SETTINGS).result()
        parts.end("forward_backward")
        self.training.optim_step(self.adam_params).result()
        parts.end("optim_step")
        lengths = [len(sequence.tokens) for group in groups for sequence in group]
        return {
            "sample_s": parts.seconds["sample"],  # to the start of the reward, as on TRL's side
            "part_ends_s": parts.seconds,
            "completion_lengths": lengths,
            "tokens": sum(lengths),
        }

    def datums(self, prompt: list[int], group: list[types.SampledSequence]) -> list[types.Datum]:
        """One datum for each sample of a group, with the centred reward as its advantage.

        The advantage is divided by the tokens of the step, as the loss of Dr. GRPO is on TRL's side.
        """
        rewards = [reward(sequence.tokens) for sequence in group]
        mean = sum(rewards) / len(rewards)
        tokens_per_step = self.spec["prompts_per_step"] * self.spec["group_size"] * self.spec["max_tokens"]
        return [
            make_datum(prompt, sequence.tokens, sequence.logprobs, (value - mean) / tokens_per_step)
            for sequence, value in zip(group, rewards, strict=True)
        ]


LOOPS = {"sample": SampleLoop, "train": TrainLoop, "grpo": GrpoLoop}
"""Loops by the name of the work in the spec."""


class PartTimer:
    """When the parts of a step ended, in seconds since it began."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Records that the part `name` has just ended."""
        self.seconds[name] = time.perf_counter() - self._started_s


def make_datum(prompt: list[int], completion: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """The inputs of `importance_sampling` for one sample; only its completion has weight."""
    full = [*prompt, *completion]
    prefix = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(full[:-1]),
        loss_fn_inputs={
            "target_tokens": full[1:],
            "weights": prefix + [1.0] * len(completion),
            "logprobs": prefix + logprobs,
            "advantages": prefix + [advantage] * len(completion),
        },
    )


def reward(tokens: list[int]) -> float:
    """The share of even token ids: as cheap as a reward can be, and different within a group."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)
