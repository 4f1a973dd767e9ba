"""Questions about things, their held-out split, and the rubric for a good reply.

The pre-training corpus of the bundled model and the chat recipe share this file, so that both hold out the same
questions.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from mint.rl.tasks.rubric import Rubric

HELDOUT_ONE_IN = 8

EASY_MESSAGES = (
    "Tell me about the {}.",
    "What is the {} like?",
    "Say something about the {}.",
    "What do you know about the {}?",
)
HARD_MESSAGES = (
    "Do you like the {}?",
    "Any thoughts on the {}?",
    "Describe the {} for me.",
    "Why do people talk about the {}?",
)
MESSAGES = EASY_MESSAGES + HARD_MESSAGES
SYSTEM = "You are a helpful assistant."

THINGS_TABLE = """
fox animal quick forest; owl bird quiet tree; whale animal huge ocean; bee insect busy garden; horse animal strong field
cat animal soft house; dog animal loyal yard; frog animal green pond; eagle bird proud mountain; duck bird funny lake
ant insect tiny ground; bear animal heavy cave; camel animal patient desert; goat animal stubborn hill
seal animal smooth coast; crow bird clever roof; tiger animal striped jungle; mouse animal shy kitchen
tea drink warm cup; coffee drink bitter morning; juice drink sweet glass; milk drink white fridge; soup food hot bowl
bread food fresh bakery; cheese food salty plate; apple fruit crisp orchard; lemon fruit sour market
cake food rich party; rice food plain pot; honey food golden jar; pepper spice sharp dish; salad food light lunch
rose flower red garden; pine tree tall mountain; oak tree old park; cactus plant dry desert; moss plant damp stone
river place long valley; beach place sunny sea; island place lonely ocean; library place silent city
museum place grand town; harbor place windy coast; bridge place high river; tower place narrow castle
market place loud square; school place lively street; farm place wide village; station place crowded city
piano instrument deep hall; guitar instrument bright stage; drum instrument loud band; flute instrument gentle orchestra
violin instrument tender concert; train vehicle fast track; boat vehicle slow water; bicycle vehicle simple road
truck vehicle big highway; plane vehicle modern sky; wagon vehicle wooden farm; hammer tool heavy workshop
needle tool thin basket; ladder tool tall barn; shovel tool sturdy shed; lamp thing bright desk; clock thing exact wall
mirror thing clear hallway; chair thing comfortable kitchen; pillow thing soft bed; window thing open house
rain weather cold autumn; snow weather white winter; storm weather wild night; wind weather free plain
sun star warm sky; moon body pale night; chess game hard table; tennis sport fast court; hockey sport rough ice
football sport popular stadium; poem text short page; novel text long shelf; letter text personal envelope
"""


@dataclass(frozen=True)
class Thing:
    """A thing to chat about and three words that belong to it."""

    name: str
    category: str
    trait: str
    place: str


@dataclass(frozen=True)
class ChatQuestion:
    """One message about one thing, with or without a system message before it."""

    message: str
    thing: Thing
    with_system: bool = False

    @property
    def text(self) -> str:
        """`Do you like the fox?`"""
        return self.message.format(self.thing.name)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the reply, as chat templates take it."""
        system = [{"role": "system", "content": SYSTEM}] if self.with_system else []
        return [*system, {"role": "user", "content": self.text}]


THINGS = tuple(Thing(*entry.split()) for entry in THINGS_TABLE.replace("\n", ";").split(";") if entry.strip())
PAIRS = tuple((message, thing) for message in MESSAGES for thing in THINGS)


def is_heldout_pair(message: str, thing: Thing) -> bool:
    """Whether the pair is held out: 1 in 8 by a stable hash; the corpus never contains it."""
    return hashlib.sha256(message.format(thing.name).encode()).digest()[0] % HELDOUT_ONE_IN == 0


def questions(*, heldout: bool) -> list[ChatQuestion]:
    """All questions of one side of the split, each with and without a system message."""
    return [
        ChatQuestion(message, thing, with_system)
        for message, thing in PAIRS
        if is_heldout_pair(message, thing) == heldout
        for with_system in (False, True)
    ]


def words_of(reply: str) -> list[str]:
    """The words of a reply in lower case."""
    return re.findall(r"[a-z']+", reply.lower())


def names_thing(reply: str, question: ChatQuestion) -> bool:
    """Whether the reply names the thing in the question."""
    return question.thing.name in words_of(reply)


def fitting(reply: str, question: ChatQuestion) -> bool:
    """Whether the reply has a word that belongs to the thing; a fixed sentence with the name copied in has none."""
    thing = question.thing
    return not {thing.category, thing.trait, thing.place}.isdisjoint(words_of(reply))


def length(reply: str, question: ChatQuestion) -> bool:
    """Whether the reply has 4 to 12 words."""
    return 4 <= len(words_of(reply)) <= 12


def ending(reply: str, question: ChatQuestion) -> bool:
    """Whether the reply ends with a full stop, exclamation or question mark."""
    return reply.rstrip().endswith((".", "!", "?"))


def no_repeats(reply: str, question: ChatQuestion) -> bool:
    """Whether no word occurs twice, except the most common ones."""
    counted = [word for word in words_of(reply) if word not in ("the", "a", "is", "and", "it")]
    return len(counted) == len(set(counted))


RUBRIC = Rubric(
    {
        "names_thing": (0.3, names_thing),
        "fitting": (0.3, fitting),
        "length": (0.2, length),
        "ending": (0.1, ending),
        "no_repeats": (0.1, no_repeats),
    }
)
"""1 if every part holds."""
