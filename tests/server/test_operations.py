"""Health says the truth, numbers add up, and the log holds what an operator needs and nothing that is private."""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from waiting import HANG_S

from mint.engine.fake_engine import FakeBatch, FakeEngine
from mint.engine.protocol import SampleResult
from mint.engine.torch_engine import TorchEngine
from mint.errors import JournalError
from mint.server.disk_space import DiskSpace
from mint.server.http.access_log import request_id
from mint.server.ops.logs import RARE_S, RareWarnings, configure_logs
from mint.server.store.database import Database
from tests.server.server_harness import API, Person, make_key, pass_input, running, sample_body


class Held(FakeEngine):
    """Samples only once it is let go."""

    def __init__(self, *, lanes: int = 1) -> None:
        super().__init__(lanes=lanes)
        self.go_on = threading.Event()
        self.busy = threading.Event()

    def open_batch(self) -> FakeBatch:
        return HeldBatch(self)


class HeldBatch(FakeBatch):
    """Waits before every step."""

    def __init__(self, engine: Held) -> None:
        super().__init__(engine)
        self._engine = engine

    def step(self) -> dict[str, SampleResult]:
        self._engine.busy.set()
        self._engine.go_on.wait(2 * HANG_S)
        return super().step()


class Dying(FakeEngine):
    """Ends the engine's thread, as nothing that is caught would."""

    def open_batch(self) -> FakeBatch:
        raise SystemExit


def wait_for_status(person: Person, path: str, status: int) -> dict[str, Any]:
    give_up_at = time.monotonic() + HANG_S
    while time.monotonic() < give_up_at:
        response = person.send("GET", path)
        if response.status_code == status:
            return response.json()
        time.sleep(0.02)
    raise AssertionError(f"{path} did not answer {status}: {response.text}")


# --- health ------------------------------------------------------------------------------------------------------


def test_a_server_that_works_is_alive_and_ready(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        for path in ("/healthz", "/health", f"{API}/healthz", "/readyz"):
            assert Person(server).send("GET", path).json()["status"] == "ok"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_readiness_ends_with_the_engines_thread_and_life_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, engine=Dying()) as server:
        person = Person(server)
        person.post("asample", sample_body(person.sampler(person.session())))
        found = wait_for_status(person, "/readyz", 503)
        assert found["problems"] == ["the engine's thread has ended"]
        assert person.send("GET", "/healthz").status_code == 200


@pytest.mark.parametrize("lanes", [1, 2])
def test_readiness_ends_where_one_request_takes_for_ever_and_comes_back(tmp_path: Path, lanes: int) -> None:
    engine = Held(lanes=lanes)
    with running(tmp_path, engine=engine, stuck_after_s=1.0) as server:
        person = Person(server)
        person.post("asample", sample_body(person.sampler(person.session())))
        assert engine.busy.wait(HANG_S)
        assert person.send("GET", "/readyz").status_code == 200  # busy is not stuck
        found = wait_for_status(person, "/readyz", 503)
        assert "busy with one request" in found["problems"][0]
        engine.go_on.set()
        wait_for_status(person, "/readyz", 200)


def test_readiness_ends_where_the_journal_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_database: Database) -> None:
        raise JournalError("database or disk is full: /secret/path")

    with running(tmp_path) as server:
        person = Person(server)
        monkeypatch.setattr(Database, "probe", full)
        found = wait_for_status(person, "/readyz", 503)
        assert found["problems"] == ["the journal cannot be written"]
        monkeypatch.undo()
        wait_for_status(person, "/readyz", 200)


