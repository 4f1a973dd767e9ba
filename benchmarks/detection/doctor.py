"""Is `mint doctor` right? What it says of tasks, beside what a short GRPO run of each task comes to.

    python -m benchmarks.detection.doctor [--set tuned|shown|third|…|eighth] [--only NAME …] [--output FILE]

For each task: the doctor's verdict on the starting weights, then a run. `outcome` says what the run came to, from
numbers alone; it does not see the verdict. `doctor_tasks` says which tasks set limits of the doctor. `--output` keeps
one JSON line per task; a second call with the same file makes only the tasks that are not in it, and `--verdicts` asks
the doctor again about those that are.

| outcome | what the run showed |
|---|---|
| truncated | a quarter of the untrained completions is cut off, and four times the limit earns clearly more |
| saturated | the untrained model succeeds in 90 % of the held-out items |
| unlearnable | most completions got no grade; or nothing rose, and a quarter of the rewards changed when graded again |
| reward_constant | no reward differs; or after training one reply to every item earns about as much as the policy |
| go | the held-out reward at temperature 1 rose by two standard errors, and by a twentieth of the range |
| sft_first | it did not rise |

About as much is: two standard errors or a twentieth of the range below, or more; where the reply earns less than a
tenth of the range, two standard errors. The doctor is right if its verdict is the outcome.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mint
from benchmarks.detection.doctor_tasks import SEED, SETS, TASKS
from mint.rl import RLAdapter, RLConfig, run_grpo
from mint.rl.analysis.doctor import examine
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.checkpoint_sampler import checkpoint_sampler
from mint.rl.estimate import Z95, Estimate, reward_interval, wilson
from mint.rl.heldout_evaluation import sample_heldout
from mint.rl.rollout import Rollout
from mint.rl.rollouts.grading import Grade, Grader
from mint.rl.rollouts.rollout_worker import RolloutWorker, open_calls
from mint.runs.log import RunLog

CUT_OFF = 0.25
NOISY = 0.25
SOLVED = 0.9
CLEARLY = 2.0
"""Standard errors."""

LEAST_GAIN = 0.05
"""Of the range. A run that gained less has learned where scraps of credit lie, and one that earns less than this above
the best reply to every item has learned that reply."""

LEAST_PAID = 0.1
"""A reply to every item that earns less than this share of the range is a lucky guess, unless it is all that a run has
learned."""

REPLIES = 16
"""The most frequent replies of the trained policy, among which the best reply to every item is looked for."""


@dataclass(frozen=True)
class Facts:
    """What a run showed. `before` and `after` are held-out rewards at temperature 1 as (mean, standard error), `longer`
    is `before` with four times the limit; `fixed` is the reward of the best reply to every held-out item."""

    floor: float
    ceiling: float
    success: float
    before: tuple[float, float]
    after: tuple[float, float]
    longer: tuple[float, float]
    cut_off: float
    ungraded: float
    noisy: float
    informative: float
    fixed: float
    fixed_reply: str


def outcome(facts: Facts) -> str:
    """What the run came to; the table above says by which rules."""
    span = facts.ceiling - facts.floor
    rose = _clearly_above(facts.after, facts.before) and facts.after[0] - facts.before[0] >= LEAST_GAIN * span
    if facts.ungraded > 0.5 or (facts.noisy > NOISY and not rose):
        return "unlearnable"
    if facts.cut_off > CUT_OFF and _clearly_above(facts.longer, facts.before):
        return "truncated"
    if facts.success >= SOLVED:
        return "saturated"
    if facts.informative == 0 and facts.before[0] > facts.floor:
        return "reward_constant"
    as_good = facts.fixed >= facts.after[0] - max(CLEARLY * facts.after[1], LEAST_GAIN * span)
    if as_good and facts.fixed - facts.floor > LEAST_PAID * span:
        return "reward_constant"
    if rose and facts.fixed >= facts.after[0] - CLEARLY * facts.after[1]:
        return "reward_constant"  # all that was gained is what one reply earns, little as it is
    return "go" if rose else "sft_first"


def _clearly_above(later: tuple[float, float], earlier: tuple[float, float]) -> bool:
    return later[0] - earlier[0] >= CLEARLY * math.hypot(later[1], earlier[1]) > 0


def run(task: RLAdapter, config: RLConfig, service: mint.ServiceClient) -> Facts:
    """Trains, and measures before and after."""
    result = run_grpo(task, config, service_client=service)
    steps = list(RunLog(result.run_dir).read("metrics.jsonl"))
    base = checkpoint_sampler(service, config.base_model)
    trained = service.create_sampling_client(model_path=result.sampler_checkpoint)
    items = list(task.build_heldout())[: config.heldout_size]
    with closing(open_calls(config)) as calls:

        def sampled(client: Any, settings: RLConfig) -> list[Rollout]:
            worker = RolloutWorker(task, config=settings, tokenizer=client.get_tokenizer(), calls=calls)
            groups = sample_heldout(worker, client, items, temperature=1.0, completions=1)
            return [group.rollouts[0] for group in groups if group.rollouts]

        def grades(pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
            return run_in_own_thread(Grader(task, calls).one_by_one(pairs))

        def earned(reply: str, of: Sequence[Any]) -> float:
            return sum(grade.reward or 0.0 for grade in grades([(reply, item) for item in of])) / len(of)

        untrained, replies = sampled(base, config), sampled(trained, config)
        again = grades([(one.text, item) for one, item in zip(untrained, items, strict=True)])
        longer = sampled(base, config.changed(max_tokens=4 * config.max_tokens))
        chosen, others = items[::2], items[1::2]
        candidates = [text for text, _ in Counter(one.text for one in replies).most_common(REPLIES)]
        fixed_reply = max(candidates, key=lambda text: earned(text, chosen))
        before, after = result.heldout_before[1.0], result.heldout_after[1.0]
        low, high = task.reward_range or (0.0, task.success_reward)
        return Facts(
            floor=low,
            ceiling=high,
            success=before.success,
            before=_reading(before),
            after=_reading(after),
            longer=_mean_of(task, longer),
            cut_off=sum(one.truncated for one in untrained) / len(untrained),
            ungraded=sum(one.reward is None for one in untrained) / len(untrained),
            noisy=sum(grade.reward != one.reward for grade, one in zip(again, untrained, strict=True)) / len(again),
            informative=sum(row["groups/used"] for row in steps) / sum(row["groups/total"] for row in steps),
            fixed=earned(fixed_reply, others),
            fixed_reply=fixed_reply,
        )


def _reading(estimate: Estimate) -> tuple[float, float]:
    return estimate.mean, (estimate.high - estimate.low) / (2 * Z95)


def _mean_of(task: RLAdapter, rollouts: Sequence[Rollout]) -> tuple[float, float]:
    mean, low, high = reward_interval(task, [one.reward or 0.0 for one in rollouts])
    return mean, (high - low) / (2 * Z95)


def row_of(name: str) -> dict[str, Any]:
    """The verdict, the facts and the outcome of a task."""
    began, cpu_began = time.monotonic(), time.process_time()
    chosen = TASKS[name]
    task = chosen.make()
    with tempfile.TemporaryDirectory() as folder, mint.ServiceClient(data_dir=Path(folder) / "service") as service:
        config = chosen.config.changed(run_dir=Path(folder) / "run")
        seen = examine(task, config, service_client=service, seed=SEED)
        facts = run(task, config, service)
        task.close()
    return {
        "task": name,
        "verdict": seen.verdict,
        "reason": seen.reason,
        "outcome": outcome(facts),
        "facts": asdict(facts),
        "doctor": {"success": seen.evidence.success, "informative": max(seen.evidence.informative.values())},
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Verdict beside outcome, and how many agree."""
    print("| task | doctor | the run | held-out before → after | groups with a signal | cut off | best fixed reply | |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        facts = row["facts"]
        cells = [
            row["task"],
            row["verdict"],
            row["outcome"],
            f"{facts['before'][0]:.2f} → {facts['after'][0]:.2f}",
            f"{facts['informative']:.0%}",
            f"{facts['cut_off']:.0%}",
            f"{facts['fixed']:.2f}",
            "right" if row["verdict"] == row["outcome"] else "**wrong**",
        ]
        print("|", " | ".join(cells), "|")
    right = sum(row["verdict"] == row["outcome"] for row in rows)
    low, high = wilson(right, len(rows))
    print(f"\nright: {right} of {len(rows)} (95 %: {low:.2f} to {high:.2f})")


def verdict_of(name: str) -> dict[str, Any]:
    """What the doctor says of a task, without a run."""
    chosen = TASKS[name]
    with tempfile.TemporaryDirectory() as folder, mint.ServiceClient(data_dir=Path(folder)) as service:
        seen = examine(chosen.make(), chosen.config, service_client=service, seed=SEED)
    return {"verdict": seen.verdict, "reason": seen.reason}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(SETS), default="eighth")
    parser.add_argument("--only", nargs="*", choices=list(TASKS), metavar="NAME")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--verdicts", action="store_true", help="ask the doctor again about the tasks of --output")
    options = parser.parse_args()
    lines = options.output.read_text().splitlines() if options.output is not None and options.output.exists() else []
    known = {row["task"]: row for row in map(json.loads, lines)}
    rows = []
    for name in options.only or SETS[options.set]:
        row = known.get(name) or row_of(name)
        if options.verdicts and name in known:
            row = {**row, **verdict_of(name)}
        rows.append({**row, "outcome": outcome(Facts(**row["facts"]))})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if options.output is not None and name not in known:
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
