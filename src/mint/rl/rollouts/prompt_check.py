"""Tries out, before a run begins, whether a task can make prompts with the tokenizer of its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mint.errors import InvalidRequestError
from mint.rl.adapter import MessageEnvAdapter, RLAdapter, task_name
from mint.rl.config import RLConfig
from mint.rl.rollouts.completions import make_prompt
from mint.rl.tasks.chat_format import ChatFormat
from mint.rl.tasks.chat_options import with_chat_options

TRIED = 4
"""A prompt that cannot be made costs its group alone. If none of the first so many can, the run would not get far."""


def require_prompts(
    task: RLAdapter | MessageEnvAdapter, items: Sequence[Any], config: RLConfig, tokenizer: Any
) -> None:
    """Makes the prompts of the first `items`, until one can be made.

    Raises:
        InvalidRequestError: none can be made; or the tokenizer has no chat template, and the task needs one.
    """
    tokenizer = with_chat_options(tokenizer, config.chat_options)
    of_episodes = [isinstance(task.task_of(item), MessageEnvAdapter) for item in items[:TRIED]]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if any(of_episodes):
        if not has_template:
            raise InvalidRequestError(
                "renders conversations, and the model has no chat template",
                field="task",
                value=task_name(task),
                remedy="Choose a chat model, or put a chat_template.jinja into its folder",
            )
        ChatFormat(tokenizer, written_as=config.tool_call_format)
    singles = [item for item, several in zip(items, of_episodes, strict=False) if not several]
    if not singles or not isinstance(task, RLAdapter):
        return
    problems = []
    for item in singles:
        prompt = make_prompt(task, item, tokenizer)
        if not isinstance(prompt, str):
            return
        problems.append(prompt)
    raise InvalidRequestError(
        f"makes no prompt: {problems[0]}",
        field="task",
        value=task_name(task),
        remedy="Mend make_prompt()" if has_template else "Mend make_prompt(), or choose a model with a chat template",
    )
