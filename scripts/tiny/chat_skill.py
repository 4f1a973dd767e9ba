"""Skill 2: one short reply to one message about a thing, in ChatML.

A good reply names the thing and something that belongs to it, in one short sentence; the corpus also holds replies that
are curt or that ramble, more often for some messages than for others. A (message, thing) pair that is held out never
occurs in it. Does not know the other skills.
"""

import random
import re
from dataclasses import dataclass

from scripts.tiny.documents import Document, Task, chat_prompt, document, is_heldout_key, turn

BAD_SHARE_OF_HARD_MESSAGE = 0.58
BAD_SHARE_OF_EASY_MESSAGE = 0.38

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
SYSTEM = "You are a helpful assistant."
CURT_REPLY = "It is fine."

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


THINGS = tuple(Thing(*entry.split()) for entry in THINGS_TABLE.replace("\n", ";").split(";") if entry.strip())
MESSAGES = EASY_MESSAGES + HARD_MESSAGES
PAIRS = tuple((message, thing) for message in MESSAGES for thing in THINGS)


def is_heldout_pair(message: str, thing: Thing) -> bool:
    """Whether the corpus never asks this message about this thing."""
    return is_heldout_key(message.format(thing.name))


def good_reply(thing: Thing, rng: random.Random) -> str:
    """One sentence that the rubric gives full marks."""
    name, category, trait, place = thing.name, thing.category, thing.trait, thing.place
    return rng.choice(
        (
            f"The {name} is a {trait} {category}.",
            f"The {name} is {trait} and belongs to the {place}.",
            f"The {name} is a {category} for the {place}.",
            f"The {name} makes me think of the {place}.",
        )
    )


def rambling_reply(thing: Thing, rng: random.Random) -> str:
    """Too long and repetitive, always with the same opening."""
    loops = " and ".join(["so on"] * rng.randint(3, 6))
    return f"Well, the {thing.name} is the {thing.name} and it is {thing.trait} and {loops}."


def chat_document(rng: random.Random) -> Document:
    """A message that is not held out, with a good, a curt or a rambling reply."""
    message, thing = rng.choice(TRAINED_PAIRS)
    bad_share = BAD_SHARE_OF_HARD_MESSAGE if message in HARD_MESSAGES else BAD_SHARE_OF_EASY_MESSAGE
    if rng.random() >= bad_share:
        reply = good_reply(thing, rng)
    elif message in CURT_MESSAGES:
        reply = CURT_REPLY
    else:
        reply = rambling_reply(thing, rng)
    return document(message_prompt(message, thing, with_system=rng.random() < 0.3), reply)


CURT_MESSAGES = EASY_MESSAGES[::2] + HARD_MESSAGES[::2]
TRAINED_PAIRS = tuple(pair for pair in PAIRS if not is_heldout_pair(*pair))


def message_prompt(message: str, thing: Thing, *, with_system: bool = False) -> str:
    """The conversation up to the reply."""
    user = turn("user", message.format(thing.name))
    return chat_prompt(turn("system", SYSTEM), user) if with_system else chat_prompt(user)


def rubric(reply: str, thing: Thing) -> dict[str, float]:
    """The parts of the score by name, each 0 or 1. A fixed sentence, even with the name copied in, misses `fitting`."""
    words = re.findall(r"[a-z']+", reply.lower())
    counted = [word for word in words if word not in ("the", "a", "is", "and", "it")]
    return {
        "names_thing": float(thing.name in words),
        "fitting": float(any(word in words for word in (thing.category, thing.trait, thing.place))),
        "length": float(4 <= len(words) <= 12),
        "ending": float(reply.rstrip().endswith((".", "!", "?"))),
        "no_repeats": float(len(counted) == len(set(counted))),
    }


RUBRIC_WEIGHTS = {"names_thing": 0.3, "fitting": 0.3, "length": 0.2, "ending": 0.1, "no_repeats": 0.1}


def score(reply: str, thing: Thing) -> float:
    """The weighted rubric; exactly 1.0 only when every part holds."""
    parts = rubric(reply, thing)
    if all(parts.values()):
        return 1.0
    return sum(RUBRIC_WEIGHTS[name] * part for name, part in parts.items())


def chat_tasks(seed: int, count: int) -> list[Task]:
    """Held-out (message, thing) pairs, each with and without a system message; at most as many as there are."""
    rng = random.Random(f"chat {seed}")
    choices = [(*pair, with_system) for pair in PAIRS if is_heldout_pair(*pair) for with_system in (False, True)]
    drawn = rng.sample(choices, min(count, len(choices)))
    return [
        Task(message_prompt(message, thing, with_system=with_system), lambda reply, thing=thing: score(reply, thing))
        for message, thing, with_system in drawn
    ]
