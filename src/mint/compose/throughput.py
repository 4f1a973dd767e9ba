"""Measures how fast this installation samples and trains, and how fast this machine could at most: `mint bench`.

Runs the service in this process and uses it through the SDK, as a user's loop does. Sampling, training and the
machine's own rates take turns, so that a busy neighbour slows all of them. Comparisons with other libraries are not
part of the package; they are in `benchmarks/` of the source.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import mint
from mint import types
from mint.compose.embedded import open_embedded, torch_engine
from mint.config import Settings
from mint.engine.machine_limits import (
    Device,
    Rates,
    StepShape,
    expected_sampling_seconds,
    expected_training_seconds,
    measured_rows,
    sampling_seconds,
    training_seconds,
)
from mint.engine.model.config import DecoderConfig, read_decoder_config
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder
from mint.models.random_base import SHAPES, DType, ModelShape, write_random_base
from mint.models.registry import resolve

SEED = 0


@dataclass(frozen=True)
class Speed:
    """The time of every measured step, and the least time in which the machine could do the same step."""

    tokens: int
    seconds: list[float]
    limit_seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / median(self.seconds)

    @property
    def limit_tokens_per_second(self) -> float:
        return self.tokens / median(self.limit_seconds)

    @property
    def share_of_limit(self) -> float:
        return self.tokens_per_second / self.limit_tokens_per_second

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second,
            "limit_tokens_per_second": self.limit_tokens_per_second,
            "share_of_limit": self.share_of_limit,
            "tokens_per_step": self.tokens,
            "seconds": self.seconds,
            "limit_seconds": self.limit_seconds,
        }


@dataclass(frozen=True)
class ThroughputReport:
    """What was measured. `settings`: dtype, threads, device and kernels that took effect. `load`: before the start."""

    model: str
    step: StepShape
    settings: dict[str, Any]
    sampling: Speed
    training: Speed
    rates: list[Rates]
    load: float

    @property
    def read_bytes_per_second(self) -> float:
        return median(rates["read"] for rates in self.rates)

    @property
    def product_flops_per_second(self) -> dict[str, float]:
        """The rate of a block's matrix products, by number of rows."""
        return {rows: median(rates["block"][rows] for rates in self.rates) for rows in self.rates[0]["block"]}

    def as_json(self) -> dict[str, Any]:
        """One JSON object with everything."""
        step = self.step
        return {
            "model": self.model,
            **self.settings,
            "cores": os.cpu_count(),
            "load_before": self.load,
            "prompts": step.prompts,
            "group": step.group,
            "prompt_tokens": step.prompt_tokens,
            "new_tokens": step.max_tokens,
            "sampling": self.sampling.as_json(),
            "training": self.training.as_json(),
            "read_bytes_per_second": self.read_bytes_per_second,
            "product_flops_per_second": self.product_flops_per_second,
        }


@dataclass(frozen=True)
class ThroughputPlan:
    """Tokens per second that are expected of sampling and training on this CPU."""

    step: StepShape
    sampled: float
    trained: float

    @classmethod
    def from_rates(cls, step: StepShape, rates: Rates, dtype: DType, threads: int) -> ThroughputPlan:
        """From the rates of this machine's products."""
        sampling_s = expected_sampling_seconds(step, rates, dtype, threads)
        training_s = expected_training_seconds(step, rates, threads)
        return cls(step, step.sampled_tokens / sampling_s, step.trained_tokens / training_s)


def plan_throughput(settings: Settings, model: str, **sizes: int) -> ThroughputPlan:
    """Measures this machine's products with matrices of the model's shapes, for some seconds; loads no model.

    `sizes` as in `measure_throughput`.

    Raises:
        UnknownBaseModelError: the model's files are not on this machine.
        InvalidRequestError: mint's own decoder does not compute its family.
    """
    from mint.engine.machine_rates import MachineRates  # deferred: torch takes seconds to import

    folder = ModelFolder(resolve(model, settings.model_aliases))
    step = StepShape(_shape_of(read_decoder_config(folder.config)), **sizes)
    dtype: DType = settings.dtype or "float32"
    torch_engine(settings)  # sets the threads
    rows = measured_rows(step, "cpu")
    machine = MachineRates(step.model, rows=rows, dtype=dtype, kernels_dir=settings.native_folder)
    return ThroughputPlan.from_rates(step, machine.measure(), dtype, settings.threads)


def measure_throughput(
    model: str,
    *,
    settings: Settings,
    say: Callable[[str], None],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    **sizes: int,
) -> ThroughputReport:
    """Measures `repeats` steps of sampling and of training, after one of each that is not counted.

    `model` is a base model as everywhere, or the name of a shape of `SHAPES`, whose weights are random. `sizes` are
    `prompts`, `group`, `prompt_tokens`, `max_tokens` and `rank` of `StepShape`. `clock` in seconds: with one thread,
    that of CPU time leaves out the waits for a core.

    Raises:
        InvalidRequestError: the model cannot be found or read, or the sequences are longer than its context.
        MissingExtraError: the `local` extra is not installed.
    """
    folder = _random_base(model, settings.home_dir, say) if model in SHAPES else resolve(model, settings.model_aliases)
    step = StepShape(_shape_of(read_decoder_config(ModelFolder(folder).config)), **sizes)
    if step.prompt_tokens + step.max_tokens > step.model.context:
        raise InvalidRequestError(
            f"and {step.max_tokens} new tokens are longer than the context of {step.model.context} tokens",
            field="prompt_tokens",
            value=step.prompt_tokens,
            remedy="Take shorter prompts or fewer new tokens",
        )
    load = os.getloadavg()[0]
    say(f"loading {model}")
    with tempfile.TemporaryDirectory(prefix="mint-bench-") as data_dir:
        engine = torch_engine(settings)
        service = mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=Path(data_dir), engine=engine))
        with service:
            given = {"repeats": repeats, "load": load, "say": say, "clock": clock}
            return _measure(service, model, str(folder), step, settings.native_folder, **given)


