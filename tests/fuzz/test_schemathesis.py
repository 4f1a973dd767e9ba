"""The whole OpenAPI surface under schemathesis: no answer is a server error, and every refusal is a sentence.

Installs schemathesis from the package registry into an environment of its own, and runs its command line against
`mint serve` on the bundled model, with a key. More than 10,000 cases: generated, at the boundaries, broken, and chains
of calls that use each other's answers. Meanwhile another owner has a model there, which goes on afterwards as if
nothing had been.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mint import ServiceClient, TrainingClient
from mint.types import AdamParams, Datum, ModelInput

CASES = 10_000
EXAMPLES_PER_OPERATION = int(os.environ.get("MINT_FUZZ_EXAMPLES", "120"))


@dataclass(frozen=True)
class Served:
    """A running `mint serve`."""

    url: str
    key: str
    other_key: str
    log: Path


@pytest.fixture(scope="module")
def fuzzer() -> Path:
    """The `schemathesis` command, installed once below the user's cache."""
    folder = Path(os.environ.get("MINT_HOME", "~/.mint")).expanduser() / "peers" / "schemathesis"
    command = folder / "bin" / "schemathesis"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "schemathesis==4.32.*"]
        subprocess.run(install, check=True)
    return command


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real server, on a free port, with a key."""
    folder = tmp_path_factory.mktemp("served")
    mint = [sys.executable, "-c", "from mint.cli.main import app; app()"]

    def make_key(owner: str) -> str:
        made = [*mint, "keys", "create", "--owner", owner, "--data-dir", str(folder), "--json"]
        return json.loads(subprocess.run(made, capture_output=True, check=True, text=True).stdout)["key"]

    key, other_key = make_key("fuzzer"), make_key("other")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    with log.open("w") as output:
        command = [*mint, "serve", "--port", str(port), "--data-dir", str(folder)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                if httpx.get(f"{url}/healthz").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield Served(url, key, other_key, log)
        assert process.poll() is None, log.read_text()[-3000:]
    finally:
        process.terminate()
        process.wait(30)


DATA = [Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]})]


def next_digest(trainer: TrainingClient) -> str:
    """The digest of the state after one more pass and step."""
    trainer.forward_backward(DATA, "cross_entropy")
    digest = trainer.optim_step(AdamParams(learning_rate=1e-3)).result(300).state_digest
    assert digest is not None
    return digest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_makes_the_server_fail_and_every_refusal_is_a_sentence(
    fuzzer: Path, served: Served, tmp_path: Path
) -> None:
    client = ServiceClient(base_url=served.url, api_key=served.other_key)
    undisturbed = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
    digests = [next_digest(undisturbed) for _ in range(2)]
    trainer = client.create_lora_training_client("mint/tiny", rank=4, seed=1)
    assert next_digest(trainer) == digests[0]

    report = tmp_path / "cases.ndjson"
    command = [
        *(str(fuzzer), "run", f"{served.url}/openapi.json", "--no-color", "--seed", "1"),
        *("--header", f"X-API-Key: {served.key}", "--checks", "not_a_server_error", "--continue-on-failure"),
        *("--max-examples", str(EXAMPLES_PER_OPERATION), "--no-shrink", "--request-timeout", "60"),
        *("--suppress-health-check", "all", "--generation-database", "none", "--warnings", "off"),
        *("--report", "vcr", "--report-vcr-path", str(report), "--workers", "2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    statuses, mute = read_cassette(report)
    print(statuses, done.stdout[-2000:])
    assert sum(statuses.values()) >= CASES, done.stdout[-3000:]
    assert not [status for status in statuses if status >= 500], done.stdout[-6000:]
    assert mute == [], "refused without a sentence"
    assert done.returncode == 0, done.stdout[-6000:]
    assert next_digest(trainer) == digests[1], "another owner's model was changed"
    client.close()
    assert httpx.get(f"{served.url}/readyz").status_code == 200
    assert "Traceback" not in served.log.read_text()


def read_cassette(path: Path) -> tuple[Counter[int], list[str]]:
    """How often each status was answered, and the refusals whose body is no JSON with a sentence."""
    import yaml  # deferred: huggingface_hub brings it; only this test reads it

    statuses: Counter[int] = Counter()
    mute = []
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for case in yaml.load(path.read_text(), Loader=loader)["http_interactions"]:
        response = case.get("response")
        if response is None:
            continue
        code = int(response["status"]["code"])
        statuses[code] += 1
        if 400 <= code < 500 and case["request"]["method"] != "HEAD":
            text = response.get("body", {}).get("string", "")
            if "error" not in text or len(text) < 20:
                mute.append(f"{case['request']['method']} {case['request']['uri']} {code} {text[:200]}")
    return statuses, mute
