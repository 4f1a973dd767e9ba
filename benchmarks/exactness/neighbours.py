"""Same seed, same tokens, whatever else is sampled at the same time: how often does a token or a logprob differ?

    python -m benchmarks.exactness.neighbours [--sequences 10000] [--alone 500] [--threads 1] [--shape tiny]
        [--shape-alone] [--dtypes float32 bfloat16] [--device cpu] [--batch-invariant]

Random jobs on `mint/tiny` and a shape of the comparisons (with `--shape-alone` on the shape), in float32 and bfloat16;
on a GPU, with or without the batch-invariant mode. They have prompts of 1
to 200 tokens (a third begin as another one does) and mixed lengths, temperatures, top-k, top-p and stop tokens, on the
base and three loras. Every job is sampled in three batches, which differ in order, in size and in how jobs arrive while
others run; some jobs also run alone. All answers to one job are compared bit for bit. In the table, `sequences` is the
number compared; of those that differ, the first few are shown with the place at which they part.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mint.config import read_settings
from mint.engine.protocol import AdamSpec, LoraSpec, SampleJob, SampleResult, StopRule, TrainDatum, resolve_loss
from mint.engine.torch_engine import TorchEngine
from mint.models.random_base import SHAPES, write_random_base
from mint.models.registry import resolve

LORAS = {
    "attention and mlp": LoraSpec(16, 1, True, True, False),
    "everything": LoraSpec(4, 7, True, True, True),
    "mlp": LoraSpec(3, 2, False, True, False),
}
ADAM = AdamSpec(learning_rate=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)
PROMPT_LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 199, 200)
"""Half of the prompts have one of these lengths, for they lie where cuts and blocks may lie."""

SHOWN = 10


@dataclass(frozen=True)
class Company:
    """How jobs meet: at most `sequences` at once, and `arrivals` new jobs on average before each step."""

    sequences: int
    arrivals: float


COMPANIES = (Company(64, 1e9), Company(48, 3.0), Company(12, 0.7))
"""All jobs at once; a steady stream; a slow stream, in which few run together."""

ALONE = Company(1, 1e9)


@dataclass
class Tally:
    """What was compared and found. `examples` describes the first differences."""

    sequences: int = 0
    tokens: int = 0
    sequences_differ: int = 0
    tokens_differ: int = 0
    logprobs_differ: int = 0
    largest: float = 0.0

    def __post_init__(self) -> None:
        self.examples: list[str] = []

    def compare(self, job: SampleJob, first: SampleResult, second: SampleResult, where: str) -> None:
        """Two answers to one job. Behind the first token that differs nothing is compared: the texts have parted."""
        assert first.error is None and second.error is None, first.error or second.error
        for index, (one, other) in enumerate(zip(first.samples, second.samples, strict=True)):
            size = min(len(one.tokens), len(other.tokens))
            parted = np.flatnonzero(one.tokens[:size] != other.tokens[:size])
            same = int(parted[0]) if len(parted) else size
            moved = np.flatnonzero(one.logprobs[:same] != other.logprobs[:same])
            apart = len(parted) > 0 or len(one.tokens) != len(other.tokens)
            self.sequences += 1
            self.tokens += size
            self.tokens_differ += len(parted)
            self.logprobs_differ += len(moved)
            if len(moved):
                differences = np.abs(one.logprobs[:same] - other.logprobs[:same])
                self.largest = max(self.largest, float(differences.max()))
            if apart or len(moved):
                self.sequences_differ += 1
                self._tell(job, index, where, same if apart else None, moved)

    def _tell(self, job: SampleJob, index: int, where: str, parted: int | None, moved: np.ndarray) -> None:
        if len(self.examples) >= SHOWN:
            return
        before = f"{len(moved)} logprobs before it" if len(moved) else "no logprob before it"
        place = "no token" if parted is None else f"the token at {parted}"
        self.examples.append(
            f"{where}: {place} and {before} differ; sample {index} of {job.num_samples}, prompt of {len(job.prompt)}, "
            f"lora {job.weights_id}, temperature {job.temperature}, top-k {job.top_k}, top-p {job.top_p:.2f}, "
            f"first logprob that differs at {moved[0] if len(moved) else '-'}"
        )


def make_engine(dtype: Any, options: argparse.Namespace, bases: dict[str, Path]) -> TorchEngine:
    """An engine with these bases and, for each, the loras, trained for a few steps so that they change something."""
    engine = TorchEngine(
        dtype=dtype,
        threads=options.threads,
        device=options.device,
        native=read_settings().native_folder if options.device == "cpu" else None,
        batch_invariant=options.batch_invariant,
    )
    for base, folder in bases.items():
        vocabulary = engine.load_base(base, str(folder)).vocab_size
        for name, lora in LORAS.items():
            engine.create_model("trained", base, lora)
            rng = np.random.default_rng(lora.seed)
            for _ in range(3):
                tokens = rng.integers(1, vocabulary, (8, 40))
                data = [TrainDatum(row[:-1], row[1:], np.ones(39, np.float32)) for row in tokens]
                engine.forward_backward("trained", data, resolve_loss("cross_entropy"))
                engine.optim_step("trained", ADAM)
            engine.publish("trained", f"{base}: {name}")
    return engine


def random_jobs(rng: np.random.Generator, base: str, vocabulary: int, sequences: int) -> list[SampleJob]:
    """Jobs with so many sequences in all."""
    jobs: list[SampleJob] = []
    wanted = sequences
    while wanted > 0:
        size = int(rng.choice(PROMPT_LENGTHS) if rng.random() < 0.5 else rng.integers(1, 201))
        prompt = rng.integers(1, vocabulary, size)
        if jobs and rng.random() < 0.35:
            model = jobs[int(rng.integers(max(0, len(jobs) - 40), len(jobs)))].prompt
            shared = min(size, len(model), int(rng.integers(1, 201)))
            prompt[:shared] = model[:shared]
        few, narrow = rng.random() < 0.3, rng.random() < 0.3
        lora = rng.choice([None, *LORAS])
        samples = min(wanted, int(rng.choice([1, 1, 2, 4, 8])))
        jobs.append(
            SampleJob(
                base=base,
                weights_id=None if lora is None else f"{base}: {lora}",
                prompt=prompt,
                num_samples=samples,
                max_tokens=int(rng.integers(1, 33)),
                temperature=float(rng.choice([0.0, 0.5, 0.8, 1.0, 1.0, 1.5])),
                top_k=int(rng.integers(1, 60)) if few else -1,
                top_p=float(rng.uniform(0.3, 1.0)) if narrow else 1.0,
                seed=int(rng.integers(1 << 40)),
                stop=StopRule(frozenset(rng.integers(0, vocabulary, 3).tolist())),
            )
        )
        wanted -= samples
    return jobs


def sample_in(
    engine: TorchEngine, jobs: Sequence[SampleJob], company: Company, rng: np.random.Generator
) -> list[SampleResult]:
    """All jobs, in a random order, as the company has it; the answers in the order of `jobs`."""
    waiting = [int(place) for place in rng.permutation(len(jobs))]
    batch, found, running = engine.open_batch(), {}, 0
    while waiting or running:
        arriving = min(len(waiting), 1000, int(rng.poisson(min(company.arrivals, 1000.0))) or int(running == 0))
        while arriving and waiting and (running == 0 or running + jobs[waiting[-1]].num_samples <= company.sequences):
            place = waiting.pop()
            batch.add(str(place), jobs[place])
            running += jobs[place].num_samples
            arriving -= 1
        for key, result in batch.step().items():
            found[int(key)] = result
            running -= jobs[int(key)].num_samples
    return [found[place] for place in range(len(jobs))]


def measure(
    engine: TorchEngine, base: str, vocabulary: int, sequences: int, alone: int, seed: int
) -> tuple[Tally, Tally]:
    """Company against company, and alone against company."""
    rng = np.random.default_rng(seed)
    jobs = random_jobs(rng, base, vocabulary, sequences)
    together, single = Tally(), Tally()
    answers = [sample_in(engine, jobs, company, rng) for company in COMPANIES]
    for number in range(1, len(COMPANIES)):
        for job, first, second in zip(jobs, answers[0], answers[number], strict=True):
            together.compare(job, first, second, f"company {number}")
    for place in some_of(jobs, alone, rng):
        job = jobs[place]
        own = sample_in(engine, [job], ALONE, rng)[0]
        for number, answer in enumerate(answers):
            single.compare(job, own, answer[place], f"alone, company {number}")
        first_sample = sample_in(engine, [replace(job, num_samples=1)], ALONE, rng)[0]
        single.compare(replace(job, num_samples=1), first_sample, replace(own, samples=own.samples[:1]), "one sample")
    return together, single


def some_of(jobs: Sequence[SampleJob], sequences: int, rng: np.random.Generator) -> Iterator[int]:
    """Random places until so many sequences are reached."""
    for place in rng.permutation(len(jobs)):
        if sequences <= 0:
            return
        yield int(place)
        sequences -= jobs[place].num_samples


def main() -> None:
    """A table, then whatever differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=10_000, help="over all bases and dtypes")
    parser.add_argument("--alone", type=int, default=500, help="how many of them are sampled alone, too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--shape-alone", action="store_true", help="leaves mint/tiny out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    print("| base | dtype | compared | sequences | tokens | sequences that differ | tokens | logprobs | largest Δ |")
    print("|---|---|---|---|---|---|---|---|---|")
    examples: list[str] = []
    began_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        write_random_base(Path(folder), SHAPES[options.shape], seed=0)
        tiny = {} if options.shape_alone else {"mint/tiny": resolve("mint/tiny", {})}
        bases = tiny | {f"bench/{options.shape}": Path(folder)}
        share = len(bases) * len(options.dtypes)
        for dtype in options.dtypes:
            engine = make_engine(dtype, options, bases)
            for base, path in bases.items():
                vocabulary = engine.load_base(base, str(path)).vocab_size
                found = measure(
                    engine, base, vocabulary, options.sequences // share, options.alone // share, options.seed
                )
                for tally, name in zip(found, ("three companies", "alone and in company"), strict=True):
                    counts = (tally.sequences, tally.tokens, tally.sequences_differ, tally.tokens_differ)
                    cells = (base, dtype, name, *counts, tally.logprobs_differ, f"{tally.largest:.2g}")
                    print("|", " | ".join(map(str, cells)), "|", flush=True)
                    examples += [f"{base}, {dtype}, {text}" for text in tally.examples]
    print(f"\n{time.process_time() - began_s:.0f} CPU s, {options.threads} thread(s), seed {options.seed}")
    print("\n".join(examples) or "No difference.")


if __name__ == "__main__":
    main()
