"""A GRPO run over HTTP with streams open, in which a replica is killed or frozen: nothing of it differs."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_server import http_app
from typer.testing import CliRunner
from waiting import wait_until

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from clusters import cluster, torch_engine

import mint
from mint import types
from mint.cli.main import app as cli
from mint.cluster.engine import ClusterEngine
from mint.compose.embedded import open_embedded
from mint.engine.protocol import Engine
from mint.server.all_routes import ROUTES
from mint.server.http.app import create_app
from mint.server.ops.readiness import Readiness

pytestmark = pytest.mark.slow

STEPS, DISTURBED = 3, 1
PROMPTS, SAMPLES, TOKENS = 4, 4, 96
STREAM_TOKENS = 300
SILENCE_S = 5.0
MODEL = "mint/tiny"


class Stream(threading.Thread):
    """A completion that is streamed; `pieces` are the tokens that have come: choice, token, logprob."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {
            "model": MODEL, "prompt": "1 + 1 =", "max_tokens": STREAM_TOKENS, "n": 2, "seed": seed, "logprobs": 0,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        self.pieces: list[tuple[int, str, float]] = []
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                key, _, value = line.partition(": ")
                if key == "data" and value.startswith("{"):
                    self._hear(json.loads(value))

    def _hear(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", ()):
            told = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
            for token, logprob in zip(told["tokens"], told["token_logprobs"], strict=True):
                self.pieces.append((choice["index"], token, logprob))

    def tokens(self) -> list[tuple[int, str, float]]:
        """The tokens and logprobs of both choices in order, once the stream has ended."""
        self.join(timeout=240)
        assert not self.is_alive() and len(self.pieces) == 2 * STREAM_TOKENS
        return sorted(self.pieces, key=lambda piece: piece[0])


def run(data_dir: Path, engine: Engine, how: signal.Signals | None = None) -> list[object]:
    """Rollouts, losses, digests and streams of a short run; a busy replica gets the signal `how` in its second step."""
    running = open_embedded(data_dir=data_dir, engine=engine)
    app = create_app(running.service, ROUTES, readiness=Readiness(running.service))
    seen: list[object] = []
    try:
        with http_app(running, app) as url, mint.ServiceClient(base_url=url) as service:
            client = service.create_lora_training_client(MODEL, rank=4, seed=3)
            for step in range(STEPS):
                seen += [one_step(client, url, step, engine, how if step == DISTURBED else None)]
            if isinstance(engine, ClusterEngine):
                told = CliRunner().invoke(cli, ["status", "--url", url])
                assert told.exit_code == 0 and "2 of 2 train" in told.stdout, told.output
                assert all(f"process {process}" in told.stdout for process in engine.replica_processes)
    finally:
        running.release()
    return seen


def one_step(
    client: mint.TrainingClient, url: str, step: int, engine: Engine, how: signal.Signals | None
) -> tuple[object, ...]:
    sampler = client.save_weights_and_get_sampling_client()
    stream = Stream(url, step)
    prompts = [[20 + step, 30, 40 + place] for place in range(PROMPTS)]
    groups = [
        sampler.sample(
            types.ModelInput.from_ints(prompt), SAMPLES, types.SamplingParams(max_tokens=TOKENS, seed=place, stop=[])
        )
        for place, prompt in enumerate(prompts)
    ]
    if how is not None:
        assert isinstance(engine, ClusterEngine)
        wait_until(lambda: stream.pieces)
        busiest = max(engine.cluster_state["replicas"], key=lambda own: own["sequences"])
        assert busiest["sequences"], "all samples have ended before the replica is lost"
        os.kill(busiest["process"], how)
    data, rollouts = [], []
    for prompt, group in zip(prompts, groups, strict=True):
        sequences = group.result().sequences
        rewards = [float(np.mean(np.asarray(own.tokens) < 256)) for own in sequences]
        for own, reward in zip(sequences, rewards, strict=True):
            rollouts.append((own.tokens, own.logprobs))
            front = len(prompt) - 1
            inputs = {
                "target_tokens": [*prompt[1:], *own.tokens],
                "logprobs": [0.0] * front + list(own.logprobs),
                "advantages": [0.0] * front + [reward - float(np.mean(rewards))] * len(own.tokens),
            }
            tokens = types.ModelInput.from_ints([*prompt, *own.tokens[:-1]])
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    passed = client.forward_backward(data, "importance_sampling").result()
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return rollouts, passed.metrics["loss:sum"], stepped.state_digest, stream.tokens()


@pytest.fixture(scope="module")
def engine() -> Iterator[ClusterEngine]:
    engine = cluster(2, samplers=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return run(tmp_path_factory.mktemp("alone"), torch_engine())


def test_a_run_on_replicas_is_that_of_one_process(
    tmp_path: Path, engine: ClusterEngine, undisturbed: list[object]
) -> None:
    assert run(tmp_path, engine) == undisturbed


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_in_which_a_replica_is_lost_is_that_of_one_process(
    tmp_path: Path,
    engine: ClusterEngine,
    undisturbed: list[object],
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
) -> None:
    monkeypatch.setattr(engine._sampling, "_silence_s", SILENCE_S)
    lost = engine.cluster_state["samplers_lost"]
    assert run(tmp_path, engine, how) == undisturbed
    assert engine.cluster_state["samplers_lost"] == lost + 1
