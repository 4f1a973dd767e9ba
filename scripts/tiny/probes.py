"""Measures the bundled model on held-out tasks, judges the two gates, and writes the model card.

Runs the saved folder through transformers, so that it also proves that the folder loads there unchanged. Knows every
skill's tasks; does not know how the model was trained beyond the log that it prints into the card.

    python -m scripts.tiny.probes src/mint/models/tiny
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from string import Template

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mint.recipes.datasets.arithmetic import draw_problems
from scripts.tiny.arithmetic_skill import carry, clean_tasks, question_tasks
from scripts.tiny.chat_skill import chat_tasks
from scripts.tiny.code_skill import code_tasks
from scripts.tiny.documents import Task, chat_prompt, turn
from scripts.tiny.tools_skill import CALCULATOR, SHORT_SYSTEM, TOOLS_SYSTEM, tools_tasks

PROBES: dict[str, Callable[[int, int], list[Task]]] = {
    "arithmetic, clean format": clean_tasks,
    "arithmetic, question format": question_tasks,
    "chat": chat_tasks,
    "code": code_tasks,
    "tools": tools_tasks,
}
SEED = 20_000
COUNT = 512
MAX_NEW_TOKENS = 64
BATCH = 256
SPREAD_PROBLEMS, SPREAD_SAMPLES = 128, 16

CLEAN_GREEDY_AT_LEAST = 0.95
QUESTION_GREEDY_BETWEEN = (0.4, 0.7)

LOG_NAME = "pretraining.json"
CARD_TEMPLATE = Path(__file__).with_name("card.md")


class Sampler:
    """Batched sampling from a saved model folder."""

    def __init__(self, folder: Path, seed: int = SEED) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        torch.manual_seed(seed)

    @torch.no_grad()
    def replies(self, prompts: list[str], temperature: float) -> list[str]:
        """One reply to each prompt, without its end token; temperature 0 is greedy."""
        texts: list[str] = []
        for start in range(0, len(prompts), BATCH):
            inputs = self.tokenizer(
                prompts[start : start + BATCH], return_tensors="pt", padding=True, add_special_tokens=False
            )
            choice = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            output = self.model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=MAX_NEW_TOKENS,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
                **choice,
            )
            texts += [self._reply(row) for row in output[:, inputs.input_ids.shape[1] :].tolist()]
        return texts

    def _reply(self, ids: list[int]) -> str:
        end = self.tokenizer.eos_token_id
        if end not in ids:
            return "(never ended)"
        return self.tokenizer.decode(ids[: ids.index(end)], skip_special_tokens=False)


def scores(sampler: Sampler, tasks: list[Task], temperature: float) -> tuple[list[float], list[str]]:
    """Each task's score, and the first reply to it."""
    first = sampler.replies([task.prompt for task in tasks], temperature)
    graded = [0.0] * len(tasks)
    followed: list[tuple[int, str]] = []
    for i, (task, reply) in enumerate(zip(tasks, first, strict=True)):
        if task.follow_up is None:
            graded[i] = task.grade(reply)
        elif (prompt := task.follow_up(reply)) is not None:
            followed.append((i, prompt))
    if followed:
        second = sampler.replies([prompt for _, prompt in followed], temperature)
        for (i, _), reply in zip(followed, second, strict=True):
            graded[i] = tasks[i].grade(reply)
    return graded, first


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z = 1.96
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return centre - half, centre + half


