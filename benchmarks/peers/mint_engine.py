"""mint's engine without its service, for sampling and training on a machine that lacks the packages of the service.

Run as `python -m benchmarks.peers.mint_engine SPEC.json`. The steps are those of `mint_loops` without what the service
adds: journal, hand-over of weights, protocol.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.answering import answer_turns, open_answers, read_spec
from mint.engine.protocol import AdamSpec, LoraSpec, ModelState, Sample, SampleJob, StopRule, TrainDatum, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.models.folder import ModelFolder
from mint.models.peft_files import CONFIG_FILE, WEIGHTS_FILE
from mint.models.peft_format import base_layers, read_config, read_weights

BASE, MODEL = "base", "model"


class _Side:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.engine = TorchEngine(
            dtype=spec["dtype"],
            threads=spec["threads"],
            device=spec["device"],
            batch_invariant=spec.get("batch_invariant", False),
            quantize=spec.get("quantize"),
        )
        self.engine.load_base(BASE, spec["base_model"])
        lora = LoraSpec(rank=spec["rank"], seed=spec["seed"], train_attn=True, train_mlp=True, train_unembed=False)
        self.effective = self.engine.create_model(MODEL, BASE, lora)
        folder = Path(spec["adapter"])
        config = read_config((folder / CONFIG_FILE).read_bytes())
        base = ModelFolder(Path(spec["base_model"]))
        with (folder / WEIGHTS_FILE).open("rb") as file:
            self.engine.write_state(MODEL, ModelState(read_weights(file, config, base, base_layers(base))))

    def ready(self) -> dict[str, Any]:
        """Facts of the model, and the probe's logprob before training, with and without the adapter."""
        return {
            "probe_logprob": self.probe("before"),
            "base_probe_logprob": float(np.nansum(self.score(None, self.spec["probe_tokens"]))),
            "trained_parameters": self.effective["trainable_parameters"],
            "dtype": self.effective["dtype"],
            "threads": self.effective["threads"],
        }

    def finished(self) -> dict[str, Any]:
        """The probe's logprob after training, and versions."""
        versions = {"torch": importlib.metadata.version("torch"), "kernels": self.effective["attention"]}
        found = {"probe_logprob": self.probe("after"), "versions": versions}
        on_gpu = self.spec["device"] == "cuda"
        return found | ({"peak_device_bytes": torch.cuda.max_memory_allocated()} if on_gpu else {})

    def probe(self, name: str) -> float:
        """The policy's logprob of a fixed sequence."""
        self.engine.publish(MODEL, name)
        return float(np.nansum(self.score(name, self.spec["probe_tokens"])))

    def score(self, weights_id: str | None, tokens: list[int]) -> np.ndarray:
        """[tokens] logprobs, NaN at the first place."""
        scored = self.engine.sample([self.job(weights_id, tokens, max_tokens=0, prompt_logprobs=True)])[0]
        assert scored.prompt_logprobs is not None, scored.error
        return scored.prompt_logprobs

    def job(self, weights_id: str | None, prompt: list[int], **changes: Any) -> SampleJob:
        """One sample at temperature 1, which nothing ends early."""
        fields: dict[str, Any] = {"num_samples": 1, "seed": 0, **changes}
        return SampleJob(
            BASE,
            weights_id,
            np.array(prompt, np.int64),
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            stop=StopRule(),
            **fields,
        )

    def prompts(self, index: int) -> list[list[int]]:
        count = self.spec["prompts_per_step"]
        found: list[list[int]] = self.spec["prompts"][index * count : (index + 1) * count]
        return found


class SampleSide(_Side):
    """Samples from one adapter, all prompts at once."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        self.engine.publish(MODEL, "sample")
        self.latest: tuple[list[int], Sample] | None = None

    def step(self, index: int) -> dict[str, Any]:
        """Prompts to samples with their logprobs."""
        prompts, group = self.prompts(index), self.spec["group_size"]
        jobs = [
            self.job("sample", prompt, num_samples=group, max_tokens=self.spec["max_tokens"], seed=1000 * index + place)
            for place, prompt in enumerate(prompts)
        ]
        results = self.engine.sample(jobs)
        self.latest = (prompts[0], results[0].samples[0])
        lengths = [len(sample.tokens) for result in results for sample in result.samples]
        return {"completion_lengths": lengths, "tokens": sum(lengths)}

    def finished(self) -> dict[str, Any]:
        """Also the largest difference between a sample's logprobs and those of the same tokens as a prompt."""
        assert self.latest is not None, "no step was made"
        prompt, sample = self.latest
        scored = self.score("sample", [*prompt, *sample.tokens.tolist()])[len(prompt) :]
        return super().finished() | {"sample_logprob_error": float(np.abs(scored - sample.logprobs).max())}


class TrainSide(_Side):
    """Gradient and optimizer step on sequences that the spec gives."""

    def step(self, index: int) -> dict[str, Any]:
        """The result is there when the device has done everything."""
        size = self.spec["group_size"]
        first = index * self.spec["prompts_per_step"] * size
        data = [
            self.datum(prompt, first + place * size + sample)
            for place, prompt in enumerate(self.prompts(index))
            for sample in range(size)
        ]
        passed = self.engine.forward_backward(MODEL, data, resolve_loss("importance_sampling", {"trained_only": 1}))
        stepped = self.engine.optim_step(MODEL, AdamSpec(self.spec["learning_rate"], 0.9, 0.999, 1e-8, 0.0, 0.0))
        if self.spec["device"] == "cuda":
            torch.cuda.synchronize()
        return {
            "loss": passed.metrics["loss:sum"],
            "gradient_norm": stepped["grad_norm"],
            "tokens": sum(len(datum.tokens) + 1 for datum in data),
        }

    def datum(self, prompt: list[int], row: int) -> TrainDatum:
        """A sequence of which only the completion counts."""
        completion = self.spec["completions"][row]
        full = np.array([*prompt, *completion], np.int64)
        counts = np.zeros(len(full) - 1, np.float32)
        counts[len(prompt) - 1 :] = 1
        inputs = {
            "logprobs": counts * self.spec["behaviour_logprob"],
            "advantages": counts * self.spec["advantages"][row],
        }
        inputs = {name: values.astype(np.float32) for name, values in inputs.items()}
        return TrainDatum(full[:-1], full[1:], counts, inputs)


if __name__ == "__main__":
    answers, given = open_answers(), read_spec()
    answer_turns({"sample": SampleSide, "train": TrainSide}[given["work"]](given), answers)
