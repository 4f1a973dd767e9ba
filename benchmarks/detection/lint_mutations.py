"""Plants each known bug into correct datums, sends them through the service, and counts which are named, and rightly.

    python -m benchmarks.detection.lint_mutations [--seeds N] [--json]

The correct datums are samples of mint/tiny (arithmetic and chat) at several temperatures and group sizes, from the base
and after training steps; the batches that train along the way are the ones that no rule may speak about, those of a
second optimizer step on the same samples included. Uses the public SDK alone.

Letters: N tokens of one datum.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mint
from mint.recipes.datasets.arithmetic import draw_problems
from mint.types import AdamParams, Datum, ModelInput, SamplingParams

LEARNING_RATE = 1e-3
PROMPTS = 8
"""Per batch, before groups without a signal are dropped."""

PAD_TOKENS = 3
CHAT = ("Tell me about the {}.", "Do you like the {}?", "Describe the {} for me.")
THINGS = ("fox", "owl", "river", "piano", "bread", "snow", "lamp", "tiger", "letter", "boat", "rose", "clock")


@dataclass(frozen=True)
class Sample:
    """One completion with what its datum is made of; `processed` are the logprobs at the sampling temperature.

    `letters` are the tokens of the same text, encoded letter by letter.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    processed: list[float]
    reward: float
    advantage: float
    letters: list[int] = field(default_factory=list)


@dataclass
class Columns:
    """A datum before it is one: lists of N."""

    inputs: list[int]
    targets: list[int]
    weights: list[float]
    logprobs: list[float]
    advantages: list[float]

    def datum(self, *, weights: bool = True) -> Datum:
        """The `Datum`; without `weights` the server has to guess them."""
        tensors: dict[str, Any] = {
            "target_tokens": self.targets,
            "logprobs": self.logprobs,
            "advantages": self.advantages,
        }
        if weights:
            tensors["weights"] = self.weights
        return Datum(model_input=ModelInput.from_ints(self.inputs), loss_fn_inputs=tensors)


@dataclass(frozen=True)
class Batch:
    """Samples of one step, the temperature they were drawn at, and the model's end token."""

    samples: list[Sample]
    temperature: float
    end: int
    config: dict[str, float] = field(default_factory=dict)


def columns(sample: Sample, *, logprobs: Sequence[float] | None = None, offset: int = -1) -> Columns:
    """The correct columns of a sample; `offset` -1 puts its first token where it belongs."""
    full = [*sample.prompt, *sample.tokens]
    length, start = len(full) - 1, len(sample.prompt) + offset

    def placed(values: Sequence[float]) -> list[float]:
        return ([0.0] * start + [float(value) for value in values] + [0.0] * length)[:length]

    ones = [1.0] * len(sample.tokens)
    return Columns(
        inputs=full[:-1],
        targets=full[1:],
        weights=placed(ones),
        logprobs=placed(sample.logprobs if logprobs is None else logprobs),
        advantages=placed([sample.advantage * one for one in ones]),
    )


def correct(batch: Batch) -> list[Datum]:
    """The datums as they should be."""
    return [columns(sample).datum() for sample in batch.samples]


# --- the bugs ----------------------------------------------------------------------------------------------------


def _all_weights(batch: Batch) -> list[Datum]:
    rows = [columns(sample) for sample in batch.samples]
    for row in rows:
        row.weights = [1.0] * len(row.inputs)
    return [row.datum() for row in rows]


def _no_weights(batch: Batch) -> list[Datum]:
    rows = [columns(sample) for sample in batch.samples]
    for row, sample in zip(rows, batch.samples, strict=True):
        row.advantages = [sample.advantage] * len(row.inputs)
    return [row.datum(weights=False) for row in rows]


def _half_the_prompt(batch: Batch) -> list[Datum]:
    rows = [columns(sample) for sample in batch.samples]
    for row, sample in zip(rows, batch.samples, strict=True):
        start = len(sample.prompt) // 2
        row.weights[start:] = [1.0] * (len(row.inputs) - start)
        row.advantages[start:] = [sample.advantage] * (len(row.inputs) - start)
    return [row.datum() for row in rows]