def summary(graded: list[float]) -> dict[str, float]:
    """Success share with its interval, and the mean score."""
    successes = sum(score == 1.0 for score in graded)
    low, high = wilson_interval(successes, len(graded))
    return {
        "success": round(successes / len(graded), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "n": len(graded),
        "mean_score": round(sum(graded) / len(graded), 4),
    }


def spread(sampler: Sampler, tasks: list[Task]) -> dict[str, float]:
    """Share of prompts by pass rate over several samples at temperature 1: what a GRPO group can learn from."""
    repeated = [task for task in tasks for _ in range(SPREAD_SAMPLES)]
    graded, _ = scores(sampler, repeated, 1.0)
    passes = [sum(graded[i : i + SPREAD_SAMPLES]) / SPREAD_SAMPLES for i in range(0, len(graded), SPREAD_SAMPLES)]
    return {
        "prompts": len(passes),
        "samples": SPREAD_SAMPLES,
        "between_0.1_and_0.9": round(sum(0.1 <= p <= 0.9 for p in passes) / len(passes), 4),
        "never": round(sum(p == 0 for p in passes) / len(passes), 4),
        "always": round(sum(p == 1 for p in passes) / len(passes), 4),
    }


def by_kind(graded: list[float]) -> dict[str, float]:
    """Success of the question probe by kind of problem, and by whether a carry is needed."""
    groups: dict[str, list[float]] = {}
    for problem, score in zip(draw_problems(SEED, COUNT, heldout=True), graded, strict=True):
        groups.setdefault(problem.kind, []).append(score)
        groups.setdefault("with carry" if carry(problem) else "without carry", []).append(score)
    return {name: round(sum(group) / len(group), 4) for name, group in sorted(groups.items())}


def check_template(tokenizer: AutoTokenizer) -> None:
    """Raises ValueError where the chat template and the corpus lay out a conversation differently."""
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "34 + 58"}}}
    messages = [
        {"role": "user", "content": "What is 34 + 58?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "92"},
    ]
    expected = chat_prompt(
        turn("system", TOOLS_SYSTEM),
        turn("user", "What is 34 + 58?"),
        turn("assistant", '<tool_call>{"name": "calculator", "arguments": {"expression": "34 + 58"}}</tool_call>'),
        turn("user", "<tool_response>92</tool_response>"),
    )
    rendered = tokenizer.apply_chat_template(messages, tools=[CALCULATOR], tokenize=False, add_generation_prompt=True)
    short = [{"role": "system", "content": SHORT_SYSTEM}, messages[0]]
    rendered_short = tokenizer.apply_chat_template(short, tokenize=False, add_generation_prompt=True)
    expected_short = chat_prompt(turn("system", SHORT_SYSTEM), turn("user", "What is 34 + 58?"))
    for got, wanted in ((rendered, expected), (rendered_short, expected_short)):
        if got != wanted:
            raise ValueError(f"chat template renders {got!r}: the corpus has {wanted!r}")


def measure(folder: Path) -> dict:
    """The held-out table of a model folder."""
    sampler = Sampler(folder)
    check_template(sampler.tokenizer)
    report: dict = {}
    for name, make_tasks in PROBES.items():
        tasks = list({task.prompt: task for task in make_tasks(SEED, COUNT)}.values())
        greedy, first = scores(sampler, tasks, 0.0)
        sampled, _ = scores(sampler, tasks, 1.0)
        report[name] = {"temperature_1": summary(sampled), "greedy": summary(greedy)}
        report[name]["examples"] = [
            {"prompt": tasks[i].prompt, "reply": first[i], "score": greedy[i]} for i in range(3)
        ]
        if name != "arithmetic, clean format":
            report[name]["spread"] = spread(sampler, tasks[:SPREAD_PROBLEMS])
        if name.startswith("arithmetic"):
            report[name]["by_kind_greedy"] = by_kind(greedy)
            report[name]["by_kind_temperature_1"] = by_kind(sampled)
    return report


def failed_gates(report: dict) -> list[str]:
    """The reasons not to bundle the model; empty if there are none."""
    clean = report["arithmetic, clean format"]["greedy"]["success"]
    question = report["arithmetic, question format"]["greedy"]["success"]
    low, high = QUESTION_GREEDY_BETWEEN
    failures = []
    if clean < CLEAN_GREEDY_AT_LEAST:
        failures.append(f"clean-format greedy {clean:.3f}: should be at least {CLEAN_GREEDY_AT_LEAST}")
    if not low <= question <= high:
        failures.append(f"question-format greedy {question:.3f}: should be between {low} and {high}")
    return failures


def table(report: dict) -> str:
    """The held-out table in Markdown."""
    lines = [
        "| skill | temperature 1 | 95 % | greedy | 95 % | n | prompts with pass rate .1 to .9 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in report.items():
        sampled, greedy = entry["temperature_1"], entry["greedy"]
        shares = [f"{part['success']:.3f} | {part['low']:.3f}-{part['high']:.3f}" for part in (sampled, greedy)]
        between = f"{entry['spread']['between_0.1_and_0.9']:.2f}" if "spread" in entry else "—"
        lines.append(f"| {name} | {shares[0]} | {shares[1]} | {sampled['n']} | {between} |")
    return "\n".join(lines)


def write_card(folder: Path, log: dict, report: dict) -> None:
    """README.md beside the weights, from the template beside this file."""
    curve = log["loss_curve"]
    points = [curve[i * (len(curve) - 1) // 7] for i in range(8)]
    values = {
        "table": table(report),
        "tokens": f"{log['tokens']:,}",
        "steps": f"{log['steps']:,}",
        "minutes": f"{log['seconds'] / 60:.0f}",
        "seed": log["seed"],
        "threads": log["threads"],
        "torch": log["torch"],
        "budget": log["budget"],
        "loss_curve": "\n".join(
            f"| {p['tokens'] / 1e6:.1f} M | {p['seconds'] / 60:.1f} | {p['loss']:.3f} |" for p in points
        ),
        "shares": ", ".join(
            f"{name.removesuffix('_document')} {share:.0%}" for name, share in log["token_shares"].items()
        ),
        "chat_scores": ", ".join(
            f"{report['chat'][mode]['mean_score']:.2f} {label}"
            for mode, label in (("temperature_1", "at temperature 1"), ("greedy", "greedily"))
        ),
    }
    (folder / "README.md").write_text(Template(CARD_TEMPLATE.read_text()).substitute(values))


def main() -> int:
    """Prints the held-out table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print everything, not only the table")
    parser.add_argument("--update", action="store_true", help="rewrite the probes in the training log and the card")
    arguments = parser.parse_args()
    report = measure(arguments.folder)
    if arguments.update:
        log_path = arguments.folder / LOG_NAME
        log = {**json.loads(log_path.read_text()), "probes": report}
        log_path.write_text(json.dumps(log, indent=2) + "\n")
        write_card(arguments.folder, log, report)
    print(json.dumps(report, indent=2) if arguments.json else table(report))
    failures = failed_gates(report)
    for failure in failures:
        print(f"gate failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