def test_a_disk_that_is_nearly_full_is_told_before_anything_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_in_reserves = [4.0]
    monkeypatch.setattr(DiskSpace, "free_bytes", property(lambda disk: int(free_in_reserves[0] * disk.reserve_bytes)))

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "mint.storage"]

    with running(tmp_path) as server, caplog.at_level("WARNING", "mint.storage"):
        person = Person(server)
        assert person.send("GET", "/readyz").json()["status"] == "ok"
        assert numbers(person)["mint_disk_nearly_full",] == 0
        free_in_reserves[0] = 1.9
        for _ in range(3):
            answer = person.send("GET", "/readyz")
            assert answer.status_code == 200
            assert "nearly full" in answer.json()["warnings"][0] and "refused soon" in answer.json()["warnings"][0]
        assert person.model(person.session())
        assert numbers(person)["mint_disk_nearly_full",] == 1
        [line] = lines()
        assert "nearly full" in line and "mint checkpoints delete" in line and str(tmp_path) in line
        assert str(tmp_path) not in answer.text
        free_in_reserves[0] = 0.9
        assert "are refused" in person.send("GET", "/readyz").json()["warnings"][0]
        free_in_reserves[0] = 2.2  # not far enough: the log does not go to and fro
        assert "warnings" in person.send("GET", "/readyz").json()
        free_in_reserves[0] = 3.0
        assert person.send("GET", "/readyz").json()["status"] == "ok"
        assert len(lines()) == 2 and "has free space again" in lines()[1]


# --- numbers -----------------------------------------------------------------------------------------------------


def numbers(person: Person) -> dict[tuple[str, ...], float]:
    text = person.send("GET", "/metrics").text
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_numbers_show_use_beside_its_limit(tmp_path: Path) -> None:
    with running(tmp_path, engine=FakeEngine(memory_bytes=1_000_000)) as server:
        person = Person(server)
        person.model(person.session())
        found = numbers(person)
        assert found["mint_models",] == 1 and found["mint_models_parked_total",] == 0
        assert 0 < found["mint_model_memory_bytes", "of=used"] < found["mint_model_memory_bytes", "of=limit"] == 500_000
        assert found["mint_disk_bytes", "of=free"] > 0 and found["mint_disk_bytes", "of=reserve"] > 0


def test_the_numbers_say_what_was_done(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        person = Person(server)
        session = person.session()
        model = person.model(session)
        person.done("forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": pass_input()})
        sampler = person.sampler(session)
        promise = person.post("asample", sample_body(sampler, max_tokens=5))
        sampled = len(person.result(promise["request_id"])["sequences"][0]["tokens"])
        person.send("GET", "/no/such/route")
        person.send("PROPFIND", "/healthz")
        found = numbers(person)
    route = f"route={API}/create_session"
    assert found["mint_requests_total", "method=POST", route, "status=200"] == 1
    assert found["mint_request_seconds_count", route] == 1
    assert found["mint_requests_total", "method=-", "route=(none)", "status=404"] == 1
    assert found["mint_requests_total", "method=-", "route=(none)", "status=405"] == 1
    assert found["mint_tokens_total", "kind=trained"] == 3
    assert found["mint_tokens_total", "kind=sampled"] == sampled > 0
    assert found["mint_engine_busy_seconds_total", "operation=forward_backward"] > 0
    assert found[("mint_open_sessions",)] == 1 and found[("mint_working",)] == 1
    assert found["mint_waiting_requests", "kind=sample"] == 0
    assert found[("mint_journal_bytes",)] > 0


def test_prompts_that_were_known_already_are_counted_apart(tmp_path: Path) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(range(3, 43))}]}
    with running(tmp_path, engine=TorchEngine(threads=1)) as server:
        person = Person(server)
        sampler = person.sampler(person.session())
        found = []
        for seq_id in range(2):
            promise = person.post("asample", sample_body(sampler, seq_id, max_tokens=1) | {"prompt": prompt})
            person.result(promise["request_id"])
            found.append(numbers(person))
    first, second = found
    assert first["mint_prompt_tokens_total", "source=computed"] == 40
    assert first["mint_prompt_tokens_total", "source=reused"] == 0
    assert (
        second["mint_prompt_tokens_total", "source=computed"] + second["mint_prompt_tokens_total", "source=reused"]
        == 80
    )
    assert second["mint_prompt_tokens_total", "source=reused"] >= 32
    assert second[("mint_sampling_steps_total",)] > first[("mint_sampling_steps_total",)] > 0
    assert second["mint_kv_pages", "state=total"] > second["mint_kv_pages", "state=in_use"] > 0
    assert second["mint_kv_pages", "state=cached"] > 0