def _targets(shift: int) -> Callable[[Batch], list[Datum]]:
    def plant(batch: Batch) -> list[Datum]:
        rows = [columns(sample) for sample in batch.samples]
        for row in rows:
            full = [*row.inputs, *row.targets[-1:], batch.end]
            row.targets = full[shift : shift + len(row.inputs)]
        return [row.datum() for row in rows]

    return plant


def _zeros(batch: Batch) -> list[Datum]:
    return [columns(sample, logprobs=[0.0] * len(sample.tokens)).datum() for sample in batch.samples]


def _late(batch: Batch) -> list[Datum]:
    return [columns(sample, logprobs=[0.0, *sample.logprobs[:-1]]).datum() for sample in batch.samples]


def _early(batch: Batch) -> list[Datum]:
    return [columns(sample, logprobs=[*sample.logprobs[1:], 0.0]).datum() for sample in batch.samples]


def _offset(offset: int) -> Callable[[Batch], list[Datum]]:
    return lambda batch: [columns(sample, offset=offset).datum() for sample in batch.samples]


def _processed(batch: Batch) -> list[Datum]:
    return [columns(sample, logprobs=sample.processed).datum() for sample in batch.samples]


def _raw_rewards(batch: Batch) -> list[Datum]:
    return [columns(replace(sample, advantage=sample.reward)).datum() for sample in batch.samples]


def _beyond_the_end(batch: Batch) -> list[Datum]:
    pad = PAD_TOKENS
    padded = [
        replace(sample, tokens=[*sample.tokens, *[batch.end] * pad], logprobs=[*sample.logprobs, *[0.0] * pad])
        for sample in batch.samples
    ]
    return [columns(sample).datum() for sample in padded]


def _resized(logprobs: Sequence[float], length: int) -> list[float]:
    """Cut, or padded with 0."""
    return [*logprobs[:length], *[0.0] * (length - len(logprobs))]


def _encoded_again(batch: Batch) -> list[Datum]:
    """The text of each completion, encoded letter by letter; nothing where that gives the same tokens."""
    again = [
        replace(sample, tokens=sample.letters, logprobs=_resized(sample.logprobs, len(sample.letters)))
        for sample in batch.samples
    ]
    same = sum(one.tokens == other.tokens for one, other in zip(again, batch.samples, strict=True))
    return [columns(sample).datum() for sample in again] if not same else []


def _times_100(batch: Batch) -> list[Datum]:
    return [columns(replace(sample, advantage=100 * sample.advantage)).datum() for sample in batch.samples]


def _negative_weights(batch: Batch) -> list[Datum]:
    rows = [columns(sample) for sample in batch.samples]
    for row in rows:
        row.weights = [-weight for weight in row.weights]
    return [row.datum() for row in rows]


@dataclass(frozen=True)
class Bug:
    """A planted bug, the code that must report it, and whether it is a bug at temperature 1, too.

    `plant` gives no datums for a batch into which the bug does not fit. `at_least` is the number of batches in which
    the quick part plants it.
    """

    plant: Callable[[Batch], list[Datum]]
    code: str
    at_one: bool = True
    config: Callable[[Batch], dict[str, float]] = lambda batch: {}
    at_least: int = 20


