"""Many clients at once: nobody's answer is lost, and the memory stays bounded."""

from __future__ import annotations

import concurrent.futures
import resource
import threading
from pathlib import Path

import pytest

import mint
from mint.types import ModelInput, SamplingParams
from tests.server.server_harness import running

CLIENTS, CALLS = 20, 10


def test_200_samples_from_20_clients_all_come_back(tmp_path: Path) -> None:
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    together = threading.Barrier(CLIENTS)

    def client(number: int, url: str) -> list[int]:
        with mint.ServiceClient(base_url=url) as service:
            sampler = service.create_sampling_client(base_model="mint/tiny")
            together.wait(120)
            asked = [
                sampler.sample(
                    ModelInput.from_ints([number + 1, call + 1]),
                    num_samples=4,
                    sampling_params=SamplingParams(max_tokens=8, seed=number),
                )
                for call in range(CALLS)
            ]
            return [len(found.result(timeout=60).sequences) for found in asked]

    with running(tmp_path) as server, concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(client, range(CLIENTS), [server.url] * CLIENTS))
    assert answers == [[4] * CALLS] * CLIENTS
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) / 1024
    assert grown_mb < 256, f"{grown_mb:.0f} MB more, clients and server together"


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_number_of_requests(tmp_path: Path) -> None:
    def burst(sampler: mint.SamplingClient) -> None:
        prompt, params = ModelInput.from_ints([1, 2]), SamplingParams(max_tokens=8)
        asked = [sampler.sample(prompt, num_samples=1, sampling_params=params) for _ in range(100)]
        assert all(found.result(timeout=60).sequences for found in asked)

    with running(tmp_path) as server, mint.ServiceClient(base_url=server.url) as service:
        sampler = service.create_sampling_client(base_model="mint/tiny")
        for _ in range(5):
            burst(sampler)
        settled = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(10):
            burst(sampler)
        grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - settled) / 1024
    assert grown_mb < 64