def test_the_queue_is_counted_while_it_waits(tmp_path: Path) -> None:
    engine = Held()
    with running(tmp_path, engine=engine) as server:
        person = Person(server)
        sampler = person.sampler(person.session())
        person.post("asample", sample_body(sampler, 0))
        assert engine.busy.wait(HANG_S)
        for seq_id in range(1, 4):
            person.post("asample", sample_body(sampler, seq_id))
        found = numbers(person)
        assert found["mint_waiting_requests", "kind=sample"] == 3
        assert found[("mint_sampled_rows",)] == 1
        engine.go_on.set()


# --- the log -----------------------------------------------------------------------------------------------------


@pytest.fixture
def written() -> io.StringIO:
    stream = io.StringIO()
    configure_logs(format="json", level="debug", stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_request_is_one_line_with_an_id_that_the_answer_carries(tmp_path: Path, written: io.StringIO) -> None:
    key = make_key(tmp_path, "ann")
    with running(tmp_path) as server:
        own = Person(server, key).send("POST", f"{API}/create_session", {}, x_request_id="mine-1")
        odd = Person(server, key).send("POST", f"{API}/create_session", {}, x_request_id="no good; {}")
        refused = Person(server).send("POST", f"{API}/create_session", {"secret": 1})
    assert own.headers["x-request-id"] == "mine-1"
    assert odd.headers["x-request-id"] not in ("", "no good; {}")
    access = {line["request_id"]: line for line in lines(written) if line["logger"] == "mint.access"}
    line = access["mine-1"]
    assert (line["method"], line["route"], line["status"]) == ("POST", f"{API}/create_session", 200)
    assert line["owner"] == "ann" and line["ms"] > 0 and line["received_bytes"] == 2 and line["sent_bytes"] > 2
    line = access[refused.headers["x-request-id"]]
    assert (line["status"], line["owner"]) == (401, None)


def test_what_is_logged_during_a_request_carries_its_id(tmp_path: Path, written: io.StringIO) -> None:
    with running(tmp_path) as server:
        Person(server).send("POST", f"{API}/create_session", {"unheard_of": 1}, x_request_id="mine-2")
    warned = [line for line in lines(written) if "unheard_of" in line["event"]]
    assert [line["request_id"] for line in warned] == ["mine-2"]


def test_neither_keys_nor_prompts_are_written_anywhere_they_should_not_be(
    tmp_path: Path, written: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    key = make_key(tmp_path, "ann")
    secret_text = "the quick brown canary"
    tokens = [977, 978, 979, 980, 981]
    with running(tmp_path) as server:
        ann = Person(server, key)
        session = ann.session()
        sampler = ann.sampler(session)
        ann.done("asample", sample_body(sampler, 0, tokens=tokens))
        ann.send("POST", f"{API}/asample", {**sample_body(sampler, 1), "prompt": secret_text})
        ann.send("POST", f"{API}/asample", sample_body(sampler, 2, tokens=[*tokens, -1]))
        ann.send("POST", f"{API}/asample", secret_text.encode())
        ann.send("POST", "/v1/completions", {"model": "mint/tiny", "prompt": secret_text, "max_tokens": 2})
        ann.send("GET", f"{API}/sessions?api_key={key}&note={secret_text}")
        ann.send("GET", f"/{key}")
        ann.send("POST", f"{API}/telemetry", {"events": [{"headers": {"x-api-key": key}, "note": secret_text}]})
        Person(server, f"{key}x").send("GET", f"{API}/sessions")
        Person(server).send("GET", f"{API}/sessions", None, authorization=f"Bearer {key}")
        numbers_text = ann.send("GET", "/metrics").text
        logging.getLogger("a.library").warning("sent with Authorization: Bearer %s and %s", key, key)
        try:
            raise RuntimeError(f"bad key {key}")
        except RuntimeError:
            logging.getLogger("a.library").exception("it failed")
    console = capfd.readouterr()
    log = written.getvalue()
    assert "it failed" in log and "[redacted]" in log
    for text in (log, console.out, console.err, numbers_text):
        assert key not in text and key[len("tml-mint-") :] not in text
        assert secret_text not in text
        assert "977, 978" not in text
    for file in tmp_path.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert key.encode() not in content and key[len("tml-mint-") :].encode() not in content, file
            assert secret_text.encode() not in content, file


def test_the_log_for_people_is_one_line_per_event(tmp_path: Path) -> None:
    stream = io.StringIO()
    configure_logs(format="console", level="info", stream=stream)
    with running(tmp_path) as server:
        Person(server).send("POST", f"{API}/create_session", {})
        Person(server).send("GET", "/healthz")
    access = [line for line in stream.getvalue().splitlines() if "mint.access" in line]
    assert len(access) == 1 and "status=200" in access[0] and "\x1b" not in access[0]


@pytest.mark.parametrize("level", ["info", "debug"])
def test_requests_to_other_servers_are_logged_for_debugging_alone(level: str) -> None:
    stream = io.StringIO()
    configure_logs(format="console", level=level, stream=stream)
    httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200))).get("http://other/health")
    assert ("http://other/health" in stream.getvalue()) == (level == "debug")


