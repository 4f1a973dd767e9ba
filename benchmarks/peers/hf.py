"""transformers + PEFT's side of `python -m benchmarks sample` and `train`.

Runs in its own environment and imports nothing of mint. The spec's `settings` may hold:

- `contiguous`: give the unembedding contiguous rows. As shipped it gets a slice of the prefill, whose product copies
  the unembedding once for each sequence;
- `running_logprobs`: take logprobs while sampling, instead of keeping every step's logits to the end;
- `merged`: the adapter is merged into the base; `lora_in_base_dtype`: the adapter is in float32 as shipped;
- `shared_prompts`: compute each prompt once and repeat its cache for the group, in training with gradients;
- `keep_only_targets`: in training, logits of target positions only;
- `static_cache`: a cache of fixed size, with which transformers compiles the steps of a GPU;
- `micro_batch`: sequences per forward and backward.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessor, LogitsProcessorList
from typing_extensions import override

from benchmarks.peers.answering import answer_turns, open_answers, read_spec


class RunningLogprobs(LogitsProcessor):
    """Keeps the logprobs of the step before, until the token that was drawn from them is known."""

    def __init__(self) -> None:
        self.before: Tensor | None = None
        self.taken: list[Tensor] = []

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.take(input_ids)
        self.before = scores.float().log_softmax(-1)
        return scores

    def take(self, input_ids: Tensor) -> None:
        """Notes the logprob of the latest token of each row."""
        if self.before is not None:
            self.taken.append(self.before.gather(-1, input_ids[:, -1:]))


class _Side:
    def __init__(self, spec: dict[str, Any], *, trainable: bool) -> None:
        self.spec, self.settings = spec, spec["settings"]
        self.device = torch.device(spec.get("device", "cpu"))
        torch.set_num_threads(spec["threads"])
        torch.manual_seed(spec["seed"])
        base = AutoModelForCausalLM.from_pretrained(spec["base_model"], dtype=getattr(torch, spec["dtype"]))
        base.to(self.device)
        self.base_probe = score(base.eval(), spec["probe_tokens"])
        self.model: Any = PeftModel.from_pretrained(base, spec["adapter"], is_trainable=trainable)
        if self.settings.get("contiguous"):
            base.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        if self.settings.get("lora_in_base_dtype"):
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.to(getattr(torch, spec["dtype"]))
        self.trained = [parameter for name, parameter in self.model.named_parameters() if "lora_" in name]
        self.parameters = sum(parameter.numel() for parameter in self.trained)
        if self.settings.get("merged"):
            self.model = self.model.merge_and_unload()

    def ready(self) -> dict[str, Any]:
        """Settings, and the probe's logprob before training."""
        return {
            "probe_logprob": score(self.model, self.spec["probe_tokens"]),
            "base_probe_logprob": self.base_probe,
            "trained_parameters": self.parameters,
            "dtype": self.spec["dtype"],
            "threads": torch.get_num_threads(),
        }

    def finished(self) -> dict[str, Any]:
        """How the probe stands after."""
        packages = ("transformers", "peft", "torch")
        on_device = {"peak_device_bytes": torch.cuda.max_memory_allocated()} if self.device.type == "cuda" else {}
        return on_device | {
            "probe_logprob": score(self.model, self.spec["probe_tokens"]),
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }

    def prompts(self, index: int) -> Tensor:
        """[prompts, prompt tokens] of a step."""
        count = self.spec["prompts_per_step"]
        return torch.tensor(self.spec["prompts"][index * count : (index + 1) * count], device=self.device)


