"""What the SDK does with every kind of answer: repeats, gives up, falls back, and tells people."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine, in_one_process
from http_server import http_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from waiting import HANG_S, wait_until

import mint
import mint.client.connection.http_transport as http_transport
import mint.client.connection.server_connection as server_connection
from mint.client.connection.backoff import LONGEST_PAUSE_S, Backoff
from mint.client.connection.endpoint import Endpoint
from mint.client.connection.http_transport import HttpTransport
from mint.client.connection.wait_log import WaitLog, describe
from mint.compose.embedded import EmbeddedService, open_embedded
from mint.errors import (
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
    SessionEndedError,
)
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.types import AdamParams, Datum, ModelInput, SamplingParams

DATA = [Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})]
PROMPT = ModelInput.from_ints([5, 6])
Answer = Callable[[Request], Response | None]


@dataclass
class RecordingServer:
    """An app before the real one: `answers` speak first, and None from them lets the request through.

    Unless `lets_wait`, it is a server that gives promises alone.
    """

    running: EmbeddedService
    lets_wait: bool = False
    answers: dict[str, Answer] = field(default_factory=dict)
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            route = scope["path"].rpartition("/api/v1/")[2]
            self.seen.append((route, dict(request.headers)))
            if not self.lets_wait:
                scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"prefer"]
            spoken = self.answers.get(route, lambda _request: None)(request)
            if spoken is not None:
                await spoken(scope, receive, send)
                return
        await self.running.app(scope, receive, send)

    def headers(self, route: str) -> list[dict[str, str]]:
        return [headers for name, headers in self.seen if name == route]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[RecordingServer]:
    running = open_embedded(data_dir=tmp_path / "data", engine=fake_engine())
    yield RecordingServer(running)
    running.release()


@pytest.fixture
def url(door: RecordingServer) -> Iterator[str]:
    with http_app(door.running, door) as address:
        yield address


def assert_true(happened: bool) -> None:
    assert happened


def held_bytes(door: RecordingServer) -> int:
    """Of all bodies that the application has in its hands."""
    return door.running.app.state.bodies.held_bytes


def times(count: int, answer: Response) -> Answer:
    """The same answer for the first `count` requests."""
    left = iter(range(count))
    return lambda _request: answer if next(left, None) is not None else None


# --- repeating and giving up -------------------------------------------------------------------------------------


def test_pauses_grow_are_drawn_at_random_and_honour_what_the_server_asks() -> None:
    longest, shortest = Backoff(lambda: 1.0), Backoff(lambda: 0.0)
    grown = [longest.next_s() for _ in range(10)]
    assert grown == sorted(grown) and grown[0] < 0.5 and grown[-1] == LONGEST_PAUSE_S
    assert [shortest.next_s() for _ in range(10)] == [pause / 2 for pause in grown]
    assert Backoff(lambda: 0.0).next_s("7") == 7.0
    assert Backoff().next_s("1000000") <= 60.0
    for nonsense in ("soon", "", "-5", "Wed, 21 Oct 2026 07:28:00 GMT", None):
        assert Backoff(lambda: 1.0).next_s(nonsense) == grown[0]


@pytest.mark.parametrize("status", [429, 503, 408])
def test_a_passing_trouble_is_tried_again_and_no_sooner_than_the_server_asks(
    door: RecordingServer, url: str, status: int
) -> None:
    with mint.ServiceClient(base_url=url) as client:
        training = client.create_lora_training_client("mint/tiny", rank=4)
        door.answers["optim_step"] = times(1, Response("busy", status_code=status, headers={"retry-after": "1"}))
        training.forward_backward(DATA, "cross_entropy")
        began = time.monotonic()
        assert training.optim_step().result(timeout=HANG_S).metrics["step"] == 1
        assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AuthenticationError), (403, AuthenticationError), (404, NotFoundError), (400, InvalidRequestError),
     (500, RequestFailedError), (301, InvalidRequestError)],
)  # fmt: skip
def test_a_lasting_trouble_is_raised_at_once_as_the_class_that_the_status_means(
    door: RecordingServer, url: str, status: int, kind: type[mint.MintError]
) -> None:
    door.answers["create_model"] = times(1000, Response("no", status_code=status))
    with mint.ServiceClient(base_url=url) as client, pytest.raises(kind):
        client.create_lora_training_client("mint/tiny")
    assert len(door.headers("create_model")) == 1


def test_an_overload_that_lasts_is_an_error_in_the_end(
    door: RecordingServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "SUBMIT_PATIENCE_S", 1.0)
    with mint.ServiceClient(base_url=url) as client:
        door.answers["create_model"] = times(1000, Response("busy", status_code=429))
        with pytest.raises(OverloadedError, match="429"):
            client.create_lora_training_client("mint/tiny")
        with pytest.raises(mint.RateLimitError):
            client.create_lora_training_client("mint/tiny")


def test_a_failed_future_raises_the_error_that_the_server_named_with_all_its_parts(url: str) -> None:
    with mint.ServiceClient(base_url=url) as client:
        training = client.create_lora_training_client("mint/tiny", rank=4)
        wrong = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [987_654]})
        with pytest.raises(mint.BadRequestError) as caught:
            training.forward_backward([wrong], "cross_entropy").result()
        error = caught.value
        assert type(error) is InvalidRequestError and "987654" in str(error)
        assert (error.category, error.status_code) == ("user", 400) and error.field and error.remedy
        with pytest.raises(NotFoundError):
            client.create_sampling_client("tinker://sess-nobody:train:0/weights/none")


def test_an_error_names_a_checkpoint_by_its_path_in_python(url: str) -> None:
    with mint.ServiceClient(base_url=url) as client:
        saved = client.create_lora_training_client("mint/tiny", rank=4).save_state("first").result().path
        with pytest.raises(InvalidRequestError) as caught:
            client.create_lora_training_client("mint/tiny", rank=8).load_state(saved).result()
        assert f"path = {saved}: was saved from" in str(caught.value) and saved.startswith("mint://")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"error": "boom", "category": "server"}, RequestFailedError),
        ({"category": "user", "error": "x"}, InvalidRequestError),
    ],
)
def test_failed_futures_of_other_servers_are_read_too(
    door: RecordingServer, url: str, body: dict[str, str], kind: type[mint.MintError]
) -> None:
    door.answers["retrieve_future"] = times(1, JSONResponse(body))
    with mint.ServiceClient(base_url=url) as client, pytest.raises(kind, match=body["error"]):
        client.create_lora_training_client("mint/tiny")


def test_what_the_server_says_of_a_result_that_is_gone_is_kept(door: RecordingServer, url: str) -> None:
    gone = NotFoundError("was dropped to make room", field="request_id", value="r1", remedy="Read results sooner")
    door.answers["retrieve_future"] = times(1, JSONResponse(gone.to_wire(), status_code=410))
    with mint.ServiceClient(base_url=url) as client, pytest.raises(SessionEndedError) as caught:
        client.create_lora_training_client("mint/tiny")
    assert str(caught.value) == str(gone) and caught.value.remedy == gone.remedy


def test_a_server_that_does_not_hold_the_question_is_not_asked_in_a_loop(door: RecordingServer, url: str) -> None:
    pending = JSONResponse({"type": "try_again", "queue_state": "active"}, status_code=408)
    old_style = JSONResponse({"type": "try_again", "queue_state": "paused_capacity"}, status_code=200)
    waves = iter([pending, pending, old_style, old_style])
    door.answers["retrieve_future"] = lambda _request: next(waves, None)
    with mint.ServiceClient(base_url=url) as client:
        began = time.monotonic()
        client.create_lora_training_client("mint/tiny", rank=4)
        assert time.monotonic() - began >= 4 * 0.25


# --- telling people ----------------------------------------------------------------------------------------------


def test_a_long_wait_is_told_about_once_in_a_while_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    waits = WaitLog(clock=lambda: now[0])
    body = {
        "queue_state": "paused_capacity",
        "queue_state_reason": "3 tenants",
        "queue_position": 4,
        "estimated_wait_s": 12.0,
    }
    with caplog.at_level(logging.WARNING, logger="mint.client"):
        waits.start("sess:train:0:5")
        waits.start("sess:train:0:6")
        for second in range(0, 200, 5):
            now[0] = float(second)
            waits.try_again("sess:train:0:5", body)
            waits.try_again("sess:train:0:6", body)
    assert len(caplog.messages) == 3
    for text in ("sess:train:0:5", "60 s", "2 results", "paused_capacity", "3 tenants", "4 requests", "about 12 s"):
        assert text in caplog.messages[0]


@pytest.mark.parametrize(
    ("reason", "wait_s", "told"),
    [
        ("2 requests go before it", 0.0, "queue active, 2 requests go before it"),
        ("2 requests go before it; its result is expected in about 9 s", 8.4,
         "queue active, 2 requests go before it; its result is expected in about 9 s"),
        ("waits for request 3 of m, which has not arrived", None,
         "queue active, waits for request 3 of m, which has not arrived, 2 requests before it"),
        ("", 8.4, "queue active, 2 requests before it, about 8 s to go"),
    ],
)  # fmt: skip
def test_nothing_is_told_twice_about_a_wait(reason: str, wait_s: float | None, told: str) -> None:
    body = {"queue_state": "active", "queue_state_reason": reason, "queue_position": 2, "estimated_wait_s": wait_s}
    assert describe(body) == told


def test_a_lost_server_is_told_about_once_not_once_per_request(
    door: RecordingServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with mint.ServiceClient(base_url=url) as client, caplog.at_level(logging.WARNING, logger="mint.client"):
        sampler = client.create_sampling_client(base_model="mint/tiny")
        door.answers["asample"] = times(40, Response("busy", status_code=503))
        futures = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)) for _ in range(20)]
        for future in futures:
            future.result(timeout=HANG_S)
    told = [message for message in caplog.messages if "trying again" in message]
    assert len(told) == 1 and "503" in told[0]


# --- protobuf, and servers without it ----------------------------------------------------------------------------


def test_passes_and_large_results_travel_as_protobuf(door: RecordingServer, url: str) -> None:
    with mint.ServiceClient(base_url=url) as client:
        training = client.create_lora_training_client("mint/tiny", rank=4)
        training.forward_backward(DATA, "cross_entropy").result()
        training.save_weights_and_get_sampling_client().sample(PROMPT, 1, SamplingParams(max_tokens=1)).result()
    assert [headers["content-type"] for headers in door.headers("forward_backward")] == ["application/x-protobuf"]
    assert {headers["content-type"] for headers in door.headers("asample")} == {"application/json"}
    accepted = Counter(headers["accept"] for headers in door.headers("retrieve_future"))
    assert accepted["application/x-protobuf, application/json"] >= 2 and accepted["application/json"] >= 2


@pytest.mark.parametrize("status", [415, 400])
def test_a_server_that_reads_no_protobuf_gets_json_from_then_on(door: RecordingServer, url: str, status: int) -> None:
    def no_protobuf(request: Request) -> Response | None:
        if request.headers["content-type"] != "application/x-protobuf":
            return None
        return JSONResponse({"error": "has no protobuf form", "category": "user"}, status_code=status)

    def json_only(request: Request) -> Response | None:
        request.scope["headers"] = [(k, v) for k, v in request.scope["headers"] if k != b"accept"]
        return None

    def steps(client: mint.ServiceClient) -> list[Any]:
        training = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
        passes = [training.forward_backward(DATA, "cross_entropy") for _ in range(3)]
        stepped = training.optim_step(AdamParams()).result()
        return [*(passed.result() for passed in passes), stepped]

    with mint.ServiceClient(base_url=url) as client:
        expected = steps(client)
    door.answers.update({"forward_backward": no_protobuf, "retrieve_future": json_only})
    with mint.ServiceClient(base_url=url) as client:
        assert steps(client) == expected
        assert steps(client) == expected
    sent = [headers["content-type"] for headers in door.headers("forward_backward")]
    assert sent[-3:] == ["application/json"] * 3


# --- addresses and headers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "/"])
def test_an_address_may_have_a_path_and_a_trailing_slash(door: RecordingServer, ending: str) -> None:
    below = Starlette(routes=[Mount("/train/here", app=door)])
    with http_app(door.running, below) as url, mint.ServiceClient(base_url=f"{url}/train/here{ending}") as client:
        assert client.create_lora_training_client("mint/tiny", rank=4).get_info().lora_rank == 4


@pytest.mark.parametrize("address", ["127.0.0.1:8500", "localhost", "ftp://x", "/tmp/x"])
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="http://HOST:PORT"):
        mint.ServiceClient(base_url=address)


def test_every_request_says_who_sends_it(door: RecordingServer, url: str) -> None:
    overrides = {"CF-Access-Client-Id": "me"}
    with mint.ServiceClient(base_url=url, api_key="tml-secret", default_headers_overrides=overrides) as client:
        client.get_server_capabilities()
    for route, headers in door.seen:
        assert headers["user-agent"] == f"mint/{mint.__version__}" == "mint/" + headers["x-sdk-version"], route
        assert headers["x-api-key"] == "tml-secret" and headers["cf-access-client-id"] == "me", route
    assert "tml-secret" not in repr(Endpoint(url, "tml-secret", overrides))


def test_settings_that_mint_does_not_know_are_named_and_change_nothing(url: str) -> None:
    with pytest.warns(UserWarning, match="max_retries"), mint.ServiceClient(base_url=url, max_retries=3) as client:
        assert client.get_server_capabilities().supported_models


def test_the_environment_is_read_when_the_client_is_made(
    door: RecordingServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BASE_URL": url, "API_KEY": "sk-mine", "PROJECT_ID": "p1", "TAGS": "a, b"}.items():
        monkeypatch.setenv(f"MINT_{name}", value)
    with mint.ServiceClient(display_name="shown") as client:
        file = door.running.data_dir / JOURNAL_FILE
        with closing(Journal(file, OpenFor.READING)) as journal:
            row = journal.session(client.session_id)
        assert door.headers("create_session")[0]["x-api-key"] == "sk-mine"
        assert row is not None and row.details is not None
        assert [row.details[name] for name in ("project_id", "tags", "display_name")] == ["p1", ["a", "b"], "shown"]


# --- opening a session -------------------------------------------------------------------------------------------


def test_a_session_whose_opening_was_answered_too_late_is_opened_once(door: RecordingServer) -> None:
    lost = iter(range(2))

    async def losing(scope: Any, receive: Any, send: Any) -> None:
        if not scope.get("path", "").endswith("/create_session") or next(lost, None) is None:
            return await door(scope, receive, send)
        await door(scope, receive, assert_sent)  # the server has done it; nobody hears of it
        return await Response("lost", status_code=503)(scope, receive, send)

    async def assert_sent(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200

    with http_app(door.running, losing) as url, mint.ServiceClient(base_url=url) as client:
        opened = client.session_id
        assert len(door.headers("create_session")) == 3
        assert list(door.running.service.session_owners) == [opened]
        assert client.create_lora_training_client("mint/tiny", rank=4).get_info()


def test_a_session_that_is_refused_closes_its_connections(
    door: RecordingServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_transports: list[HttpTransport] = []

    class Counted(HttpTransport):
        def __init__(self, base_url: str) -> None:
            super().__init__(base_url)
            open_transports.append(self)

        async def close(self) -> None:
            await super().close()
            open_transports.remove(self)

    monkeypatch.setattr(http_transport, "HttpTransport", Counted)
    door.answers["create_session"] = times(1, Response("no", status_code=401))
    threads = client_threads()
    client = mint.ServiceClient(base_url=url)
    with pytest.raises(AuthenticationError):
        client.get_server_capabilities()
    assert not open_transports and client_threads() == threads
    with client:  # the server takes it now
        assert client.get_server_capabilities() and len(open_transports) == 1
    assert not open_transports


@pytest.mark.parametrize("is_cut", [False, True], ids=["503", "cut off"])
def test_a_deletion_whose_answer_was_lost_is_done(door: RecordingServer, is_cut: bool) -> None:
    lost = iter(range(1))

    async def losing(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("method") != "DELETE" or next(lost, None) is None:
            return await door(scope, receive, send)
        await door(scope, receive, assert_sent)  # the server has done it; nobody hears of it
        if not is_cut:
            return await Response("lost", status_code=503)(scope, receive, send)
        cut = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]}
        return await send(cut)

    async def assert_sent(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200

    with http_app(door.running, losing) as url, mint.ServiceClient(base_url=url) as client:
        path = client.create_lora_training_client("mint/tiny", rank=4).save_state("a").result().path
        rest = client.create_rest_client()
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert sum(name.endswith("/weights/a") for name, _ in door.seen) == 2
        with pytest.raises(NotFoundError):
            rest.delete_checkpoint_from_tinker_path(path).result()


def test_many_tasks_that_open_one_session_wait_until_it_is_open(door: RecordingServer) -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path", "").endswith("/create_session"):
            await asyncio.sleep(0.5)
        await door(scope, receive, send)

    async def sample(client: mint.ServiceClient, after_s: float) -> int:
        await asyncio.sleep(after_s)
        sampler = await client.create_sampling_client_async(base_model="mint/tiny")
        return len((await sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=2))).sequences)

    async def all_at_once(client: mint.ServiceClient) -> list[int]:
        return await asyncio.gather(*(sample(client, 0.1 * number) for number in range(4)))

    with http_app(door.running, slow) as url, mint.ServiceClient(base_url=url) as client:
        assert asyncio.run(all_at_once(client)) == [1] * 4
        assert len(door.headers("create_session")) == 1


# --- other processes ---------------------------------------------------------------------------------------------


def client_threads() -> int:
    return sum(thread.name == "mint-client" for thread in threading.enumerate())


def test_a_sampling_client_may_be_pickled_and_handed_to_another_process(url: str) -> None:
    params = SamplingParams(max_tokens=4, seed=7)
    with mint.ServiceClient(base_url=url, api_key="tml-secret") as client:
        sampler = client.create_sampling_client(base_model="mint/tiny")
        expected = sampler.sample(PROMPT, 2, params).result()
        loops = client_threads()
        clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]  # noqa: S301
        assert [clone.sample(PROMPT, 2, params).result() for clone in clones] == [expected] * 2
        assert client_threads() == loops + 1  # they share one connection
        handle = sampler.get_sampler_handle()
        assert b"tml-secret" not in base64.urlsafe_b64decode(handle)
        program = (
            "import sys, mint; from mint.types import ModelInput, SamplingParams;"
            "sampler = mint.SamplingClient.from_sampler_handle(sys.argv[1]);"
            "answer = sampler.sample(ModelInput.from_ints([5, 6]), 2, SamplingParams(max_tokens=4, seed=7)).result();"
            "print([sequence.tokens for sequence in answer.sequences])"
        )
        child = subprocess.run([sys.executable, "-c", program, handle], capture_output=True, text=True, check=True)
        assert child.stdout.strip() == str([sequence.tokens for sequence in expected.sequences])
        assert client.get_server_capabilities()  # the child's end was not the session's
    with pytest.raises(InvalidRequestError, match="get_sampler_handle"):
        mint.SamplingClient.from_sampler_handle("nonsense")


def test_an_embedded_sampler_cannot_leave_its_process_and_says_so(tmp_path: Path) -> None:
    opened = lambda: open_embedded(data_dir=tmp_path, engine=fake_engine())  # noqa: E731
    with mint.ServiceClient(open_embedded=opened) as client:
        sampler = client.create_sampling_client(base_model="mint/tiny")
        with pytest.raises(InvalidRequestError, match="mint serve"):
            pickle.dumps(sampler)


def test_a_forked_process_is_told_instead_of_hanging(url: str) -> None:
    with mint.ServiceClient(base_url=url) as client:
        sampler = client.create_sampling_client(base_model="mint/tiny")
        child = os.fork()
        if child == 0:
            try:
                sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1))
            except SessionEndedError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result(timeout=HANG_S)


# --- the result itself, instead of a promise ---------------------------------------------------------------------


def results(url: str) -> list[Any]:
    with mint.ServiceClient(base_url=url) as client:
        training = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
        passed = training.forward_backward(DATA, "cross_entropy")
        stepped = training.optim_step(AdamParams())
        sampler = training.save_weights_and_get_sampling_client()
        sampled = sampler.sample(PROMPT, 2, SamplingParams(max_tokens=3))
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            sampler.sample(PROMPT, 1, SamplingParams(max_tokens=-1)).result()
        return [passed.result(), stepped.result(), sampled.result()]


def test_a_server_that_lets_wait_is_asked_once_and_gives_the_same_results(
    door: RecordingServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised = results(url)
    door.lets_wait = True
    door.seen.clear()
    assert results(url) == promised
    assert door.headers("forward_backward") and door.headers("asample") and not door.headers("retrieve_future")
    monkeypatch.setattr(door.running.service.results, "long_poll_s", 0.0)  # then the promise comes, and is polled
    assert results(url) == promised
    assert door.headers("retrieve_future"), "what takes longer than a long poll is promised"


@in_one_process("the service's thread is held")
def test_a_sample_that_is_waited_for_and_given_up_is_cancelled_on_the_server(door: RecordingServer, url: str) -> None:
    door.lets_wait = True
    service, go_on = door.running.service, threading.Event()
    with mint.ServiceClient(base_url=url) as client:
        sampler = client.create_sampling_client(base_model="mint/tiny").result()
        service.call_soon(lambda: assert_true(go_on.wait(HANG_S)))
        future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1))
        wait_until(lambda: len(service.pending.samples) == 1)
        assert future.cancel()
        wait_until(lambda: not service.pending.samples)
        go_on.set()


@in_one_process("the service's thread is held")
def test_a_body_is_let_go_of_while_its_result_is_waited_for(door: RecordingServer, url: str) -> None:
    door.lets_wait = True
    service, go_on = door.running.service, threading.Event()
    with mint.ServiceClient(base_url=url) as client:
        sampler = client.create_sampling_client(base_model="mint/tiny").result()
        service.call_soon(lambda: assert_true(go_on.wait(HANG_S)))
        futures = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)) for _ in range(3)]
        wait_until(lambda: len(service.pending.samples) == 3)
        wait_until(lambda: held_bytes(door) == 0)
        go_on.set()
        assert all(future.result(timeout=HANG_S) for future in futures)


# --- giving up a result ------------------------------------------------------------------------------------------


def test_a_sample_that_is_given_up_is_cancelled_on_the_server(door: RecordingServer, url: str) -> None:
    pending = JSONResponse({"type": "try_again", "queue_state": "active"}, status_code=408)
    with mint.ServiceClient(base_url=url) as client:
        sampler = client.create_sampling_client(base_model="mint/tiny")
        door.answers["retrieve_future"] = times(10**6, pending)

        def wait_for(route: str, count: int) -> None:
            wait_until(lambda: len(door.headers(route)) >= count)

        future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1))
        wait_for("retrieve_future", 1)
        assert future.cancel()
        wait_for("cancel_future", 1)
        asked = len(door.headers("retrieve_future"))

        async def give_up() -> None:
            waiting = asyncio.ensure_future(sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=1)))
            await asyncio.to_thread(wait_for, "retrieve_future", asked + 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        asyncio.run(give_up())
        wait_for("cancel_future", 2)
        assert len(door.headers("cancel_future")) == 2


def test_a_step_that_is_given_up_is_taken_all_the_same(url: str) -> None:
    with mint.ServiceClient(base_url=url) as client:
        training = client.create_lora_training_client("mint/tiny", rank=4)
        for _ in range(5):
            training.forward_backward(DATA, "cross_entropy").cancel()
            training.optim_step().cancel()
        training.forward_backward(DATA, "cross_entropy")
        assert training.optim_step().result(timeout=HANG_S).metrics["step"] == 6


def test_a_wrong_argument_uses_no_place_up(url: str) -> None:
    wrong: Any = 17
    with mint.ServiceClient(base_url=url) as client:
        training = client.create_lora_training_client("mint/tiny", rank=4)
        for call in (training.save_state, training.load_state, training.save_weights_for_sampler):
            with pytest.raises(InvalidRequestError, match="path"):
                call(wrong)
        with pytest.raises(InvalidRequestError, match="AdamParams"):
            training.optim_step({"learning_rate": 1.0})  # ty: ignore
        with pytest.raises(InvalidRequestError, match="optim_params alone"):
            training.optim_step(AdamParams(), adam_params=AdamParams())
        training.forward_backward(DATA, "cross_entropy")
        assert training.optim_step(adam_params=AdamParams()).result(timeout=HANG_S).metrics["step"] == 1


def test_a_wrong_argument_of_any_client_is_named(url: str) -> None:
    wrong: Any = ["wrong"]
    params = SamplingParams(max_tokens=1)
    with mint.ServiceClient(base_url=url) as client:
        sampler, rest = client.create_sampling_client(base_model="mint/tiny"), client.create_rest_client()
        training = client.create_lora_training_client("mint/tiny", rank=4)
        calls: dict[str, Callable[[], object]] = {
            "num_samples": lambda: sampler.sample(PROMPT, wrong, params),
            "prompt": lambda: sampler.sample(wrong, 1, params),
            "sampling_params": lambda: sampler.sample(PROMPT, 1, wrong),
            "prompt_logprobs_last_n": lambda: sampler.compute_logprobs(PROMPT, wrong),
            "model_path": lambda: training.create_sampling_client(wrong),
            "base_model": lambda: client.create_sampling_client(base_model=wrong),
            "tinker_path": lambda: rest.get_weights_info_by_tinker_path(wrong),
            "ttl_seconds": lambda: rest.set_checkpoint_ttl_from_tinker_path("mint://a/weights/b", wrong),
            "source_path": lambda: rest.copy_weights(wrong),
            "project_id": lambda: rest.assign_session_project("a", wrong),
            "detail": lambda: client.close(detail=wrong),
        }
        for field, call in calls.items():
            with pytest.raises(InvalidRequestError) as caught:
                call()
            assert (caught.value.field or "").endswith(f".{field}") and caught.value.remedy, caught.value
            assert "must be" in caught.value.message and "wrong" in (caught.value.value or "")
        assert sampler.sample(PROMPT, 1, params).result(timeout=HANG_S)
