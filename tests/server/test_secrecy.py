"""Prompts, training data and keys of a whole day's work are in no log, no metric and no error of another owner.

The work goes through every kind of request, most of it also wrongly, and through an engine that fails and names what it
was given, as an engine's error may. Then all that the server wrote is searched.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from mint.engine.fake_engine import FakeEngine
from mint.server.ops.logs import configure_logs
from tests.server.server_harness import API, BASE, Person, make_key, running, sample_body

TEXT = "the quick brown canary"
TOKENS = [971, 972, 973, 974, 975, 976]
TRACES = (TEXT, "quick brown", "971, 972", "971,972", "971 972", "973, 974", "973,974", "973 974")
"""What Ann's texts and tokens look like, in whatever form they are written."""


class Blabbing(FakeEngine):
    """Its errors repeat the data that it was given."""

    def forward_backward(self, model_id: str, data: Any, loss: Any, **more: Any) -> Any:
        if any(TOKENS[0] in datum.tokens for datum in data):
            raise ValueError(f"cannot compute {[datum.tokens.tolist() for datum in data]}")
        return super().forward_backward(model_id, data, loss, **more)


@dataclass
class Recorded(Person):
    """Somebody whose answers are kept."""

    answers: list[httpx.Response] = field(default_factory=list)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        self.answers.append(super().send(method, path, body, **headers))
        return self.answers[-1]


@pytest.fixture(params=["json", "console"])
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logs(format=request.param, level="debug", stream=stream)
    # each of their lines would be one of the harness, which is a client in this process
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield stream
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def _pass(tokens: list[int], **more: Any) -> dict[str, Any]:
    inputs = {"target_tokens": {"data": tokens, "dtype": "int64"}, **more}
    return {
        "data": [{"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": inputs}],
        "loss_fn": "cross_entropy",
    }


def _train(person: Person, model_id: str, seq_id: int, body: Any) -> None:
    body = {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": body}
    promise = person.send("POST", f"{API}/forward_backward", body).json()
    if "request_id" in promise:
        person.send("POST", f"{API}/retrieve_future", {"request_id": promise["request_id"]})


def _a_days_work(ann: Person) -> str:
    """Right and wrong requests with the traces in all of their places; returns Ann's session."""
    session_id = ann.session()
    model_id, sampler = ann.model(session_id), ann.sampler(session_id)
    odd = {"weights": {"data": [float("1e999"), 1.0], "dtype": "float32"}, TEXT: {"data": TOKENS, "dtype": "int64"}}
    for seq_id, body in enumerate([_pass(TOKENS), _pass([*TOKENS, -1]), _pass(TOKENS, **odd), TEXT, {"data": TEXT}], 1):
        _train(ann, model_id, seq_id, body)
    ann.send("POST", f"{API}/forward_backward", json.dumps({"model_id": model_id, "prompt": TEXT}).encode()[:-3])
    ann.done("asample", sample_body(sampler, 0, tokens=TOKENS))
    for seq_id, changes in enumerate(
        [{"prompt": TEXT}, {"sampling_params": {"stop": [TEXT], "max_tokens": 2}}, {"sampling_params": TEXT}], 1
    ):
        ann.send("POST", f"{API}/asample", {**sample_body(sampler, seq_id, tokens=TOKENS), **changes})
    for name, asked in (
        ("completions", {"prompt": TEXT}),
        ("chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    ):
        for more in ({"max_tokens": 2}, {"max_tokens": -1}, {"tools": TEXT}, {"stream": True, "max_tokens": 2}):
            ann.send("POST", f"/v1/{name}", {"model": BASE, **asked, **more})
    ann.send("POST", f"{API}/telemetry", {"events": [{"headers": {"x-api-key": ann.key}, "note": TEXT}]})
    ann.send("GET", f"{API}/sessions?api_key={ann.key}&note={TEXT}")
    return session_id


@pytest.mark.parametrize("text", ["1" * 16_000, "1 " * 8_000, "1e" * 8_000, "1,1,1,1 x " * 1_600])
def test_the_search_for_numbers_takes_no_time(text: str) -> None:
    stream = io.StringIO()
    configure_logs(format="json", level="info", stream=stream)
    began_at = time.process_time()
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logging.getLogger("a.library").exception("it failed")
    assert time.process_time() - began_at < 1 and stream.getvalue()


def test_shapes_and_times_stay_readable() -> None:
    stream = io.StringIO()
    configure_logs(format="json", level="info", stream=stream)
    logging.getLogger("a.library").warning("[2, 3, 4, 5] against [2, 3]; [971, 972, 973, 974, 975] [0.5 1.e-3 -2. 3 4]")
    assert "[2, 3, 4, 5] against [2, 3]; [[numbers]] [[numbers]]" in stream.getvalue()


def test_what_an_owner_does_is_in_no_log_no_metric_and_no_answer_to_another(
    tmp_path: Path, log: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {owner: make_key(tmp_path, owner) for owner in ("annabel", "bob", "operator")}
    with running(tmp_path, engine=Blabbing(), operators=("operator",)) as server:
        ann, bob = Recorded(server, keys["annabel"]), Recorded(server, keys["bob"])
        session_id = _a_days_work(ann)
        _a_days_work(Person(server, keys["annabel"]))
        for path in ("sessions", "training_runs", "checkpoints", "models"):
            bob.send("GET", f"{API}/{path}")
        bob.send("GET", "/metrics"), bob.send("GET", "/readyz"), bob.send("GET", "/")
        Person(server).send("GET", f"{API}/sessions", None, authorization=f"Bearer {keys['annabel']}")
        with httpx.Client(base_url=server.url) as browser:
            browser.post("/login", data={"key": keys["operator"]}, headers={"origin": server.url})
            shown = browser.get("/dashboard/v1/service").text
        metrics = Person(server, keys["operator"]).send("GET", "/metrics").text
    console = capfd.readouterr()
    told = [answer.text + str(answer.headers) for answer in bob.answers]
    assert any("cannot compute [[971" in answer.text for answer in ann.answers)  # her own request failed with it
    assert "mint_requests_total" in metrics and '"tenants"' in shown and "forward_backward" in log.getvalue()
    for text in (log.getvalue(), console.out, console.err, metrics, shown, *told):
        assert [trace for trace in TRACES if trace in text] == []
        assert [owner for owner, key in keys.items() if key.removeprefix("tml-mint-") in text] == []
    assert not any(session_id in text or "annabel" in text for text in told)
    for answer in ann.answers:  # nor does an error repeat the key to its own sender
        assert keys["annabel"].removeprefix("tml-mint-") not in answer.text + str(answer.headers)
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        content = file.read_bytes()
        assert [owner for owner, key in keys.items() if key.removeprefix("tml-mint-").encode() in content] == [], file
