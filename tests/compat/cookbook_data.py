"""Made-up data in the form of what programs of tinker-cookbook load: from the hub, a folder, or GitHub.

Read by `cookbook_program.py` in the cookbook's own environment. Knows nothing of what the programs do with the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import httpx

ROWS = 1024

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
    return {"text": f" Number {number} comes after {number - 1} , and many more come later than both . "}


def judged(number: int) -> Row:
    """As Feedback-Collection."""
    scores = {f"orig_score{score}_description": f"The answer deserves {score} of 5." for score in range(1, 6)}
    return {
        "orig_instruction": f"What is {number} + 1?",
        "orig_criteria": "Is the answer right?",
        "orig_reference_answer": str(number + 1),
        **scores,
    }


def science(number: int) -> Row:
    """As the science data of the paper on self-distillation: to train on, and to evaluate."""
    asked = [
        {"role": "system", "content": "Answer with a letter."},
        {"role": "user", "content": f"What is {number} + 1? A: {number} B: {number + 1}"},
    ]
    answered = f"<reasoning>\nOne more than {number}.\n</reasoning>\n<answer>\nB\n</answer>"
    return {"messages": asked, "output_text": answered, "prompt": asked, "answer": "B"}


def tool_use(number: int) -> Row:
    """As the tool data of the same paper."""
    call = f'Action: add\nAction Input: {{"first": {number}, "second": 1}}'
    return {
        "prompt": f"Which tool adds {number} and 1?",
        "golden_response": [call],
        "golden_answer": [{"Action": "add", "Action_Input": f'{{"first": {number}, "second": 1}}'}],
    }


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
    "prometheus-eval/Feedback-Collection": judged,
}
ROW_COUNT = {
    "allenai/tulu-3-sft-mixture": 4 * ROWS,  # chat_sl takes the first 1024 for its evaluation
    "Salesforce/wikitext": 64 * ROWS,  # a document is about 320,000 characters
}
ON_DISK = {"science_data": science, "tooluse_data": tool_use}
"""By the folder below which `train_data` and `eval_data` lie."""
DISK_ROWS = 128


def made(row_of: Callable[[int], Row], numbers: range) -> datasets.Dataset:
    """A data set of the rows of these numbers."""
    return datasets.Dataset.from_list([row_of(number) for number in numbers])


def load_dataset(path: str, *_: Any, split: str | None = None, streaming: bool = False, **__: Any) -> Any:
    """In place of the function of `datasets`; the rows of the test part are others than those of the train part."""
    row_of, count = ROW_OF[path], ROW_COUNT.get(path, ROWS)
    parts = datasets.DatasetDict(
        train=made(row_of, range(1, count + 1)), test=made(row_of, range(100 * ROWS, 100 * ROWS + 128))
    )
    if split is None:
        return parts
    part = parts["train" if path == "hicai-zju/SciKnowEval" else split]
    return part.to_iterable_dataset() if streaming else part


def load_from_disk(path: str, *_: Any, **__: Any) -> datasets.Dataset:
    """In place of the function of `datasets`, for the folders in `ON_DISK`."""
    folder = Path(path)
    first = 1 if folder.name == "train_data" else 10 * ROWS
    return made(ON_DISK[folder.parent.name], range(first, first + DISK_ROWS))


def get(url: str, **_: Any) -> httpx.Response:
    """In place of the function of `httpx`: a text file, as a check downloads one from GitHub."""
    return httpx.Response(200, text="".join(map(text_line, range(200))), request=httpx.Request("GET", url))


def text_line(number: int) -> str:
    return f"def step_{number}(value):\n    return value + {number}\n\n\n"


def stand_in() -> None:
    """Puts made-up data in the place of what the hub and the disk have, and of downloads."""
    httpx.get = get
    datasets.load_dataset = load_dataset
    datasets.load_from_disk = load_from_disk
    datasets.get_dataset_config_names = lambda _path: ["algebra"]
