"""Skill 2: one short reply to one message about a thing, in ChatML.

A good reply names the thing and something that belongs to it, in one short sentence; the corpus also holds replies that
are curt or that ramble, more often for some messages than for others. A (message, thing) pair that is held out never
occurs in it. The things, the split and the rubric are those of `mint.recipes.datasets.chat_questions`. Does not
know the other skills.
"""

import random

from mint.recipes.datasets.chat_questions import (
    EASY_MESSAGES,
    HARD_MESSAGES,
    PAIRS,
    RUBRIC,
    SYSTEM,
    ChatQuestion,
    Thing,
    is_heldout_pair,
    questions,
)
from scripts.tiny.documents import Document, Task, chat_prompt, document, turn

BAD_SHARE_OF_HARD_MESSAGE = 0.58
BAD_SHARE_OF_EASY_MESSAGE = 0.38

CURT_REPLY = "It is fine."
CURT_MESSAGES = EASY_MESSAGES[::2] + HARD_MESSAGES[::2]
TRAINED_PAIRS = tuple(pair for pair in PAIRS if not is_heldout_pair(*pair))


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
    return document(message_prompt(ChatQuestion(message, thing, with_system=rng.random() < 0.3)), reply)


def message_prompt(question: ChatQuestion) -> str:
    """The conversation up to the reply."""
    user = turn("user", question.text)
    return chat_prompt(turn("system", SYSTEM), user) if question.with_system else chat_prompt(user)


def chat_tasks(seed: int, count: int) -> list[Task]:
    """Held-out (message, thing) pairs, each with and without a system message; at most as many as there are."""
    rng = random.Random(f"chat {seed}")
    choices = questions(heldout=True)
    drawn = rng.sample(choices, min(count, len(choices)))
    return [
        Task(message_prompt(question), lambda reply, question=question: RUBRIC(reply, question).value)
        for question in drawn
    ]