def test_a_flood_of_requests_that_are_no_http_is_one_line_a_minute(tmp_path: Path, written: io.StringIO) -> None:
    upgrade = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    with running(tmp_path) as server:
        address = urlsplit(server.url)
        for sent in (b"no http at all\r\n\r\n", upgrade):
            for _ in range(100):
                with socket.create_connection((address.hostname, address.port), timeout=HANG_S) as connection:
                    connection.sendall(sent)
                    assert b" 400 " in connection.recv(65536) or sent is upgrade
        assert Person(server).send("GET", "/healthz").status_code == 200
    told = [line["event"] for line in lines(written) if line["logger"].startswith("uvicorn")]
    assert len([event for event in told if "Invalid HTTP request" in event]) == 1
    assert len([event for event in told if "upgrade" in event.lower()]) == 1


def test_the_next_warning_of_a_kind_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    logger = logging.getLogger("a.library.that.warns")
    logger.addFilter(RareWarnings(clock=lambda: clock[0]))

    def warn() -> None:
        logger.warning("bad request of %s", "somebody")

    for moment in (0.0, 1.0, RARE_S - 1, RARE_S, RARE_S + 1, 5 * RARE_S):
        clock[0] = moment
        warn()
        logger.error("an error is never left out")
    logger.warning("another kind")
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "bad request of somebody",
        "bad request of somebody (2 more like this since the last such line)",
        "bad request of somebody (1 more like this since the last such line)",
        "another kind",
    ]
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 6


@pytest.mark.parametrize("format", ["console", "json"])
def test_what_strangers_send_feigns_no_line_and_fills_no_disk(format: str) -> None:
    stream = io.StringIO()
    configure_logs(format=format, level="info", stream=stream)
    logging.getLogger("a.library").warning("unknown: %s", "\n2026 [info] all is well \x1b[2J" + "x" * 100_000)
    text = stream.getvalue()
    assert len(text.splitlines()) == 1 and len(text) < 2_000 and "\x1b" not in text


def test_a_log_that_a_thread_writes_has_every_line_in_order_with_the_id_of_its_request() -> None:
    stream = io.StringIO()
    configure_logs(format="json", level="info", stream=stream, on_thread=True)
    token = request_id.set("of-a-request")
    for number in range(100):
        logging.getLogger("mint.some").info("line %d", number)
    request_id.reset(token)
    [handler] = logging.getLogger().handlers
    handler.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == [f"line {number}" for number in range(100)]
    assert {line["request_id"] for line in lines} == {"of-a-request"}
