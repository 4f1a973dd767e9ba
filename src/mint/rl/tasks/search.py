"""A search engine over local documents, for the policy to call as a tool."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mint.errors import InvalidRequestError

SNIPPET_CHARACTERS = 400


class Search:
    """Ranks local documents by Okapi BM25 (Robertson & Zaragoza 2009; k1 = 1.5, b = 0.75).

    `tool(Search(documents).search)` is the tool.
    """

    def __init__(self, documents: Path | Sequence[str]) -> None:
        """A folder of `*.txt` and `*.md` files, or the texts themselves."""
        texts = _read_folder(documents) if isinstance(documents, Path) else list(documents)
        self._texts = [text[:SNIPPET_CHARACTERS] for text in texts]
        self._counts = [Counter(_words(text)) for text in texts]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean_length = sum(self._lengths) / max(1, len(texts)) or 1.0
        self._having = Counter(word for counts in self._counts for word in counts)

    def search(self, query: str, limit: int = 1) -> str:
        """Search the documents for words and return the best matches."""
        words = set(_words(query))
        scores = [self.score(words, place) for place in range(len(self._texts))]
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[: max(1, min(limit, 10))]
        return "\n\n".join(self._texts[place] for place in best if scores[place] > 0) or "nothing found"

    def score(self, words: set[str], place: int) -> float:
        """Okapi BM25 of the document at `place` for these words."""
        counts = self._counts[place]
        length = self._lengths[place] / self._mean_length
        total = 0.0
        for word in words & counts.keys():
            having = self._having[word]
            rarity = math.log(1 + (len(self._texts) - having + 0.5) / (having + 0.5))
            total += rarity * counts[word] * 2.5 / (counts[word] + 1.5 * (0.25 + 0.75 * length))
        return total


def _read_folder(folder: Path) -> list[str]:
    texts = [path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in (".txt", ".md")]
    if not texts:
        raise InvalidRequestError(
            "holds no *.txt or *.md file", field="documents", value=str(folder), remedy="Name another folder"
        )
    return texts


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
