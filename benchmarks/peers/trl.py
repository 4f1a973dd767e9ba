"""TRL's side of `python -m benchmarks grpo`: one `GRPOTrainer` that makes a training step for each line on stdin.

Runs in TRL's own environment and imports nothing of mint, so the reward and the turn protocol are defined here again.
All settings come from the spec, which `benchmarks.compare.grpo` writes.

A step is timed from the arrival of its command to the callback that ends it: batch, tokenisation, generation, decoding,
reward, loss, backward, optimizer, scheduler. Between two steps the process is blocked on a read.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # ty: ignore[import-not-found]
from typing_extensions import override

LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Turns(TrainerCallback):
    """Lets the trainer go on only when it is this side's turn, and answers with what the step took and made."""

    def __init__(self, answers: TextIO, probe_tokens: list[int]) -> None:
        self.answers = answers
        self.probe_tokens = probe_tokens
        self.lengths: list[int] = []
        self.started_s = self.cpu_started_s = self.sampled_s = self.idle_cpu_s = 0.0

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """The share of even token ids: as cheap as a reward can be, and different within a group."""
        self.sampled_s = time.perf_counter() - self.started_s
        self.lengths = [len(ids) for ids in completion_ids]
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ready: everything is loaded, nothing has been computed."""
        model = kwargs["model"]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.answer(
            event="ready",
            probe_logprob=probe(model, self.probe_tokens),
            trained_parameters=sum(parameter.numel() for parameter in trained),
            dtype=str(model.get_base_model().dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
        )
        return self.wait(control)

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """The clock stops here; what follows until the next command is not timed."""
        wall_s, cpu_s = time.perf_counter() - self.started_s, time.process_time() - self.cpu_started_s
        self.answer(
            event="step",
            wall_s=wall_s,
            cpu_s=cpu_s,
            sample_s=self.sampled_s,
            idle_cpu_s=self.idle_cpu_s,
            completion_lengths=self.lengths,
            tokens=sum(self.lengths),
        )
        return self.wait(control)

    def answer(self, **fields: Any) -> None:
        """One JSON line to the parent."""
        self.answers.write(json.dumps(fields) + "\n")
        self.answers.flush()

    def wait(self, control: Any) -> Any:
        """Blocks until the next command, then starts the clock."""
        idle_from_s = time.process_time()
        command = json.loads(sys.stdin.readline() or '{"command": "finish"}')["command"]
        self.idle_cpu_s = time.process_time() - idle_from_s
        control.should_training_stop = command == "finish"
        self.started_s, self.cpu_started_s = time.perf_counter(), time.process_time()
        return control


@torch.no_grad()
def probe(model: Any, tokens: list[int]) -> float:
    """The policy's logprob of a fixed sequence: shows that the base is the same, and that training changes it."""
    ids = torch.tensor([tokens], device=model.device)
    logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return float(logprobs.gather(-1, ids[0, 1:, None]).sum())


def make_trainer(spec: dict[str, Any], turns: Turns) -> GRPOTrainer:
    """The trainer with the settings that make it do the same step as mint (see `benchmarks/README.md`)."""
    settings: dict[str, Any] = {
        "output_dir": spec["work_dir"],
        "max_steps": spec["steps"],
        "per_device_train_batch_size": spec["prompts_per_step"] * spec["group_size"],
        "num_generations": spec["group_size"],
        "max_completion_length": spec["max_tokens"],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": 0.0,
        "num_iterations": 1,
        "learning_rate": spec["learning_rate"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 0.0,
        "bf16": spec["dtype"] == "bfloat16",
        "use_cpu": spec.get("device", "cpu") == "cpu",
        "use_vllm": False,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": spec["seed"],
    }
    model = AutoModelForCausalLM.from_pretrained(spec["base_model"], dtype=getattr(torch, spec["dtype"]))
    if spec.get("end_token_ids"):
        model.generation_config.eos_token_id = spec["end_token_ids"]  # the trainer reads them from here
    return GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(spec["base_model"]),
        args=GRPOConfig(**(settings | spec["overrides"])),
        reward_funcs=turns.reward,
        train_dataset=Dataset.from_dict({"prompt": spec["prompts"]}),
        peft_config=LoraConfig(
            r=spec["rank"],
            lora_alpha=spec["alpha"],
            lora_dropout=0.0,
            target_modules=LORA_LAYERS,
            task_type="CAUSAL_LM",
        ),
        callbacks=[turns],
    )


def main() -> None:
    """Speaks JSON lines on the real stdout; whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    turns = Turns(answers, spec["probe_tokens"])
    trainer = make_trainer(spec, turns)
    trainer.train()
    packages = ("trl", "transformers", "peft", "accelerate", "torch")
    turns.answer(
        event="finished",
        probe_logprob=probe(trainer.model, spec["probe_tokens"]),
        versions={name: importlib.metadata.version(name) for name in packages},
    )


if __name__ == "__main__":
    main()
