"""Games of one player of the `textarena` package (arXiv 2504.11442): many turns, with the game's own rules and rewards.

The game's opening is the first message, each of its observations the next one. Held-out games are other seeds.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.rl import MessageEnvAdapter
from mint.rl.message_env import Message, MessageEnv, MessageStepResult

GLOBAL_RANDOM = threading.Lock()
"""Games draw from Python's global generator while they are set up; one thread at a time may seed it."""


@dataclass(frozen=True)
class Game:
    """One game: its name in the package, its seed (odd: held out), the options of its environment."""

    name: str
    seed: int
    options: tuple[tuple[str, Any], ...]


class TextArenaAdapter(MessageEnvAdapter):
    """`textarena.make(name, **options)` as a task; the reward is the one that the game gives at its end."""

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        train_size: int = 4096,
        heldout_size: int = 512,
        instruction: str = "",
        **options: Any,
    ) -> None:
        """`options` go to the game (`max_turns=3`, …); `instruction` is put behind its opening. `seed` draws the
        training games; the held-out ones are the same for every seed.

        Raises:
            MissingExtraError: textarena is not installed.
            InvalidRequestError: no such game, an option that it does not take, or it is not for one player.
        """
        self.name = name
        self.seed = seed
        self.train_size = train_size
        self.heldout_size = heldout_size
        self.instruction = instruction
        self.options = options
        self.heldout_name = f"textarena {name}, games of other seeds"
        self._textarena = _import_textarena()
        self.make_env(self._game(0))

    def build_dataset(self) -> Sequence[Game]:
        """`train_size` games with even seeds."""
        rng = random.Random(f"textarena {self.seed}")
        return [self._game(2 * rng.getrandbits(40)) for _ in range(self.train_size)]

    def build_heldout(self) -> Sequence[Game]:
        """The same `heldout_size` games with odd seeds for every seed of the run."""
        rng = random.Random("textarena held-out")
        return [self._game(2 * rng.getrandbits(40) + 1) for _ in range(self.heldout_size)]

    def game_options(self, seed: int) -> Mapping[str, Any]:
        """The options of the game with this seed; override it for games that differ in more than their seed."""
        return self.options

    def make_env(self, item: Game) -> MessageEnv:
        """The game, set up.

        Raises:
            InvalidRequestError: the package cannot set it up for one player.
        """
        # "-raw" is without wrappers, which would repeat the whole game in each message.
        wrappers = importlib.import_module("textarena.wrappers")
        with GLOBAL_RANDOM:
            state = random.getstate()
            random.seed(item.seed)
            try:
                game = wrappers.ActionFormattingWrapper(self._textarena.make(f"{item.name}-raw", **dict(item.options)))
                game.reset(num_players=1, seed=item.seed)
            except (ValueError, TypeError, KeyError, AssertionError, ImportError, LookupError, SyntaxError) as error:
                raise InvalidRequestError(
                    f"cannot be set up for one player ({' '.join(str(error).split())})",
                    field="task",
                    value=f"textarena:{item.name}",
                    remedy="Name a game of one player with its version (GuessTheNumber-v0), and options that it takes",
                ) from error
            finally:
                random.setstate(state)
        return GameEnv(game, game_id=self._textarena.GAME_ID, instruction=self.instruction)

    def _game(self, seed: int) -> Game:
        return Game(self.name, seed, tuple(self.game_options(seed).items()))


class GameEnv(MessageEnv):
    """One game in progress. What the game says goes to the policy; the policy's message is its move."""

    def __init__(self, game: Any, *, game_id: int, instruction: str) -> None:
        """`game` is set up; `game_id` marks what the game says, unlike the player's own moves."""
        self._game = game
        self._game_id = game_id
        self._opening = self._observe() + instruction

    def initial_observation(self) -> Sequence[Message]:
        """The rules and the board."""
        return [{"role": "user", "content": self._opening}]

    def step(self, message: Message) -> MessageStepResult:
        """Makes the move. The game's reward comes with its end; `invalid_move` counts games that end by one."""
        ended, _ = self._game.step(message["content"].strip())
        if not ended:
            return MessageStepResult(0.0, False, [{"role": "user", "content": self._observe()}])
        rewards, info = self._game.close()
        return MessageStepResult(float(rewards[0]), True, metrics={"invalid_move": int(info[0]["invalid_move"])})

    def _observe(self) -> str:
        _, observed = self._game.get_observation()
        return "\n".join(text for sender, text, _ in observed if sender == self._game_id)


def _import_textarena() -> Any:
    try:
        return importlib.import_module("textarena")  # an optional extra
    except ImportError as error:
        raise MissingExtraError(
            "textarena tasks need the textarena package", remedy=install_command("textarena")
        ) from error
