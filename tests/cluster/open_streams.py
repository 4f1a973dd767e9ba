"""Completions that are streamed one after another while something else goes on; one that breaks is asked for again."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

TOKENS, CHOICES = 120, 2
RETRY_S = 0.2

Piece = tuple[int, str, float]
"""A token of a stream: its choice, its text and its logprob."""


class OpenStreams(threading.Thread):
    """One stream is open at any time, the next one with the next seed. `ended` has the whole ones by seed."""

    def __init__(self, url: str, first_seed: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._seed = first_seed
        self._stopping = threading.Event()
        self.ended: dict[int, list[Piece]] = {}
        self.broken = 0
        self.contradictions: list[str] = []
        self.heard_at = 0.0
        """When the last token came (monotonic seconds)."""
        self.start()

    def finish(self) -> None:
        """Returns when the stream that is open now has ended."""
        self._stopping.set()
        self.join(timeout=600)
        assert not self.is_alive(), "a stream does not end"

    def run(self) -> None:
        while not self._stopping.is_set():
            self.ended[self._seed] = self._whole(self._seed)
            self._seed += 1

    def _whole(self, seed: int) -> list[Piece]:
        """The tokens of one stream in order, asked for until all have come; those that came before must come again."""
        before: list[Piece] = []
        while True:
            pieces: list[Piece] = []
            try:
                self._hear(seed, pieces)
            except httpx.HTTPError:
                self.broken += 1
            before_by_choice, now_by_choice = _by_choice(before), _by_choice(pieces)
            for own, again in zip(before_by_choice, now_by_choice, strict=True):
                if own[: len(again)] != again[: len(own)]:
                    self.contradictions.append(f"stream {seed} said something else when it was asked for again")
            if len(pieces) == TOKENS * CHOICES:
                return [piece for own in now_by_choice for piece in own]
            before = max(before, pieces, key=len)
            time.sleep(RETRY_S)

    def _hear(self, seed: int, pieces: list[Piece]) -> None:
        body = {
            "model": "mint/tiny", "prompt": "1 + 1 =", "max_tokens": TOKENS, "n": CHOICES, "seed": seed, "logprobs": 0,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=300) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                key, _, value = line.partition(": ")
                if key == "data" and value.startswith("{"):
                    self._take(json.loads(value), pieces)

    def _take(self, event: dict[str, Any], pieces: list[Piece]) -> None:
        for choice in event.get("choices", ()):
            told = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
            for token, logprob in zip(told["tokens"], told["token_logprobs"], strict=True):
                pieces.append((choice["index"], token, logprob))
                self.heard_at = time.monotonic()


def _by_choice(pieces: list[Piece]) -> list[list[Piece]]:
    return [[piece for piece in pieces if piece[0] == choice] for choice in range(CHOICES)]
