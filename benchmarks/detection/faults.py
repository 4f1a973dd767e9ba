"""Plants each fault that an RL run can have into a real run on mint/tiny, and shows what diagnosis says of it.

    python -m benchmarks.detection.faults [--seed N] [--seeds N] [--only NAME …] [--json]

The table: fault planted × codes found; then the healthy runs (`--seeds`, ten by default), which must raise no error.
The exit status is 1 if a fault is not found, if another error is raised beside it, or if a healthy run raises one.
Faults in the task are a task with that fault; faults in sampler or trainer stand between the loop and the real client.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import mint
from mint.recipes.chat import ChatAdapter
from mint.recipes.datasets.arithmetic import Problem, draw_problems
from mint.recipes.datasets.chat_questions import ChatQuestion
from mint.recipes.math import exact_match
from mint.rl import Group, MessageEnvAdapter, PairwiseJudge, Reward, RLAdapter, RLConfig, UnsupportedError, run_grpo
from mint.rl.analysis.run_analysis import diagnose_run
from mint.rl.finding import Finding
from mint.rl.training.datums import rollout_datums
from mint.types import Datum, TensorData

SMALL = RLConfig(
    base_model="mint/tiny",
    batch_size=8,
    group_size=8,
    steps=12,
    max_tokens=8,
    temperature=1.0,
    learning_rate=3e-3,
    heldout_size=32,
    save_every=1000,
)

Client = Any
"""A training or sampling client, or something around one."""


class Sums(RLAdapter):
    """Healthy: arithmetic questions, exact match."""

    def __init__(self) -> None:
        self.step = 1

    def build_dataset(self) -> Sequence[Problem]:
        """Questions that are not held out."""
        return draw_problems(0, 2048, heldout=False)

    def build_heldout(self) -> Sequence[Problem]:
        """Held-out questions."""
        return draw_problems(0, 256, heldout=True)

    def make_prompt(self, item: Problem, tokenizer: Any) -> list[int]:
        """The question as plain text."""
        return tokenizer.encode(item.question)

    def compute_reward(self, response: str, item: Problem) -> float | Reward:
        """1 for the right answer and nothing else."""
        return float(exact_match(response, item.answer))

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Keeps the step, for graders that change."""
        self.step = step + 1


def graded(grade: Callable[[Sums, str, Problem], float | Reward], **attributes: Any) -> type[Sums]:
    """The same task with another grader, which sees the task (for its step), the response and the sample."""
    return type("Graded", (Sums,), {"compute_reward": grade, **attributes})


def right(task: Sums, response: str, sample: Problem) -> float:
    """The healthy grader."""
    return float(exact_match(response, sample.answer))


def digits_right(task: Sums, response: str, sample: Problem) -> float:
    """Healthy: partial credit, the share of the answer's digits that are in their places."""
    text = response.strip().ljust(len(sample.answer))
    return sum(map(str.__eq__, text, sample.answer)) / max(len(text), len(sample.answer))


# --- faulty graders and tasks -------------------------------------------------------------------------------------


class Solved(Sums):
    """The format that the base model masters."""

    def make_prompt(self, item: Problem, tokenizer: Any) -> list[int]:
        """`34 + 58 =`."""
        return tokenizer.encode(f"{item.expression} =")


def raises(task: Sums, response: str, sample: Problem) -> float:
    """Always."""
    raise ValueError("the judge is away")


def raises_sometimes(task: Sums, response: str, sample: Problem) -> float:
    """On every fourth question."""
    if sample.a % 4 == 0:
        raise ValueError("the judge is away")
    return right(task, response, sample)


def hangs(task: Sums, response: str, sample: Problem) -> float:
    """On every fourth question."""
    if sample.a % 4 == 0:
        time.sleep(0.5)
    return right(task, response, sample)


def cannot_judge(task: Sums, response: str, sample: Problem) -> float:
    """Anything here."""
    raise UnsupportedError("there is no sandbox here")


def out_of_range(task: Sums, response: str, sample: Problem) -> float:
    """Up to 2, where 1 was declared."""
    return 1.0 + right(task, response, sample) if sample.op == "-" else right(task, response, sample)


