"""Plants each known bug into correct datums, sends them through the service, and counts which are named, and rightly.

    python -m benchmarks.detection.lint_mutations [--seeds N] [--first-seed N] [--json]

The correct datums are samples of mint/tiny (arithmetic and chat) at several temperatures and group sizes, from the base
and after training steps; the batches that train along the way are the ones that no rule may speak about, those of a
second optimizer step on the same samples included. So are the healthy batches of unusual runs (`ODD`): other sampling,
samples one to four steps old, a policy that was trained for long or is nearly deterministic. Uses the public SDK alone.

Letters: N tokens of one datum.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mint
from mint.recipes.datasets.arithmetic import draw_problems
from mint.rl.estimate import wilson
from mint.types import AdamParams, Datum, ModelInput, SamplingParams

LEARNING_RATE = 1e-3
PROMPTS = 8
"""Per batch, before groups without a signal are dropped."""

PAD_TOKENS = 3

RANDOM_TOKENS = 1000
"""Random tokens are drawn from so many first ids."""

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


def _mask_early(*, as_long: bool) -> Callable[[Batch], list[Datum]]:
    """The mask alone begins at the prompt's last token, and ends where it should or, `as_long`, a token early too."""

    def plant(batch: Batch) -> list[Datum]:
        rows = [columns(sample) for sample in batch.samples]
        for row, sample in zip(rows, batch.samples, strict=True):
            start, end = len(sample.prompt) - 2, len(row.inputs) - as_long
            for column, value in ((row.weights, 1.0), (row.advantages, sample.advantage)):
                column[:] = [value if start <= place < end else 0.0 for place in range(len(column))]
        return [row.datum() for row in rows]

    return plant


def _first_of_each_group(batch: Batch) -> list[Sample]:
    """For each sample, the first one of its prompt, with the sample's own reward and advantage."""
    first: dict[tuple[int, ...], Sample] = {}
    for sample in batch.samples:
        first.setdefault(tuple(sample.prompt), sample)
    return [
        replace(first[tuple(sample.prompt)], reward=sample.reward, advantage=sample.advantage)
        for sample in batch.samples
    ]


def _copied(batch: Batch) -> list[Datum]:
    """One sample stands for its whole group; nothing where the policy is so certain that it repeats itself."""
    return correct(replace(batch, samples=_first_of_each_group(batch))) if _is_varied(batch) else []


def _copied_and_graded(batch: Batch) -> list[Datum]:
    """As `_copied`, graded as copies, with the mean of the batch as the baseline."""
    copies = _first_of_each_group(batch)
    own = {tuple(sample.prompt): sample.reward for sample in reversed(batch.samples)}
    rewards = [own[tuple(sample.prompt)] for sample in copies]
    mean = sum(rewards) / len(rewards)
    if not _is_varied(batch) or not 0 < mean < 1:
        return []
    graded = [replace(sample, advantage=reward - mean) for sample, reward in zip(copies, rewards, strict=True)]
    return correct(replace(batch, samples=graded))


def _is_varied(batch: Batch) -> bool:
    """Whether copies of first samples can be told from the policy's own: half of the others differ from theirs."""
    copies = _first_of_each_group(batch)
    differ = sum(one.tokens != other.tokens for one, other in zip(batch.samples, copies, strict=True))
    return 2 * differ >= len(copies) - len({tuple(sample.prompt) for sample in copies})


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


def _cut_to_fit(batch: Batch) -> list[Datum]:
    """As `_encoded_again`, cut to the length of the logprobs, so that none is missing."""
    again = [replace(one, tokens=one.letters[: len(one.tokens)]) for one in batch.samples]
    again = [replace(one, logprobs=one.logprobs[: len(one.tokens)]) for one in again]
    same = sum(one.tokens == other.tokens for one, other in zip(again, batch.samples, strict=True))
    return [columns(sample).datum() for sample in again] if same <= len(again) // 4 else []


def _random_tokens(batch: Batch) -> list[Datum]:
    rng = random.Random(sum(batch.samples[0].tokens))
    strangers = [replace(one, tokens=[rng.randrange(RANDOM_TOKENS) for _ in one.tokens]) for one in batch.samples]
    return [columns(sample).datum() for sample in strangers]


def _others_tokens(batch: Batch) -> list[Datum]:
    """The tokens of a sample of another group, with this sample's logprobs, as long as both."""
    step = len(batch.samples) // 2
    taken = []
    for place, one in enumerate(batch.samples):
        other = batch.samples[(place + step) % len(batch.samples)]
        length = min(len(one.tokens), len(other.tokens))
        taken.append(replace(one, tokens=other.tokens[:length], logprobs=one.logprobs[:length]))
    return [columns(sample).datum() for sample in taken]


def _of_others(order: Callable[[Batch], Sequence[int]]) -> Callable[[Batch], list[Datum]]:
    """Each sample with the logprobs of the one that `order` names, cut or padded with 0."""

    def plant(batch: Batch) -> list[Datum]:
        samples = batch.samples
        return [
            columns(one, logprobs=_resized(samples[other].logprobs, len(one.tokens))).datum()
            for one, other in zip(samples, order(batch), strict=True)
        ]

    return plant