class SampleSide(_Side):
    """`generate` with per-token logprobs."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec, trainable=False)
        self.model.eval()
        self.latest: tuple[list[int], list[float]] = ([], [])

    @torch.no_grad()
    def step(self, index: int) -> dict[str, Any]:
        """Prompts to samples and their logprobs, as lists."""
        prompts = self.prompts(index)
        tokens, logprobs = self.generate(prompts)
        completions = tokens[:, prompts.shape[1] :].tolist()
        self.latest = (tokens[0].tolist(), logprobs[0].tolist())
        logprobs.tolist()
        lengths = [len(completion) for completion in completions]
        return {"completion_lengths": lengths, "tokens": sum(lengths)}

    def generate(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Sequences [samples, prompt + new] and logprobs [samples, new]."""
        group = self.spec["group_size"]
        options: dict[str, Any] = {
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": self.spec["max_tokens"],
            "pad_token_id": 0,
            "return_dict_in_generate": True,
        }
        if self.settings.get("shared_prompts"):
            cache = DynamicCache(config=self.model.config)
            self.model(prompts[:, :-1], past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(group)
            prompts, group = prompts.repeat_interleave(group, 0), 1
            options["past_key_values"] = cache
        if self.settings.get("static_cache"):
            options["cache_implementation"] = "static"
        options |= {"input_ids": prompts, "num_return_sequences": group, "attention_mask": torch.ones_like(prompts)}
        if self.settings.get("running_logprobs"):
            running = RunningLogprobs()
            made = self.model.generate(**options, logits_processor=LogitsProcessorList([running]))
            running.take(made.sequences)
            return made.sequences, torch.cat(running.taken, dim=1)
        made = self.model.generate(**options, output_scores=True)
        return made.sequences, self.model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)

    def finished(self) -> dict[str, Any]:
        """Also the largest difference between a sample's logprobs and those of the same tokens in one forward."""
        tokens, logprobs = self.latest
        again = token_logprobs(self.model, tokens)[-len(logprobs) :]
        return super().finished() | {"sample_logprob_error": float((again.cpu() - torch.tensor(logprobs)).abs().max())}


class TrainSide(_Side):
    """A loop of micro-batches, a gradient norm, and AdamW."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec, trainable=True)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            *(self.trained, spec["learning_rate"], (0.9, 0.999), 1e-8, 0.0),
            fused=self.device.type == "cuda",
        )

    def step(self, index: int) -> dict[str, Any]:
        """One gradient over all sequences of the step, and one optimizer step."""
        size = self.spec["group_size"]
        prompts = self.prompts(index).repeat_interleave(size, 0)
        rows = slice(index * len(prompts), (index + 1) * len(prompts))
        tokens = torch.cat([prompts, torch.tensor(self.spec["completions"][rows], device=self.device)], dim=1)
        advantages = torch.tensor(self.spec["advantages"][rows], device=self.device)
        batch = max(self.micro_batch // size, 1) * size if self.shares_prompts else self.micro_batch
        starts = range(0, len(tokens), batch)
        loss = sum(self.backward(tokens[at : at + batch], advantages[at : at + batch]) for at in starts)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.trained])
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {"loss": float(loss), "gradient_norm": float(norm), "tokens": tokens.numel()}

    @property
    def shares_prompts(self) -> bool:
        """Whether a group's prompt is computed once."""
        return bool(self.settings.get("shared_prompts"))

    @property
    def micro_batch(self) -> int:
        """Sequences per forward and backward."""
        return int(self.settings["micro_batch"])

    def backward(self, tokens: Tensor, advantages: Tensor) -> Tensor:
        """Adds the gradient of these sequences; their loss, -sum(ratio * advantage) over sampled tokens."""
        new = self.spec["max_tokens"]
        if self.shares_prompts:
            logits = self.shared_logits(tokens)
        elif self.settings.get("keep_only_targets"):
            logits = self.model(tokens, logits_to_keep=new + 1, use_cache=False).logits[:, :-1]
        else:
            logits = self.model(tokens, use_cache=False).logits[:, -new - 1 : -1]
        targets = tokens[:, -new:]
        logprobs = -functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        ratio = (logprobs - self.spec["behaviour_logprob"]).exp()
        loss = -(ratio.view(targets.shape) * advantages[:, None]).sum()
        loss.backward()
        return loss.detach()

    def shared_logits(self, tokens: Tensor) -> Tensor:
        """Logits of the sampled tokens of whole groups [sequences, new, vocabulary]. The cache of a prompt is repeated
        for its group, so its gradients add up."""
        size, new = self.spec["group_size"], self.spec["max_tokens"]
        prompted = self.model(tokens[::size, :-new], logits_to_keep=1, use_cache=True)
        cache = prompted.past_key_values
        cache.batch_repeat_interleave(size)
        sampled = self.model(tokens[:, -new:-1], past_key_values=cache, use_cache=True)
        return torch.cat([prompted.logits.repeat_interleave(size, 0), sampled.logits], dim=1)


@torch.no_grad()
def token_logprobs(model: Any, tokens: list[int]) -> Tensor:
    """[tokens - 1] logprobs of all tokens but the first."""
    ids = torch.tensor([tokens], device=model.device)
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]


def score(model: Any, tokens: list[int]) -> float:
    """The logprob of a sequence."""
    return float(token_logprobs(model, tokens).sum())


if __name__ == "__main__":
    answers, given = open_answers(), read_spec()
    answer_turns({"sample": SampleSide, "train": TrainSide}[given["work"]](given), answers)
