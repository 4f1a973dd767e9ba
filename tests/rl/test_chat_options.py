"""Options of a chat template reach every prompt that a run renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scripted_policy import tiny_tokenizer

from mint.errors import InvalidRequestError
from mint.rl import RLAdapter, RLConfig
from mint.rl.calls.call_pool import CallPool
from mint.rl.rollouts.rollout_worker import RolloutWorker
from mint.rl.tasks.chat_format import ChatFormat
from mint.rl.tasks.chat_options import with_chat_options

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
MESSAGES = [{"role": "user", "content": "3 + 4?"}]
OFF = "<think>\n\n</think>\n\n"


def test_an_option_is_the_default_of_every_rendering_and_the_tokenizer_itself_stays_as_it_was() -> None:
    tokenizer = tiny_tokenizer(TEMPLATE)
    configured = with_chat_options(tokenizer, {"enable_thinking": False})
    plain, without = (
        one.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) for one in (tokenizer, configured)
    )
    assert without == plain + OFF
    again = configured.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert again == plain
    assert tokenizer.decode(ChatFormat(configured).prompt(MESSAGES)) == without
    assert with_chat_options(tokenizer, {}) is tokenizer


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_an_option_that_the_template_does_not_have_is_refused(template: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="chat_options = enable_thinkin: "):
        with_chat_options(tiny_tokenizer(template), {"enable_thinkin": False})


def test_a_runs_own_setting_reaches_the_prompts_of_a_task() -> None:
    class Asks(RLAdapter):
        def build_dataset(self) -> Sequence[str]:
            return ["3 + 4?"]

        def make_prompt(self, item: str, tokenizer: Any) -> list[int]:
            return tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)

        def compute_reward(self, response: str, item: str) -> float:
            return 0.0

    config = RLConfig(chat_options={"enable_thinking": False})
    calls = CallPool(timeout_s=60)
    worker = RolloutWorker(Asks(), config=config, tokenizer=tiny_tokenizer(TEMPLATE), calls=calls)
    calls.close()
    prompt = worker.tokenizer.decode(Asks().make_prompt("", worker.tokenizer))
    assert prompt.endswith(OFF)
