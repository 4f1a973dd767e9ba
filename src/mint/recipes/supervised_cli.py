"""`mint train sft|dpo|distill`: where the data of the other levers comes from on the command line.

sft      task=NAME            a task that knows a good completion of its samples (`Task.demonstrate`)
dpo      data=PATH            JSONL rows with prompt, chosen, rejected
distill  task=NAME teacher=…  the task's prompts; the teacher is a checkpoint or a base model
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import mint
from mint.errors import InvalidRequestError
from mint.recipes.data.demonstrations import Demonstration
from mint.recipes.distill import DistillConfig, run_distill
from mint.recipes.dpo import DPOConfig, Preference, run_dpo
from mint.recipes.questions import Question, encode_prompt, is_heldout
from mint.recipes.registry import load_task
from mint.recipes.sft import SFTConfig, run_sft
from mint.rl.adapter import RLAdapter
from mint.rl.training_run import default_run_dir

HELDOUT_SHARE = 0.1
HELDOUT_LIMIT = 256


def train_sft(words: dict[str, Any], run_dir: Path | None) -> dict[str, Any]:
    """Supervised fine-tuning on a task's demonstrations; what to print."""
    config, rest = _config(SFTConfig, words, run_dir or default_run_dir("sft"))
    adapter = _adapter("sft", rest, config.seed)
    with mint.ServiceClient() as service:
        tokenizer = service.create_sampling_client(base_model=config.base_model).get_tokenizer()
        trained, heldout = (
            [
                Demonstration(list(adapter.make_prompt(sample, tokenizer)), completion)
                for sample in samples
                if (completion := adapter.demonstrate(sample)) is not None
            ]
            for samples in _sides(adapter)
        )
        if not trained:
            raise InvalidRequestError(
                "knows no good completion of its samples",
                field="task",
                value=type(adapter).__name__,
                remedy="Give it a demonstrate(sample), or take task=file:PATH with prompts and answers",
            )
        result = run_sft(trained, heldout, config, service_client=service)
    return {"recipe": "sft", "run_dir": str(config.run_dir), **asdict(result)}


def train_dpo(words: dict[str, Any], run_dir: Path | None) -> dict[str, Any]:
    """Direct preference optimization on a file of pairs; what to print."""
    config, rest = _config(DPOConfig, words, run_dir or default_run_dir("dpo"))
    path = Path(str(_required(rest, "data", "dpo")))
    style = rest.pop("prompt_style", "chat")
    _nothing_left("dpo", rest)
    rows = _read_pairs(path)
    with mint.ServiceClient() as service:
        tokenizer = service.create_sampling_client(base_model=config.base_model).get_tokenizer()
        pairs: dict[bool, list[Preference]] = {False: [], True: []}
        for row in rows:
            prompt = encode_prompt(row["prompt"], tokenizer, style)
            side = is_heldout(Question(row["prompt"], ""), HELDOUT_SHARE)
            pairs[side].append(Preference(prompt, row["chosen"], row["rejected"]))
        result = run_dpo(pairs[False], pairs[True], config, service_client=service)
    return {"recipe": "dpo", "run_dir": str(config.run_dir), **asdict(result)}


def train_distill(words: dict[str, Any], run_dir: Path | None) -> dict[str, Any]:
    """On-policy distillation on a task's prompts; what to print."""
    config, rest = _config(DistillConfig, words, run_dir or default_run_dir("distill"))
    teacher = str(_required(rest, "teacher", "distill"))
    adapter = _adapter("distill", rest, config.seed)
    with mint.ServiceClient() as service:
        path, base = (teacher, None) if "://" in teacher else (None, teacher)
        sampler = service.create_sampling_client(model_path=path, base_model=base)
        tokenizer = sampler.get_tokenizer()
        trained, heldout = (
            [list(adapter.make_prompt(sample, tokenizer)) for sample in samples] for samples in _sides(adapter)
        )
        result = run_distill(trained, heldout, sampler, config, service_client=service)
    return {"recipe": "distill", "run_dir": str(config.run_dir), **asdict(result)}


LEVERS: Mapping[str, Callable[[dict[str, Any], Path | None], dict[str, Any]]] = {
    "sft": train_sft,
    "dpo": train_dpo,
    "distill": train_distill,
}
"""Recipe → what runs it."""


def _sides(adapter: RLAdapter) -> tuple[list[Any], list[Any]]:
    """Training and held-out samples, apart by content."""
    heldout = list(adapter.build_heldout())[:HELDOUT_LIMIT]
    closed = {adapter.item_key(sample) for sample in heldout}
    return [sample for sample in adapter.build_dataset() if adapter.item_key(sample) not in closed], heldout


def _adapter(recipe: str, words: dict[str, Any], seed: int) -> RLAdapter:
    task = str(_required(words, "task", recipe))
    adapter = load_task(task, seed=seed, **words).adapter
    if not isinstance(adapter, RLAdapter):
        raise InvalidRequestError(
            "is a task of several turns", field="task", value=task, remedy=f"`mint train {recipe}` takes single turns"
        )
    return adapter


def _config(kind: type[Any], words: dict[str, Any], run_dir: Path) -> tuple[Any, dict[str, Any]]:
    """The recipe's settings, and the words that are none."""
    names = {field.name: field for field in fields(kind)}
    given = {key: value for key, value in words.items() if key in names}
    for key, value in given.items():
        default = names[key].default
        wanted = float if isinstance(default, float) else type(default)
        if default is not None and not isinstance(value, (int, float) if wanted is float else wanted):
            raise InvalidRequestError(
                f"is not a {wanted.__name__}", field=key, value=value, remedy=f"The default is {default!r}"
            )
    return kind(run_dir=run_dir, **given), {key: value for key, value in words.items() if key not in names}


def _required(words: dict[str, Any], key: str, recipe: str) -> Any:
    if key not in words:
        raise InvalidRequestError(
            "is missing", field=key, value="(missing)", remedy=f"Write mint train {recipe} {key}=…"
        )
    return words.pop(key)


def _nothing_left(recipe: str, words: Mapping[str, Any]) -> None:
    for key, value in words.items():
        raise InvalidRequestError(f"is no setting of {recipe}", field=key, value=value, remedy="Remove it")


def _read_pairs(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InvalidRequestError("does not exist", field="data", value=str(path), remedy="Give a .jsonl file")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        row = _pair(line)
        if row is None:
            raise InvalidRequestError(
                "is not a pair",
                field=f"{path}:{number}",
                value=line[:80],
                remedy='Write {"prompt": …, "chosen": "…", "rejected": "…"}',
            )
        rows.append(row)
    return rows


def _pair(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        complete = all(isinstance(row[key], str) and row[key] for key in ("chosen", "rejected")) and row["prompt"]
    except (ValueError, KeyError, TypeError):
        return None
    return row if complete else None