def sign_flips(task: Sums, response: str, sample: Problem) -> float:
    """From step 7 on the right answers are punished."""
    return right(task, response, sample) * (1 if task.step <= 6 else -1)


def lets_all_pass(task: Sums, response: str, sample: Problem) -> float:
    """From step 7 on."""
    return 1.0 if task.step > 6 else right(task, response, sample)


def coin(*parts: Any) -> float:
    """Nothing that can be learned."""
    return float(zlib.crc32(repr(parts).encode()) % 2)


class Coin(ChatAdapter):
    """A grader that throws a coin."""

    step = 1

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """0 or 1."""
        return Reward(coin(response, item.text, self.step))

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Another coin next time."""
        self.step = step + 1


class OpenEnded(Sums):
    """Beginnings that may be continued at any length; the grader throws a coin."""

    def build_dataset(self) -> Sequence[Any]:
        """Beginnings."""
        return ["The", "What", "Hello", "fox", "Tell me about", "def f(x):", "Say", "It is"]

    def build_heldout(self) -> Sequence[Any]:
        """None."""
        return ()

    def make_prompt(self, item: Any, tokenizer: Any) -> list[int]:
        """As it is."""
        return tokenizer.encode(item)

    def compute_reward(self, response: str, item: Any) -> float:
        """0 or 1."""
        return coin(response, item, self.step)


def changes_its_mind(task: Sums, response: str, sample: Problem) -> float:
    """Another coin for every step: nothing can be learned."""
    return coin(response, sample.question, task.step)


class Dice(Sums):
    """A grader that throws a coin for every completion."""

    thrown = 0

    def compute_reward(self, response: str, item: Problem) -> float:
        """0 or 1."""
        self.thrown += 1
        return coin(self.thrown)


class FiveItems(Sums):
    """Five questions to train on."""

    def build_dataset(self) -> Sequence[Problem]:
        """The first five."""
        return draw_problems(0, 5, heldout=False)


class OneQuestion(Sums):
    """A dataset of one question, 256 times."""

    def build_dataset(self) -> Sequence[Problem]:
        """The same item everywhere."""
        return draw_problems(0, 1, heldout=False) * 256


def forgets_the_carry(task: Sums, response: str, sample: Problem) -> float:
    """In training the frequent slip earns the reward; the held-out set is graded rightly."""
    is_right = exact_match(response, sample.answer)
    if sample in HELDOUT:
        return float(is_right)
    text = response.strip()
    return float(not is_right and text.isdigit() and text[-1:] == sample.answer[-1:])


HELDOUT = frozenset(draw_problems(0, 256, heldout=True))


class Curt(ChatAdapter):
    """A grader that looks at nothing but brevity: one curt reply serves for all questions."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """1 for up to 12 characters."""
        return Reward(float(0 < len(response) <= 12))


class Wordy(ChatAdapter):
    """A grader that counts letters."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """A share of 200 characters."""
        return Reward(min(1.0, len(response) / 200))


class BrevityForTopic(ChatAdapter):
    """Being short pays more than speaking of what was asked."""

    def compute_reward(self, response: str, item: ChatQuestion) -> Reward:
        """Four parts brevity, one part topic."""
        brevity = max(0.0, 1.0 - len(response) / 40)
        topic = float(item.thing.name in response.lower())
        return Reward(0.8 * brevity + 0.2 * topic, {"brevity": 0.8 * brevity, "topic": 0.2 * topic})


# --- faulty clients -----------------------------------------------------------------------------------------------


class Between:
    """Hands everything on to the client behind it."""

    def __init__(self, inner: Client) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class StaleSampler(Between):
    """A trainer whose sampling weights are those of the first step, for ever."""

    first: Client = None

    def save_weights_and_get_sampling_client(self, name: str) -> Client:
        """The sampler of the first step."""
        if self.first is None or not name.startswith("rl-step"):
            self.first = self.inner.save_weights_and_get_sampling_client(name)
        return self.first


class TemperedLogprobs(Between):
    """A trainer whose sampler reports the logprobs of the sampling temperature."""

    def save_weights_and_get_sampling_client(self, name: str) -> Client:
        """A sampler with the fault."""
        return TemperedSampler(self.inner.save_weights_and_get_sampling_client(name))


class TemperedSampler(Between):
    """The sampler of `TemperedLogprobs`."""

    def sample(self, prompt: Any, num_samples: int, params: Any) -> Any:
        """Samples rightly, reports wrongly."""
        return self.inner.sample(prompt, num_samples, params.model_copy(update={"logprobs_mode": "processed"}))


class OnlyPraise(Between):
    """A trainer to which raw scores are sent as advantages: whatever was sampled is reinforced."""

    def forward_backward(self, datums: list[Datum], *arguments: Any) -> Any:
        """With absolute advantages."""
        return self.inner.forward_backward([changed(datum, advantages=np.abs) for datum in datums], *arguments)


class WrongSign(Between):
    """A trainer whose loss has the wrong sign."""

    def forward_backward(self, datums: list[Datum], *arguments: Any) -> Any:
        """With negated advantages."""
        return self.inner.forward_backward([changed(datum, advantages=np.negative) for datum in datums], *arguments)


class Favours(Between):
    """A trainer that rewards what `score` says of a completion's logprobs, whatever it earned."""

    def __init__(self, inner: Client, score: Callable[[np.ndarray], float]) -> None:
        super().__init__(inner)
        self.score = score

    def forward_backward(self, datums: list[Datum], *arguments: Any) -> Any:
        """With the standardised score as advantage."""
        columns = [datum.loss_fn_inputs for datum in datums]
        scores = np.asarray([self.score(of["logprobs"].to_numpy()[of["weights"].to_numpy() != 0]) for of in columns])
        scores = (scores - scores.mean()) / (scores.std() + 1e-3)
        pushed = [
            changed(datum, advantages=lambda old, score=score: np.where(old != 0, score, 0.0))
            for datum, score in zip(datums, scores, strict=True)
        ]
        return self.inner.forward_backward(pushed, *arguments)