BUGS = {
    "weight 1 on the whole prompt": Bug(_all_weights, "prompt_trained"),
    "no weights, advantages on the prompt": Bug(_no_weights, "prompt_trained"),
    "second half of the prompt trained": Bug(_half_the_prompt, "prompt_trained"),
    "targets equal the input": Bug(_targets(0), "not_shifted"),
    "targets shifted by two": Bug(_targets(2), "not_shifted"),
    "logprobs missing (all 0)": Bug(_zeros, "zero_logprobs"),
    "logprobs one place late": Bug(_late, "shifted_logprobs"),
    "logprobs one place early": Bug(_early, "shifted_logprobs"),
    "mask and tensors one place late": Bug(_offset(0), "shifted_logprobs"),
    "mask and tensors one place early": Bug(_offset(-2), "shifted_logprobs"),
    "logprobs at the sampling temperature": Bug(_processed, "temperature_logprobs", at_one=False, at_least=12),
    "trained at T, logprobs at 1": Bug(
        correct,
        "temperature_logprobs",
        at_one=False,
        config=lambda batch: {"temperature": batch.temperature},
        at_least=12,
    ),
    "raw rewards as advantages": Bug(_raw_rewards, "raw_rewards"),
    "the batch twice": Bug(lambda batch: correct(batch) * 2, "duplicates"),
    "one datum for all": Bug(lambda batch: correct(batch)[:1] * len(batch.samples), "duplicates"),
    "tokens after the end trained": Bug(_beyond_the_end, "tokens_after_stop"),
    "advantages times 100": Bug(_times_100, "large_advantages"),
    "weights of -1": Bug(_negative_weights, "negative_weights"),
    "text encoded again, letter by letter": Bug(_encoded_again, "foreign_tokens", at_least=3),
}
"""Planted into single batches. Stale samples need a policy that has moved; see `stale_batches`."""


# --- batches -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One run that batches are taken from."""

    seed: int
    temperature: float
    group_size: int
    task: str


class Run:
    """A model in training, and the batches that it samples on the way."""

    def __init__(self, service: mint.ServiceClient, setting: Setting) -> None:
        """Starts from the base."""
        self.setting = setting
        self.model = service.create_lora_training_client("mint/tiny", rank=8, seed=setting.seed)
        self.tokenizer = self.model.get_tokenizer()
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._rng = random.Random(setting.seed)
        self._problems = draw_problems(setting.seed, 512, heldout=False)
        self._seed = 1000 * setting.seed

    def batch(self) -> Batch:
        """Groups with a signal, from the weights as they are now, published for it."""
        sampler, setting = self.model.save_weights_and_get_sampling_client(), self.setting
        samples: list[Sample] = []
        asked = [self._ask() for _ in range(PROMPTS)]
        futures = []
        for prompt, _ in asked:
            self._seed += 1
            for mode in ("raw", "processed"):  # the same seed: the same tokens, with other logprobs
                params = SamplingParams(
                    max_tokens=16, temperature=setting.temperature, seed=self._seed, logprobs_mode=mode
                )
                futures.append(sampler.sample(ModelInput.from_ints(prompt), setting.group_size, params))
        answers = [future.result().sequences for future in futures]
        for (prompt, reward), raws, processeds in zip(asked, answers[::2], answers[1::2], strict=True):
            rewards = [reward(self.tokenizer.decode(row.tokens)) for row in raws]
            mean = sum(rewards) / len(rewards)
            for raw, processed, own in zip(raws, processeds, rewards, strict=True):
                if min(rewards) < max(rewards):
                    letters = self._letters(raw.tokens)
                    samples.append(
                        Sample(prompt, raw.tokens, raw.logprobs, processed.logprobs, own, own - mean, letters)
                    )
        return Batch(samples, setting.temperature, self.end)

    def _letters(self, tokens: list[int]) -> list[int]:
        kept = tokens[:-1] if tokens[-1] == self.end else tokens
        return [
            *(token for letter in self.tokenizer.decode(kept) for token in self.tokenizer.encode(letter)),
            *tokens[len(kept) :],
        ]

    def check(self, data: Sequence[Datum], config: dict[str, float] | None = None) -> list[str]:
        """The codes of the warnings about a batch, without a gradient."""
        return codes(self.model.forward(data, "importance_sampling", config).result().warnings)

    def train(self, data: Sequence[Datum], loss: str = "importance_sampling") -> list[str]:
        """One step; the codes of its warnings."""
        output = self.model.forward_backward(data, loss).result()
        self.model.optim_step(AdamParams(learning_rate=LEARNING_RATE)).result()
        return codes(output.warnings)

    def _ask(self) -> tuple[list[int], Callable[[str], float]]:
        if self.setting.task == "chat":
            thing = self._rng.choice(THINGS)
            message = {"role": "user", "content": self._rng.choice(CHAT).format(thing)}
            prompt = self.tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, return_dict=False, tokenize=True
            )
            return list(prompt), lambda text: float(thing in text and len(text.split()) <= 12)
        problem = self._problems[self._rng.randrange(len(self._problems))]
        prompt = self.tokenizer.encode(problem.question)
        return prompt, lambda text: float(text.removesuffix("<|im_end|>").strip() == problem.answer)


