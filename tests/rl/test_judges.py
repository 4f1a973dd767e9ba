"""Pairwise judges: place does not count, preference does, and an error costs one comparison."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

import mint
from mint.errors import InvalidRequestError
from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.own_thread import run_in_own_thread
from mint.rl.calls.user_call import CallResult
from mint.rl.reward import Reward
from mint.rl.tasks.judges import QUESTION, Compare, ComparisonVerdict, JudgeError, PairwiseJudge, SamplingComparison
from mint.rl.tasks.openai_judge import OpenAIComparison, read_verdict
from mint.types import ModelInput

REPLIES = ["a", "bb", "ccc", "dddd"]


def longer(prompt: str, a: str, b: str) -> ComparisonVerdict:
    return "tie" if len(a) == len(b) else "a" if len(a) > len(b) else "b"


def always_first(prompt: str, a: str, b: str) -> ComparisonVerdict:
    return "a"


def scores(judge: PairwiseJudge, responses: list[str], prompt: str = "Q") -> list[float | None]:
    rewards = asyncio.run(judge.judge(prompt, responses))
    judge.close()
    return [None if reward is None else reward.value for reward in rewards]


@pytest.mark.parametrize("place", ["a", "b"])
def test_a_judge_that_prefers_a_place_gives_every_rollout_a_half(place: ComparisonVerdict) -> None:
    judge = PairwiseJudge(lambda prompt, a, b: place)
    assert scores(judge, REPLIES) == [0.5] * 4
    assert judge.statistics.flip_rate == 1.0


def test_a_real_preference_is_recovered_by_round_robin() -> None:
    judge = PairwiseJudge(longer)
    assert scores(judge, ["bb", "dddd", "a", "ccc"]) == pytest.approx([1 / 3, 1, 0, 2 / 3])
    assert judge.statistics.flip_rate == 0.0
    assert judge.statistics.comparisons == 12


def test_an_async_judge_is_asked_the_same_way() -> None:
    async def compare(prompt: str, a: str, b: str) -> ComparisonVerdict:
        await asyncio.sleep(0)
        return longer(prompt, a, b)

    assert scores(PairwiseJudge(compare), REPLIES) == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_a_preference_in_one_order_only_is_a_tie() -> None:
    def half_hearted(prompt: str, a: str, b: str) -> ComparisonVerdict:
        return "a" if a > b else "tie"

    judge = PairwiseJudge(half_hearted)
    assert scores(judge, REPLIES) == [0.5] * 4
    assert judge.statistics.flips == 6


def test_equal_responses_tie_without_asking_and_count_for_each_copy() -> None:
    judge = PairwiseJudge(longer)
    assert scores(judge, ["bb", "bb", "a"]) == pytest.approx([0.75, 0.75, 0])
    assert judge.statistics.comparisons == 2
    assert scores(PairwiseJudge(longer), ["same", "same"]) == [0.5, 0.5]
    assert scores(PairwiseJudge(longer), ["alone"]) == [0.5]


def test_scores_of_a_group_always_average_a_half() -> None:
    assert math.fsum(filter(None, scores(PairwiseJudge(longer), ["x", "yy", "x", "zzz", "yy", "q"]))) / 6 == 0.5


def test_an_error_leaves_out_its_comparison_and_is_counted() -> None:
    def fails_on_two(prompt: str, a: str, b: str) -> ComparisonVerdict:
        if {a, b} == {"a", "dddd"}:
            raise ConnectionError("gone")
        return longer(prompt, a, b)

    judge = PairwiseJudge(fails_on_two)
    assert scores(judge, REPLIES) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert judge.statistics.errors == 2
    assert judge.statistics.last_error == "ConnectionError: gone"


def test_a_response_whose_comparisons_all_failed_is_not_graded() -> None:
    def cannot_read(prompt: str, a: str, b: str) -> Any:
        return longer(prompt, a, b) if "a" not in (a, b) else "neither"

    judge = PairwiseJudge(cannot_read)
    assert scores(judge, REPLIES) == pytest.approx([None, 0, 0.5, 1])
    assert judge.statistics.errors == 6
    assert scores(PairwiseJudge(cannot_read), ["a", "a", "bb"]) == [None, None, None]


def test_a_pair_that_comes_again_is_not_asked_again_unless_it_failed() -> None:
    asked: list[tuple[str, str, str]] = []

    def compare(prompt: str, a: str, b: str) -> ComparisonVerdict:
        asked.append((prompt, a, b))
        if len(asked) == 1:
            raise TimeoutError("once")
        return longer(prompt, a, b)

    judge = PairwiseJudge(compare, concurrency=1)
    for _ in range(3):
        asyncio.run(judge.judge("Q", ["a", "bb"]))
    asyncio.run(judge.judge("another question", ["a", "bb"]))
    judge.close()
    assert len(asked) == 2 + 1 + 2
    assert judge.statistics.from_cache == 1 + 2


def test_the_reward_says_how_far_to_trust_the_judge() -> None:
    judge = PairwiseJudge(always_first)
    for question in "abcdef":
        reward = asyncio.run(judge.judge(question, REPLIES))[0]
    judge.close()
    assert isinstance(reward, Reward)
    assert reward.parts == {"judge": 0.5}
    assert reward.info["judge_flip_rate"] == 1.0
    assert "position bias" in str(judge.statistics.alarm)
    fair = PairwiseJudge(longer)
    rewards = asyncio.run(fair.judge("Q", [letter * length for letter in "ab" for length in range(1, 7)]))
    fair.close()
    assert fair.statistics.alarm is None
    assert fair.statistics.length_correlation > 0.8
    assert all(reward is not None and reward.info["judge_flip_rate"] == 0.0 for reward in rewards)


def test_the_number_of_questions_in_flight_is_bounded() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def compare(prompt: str, a: str, b: str) -> ComparisonVerdict:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        threading.Event().wait(0.005)
        with lock:
            now -= 1
        return "tie"

    scores(PairwiseJudge(compare, concurrency=3), [str(number) for number in range(6)])
    assert most <= 3


def test_groups_that_wait_for_the_judge_do_not_time_out_meanwhile() -> None:
    async def slow(prompt: str, a: str, b: str) -> ComparisonVerdict:
        await asyncio.sleep(0.2)
        return longer(prompt, a, b)

    judge = PairwiseJudge(slow, concurrency=6)  # the six comparisons of one group of three

    async def judge_groups() -> list[CallResult]:
        return await asyncio.gather(*(calls.call(judge.judge, f"Q{place}", ["a", "bb", "ccc"]) for place in range(12)))

    with closing(CallPool(timeout_s=1.6)) as calls:
        results = run_in_own_thread(judge_groups())
    assert [result.failure for result in results] == [None] * 12, "the groups take 2.4 s, one after the other"
    assert all([reward.value for reward in result.value] == [0.0, 0.5, 1.0] for result in results)


# --- A policy as the judge ------------------------------------------------------------------------------------------


def test_a_policy_judges_by_the_logprobs_of_its_answers_and_always_alike() -> None:
    with mint.ServiceClient() as service:
        sampler = service.create_sampling_client(base_model="mint/tiny")
        template = "Best: {prompt} {a} {b}"
        comparison = SamplingComparison(sampler, template=template)
        replies = ["The fox is a quick animal.", "It is fine."]
        verdicts = [asyncio.run(comparison("fox?", *replies)) for _ in range(2)]
        assert verdicts[0] == verdicts[1]

        tokenizer = sampler.get_tokenizer()
        content = template.format(prompt="fox?", a=replies[0], b=replies[1])
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        ids = {letter: tokenizer.encode(text + letter) for letter in "AB"}
        logprobs = {
            letter: sampler.compute_logprobs(ModelInput.from_ints(ids[letter])).result()[-1] or 0.0 for letter in "AB"
        }
        assert verdicts[0] == ("a" if logprobs["A"] > logprobs["B"] else "b")
        undecided = SamplingComparison(sampler, template=template, tie_margin=1e9)
        assert asyncio.run(undecided("fox?", *replies)) == "tie"
        rewards = asyncio.run(PairwiseJudge(sampler).judge("fox?", replies))
        assert math.fsum(reward.value for reward in rewards if reward is not None) == 1.0
    with pytest.raises(InvalidRequestError, match=r"\{b\}"):
        SamplingComparison(sampler, template="{prompt} {a}")


# --- An endpoint as the judge ---------------------------------------------------------------------------------------


class Endpoint(ThreadingHTTPServer):
    """Answers with what `script` holds, in turn; then prefers the longer reply."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[tuple[int, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append({"path": self.path, **body})
        self.server.keys.append(self.headers.get("authorization"))
        status, answer = self.server.script.pop(0) if self.server.script else (200, chat(better(body)))
        content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("retry-after", "0.01")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        return