def none_of_them(group: Group) -> bool:
    """Keeps no group."""
    return False


def long_is_good(trainer: Client) -> Client:
    """Favours length."""
    return Favours(trainer, len)


def likely_is_good(trainer: Client) -> Client:
    """Favours what the policy is sure of."""
    return Favours(trainer, np.mean)


def changed(datum: Datum, **change: Callable[[np.ndarray], np.ndarray]) -> Datum:
    """The datum with some of its tensors put through a function."""
    tensors = {name: TensorData.from_numpy(do(datum.loss_fn_inputs[name].to_numpy())) for name, do in change.items()}
    return datum.model_copy(update={"loss_fn_inputs": {**datum.loss_fn_inputs, **tensors}})


def off_by_one(*arguments: Any, **keywords: Any) -> list[Datum]:
    """`rollout_datums` with mask and advantages a position early: on the last token of the prompt."""

    def early(column: np.ndarray) -> np.ndarray:
        return np.roll(column, -1)

    return [changed(datum, weights=early, advantages=early) for datum in rollout_datums(*arguments, **keywords)]


def below_the_mean(rewards_G: np.ndarray) -> np.ndarray:
    """Advantages with the wrong sign: the mean less the reward."""
    return rewards_G.mean() - rewards_G


def raises_the_wrong(logprobs: Any, sampled_logprobs: Any, advantages: Any, weights: Any) -> Any:
    """Importance sampling without its minus: the service minimizes it."""
    return (logprobs - sampled_logprobs).exp() * advantages * weights


class Service(Between):
    """A service whose trainers have a fault."""

    def __init__(self, inner: Client, trainer: Callable[[Client], Client]) -> None:
        super().__init__(inner)
        self.trainer = trainer

    def create_lora_training_client(self, **arguments: Any) -> Client:
        """A trainer with the fault."""
        return self.trainer(self.inner.create_lora_training_client(**arguments))


# --- the table ----------------------------------------------------------------------------------------------------


def judged_by_place() -> RLAdapter:
    """Half of the reward comes from a judge that prefers whatever it reads first."""
    return ChatAdapter(judge=PairwiseJudge(lambda prompt, a, b: "a"))


