"""A recipe of tinker-cookbook at its own settings: `python cookbook_recipe.py MODULE [key=value …]`.

Run in the cookbook's own environment, as `python -m MODULE` would run it. Data sets of the Hugging Face hub, which a
machine without a network cannot load, are replaced by made-up rows of the same form. The reward of `rl_loop`, which no
tiny model earns, is the share of digits, so that its groups have a signal. Nothing else of a recipe is changed.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

import chz
import datasets

ROWS = 1024
RL_LOOP = "tinker_cookbook.recipes.rl_loop"

Row = dict[str, Any]


def chat(number: int) -> Row:
    """As no_robots and Tulu 3."""
    asked, answered = f"What is {number} + 1?", f"It is {number + 1}."
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def solved(number: int) -> Row:
    """As GSM8K."""
    return {"question": f"What is {number} + {number}?", "answer": f"It is {2 * number}.\n#### {2 * number}"}


def problem(number: int) -> Row:
    """As MATH, MATH-500 and Polaris."""
    text = f"What is {number} + {number}?"
    return {"problem": text, "answer": str(2 * number), "solution": f"It is \\boxed{{{2 * number}}}."}


def deep(number: int) -> Row:
    """As DeepMath."""
    return {"question": f"What is {number} + {number}?", "final_answer": str(2 * number)}


def preferred(number: int) -> Row:
    """As Anthropic's HH-RLHF: short answers are preferred."""
    asked = f"\n\nHuman: What is {number} + 1?\n\nAssistant:"
    return {"chosen": f"{asked} {number + 1}", "rejected": f"{asked} That would be {number + 1}, I think."}


def thought(number: int) -> Row:
    """As OpenThoughts3."""
    asked, answered = f"What is {number} + 1?", f"<think>One more.</think>{number + 1}"
    return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]}


def choice(number: int) -> Row:
    """As SciKnowEval."""
    return {
        "domain": "Chemistry",
        "details": {"level": "L3"},
        "type": "mcq-4-choices",
        "question": f"What is {number} + 1?",
        "choices": {"label": ["A", "B"], "text": [str(number), str(number + 1)]},
        "answerKey": "B",
    }


def text(number: int) -> Row:
    """As WikiText."""
    return {"text": f" Number {number} comes before number {number + 1} , and after number {number - 1} . "}


ROW_OF: dict[str, Callable[[int], Row]] = {
    "HuggingFaceH4/no_robots": chat,
    "allenai/tulu-3-sft-mixture": chat,
    "openai/gsm8k": solved,
    "HuggingFaceH4/MATH-500": problem,
    "EleutherAI/hendrycks_math": problem,
    "POLARIS-Project/Polaris-Dataset-53K": problem,
    "zwhe99/DeepMath-103K": deep,
    "Anthropic/hh-rlhf": preferred,
    "open-thoughts/OpenThoughts3-1.2M": thought,
    "hicai-zju/SciKnowEval": choice,
    "Salesforce/wikitext": text,
}


def load_dataset(path: str, *_: Any, split: str | None = None, streaming: bool = False, **__: Any) -> Any:
    """Made-up rows in the form of the data set `path`; those of the test part are others."""
    row_of, count = ROW_OF[path], 4 * ROWS if path == "allenai/tulu-3-sft-mixture" else ROWS
    parts = datasets.DatasetDict(
        train=datasets.Dataset.from_list([row_of(number) for number in range(1, count + 1)]),
        test=datasets.Dataset.from_list([row_of(number) for number in range(10 * ROWS, 10 * ROWS + 128)]),
    )
    if split is None:
        return parts
    part = parts["train" if path == "hicai-zju/SciKnowEval" else split]
    return part.to_iterable_dataset() if streaming else part


def share_of_digits(response: str, _answer: str) -> float:
    """The reward of `rl_loop`."""
    return sum(map(str.isdigit, response)) / max(1, len(response))


def main(module: str) -> None:
    """Runs the recipe with the options in `sys.argv`."""
    datasets.load_dataset = load_dataset
    datasets.get_dataset_config_names = lambda _path: ["algebra"]
    if module == RL_LOOP:
        recipe = importlib.import_module(module)
        recipe.get_reward = share_of_digits
        chz.nested_entrypoint(recipe.main)
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