def _measure(
    service: mint.ServiceClient,
    model: str,
    base_model: str,
    step: StepShape,
    kernels_dir: Path | None,
    *,
    repeats: int,
    load: float,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> ThroughputReport:
    from mint.engine.machine_rates import MachineRates, device_name  # deferred: the engine has loaded torch by now

    client = service.create_lora_training_client(
        base_model=base_model, rank=step.rank, seed=SEED, train_mlp=True, train_attn=True, train_unembed=False
    )
    effective = client.get_info().effective
    dtype: DType = effective["dtype"]
    device: Device = "cuda" if effective["device"].startswith("cuda") else "cpu"
    rows = measured_rows(step, device)
    machine = MachineRates(step.model, rows=rows, dtype=dtype, device=device, kernels_dir=kernels_dir, clock=clock)
    work = _Work(client, step)
    sampling_s = []
    training_s = []
    rates = []
    for turn in range(1 + repeats):
        sampling_s.append(_seconds(work.sample, clock))
        training_s.append(_seconds(work.train, clock))
        rates.append(machine.measure())
        name = f"step {turn} of {repeats}" if turn else "warm-up"
        say(f"{name}: sampling {sampling_s[-1]:.3f} s, training {training_s[-1]:.3f} s")
    rates = rates[1:]
    return ThroughputReport(
        model=model,
        step=step,
        settings={
            "dtype": dtype,
            "threads": effective["threads"],
            "device": device_name(device),
            "kernels": effective["attention"],
        },
        sampling=Speed(
            step.sampled_tokens, sampling_s[1:], [sampling_seconds(step, each, dtype, device) for each in rates]
        ),
        training=Speed(step.trained_tokens, training_s[1:], [training_seconds(step, each, device) for each in rates]),
        rates=rates,
        load=load,
    )


class _Work:
    """One step of sampling and one of training, on random tokens."""

    def __init__(self, client: mint.TrainingClient, step: StepShape) -> None:
        self.client = client
        self.step = step
        rng = np.random.default_rng(SEED)
        self.prompts = rng.integers(1, step.model.vocabulary, (step.prompts, step.prompt_tokens)).tolist()
        completions = rng.integers(1, step.model.vocabulary, (step.prompts, step.group, step.max_tokens)).tolist()
        self.data = [
            self._datum(prompt, completion, sign=1 - 2 * (place % 2))
            for prompt, group in zip(self.prompts, completions, strict=True)
            for place, completion in enumerate(group)
        ]
        self.sampler = client.save_weights_and_get_sampling_client(name="bench")

    def _datum(self, prompt: list[int], completion: list[int], *, sign: int) -> types.Datum:
        tokens = [*prompt, *completion]
        counts = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(completion), np.float32)
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "weights": counts,
                "logprobs": counts * np.float32(-np.log(self.step.model.vocabulary)),
                "advantages": counts * np.float32(sign / self.step.sampled_tokens),
            },
        )

    def sample(self) -> None:
        """All prompts at once, with logprobs; nothing ends a sequence early."""
        params = types.SamplingParams(max_tokens=self.step.max_tokens, temperature=1.0, stop=[])
        futures = [
            self.sampler.sample(types.ModelInput.from_ints(prompt), self.step.group, params) for prompt in self.prompts
        ]
        for future in futures:
            future.result()

    def train(self) -> None:
        """The gradient of all sequences, and an optimizer step."""
        self.client.forward_backward(self.data, loss_fn="importance_sampling")
        self.client.optim_step(types.AdamParams(learning_rate=1e-4)).result()


def _seconds(work: Callable[[], None], clock: Callable[[], float]) -> float:
    started_s = clock()
    work()
    return clock() - started_s


def _shape_of(config: DecoderConfig) -> ModelShape:
    """The sizes that the limits depend on. A mixture of experts counts as the experts that one token passes."""
    experts = config.experts
    mlp = config.intermediate_size
    if experts is not None:
        mlp = experts.per_token * experts.intermediate_size + (experts.shared_intermediate_size or 0)
    return ModelShape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        mlp=mlp,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
    )


def _random_base(name: str, home: Path, say: Callable[[str], None]) -> Path:
    """The folder of a random base model, written below `home` the first time."""
    folder = home / "bench" / f"random-{name}"
    if not folder.is_dir():
        say(f"writing random weights of {name} to {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            write_random_base(Path(unfinished) / name, SHAPES[name], seed=SEED)
            (Path(unfinished) / name).rename(folder)
    return folder
