"""One external sampler: what is said to it over HTTP, and what its refusals mean. Used on one event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from mint.cluster.external.vllm_protocol import (
    GENERATE,
    HEALTH,
    LOAD_LORA,
    MODELS,
    UNLOAD_LORA,
    BadAnswerError,
    Choice,
    generate_body,
    number,
    read_choice,
    result_of,
)
from mint.engine.protocol import SampleJob, SampleResult

CONNECT_S = 5.0
"""The longest time in which a connection is made."""

KEEP_S = 2.0
"""How long an idle connection is kept: vLLM closes it after 5 seconds."""

CONTROL_S = 60.0
"""The longest time of everything that is not sampling: a lora is read from a disk that may be slow."""

SHOWN_CHARACTERS = 300
"""So much of a refusal is repeated."""

HeardToken = Callable[[int, int, float], None]
"""Called with each token that arrives: (sample, token, logprob)."""


class HostUnreachableError(RuntimeError):
    """Nobody answers, or the answer broke off."""


class HostRefusedError(RuntimeError):
    """An answer with a status that is no success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"it answered {status}: {text}")
        self.status = status
        self.text = text


class Host:
    """The connection to one sampler."""

    def __init__(self, address: str, *, api_key: str | None = None, fetches: bool = False) -> None:
        """`fetches`: it asks the server for loras, by name, and reads no folder."""
        self._fetches = fetches
        self.address = address.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=self.address,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # who is silent is found by asking for its health
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_S),
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def models(self) -> dict[str, dict[str, Any]]:
        """Its models and loras by name."""
        answer = await self._ask("GET", MODELS)
        return {each["id"]: each for each in answer.get("data", ())}

    async def is_well(self, within_s: float) -> None:
        """Returns if it answers in time.

        Raises:
            HostUnreachableError, HostRefusedError: it does not, or is not well.
        """
        await self._ask("GET", HEALTH, within_s=within_s)

    async def load_lora(self, name: str, path: str) -> None:
        """Makes the lora in a folder available under a name."""
        try:
            await self._ask("POST", LOAD_LORA, {"lora_name": name, "lora_path": name if self._fetches else path})
        except HostRefusedError as error:
            if error.status == 404 and "adapter found for" not in error.text and "failed" not in error.text:
                raise HostRefusedError(404, f"{error.text} (is VLLM_ALLOW_RUNTIME_LORA_UPDATING=True?)") from error
            if "already been loaded" not in error.text:
                raise

    async def unload_lora(self, name: str) -> None:
        """Takes a lora out; one that is not there is fine."""
        try:
            await self._ask("POST", UNLOAD_LORA, {"lora_name": name})
        except HostRefusedError as error:
            if error.status not in (400, 404):
                raise

    async def generate(self, job: SampleJob, model: str, hear: HeardToken | None = None) -> SampleResult:
        """Samples a job; tokens are heard as they arrive.

        Raises:
            HostUnreachableError, HostRefusedError: it does not sample.
            BadAnswerError: the answer is not what was asked for.
        """
        choices = [Choice() for _ in range(max(1, job.num_samples))]
        if hear is not None and job.max_tokens and not (job.prompt_logprobs or job.topk_prompt_logprobs):
            await self._stream(generate_body(job, model, stream=True), choices, hear)
            return result_of(job, choices, None)
        answer = await self._ask("POST", GENERATE, generate_body(job, model, stream=False), within_s=None)
        parts = answer.get("choices") or []
        for part in parts:
            read_choice(_choice(choices, part), part)
        if len(parts) != len(choices):
            raise BadAnswerError(f"it gave {len(parts)} samples, and {len(choices)} were asked for")
        result = result_of(job, choices, answer.get("prompt_logprobs"))
        if hear is not None:
            for index, sample in enumerate(result.samples):
                for token, logprob in zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True):
                    hear(index, token, logprob)
        return result

    async def prompt_logprobs(self, tokens: list[int], model: str) -> list[float]:
        """The logprobs of all tokens but the first."""
        params = {"n": 1, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "logprobs": 0}
        body = {"token_ids": tokens, "model": model, "sampling_params": params}
        answer = await self._ask("POST", GENERATE, body, within_s=CONTROL_S)
        rows = answer.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(tokens):
            raise BadAnswerError("it gave no logprobs for the prompt")
        return [_own(row, token) for token, row in zip(tokens[1:], rows[1:], strict=True)]

    async def _stream(self, body: Mapping[str, Any], choices: list[Choice], hear: HeardToken) -> None:
        has_ended = False
        try:
            async with self._client.stream("POST", GENERATE, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    content = line.removeprefix("data:").strip()
                    if content == "[DONE]":
                        has_ended = True
                        break
                    self._hear(_json(content), choices, hear)
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        if not has_ended:
            raise HostUnreachableError("its stream broke off")

    def _hear(self, news: Mapping[str, Any], choices: list[Choice], hear: HeardToken) -> None:
        if "error" in news:
            error = news["error"]
            raise HostRefusedError(int(error.get("code") or 500), str(error.get("message"))[:SHOWN_CHARACTERS])
        for part in news.get("choices") or ():
            choice = _choice(choices, part)
            added = read_choice(choice, part)
            first = len(choice.tokens) - added
            for token, logprob in zip(choice.tokens[first:], choice.logprobs[first:], strict=True):
                hear(int(part["index"]), token, logprob)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, within_s: float | None = CONTROL_S
    ) -> dict[str, Any]:
        timeout = httpx.Timeout(within_s, connect=CONNECT_S)
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(response, response.content)
        if path in (LOAD_LORA, UNLOAD_LORA, HEALTH):  # these answer with a sentence, or nothing
            return {}
        return _json(response.text)


def _own(row: Any, token: int) -> float:
    return number((row or {}).get(str(token), {}).get("logprob"))


def _choice(choices: list[Choice], part: Mapping[str, Any]) -> Choice:
    index = part.get("index")
    if not isinstance(index, int) or not 0 <= index < len(choices):
        raise BadAnswerError(f"it gave a sample number {index}, and {len(choices)} were asked for")
    return choices[index]


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadAnswerError(f"it answered with something that is no JSON object: {text[:80]!r}")
    return value


def _unreachable(error: httpx.HTTPError) -> HostUnreachableError:
    return HostUnreachableError(str(error) or type(error).__name__)


def _refusal(response: httpx.Response, content: bytes) -> HostRefusedError:
    text = content.decode(errors="replace")
    try:
        said = json.loads(text)
        text = str(said["error"]["message"] if "error" in said else said.get("message") or said.get("detail") or text)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    text = text[:SHOWN_CHARACTERS]
    if response.status_code == httpx.codes.FORBIDDEN and response.url.path.endswith(GENERATE):
        text += " (vLLM must be started with --enable-scale-out)"
    return HostRefusedError(response.status_code, text)