def codes(warnings: Sequence[str]) -> list[str]:
    """The codes that warnings start with."""
    return [warning.partition(":")[0] for warning in warnings]


def settings(seeds: int) -> Iterator[Setting]:
    """Every temperature with every group size, `seeds` times, the tasks in turn."""
    for seed in range(seeds):
        for place, (temperature, size) in enumerate((t, g) for t in (0.7, 0.8, 1.0) for g in (4, 8, 16)):
            yield Setting(100 * seed + place, temperature, size, "chat" if (seed + place) % 3 == 2 else "arithmetic")


QUICK = [
    Setting(seed, temperature, 4, "chat" if seed == 3 else "arithmetic")
    for seed, temperature in enumerate((0.7, 0.8, 1.0, 0.7, 0.8))
]
"""The part that the test suite runs."""


@dataclass
class Tally:
    """Batches tried, rightly named and spoken about at all, per bug and for correct batches."""

    tried: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    silent: Counter[str] = field(default_factory=Counter)
    alarms: list[str] = field(default_factory=list)
    mistaken: list[str] = field(default_factory=list)

    def note(self, what: str, found: Sequence[str], code: str | None) -> None:
        """One batch: what was in it, what the server said, and what it had to say (None: nothing)."""
        self.tried[what] += 1
        self.silent[what] += not found
        self.named[what] += (code in found) if code is not None else not found
        if code is not None and code not in found:
            self.mistaken += [f"{what}: {name}" for name in found]
        if code is None:
            self.alarms += [f"{what}: {name}" for name in found]


def play(run: Run, tally: Tally, *, steps: Sequence[int], planted: Sequence[str] = tuple(BUGS)) -> None:
    """Trains `run`, and before the given steps plants every bug into a batch of its own policy."""
    first: list[Datum] = []
    for step in range(max(steps) + 1):
        batch = run.batch()
        if len(batch.samples) < 8:
            continue
        data = correct(batch)
        first = first or data
        if step in steps:
            tally.note("correct: on-policy", run.check(data), None)
            for name in planted:
                bug = BUGS[name]
                faulty = bug.plant(batch) if bug.at_one or batch.temperature != 1.0 else []
                if faulty:
                    tally.note(name, run.check(faulty, bug.config(batch) or None), bug.code)
        half = len(data) // 2
        tally.note("correct: first step on a batch", run.train(data[:half], "ppo"), None)
        tally.note("correct: second step on a batch", run.train(data[half:], "ppo"), None)
    move_away(run, first)
    tally.note("samples of a policy left long ago", run.check(first), "stale_policy")


def move_away(run: Run, data: Sequence[Datum]) -> None:
    """Trains for long on one batch without sampling again, as a run that forgot to renew its sampler."""
    for _ in range(STALE_STEPS):
        run.train(data)


STALE_STEPS = 20


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    service, tally = mint.ServiceClient(), Tally()
    for setting in settings(options.seeds):
        play(Run(service, setting), tally, steps=(0, 6))
    if options.json:
        print(json.dumps({"tried": tally.tried, "named": tally.named, "alarms": tally.alarms}))
        return
    print("| batches | n | right answer | silent |\n|---|---|---|---|")
    for what, count in sorted(tally.tried.items(), key=lambda item: (item[0].startswith("correct"), item[0])):
        print(f"| {what} | {count} | {tally.named[what] / count:.3f} | {tally.silent[what] / count:.3f} |")
    print(f"\nfalse alarms: {dict(Counter(tally.alarms)) or 'none'}")
    print(f"another name than the right one: {dict(Counter(tally.mistaken)) or 'none'}")


if __name__ == "__main__":
    main()
