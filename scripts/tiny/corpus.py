"""The corpus: documents of all skills in fixed shares, packed into rows of token ids for one training step.

Everything follows from (seed, step), so that nothing is stored. Knows the skills and a tokenizer, not the model.
Letters: R rows, L positions in a row.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from scripts.tiny.arithmetic_skill import clean_document, question_document
from scripts.tiny.chat_skill import chat_document
from scripts.tiny.code_skill import code_document
from scripts.tiny.documents import Document
from scripts.tiny.tools_skill import tools_document

PROMPT_WEIGHT = 0.1
ROW_LENGTH = 192

MIX: tuple[tuple[Callable[[random.Random], Document], float], ...] = (
    (clean_document, 0.62),
    (question_document, 0.25),
    (chat_document, 0.04),
    (code_document, 0.05),
    (tools_document, 0.04),
)
"""Each kind of document with its share of all documents."""


@dataclass(frozen=True)
class Batch:
    """One step's rows. `document_RL` numbers the documents within a row; padding carries -1 and weight 0."""

    ids_RL: np.ndarray
    targets_RL: np.ndarray
    weights_RL: np.ndarray
    positions_RL: np.ndarray
    document_RL: np.ndarray
    tokens: int


def draw_document(rng: random.Random) -> Document:
    """One document of a kind drawn by its share."""
    draw = rng.choices([draw for draw, _ in MIX], weights=[share for _, share in MIX])[0]
    return draw(rng)


def sample_texts(seed: int, count: int) -> Iterator[str]:
    """Texts for training the tokenizer."""
    rng = random.Random(f"tokenizer {seed}")
    for _ in range(count):
        yield draw_document(rng).text


def encode(documents: list[Document], tokenizer: Tokenizer) -> list[tuple[list[int], list[float]]]:
    """Token ids and loss weights of each document. Segments are encoded on their own, as prompts are when sampling."""
    texts = [text for document in documents for text, _ in document.segments]
    encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    encoded: list[tuple[list[int], list[float]]] = []
    for document in documents:
        ids: list[int] = []
        weights: list[float] = []
        for _, is_completion in document.segments:
            segment = next(encodings).ids
            ids += segment
            weights += [1.0 if is_completion else PROMPT_WEIGHT] * len(segment)
        encoded.append((ids, weights))
    return encoded


def draw_batch(seed: int, step: int, tokenizer: Tokenizer, rows: int) -> Batch:
    """The documents of one step, first-fit into `rows` rows; the ones that no longer fit are dropped."""
    rng = random.Random(f"corpus {seed} {step}")
    ids_RL = np.zeros((rows, ROW_LENGTH), np.int64)
    targets_RL = np.zeros((rows, ROW_LENGTH), np.int64)
    weights_RL = np.zeros((rows, ROW_LENGTH), np.float32)
    positions_RL = np.zeros((rows, ROW_LENGTH), np.int64)
    document_RL = np.full((rows, ROW_LENGTH), -1, np.int64)
    used_R = [0] * rows
    misses = 0
    while misses < 32:
        for ids, weights in encode([draw_document(rng) for _ in range(64)], tokenizer):
            length = len(ids) - 1
            row = next((r for r in range(rows) if used_R[r] + length <= ROW_LENGTH), None)
            if row is None:
                misses += 1
                continue
            here = slice(used_R[row], used_R[row] + length)
            ids_RL[row, here] = ids[:-1]
            targets_RL[row, here] = ids[1:]
            weights_RL[row, here] = weights[1:]
            positions_RL[row, here] = np.arange(length)
            document_RL[row, here] = used_R[row]
            used_R[row] += length
    return Batch(ids_RL, targets_RL, weights_RL, positions_RL, document_RL, sum(used_R))


def token_shares(seed: int, count: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Each kind's share of all tokens, for the log."""
    rng = random.Random(f"shares {seed}")
    totals = {draw.__name__: share * _mean_length(draw, rng, count, tokenizer) for draw, share in MIX}
    return {name: total / sum(totals.values()) for name, total in totals.items()}


def _mean_length(
    draw: Callable[[random.Random], Document], rng: random.Random, count: int, tokenizer: Tokenizer
) -> float:
    encoded = encode([draw(rng) for _ in range(count)], tokenizer)
    return sum(len(ids) for ids, _ in encoded) / count