def _next_one(batch: Batch) -> list[int]:
    return [(place + 1) % len(batch.samples) for place in range(len(batch.samples))]


def _backwards(batch: Batch) -> list[int]:
    return list(reversed(range(len(batch.samples))))


def _shuffled(batch: Batch) -> list[int]:
    places = list(range(len(batch.samples)))
    random.Random(sum(batch.samples[0].tokens)).shuffle(places)
    return places


def _flipped_sign(batch: Batch) -> list[Datum]:
    return [columns(one, logprobs=[-value for value in one.logprobs]).datum() for one in batch.samples]


def _probabilities(batch: Batch) -> list[Datum]:
    return [columns(one, logprobs=[math.exp(value) for value in one.logprobs]).datum() for one in batch.samples]


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
    the quick part plants it, and `named` the least share of them that must be named.
    """

    plant: Callable[[Batch], list[Datum]]
    code: str
    at_one: bool = True
    config: Callable[[Batch], dict[str, float]] = lambda batch: {}
    at_least: int = 20
    named: float = 0.9


BUGS = {
    "weight 1 on the whole prompt": Bug(_all_weights, "prompt_trained"),
    "no weights, advantages on the prompt": Bug(_no_weights, "prompt_trained"),
    "second half of the prompt trained": Bug(_half_the_prompt, "prompt_trained"),
    "mask alone a token early": Bug(_mask_early(as_long=False), "prompt_trained"),
    "mask alone a token early, as long as the sample": Bug(_mask_early(as_long=True), "prompt_trained"),
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
    "one sample copied for its group": Bug(_copied, "duplicates", at_least=12),
    "one sample copied for its group, baseline of the batch": Bug(
        # answers of a few digits are often equal by themselves
        _copied_and_graded,
        "duplicates",
        at_least=6,
        named=0.1,
    ),
    "tokens after the end trained": Bug(_beyond_the_end, "tokens_after_stop"),
    "advantages times 100": Bug(_times_100, "large_advantages"),
    "weights of -1": Bug(_negative_weights, "negative_weights"),
    "text encoded again, letter by letter": Bug(_encoded_again, "foreign_tokens", at_least=3),
    "text encoded again, cut to fit": Bug(_cut_to_fit, "foreign_tokens", at_least=3),
    "random tokens with the sample's logprobs": Bug(_random_tokens, "foreign_tokens"),
    "tokens of another sample": Bug(_others_tokens, "foreign_tokens"),
    "logprobs of the next sample": Bug(_of_others(_next_one), "mispaired_logprobs"),
    "logprobs in the opposite order of samples": Bug(_of_others(_backwards), "mispaired_logprobs"),
    "logprobs of shuffled samples": Bug(_of_others(_shuffled), "mispaired_logprobs"),
    "logprobs with the sign flipped": Bug(_flipped_sign, "impossible_logprobs"),
    "probabilities in place of logprobs": Bug(_probabilities, "impossible_logprobs"),
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
    top_p: float = 1.0
    max_tokens: int = 16


class Run:
    """A model in training, and the batches that it samples on the way."""

    def __init__(self, service: mint.ServiceClient, setting: Setting) -> None:
        """Starts from the base."""
        self.setting = setting
        self.service = service
        self.model = service.create_lora_training_client("mint/tiny", rank=8, seed=setting.seed)
        self.tokenizer = self.model.get_tokenizer()
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._rng = random.Random(setting.seed)
        self._problems = draw_problems(setting.seed, 512, heldout=False)
        self._seed = 1000 * setting.seed

    def batch(self) -> Batch:
        """Groups with a signal, from the weights as they are now, published for it.

        Without any such group, all of them, with advantages of a random sign: the loss of an entropy bonus trains them.
        """
        sampler, setting = self.model.save_weights_and_get_sampling_client(), self.setting
        samples: list[Sample] = []
        equal: list[Sample] = []
        asked = [self._ask() for _ in range(PROMPTS)]
        futures = []
        for prompt, _ in asked:
            self._seed += 1
            for mode in ("raw", "processed"):  # the same seed: the same tokens, with other logprobs
                params = SamplingParams(
                    max_tokens=setting.max_tokens,
                    temperature=setting.temperature,
                    top_p=setting.top_p,
                    seed=self._seed,
                    logprobs_mode=mode,
                )
                futures.append(sampler.sample(ModelInput.from_ints(prompt), setting.group_size, params))
        answers = [future.result().sequences for future in futures]
        for (prompt, reward), raws, processeds in zip(asked, answers[::2], answers[1::2], strict=True):
            rewards = [reward(self.tokenizer.decode(row.tokens)) for row in raws]
            mean = sum(rewards) / len(rewards)
            for raw, processed, own in zip(raws, processeds, rewards, strict=True):
                letters = self._letters(raw.tokens)
                sample = Sample(prompt, raw.tokens, raw.logprobs, processed.logprobs, own, own - mean, letters)
                if min(rewards) < max(rewards):
                    samples.append(sample)
                else:
                    equal.append(replace(sample, advantage=self._rng.choice((-1, 1)) * self._rng.random()))
        return Batch(samples if len(samples) >= 8 else samples + equal, setting.temperature, self.end)

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


def settings(seeds: int, first_seed: int = 0) -> Iterator[Setting]:
    """Every temperature with every group size, `seeds` times, the tasks in turn."""
    for seed in range(first_seed, first_seed + seeds):
        for place, (temperature, size) in enumerate((t, g) for t in (0.7, 0.8, 1.0) for g in (4, 8, 16)):
            yield Setting(100 * seed + place, temperature, size, "chat" if (seed + place) % 3 == 2 else "arithmetic")


@dataclass(frozen=True)
class Odd:
    """A healthy run that is unusual: how it samples, and what was done to its policy before.

    `certain`: the policy imitated its own most likely answers, so that it gives hardly any other.
    """

    setting: Setting
    steps: int = 8
    certain: bool = False


def odd_runs(seed: int) -> dict[str, Odd]:
    """The unusual runs by name."""
    return {
        "temperature 0.7": Odd(Setting(seed, 0.7, 8, "chat")),
        "temperature 1.5": Odd(Setting(seed, 1.5, 8, "arithmetic")),
        "temperature 1.5, chat": Odd(Setting(seed, 1.5, 4, "chat")),
        "top_p 0.9": Odd(Setting(seed, 1.0, 8, "chat", top_p=0.9)),
        "trained for 40 steps": Odd(Setting(seed, 1.0, 4, "arithmetic"), steps=40),
        "answers of one token": Odd(Setting(seed, 1.0, 8, "arithmetic", max_tokens=1)),
        "answers of up to three tokens": Odd(Setting(seed, 1.0, 8, "chat", max_tokens=3)),
        "deterministic": Odd(Setting(seed, 1.0, 8, "arithmetic"), certain=True),
        "deterministic, chat": Odd(Setting(seed, 0.7, 8, "chat"), certain=True),
    }


LAGS = (1, 2, 4)
"""Steps, of two optimizer steps each, after which samples are checked again."""

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


def play_odd(run: Run, odd: Odd, name: str, tally: Tally) -> None:
    """Trains `run`, and checks its last batches, and samples that are some steps old."""
    if odd.certain:
        _imitate_itself(run)
    sampled: list[list[Datum]] = []
    for step in range(odd.steps):
        data = correct(run.batch())
        sampled.append(data)
        if step >= odd.steps - 4:
            tally.note(f"correct: {name}", run.check(data), None)
            for lag in LAGS:
                tally.note(f"correct: {lag} steps old, {name}", run.check(sampled[step - lag]), None)
        half = len(data) // 2
        tally.note(f"correct: {name}", run.train(data[:half], "ppo"), None)
        tally.note(f"correct: {name}", run.train(data[half:], "ppo"), None)


def _imitate_itself(run: Run) -> None:
    greedy = Run(run.service, replace(run.setting, temperature=1e-3, group_size=1))
    data = []
    for sample in greedy.batch().samples:
        row = columns(sample)
        tensors: dict[str, Any] = {"target_tokens": row.targets, "weights": row.weights}
        data.append(Datum(model_input=ModelInput.from_ints(row.inputs), loss_fn_inputs=tensors))
    for _ in range(10):
        run.model.forward_backward(data, "cross_entropy").result()
        run.model.optim_step(AdamParams(learning_rate=LEARNING_RATE)).result()


def move_away(run: Run, data: Sequence[Datum]) -> None:
    """Trains for long on one batch without sampling again, as a run that forgot to renew its sampler."""
    for _ in range(STALE_STEPS):
        run.train(data)


STALE_STEPS = 20


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    service, tally = mint.ServiceClient(), Tally()
    for setting in settings(options.seeds, options.first_seed):
        play(Run(service, setting), tally, steps=(0, 6))
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name, odd in odd_runs(100 * seed + 50).items():
            play_odd(Run(service, odd.setting), odd, name, tally)
    if options.json:
        print(json.dumps({"tried": tally.tried, "named": tally.named, "alarms": tally.alarms}))
        return
    print("| batches | n | right answer | 95 % | silent |\n|---|---|---|---|---|")
    for what, count in sorted(tally.tried.items(), key=lambda item: (item[0].startswith("correct"), item[0])):
        low, high = wilson(tally.named[what], count)
        print(
            f"| {what} | {count} | {tally.named[what] / count:.3f} | {low:.3f}–{high:.3f} "
            f"| {tally.silent[what] / count:.3f} |"
        )
    for kind, of_kind in (("planted", False), ("correct", True)):
        names = [what for what in tally.tried if what.startswith("correct") == of_kind]
        tried, named = (sum(counter[what] for what in names) for counter in (tally.tried, tally.named))
        low, high = wilson(named, tried)
        print(f"\n{kind}: right answer in {named} of {tried} batches ({low:.4f}–{high:.4f})")
    print(f"\nfalse alarms: {dict(Counter(tally.alarms)) or 'none'}")
    print(f"another name than the right one: {dict(Counter(tally.mistaken)) or 'none'}")


if __name__ == "__main__":
    main()
