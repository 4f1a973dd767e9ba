"""A pairwise judge behind any OpenAI-compatible endpoint (`POST {base_url}/chat/completions`).

Retries temporary failures (429, 5xx, lost connections) with growing pauses; any other failure is an error of that
comparison. Knows nothing of rewards or groups; `judges.PairwiseJudge` does.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import httpx

from mint.config import read_settings
from mint.rl.tasks.judges import QUESTION, ComparisonVerdict, CostedVerdict, JudgeError, check_template

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
LONGEST_PAUSE_S = 20.0
SHOWN_CHARACTERS = 200
VERDICT = re.compile(r"\b(A|B|[Tt]ie|TIE)\b")
"""The last match in a reply counts, because some models reason first. A small "a" is an article."""

_VERDICTS: dict[str, ComparisonVerdict] = {"a": "a", "b": "b", "tie": "tie"}


class OpenAIComparison:
    """A `compare` for `PairwiseJudge`; safe to call from several threads."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        template: str = QUESTION,
        concurrency: int = 64,
        timeout_s: float = 20.0,
        retries: int = 3,
        first_pause_s: float = 0.5,
        max_tokens: int = 16,
        price_per_million: tuple[float, float] | None = None,
    ) -> None:
        """`base_url` ends before `/chat/completions`, often in `/v1`; without `api_key`, the key comes from
        `MINT_JUDGE_API_KEY` or `OPENAI_API_KEY`, if one is set.

        `timeout_s` is for one attempt; the pause doubles from `first_pause_s`, unless `Retry-After` is given.
        `max_tokens` must leave room for the reasoning of models that reason before they answer. With
        `price_per_million`, of prompt tokens and completion tokens, a verdict comes with its cost.

        Raises:
            InvalidRequestError: the template lacks one of its fields.
        """
        check_template(template)
        key = api_key or read_settings().judge_api_key
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._template = template
        self._retries = retries
        self._first_pause_s = first_pause_s
        self._max_tokens = max_tokens
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        self._price = price_per_million
        self._concurrency = concurrency
        self._http: httpx.Client | None = None
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(concurrency)

    def __call__(self, prompt: str, a: str, b: str) -> ComparisonVerdict | CostedVerdict:
        """The endpoint's verdict at temperature 0; with its cost, if the price of tokens is known.

        Raises:
            JudgeError: the endpoint refused, cannot be reached, or its reply has no verdict.
        """
        content = self._template.format(prompt=prompt, a=a, b=b)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
        }
        with self._slots:
            response = self._post(body)
        verdict = read_verdict(response)
        return verdict if self._price is None else CostedVerdict(verdict, _cost(response, self._price))

    def close(self) -> None:
        """Closes the connections; the next question opens them again."""
        with self._lock:
            http, self._http = self._http, None
        if http is not None:
            http.close()

    def _open(self) -> httpx.Client:
        with self._lock:
            if self._http is None:
                limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
                self._http = httpx.Client(timeout=self._timeout_s, headers=self._headers, limits=limits)
            return self._http

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        problem = ""
        for attempt in range(self._retries + 1):
            pause_s = self._first_pause_s * 2**attempt
            try:
                response = self._open().post(self._url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == httpx.codes.OK:
                    return response
                problem = f"status {response.status_code}: {response.text[:SHOWN_CHARACTERS]}"
                if response.status_code not in RETRIED:
                    break
                pause_s = _asked_pause(response, pause_s)
            if attempt < self._retries:
                time.sleep(min(pause_s, LONGEST_PAUSE_S))
        raise JudgeError(f"the judge at {self._url} gave no answer ({problem})", remedy="Check its address and key")


def read_verdict(response: httpx.Response) -> ComparisonVerdict:
    """The last "A", "B" or "tie" of the reply.

    Raises:
        JudgeError: the body is no chat completion, or has no verdict.
    """
    try:
        content = response.json()["choices"][0]["message"]["content"]
        found = VERDICT.findall(content)
    except (ValueError, LookupError, TypeError) as error:
        text = response.text[:SHOWN_CHARACTERS]
        raise JudgeError(f"the judge's reply is no chat completion: {text}") from error
    if not found:
        raise JudgeError(f"the judge's reply has no verdict: {content[:SHOWN_CHARACTERS]!r}")
    return _VERDICTS[found[-1].lower()]


def _cost(response: httpx.Response, price_per_million: tuple[float, float]) -> float:
    """The cost of a reply by its `usage`; 0 where the endpoint reports none."""
    usage = response.json().get("usage") or {}
    tokens = (usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)
    return sum(price * count for price, count in zip(price_per_million, tokens, strict=True)) / 1e6


def _asked_pause(response: httpx.Response, otherwise_s: float) -> float:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return otherwise_s