def chat(content: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def better(body: dict[str, Any]) -> str:
    question = body["messages"][0]["content"]
    a, b = question.split("Reply A:\n")[1].split("\n\nAnswer")[0].split("\n\nReply B:\n")
    return "A" if len(a) > len(b) else "I think it is B."


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def comparison(endpoint: Endpoint, **settings: Any) -> OpenAIComparison:
    return OpenAIComparison(endpoint.url, "judge-1", **{"api_key": "k", "first_pause_s": 0.01, **settings})


def test_an_endpoint_judges_a_group(endpoint: Endpoint) -> None:
    compare: Compare = comparison(endpoint)
    assert scores(PairwiseJudge(compare), REPLIES, "Why?") == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert len(endpoint.requests) == 12
    first = endpoint.requests[0]
    assert (first["path"], first["model"], first["temperature"]) == ("/v1/chat/completions", "judge-1", 0)
    assert first["messages"][0]["content"].startswith(QUESTION.split("{prompt}")[0] + "Why?")
    assert set(endpoint.keys) == {"Bearer k"}


def test_a_judge_that_was_closed_at_the_end_of_a_run_serves_the_next(endpoint: Endpoint) -> None:
    judge = PairwiseJudge(comparison(endpoint))
    assert scores(judge, REPLIES, "first run") == scores(judge, REPLIES, "second run")
    assert judge.statistics.errors == 0


def test_the_key_is_read_from_the_environment(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_JUDGE_API_KEY", "from-environment")
    comparison(endpoint, api_key=None)("Q", "longer", "short")
    monkeypatch.delenv("MINT_JUDGE_API_KEY")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    comparison(endpoint, api_key=None)("Q", "longer", "short")
    assert endpoint.keys == ["Bearer from-environment", None]


def test_overload_and_server_errors_are_tried_again(endpoint: Endpoint) -> None:
    endpoint.script = [(429, {"error": "slow down"}), (500, "oops"), (503, "")]
    assert comparison(endpoint)("Q", "longer", "short") == "a"
    assert len(endpoint.requests) == 4


def test_a_judge_that_stays_down_or_refuses_is_an_error_that_says_so(endpoint: Endpoint) -> None:
    endpoint.script = [(500, "oops")] * 9
    with pytest.raises(JudgeError, match="status 500: oops"):
        comparison(endpoint, retries=1)("Q", "x", "y")
    endpoint.script = [(401, {"error": "bad key"})] * 9
    with pytest.raises(JudgeError, match="bad key"):
        comparison(endpoint)("Q", "x", "y")
    assert len(endpoint.requests) == 2 + 1
    with pytest.raises(JudgeError, match="ConnectError"):
        OpenAIComparison("http://127.0.0.1:9/v1", "m", retries=0)("Q", "x", "y")


@pytest.mark.parametrize("reply", ["not json", {"choices": []}, chat(None), chat("Neither."), chat("a good one"), [1]])
def test_a_malformed_reply_is_an_error_of_its_comparison(endpoint: Endpoint, reply: Any) -> None:
    endpoint.script = [(200, reply)] * 12
    judge = PairwiseJudge(comparison(endpoint))
    assert scores(judge, REPLIES) == [None] * 4
    assert judge.statistics.errors == 12


@pytest.mark.parametrize(
    ("content", "verdict"),
    [("A", "a"), ("B.", "b"), ("**B**", "b"), ("Tie", "tie"), ("A is a bit short, so: B", "b"), ("B? No. A", "a")],
)
def test_the_last_verdict_of_a_reply_counts(content: str, verdict: ComparisonVerdict) -> None:
    assert read_verdict(httpx.Response(200, json=chat(content))) == verdict
