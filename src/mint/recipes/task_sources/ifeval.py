"""Requests with a constraint that a program checks: the constraints of IFEval (arXiv 2311.07911), by `if-verifiable`.

The package writes the constraint and checks the reply. The request itself is one sentence about a word of the package's
own list.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.recipes.question_task import PromptStyle, Question, QuestionAdapter, one_side

HELDOUT_SHARE = 0.25
DRAWS_PER_QUESTION = 8
"""The limit of draws per wanted question of a side."""

ALL = "all"
"""The name that stands for every constraint."""

GLOBAL_RANDOM = threading.Lock()
"""The package draws a constraint's details from Python's global generator; one thread at a time may seed it."""


class IFEvalAdapter(QuestionAdapter):
    """`Write one sentence about the word "harbor". <constraint>` → 1 if the package's checker accepts the reply."""

    reward_range = (0.0, 1.0)

    def __init__(
        self,
        constraints: str = ALL,
        *,
        seed: int = 0,
        train_size: int = 4096,
        heldout_size: int = 512,
        prompt_style: PromptStyle = "chat",
    ) -> None:
        """`constraints` are IFEval's ids with commas between them (`change_case:english_lowercase,startend:quotation`),
        or `all`. `seed` draws the training requests; the held-out ones are the same for every seed.

        Raises:
            MissingExtraError: if-verifiable is not installed.
            InvalidRequestError: no such constraint.
        """
        super().__init__(prompt_style=prompt_style)
        registry, self._words = _import_ifeval()
        self._makers: dict[str, Any] = registry.INSTRUCTION_DICT
        self.constraints = _known(constraints, list(self._makers))
        self.seed = seed
        self.train_size = train_size
        self.heldout_size = heldout_size
        self.heldout_name = "IFEval constraints, other requests (1 in 4 by hash, never trained on)"

    def build_dataset(self) -> Sequence[Question]:
        """`train_size` distinct requests, or as many as were found."""
        drawn = self._draw(random.Random(f"ifeval {self.seed}"), self.train_size)
        return one_side(drawn, heldout=False, share=HELDOUT_SHARE, limit=self.train_size)

    def build_heldout(self) -> Sequence[Question]:
        """The same `heldout_size` requests for every seed."""
        drawn = self._draw(random.Random("ifeval held-out"), self.heldout_size)
        return one_side(drawn, heldout=True, share=HELDOUT_SHARE, limit=self.heldout_size)

    def compute_reward(self, response: str, item: Question) -> float:
        """1 if the reply is not empty and the constraint's own checker accepts it, else 0."""
        return float(bool(response.strip()) and bool(item.source.check_following(response)))

    def demonstrate(self, item: Question) -> str | None:
        """None: the package knows no replies."""
        return None

    def _draw(self, rng: random.Random, wanted: int) -> Iterator[Question]:
        for _ in range(wanted * DRAWS_PER_QUESTION):
            name, word = rng.choice(self.constraints), rng.choice(self._words)
            request = f'Write one short sentence about the word "{word}".'
            constraint, described = self._make(name, request, rng.getrandbits(64))
            yield Question(f"{request} {described}", name, source=constraint)

    def _make(self, name: str, request: str, seed: int) -> tuple[Any, str]:
        """A constraint with its details, and its text."""
        constraint = self._makers[name](name)
        repeats = "prompt_to_repeat" in constraint.get_instruction_args_keys()
        with GLOBAL_RANDOM:
            state = random.getstate()
            random.seed(seed)
            try:
                described = constraint.build_description(**({"prompt_to_repeat": request} if repeats else {}))
            finally:
                random.setstate(state)
        return constraint, described


def _import_ifeval() -> tuple[Any, Sequence[str]]:
    """The registry of constraints, and the package's list of words."""
    try:
        registry = importlib.import_module("if_verifiable.ifeval.instructions_registry")
        words = importlib.import_module("if_verifiable.ifeval.instructions_util").WORD_LIST
        langdetect = importlib.import_module("langdetect")  # the package's own dependency: which language a reply is in
    except ImportError as error:
        raise MissingExtraError(
            "ifeval tasks need the if-verifiable package", remedy=install_command("ifeval")
        ) from error
    langdetect.DetectorFactory.seed = 0  # else the same reply may get another language each time
    langdetect.detect("This loads its profiles, which several threads must not do at once.")
    return registry, words


def _known(names: str, known: Sequence[str]) -> list[str]:
    chosen = list(known) if names == ALL else names.split(",")
    for name in chosen:
        if name not in known:
            raise InvalidRequestError(
                "is not a constraint of IFEval",
                field="task",
                value=f"ifeval:{name}",
                remedy=f"Choose {ALL}, or some of {', '.join(known)}",
            )
    return chosen