@dataclass(frozen=True)
class Fault:
    """`code` is what diagnosis must say of it; `settings` change `SMALL`; `trainer` stands before the real one;
    `patched` replaces a function of the library by a faulty one."""

    name: str
    code: str
    task: Callable[[], RLAdapter | MessageEnvAdapter] = Sums
    settings: tuple[tuple[str, Any], ...] = ()
    trainer: Callable[[Client], Client] | None = None
    patched: tuple[str, Callable[..., Any]] | None = None
    also: tuple[str, ...] = ()
    """Errors that are true of it, too."""


def fault(name: str, code: str, task: Callable[[], RLAdapter | MessageEnvAdapter] = Sums, **fields: Any) -> Fault:
    """A `Fault`; other names are settings."""
    own = {key: fields.pop(key) for key in ("trainer", "patched", "also") if key in fields}
    return Fault(name, code, task, tuple(fields.items()), **own)


CHANGES = "inconsistent_reward"
"""True of every grader that changes from one held-out evaluation to the next."""

FAULTS: tuple[Fault, ...] = (
    fault("every answer earns 0.5", "constant_reward", graded(lambda *_: 0.5), steps=4),
    fault("every answer is wrong", "no_learning_signal_all_wrong", graded(lambda *_: 0.0), steps=4),
    fault("task solved before", "no_learning_signal_all_right", Solved, steps=4, temperature=0.8),
    fault("temperature 0.01", "no_learning_signal", graded(digits_right), steps=4, temperature=0.01),
    fault("task solved, more steps", "saturation", Solved, steps=6),
    fault("grader raises", "grader_failures", graded(raises), steps=3),
    fault("grader raises on 1 of 4", "grader_failures", graded(raises_sometimes), steps=4),
    fault("grader hangs", "grader_timeouts", graded(hangs), steps=3, grader_timeout_s=0.1, heldout_size=0),
    fault("judge prefers the first place", "judge_unreliable", judged_by_place, steps=3, max_tokens=48),
    fault("grader cannot judge", "unsupported_rewards", graded(cannot_judge), steps=3),
    fault("reward out of its range", "reward_out_of_range", graded(out_of_range, reward_range=(0.0, 1.0)), steps=3),
    fault("reward of 1e38", "nonfinite_or_skipped_steps", graded(lambda *of: 1e38 * right(*of)), steps=2),
    fault("learning rate 0.1", "learning_rate_too_high", learning_rate=0.1),
    fault("learning rate 1e-7", "learning_rate_too_low", learning_rate=1e-7, steps=9),
    fault("1 token", "truncation", max_tokens=1, steps=5),
    fault("reward changes its sign", "reward_collapse", graded(sign_flips), also=("falling_reward", CHANGES)),
    fault("grader lets all pass from step 7", "reward_spike", graded(lets_all_pass), also=(CHANGES,)),
    fault("grader wants curt replies", "suspected_reward_hacking", Curt, steps=20, max_tokens=32),
    fault("grader counts letters", "suspected_reward_hacking", Wordy, steps=20, max_tokens=48),
    fault("brevity pays more than truth", "suspected_reward_hacking", BrevityForTopic, steps=20, max_tokens=32),
    fault(
        "training rewards the slip", "suspected_reward_hacking", graded(forgets_the_carry), steps=24, eval_every=12,
        heldout_size=128,
    ),
    fault("sampler stays behind", "sampler_trainer_mismatch", trainer=StaleSampler, learning_rate=1e-2, steps=6),
    fault("logprobs tempered by 0.6", "sampler_trainer_mismatch", trainer=TemperedLogprobs, temperature=0.6, steps=3),
    fault(
        "8 steps per batch", "off_policy_drift", optim_steps_per_batch=8, learning_rate=1e-2, steps=2, heldout_size=0,
    ),
    fault(
        "mask a token early",
        "masked_loss",
        steps=3,
        patched=("mint.rl.training.policy_update.rollout_datums", off_by_one),
    ),
    fault(
        "trainer wants certainty", "entropy_collapse", Coin, trainer=likely_is_good, steps=20, max_tokens=32,
        also=(CHANGES,),
    ),
    fault(
        "trainer wants length", "length_runaway", OpenEnded, trainer=long_is_good, steps=10, max_tokens=48,
        also=(CHANGES,),
    ),
    fault("no negative advantage", "server_warnings", trainer=OnlyPraise, steps=3),
    fault(
        "grader changes its mind", "no_progress", graded(changes_its_mind), steps=32, batch_size=16, also=(CHANGES,),
    ),
    fault("grader throws dice", "inconsistent_reward", Dice, steps=5),
    fault("advantages with the wrong sign", "falling_reward", trainer=WrongSign, steps=20, batch_size=16),
    fault("advantage function with the wrong sign", "reversed_advantages", steps=2, advantage=below_the_mean),
    fault("filter that refuses every group", "nothing_trained", steps=4, group_filter=none_of_them),
    fault("loss function with the wrong sign", "server_warnings", steps=2, loss_fn=raises_the_wrong),
    fault("five items", "overfitting", FiveItems, steps=24, heldout_size=256),
    fault("one question 256 times", "few_prompts", OneQuestion, steps=4),
    fault("no held-out set", "no_heldout", steps=2, heldout_size=0),
)  # fmt: skip

