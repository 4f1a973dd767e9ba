"""Tasks of `reasoning-gym` (arXiv 2505.24760): 100+ generators of questions, each with its own verifier.

Held-out questions differ from the training ones twice: by the seed that draws them, and by a hash of their text, which
does not depend on a seed. `chain_sum*2+gcd` names a mixture of generators with their weights.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.recipes.question_task import PromptStyle, Question, QuestionAdapter, one_side
from mint.rl import mixture
from mint.rl.adapter import Task
from mint.rl.seeds import mix_seed

HELDOUT_SHARE = 0.25
HELDOUT_SEED = 1 << 40
"""reasoning-gym draws item i from `seed + i`, so close seeds share items; this seed is far from all others."""

DRAWS_PER_QUESTION = 6
"""The limit of draws per wanted question of a side, for generators that repeat themselves."""

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def load_reasoning_gym(name: str, *, seed: int = 0, **options: Any) -> Task:
    """The generator `name`, or a mixture of several: `chain_sum*2+gcd` draws two items of three from `chain_sum`.

    `options` are those of `ReasoningGymAdapter`, for each of them; `NAME.option` is one for the generator NAME alone.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        InvalidRequestError: a generator, a weight or an option that does not exist.
    """
    if "+" not in name and "*" not in name:
        return ReasoningGymAdapter(name, seed=seed, **options)
    weights = _weights(name)
    _, known = _import_gym()
    for each in weights:
        _check_name(each, known)
    shared = {key: value for key, value in options.items() if "." not in key}
    own = {each: dict(shared) for each in weights}
    for key, value in options.items():
        generator, dot, option = key.partition(".")
        if dot and generator not in own:
            raise InvalidRequestError(
                "is an option of a generator that is not in the mixture",
                field=f"task reasoning_gym:{name}",
                value=key,
                remedy=f"{_suggestion(generator, list(own))}It has {', '.join(own)}",
            )
        if dot:
            own[generator][option] = value
    tasks = {each: ReasoningGymAdapter(each, seed=seed, **own[each]) for each in weights}
    return mixture(tasks, weights=weights, seed=seed)


class ReasoningGymAdapter(QuestionAdapter):
    """`reasoning_gym.create_dataset(name, **options)` as a task; the reward is the dataset's own `score_answer`.

    Scores are clipped to [0, 1]. Several verifiers give a small score for any non-empty answer (countdown .01,
    propositional_logic .05), so a score of at most `reward_floor` counts as 0.
    """

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        train_size: int = 4096,
        heldout_size: int = 512,
        prompt_style: PromptStyle = "chat",
        instruction: str = "",
        reward_floor: float = 0.05,
        **options: Any,
    ) -> None:
        """`options` go to the generator (`min_terms=2`, …); `instruction` is put before each question.

        Raises:
            MissingExtraError: reasoning-gym is not installed.
            InvalidRequestError: no such generator, or an option that it does not take or allow.
        """
        super().__init__(prompt_style=prompt_style)
        self.name = name
        self.seed = seed
        self.options = options
        self.train_size = train_size
        self.heldout_size = heldout_size
        self.instruction = instruction
        self.reward_floor = reward_floor
        self.heldout_name = f"reasoning-gym {name}, held-out by seed and by hash"
        self._scorer = _create(name, seed=0, size=1, **options)

    def build_dataset(self) -> Sequence[Question]:
        """`train_size` distinct questions, or as many as the generator has."""
        draws = round(self.train_size * DRAWS_PER_QUESTION / (1 - HELDOUT_SHARE))
        seed = mix_seed(self.seed) % HELDOUT_SEED // 2
        return one_side(self._draw(seed, draws), heldout=False, share=HELDOUT_SHARE, limit=self.train_size)

    def build_heldout(self) -> Sequence[Question]:
        """The same `heldout_size` questions for every seed."""
        draws = round(self.heldout_size * DRAWS_PER_QUESTION / HELDOUT_SHARE)
        return one_side(self._draw(HELDOUT_SEED, draws), heldout=True, share=HELDOUT_SHARE, limit=self.heldout_size)

    def compute_reward(self, response: str, item: Question) -> float:
        """The verifier's score for the extracted answer."""
        answer = extract_answer(response)
        score = float(self._scorer.score_answer(answer, item.source)) if answer else 0.0
        return 0.0 if score <= self.reward_floor else min(score, 1.0)

    def _draw(self, seed: int, count: int) -> Iterator[Question]:
        for entry in itertools.islice(_create(self.name, seed=seed, size=count, **self.options), count):
            yield Question(self.instruction + entry["question"], str(entry["answer"]), source=entry)


def extract_answer(response: str) -> str:
    """The text in the last `<answer>` tags, or the whole completion if there are none, without surrounding space."""
    tagged = TAGGED.findall(response)
    return (tagged[-1] if tagged else response).strip()


def _weights(name: str) -> dict[str, float]:
    """Generator → weight, of `chain_sum*2+gcd`."""
    weights: dict[str, float] = {}
    for part in name.split("+"):
        generator, star, text = part.strip().partition("*")
        try:
            weight = float(text) if star else 1.0
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf or not generator or generator in weights:
            raise InvalidRequestError(
                "is not a mixture of different generators with weights above 0",
                field="task",
                value=f"reasoning_gym:{name}",
                remedy="Write reasoning_gym:chain_sum*2+gcd",
            )
        weights[generator] = weight
    return weights


def _import_gym() -> tuple[Any, dict[str, Any]]:
    """The package, and its generators by name."""
    try:
        import reasoning_gym  # deferred: an optional extra, 1.6 s to import
        from reasoning_gym.factory import DATASETS  # deferred: the same
    except ImportError as error:
        raise MissingExtraError(
            "reasoning_gym tasks need reasoning-gym", remedy=f"{install_command('tasks')}  (or reasoning-gym alone)"
        ) from error
    return reasoning_gym, DATASETS


def _check_name(name: str, known: dict[str, Any]) -> None:
    if name not in known:
        raise InvalidRequestError(
            "is not a reasoning-gym task",
            field="task",
            value=name,
            remedy=f"{_suggestion(name, list(known))}Choose among {', '.join(sorted(known))}",
        )


def _suggestion(name: str, known: Sequence[str]) -> str:
    similar = get_close_matches(name, known, n=1)
    return f"Did you mean {similar[0]}? " if similar else ""


def _create(name: str, **options: Any) -> Any:
    reasoning_gym, known = _import_gym()
    _check_name(name, known)
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidRequestError(
            f"refused by reasoning-gym ({error})",
            field=f"reasoning_gym:{name}",
            value={option: value for option, value in options.items() if option in str(error)} or None,
            remedy="See the fields of the generator's config class",
        ) from error