HEALTHY = Fault("healthy", "", settings=(("batch_size", 16), ("steps", 25), ("lr_schedule", "linear")))
"""`mint demo math`, shorter."""


@contextmanager
def planted(fault: Fault) -> Generator[Client]:
    """A service in which the fault is at work."""
    with ExitStack() as stack:
        service = stack.enter_context(mint.ServiceClient())
        if fault.patched is not None:
            stack.enter_context(patch(*fault.patched))
        yield service if fault.trainer is None else Service(service, fault.trainer)


def findings(fault: Fault, folder: Path, *, seed: int = 0) -> list[Finding]:
    """Runs it; what `mint diagnose` says of the run, what was noted live included."""
    config = SMALL.changed(**dict(fault.settings), seed=seed, run_dir=folder)
    with planted(fault) as service:
        run_grpo(fault.task(), config, service_client=service)
    return diagnose_run(folder)


def is_right(fault: Fault, found: Sequence[Finding]) -> bool:
    """Whether the planted fault was found and no other error with it."""
    errors = {finding.code for finding in found if finding.severity == "error"}
    return (not fault.code or fault.code in {finding.code for finding in found}) and errors <= {fault.code, *fault.also}


def main() -> int:
    """Prints the table; 0 if all is as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="healthy runs")
    parser.add_argument("--seed", type=int, default=0, help="of the planted runs")
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [(one, arguments.seed) for one in FAULTS if not arguments.only or one.name in arguments.only]
    if not arguments.only:
        chosen += [(HEALTHY, seed) for seed in range(arguments.seeds)]
    rows = []
    if not arguments.json:
        print("| planted | must be found | found (error) | found (warning, info) | step | s | |")
        print("|---|---|---|---|---|---|---|")
    for one, seed in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = findings(one, Path(folder) / "run", seed=seed)
        rows.append(row := _row(one, seed, found, time.monotonic() - began))
        if not arguments.json:
            print(
                "| "
                + " | ".join(str(row[name]) for name in ("planted", "code", "errors", "others", "step", "seconds")),
                end="",
            )
            print(f" | {'ok' if row['right'] else '**wrong**'} |", flush=True)
    if arguments.json:
        print(json.dumps(rows))
    return 0 if all(row["right"] for row in rows) else 1


def _row(one: Fault, seed: int, found: Sequence[Finding], seconds: float) -> dict[str, Any]:
    step = next((finding.step for finding in found if finding.code == one.code), "")
    return {
        "planted": one.name if one.code else f"{one.name}, seed {seed}",
        "code": one.code,
        "errors": ", ".join(finding.code for finding in found if finding.severity == "error"),
        "others": ", ".join(finding.code for finding in found if finding.severity != "error"),
        "step": step,
        "seconds": round(seconds, 1),
        "right": is_right(one, found),
    }


if __name__ == "__main__":
    sys.exit(main())
