"""What the wire costs: encodings, how soon a future resolves, and many clients at once over real sockets.

    python -m benchmarks.serving.wire [encoding] [latency] [crowd]

The server is a process of its own, on the bundled model. `latency` compares two readings of the machine's monotonic
clock: when the service had the result, noted in the server, and when `.result()` returned in the client.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import mint
from mint import types, wire
from mint.types import ForwardBackwardOutput
from mint.wire.requests import ForwardBackwardInput, ForwardBackwardRequest

SERVER = """
import sys, time
from pathlib import Path
import mint.server.queue.futures as futures

log = open(sys.argv[3], "a", buffering=1)
finish = futures.Futures.finish

def noted(self, answers):
    now = time.monotonic()
    for name in answers:
        log.write(f"{name} {now}\\n")
    finish(self, answers)

futures.Futures.finish = noted
from mint.cli.main import app
app(["serve", "--port", sys.argv[1], "--data-dir", sys.argv[2]])
"""


@contextmanager
def server() -> Generator[tuple[str, int, Path]]:
    """Its address, its process id, and the file in which it notes when each result was there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "noted"
        process = subprocess.Popen([sys.executable, "-c", SERVER, str(port), folder, str(noted)], stderr=sys.stderr)
        try:
            yield f"http://127.0.0.1:{port}", process.pid, noted
        finally:
            process.terminate()
            process.wait()


def memory_mib(process_id: int) -> float:
    """A process's memory now."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def encoding() -> None:
    """65,536 tokens with four tensors, as JSON and as protobuf: bytes, and milliseconds to write and read."""
    random = np.random.default_rng(0)
    data = []
    for _ in range(128):
        row = random.integers(0, 512, 513)
        floats = [random.normal(size=512).astype(np.float32) for _ in range(3)]
        inputs = dict(zip(("weights", "logprobs", "advantages"), floats, strict=True))
        model_input = types.ModelInput.from_ints(row[:-1])
        data.append(types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": row[1:], **inputs}))
    content = ForwardBackwardInput(data=data, loss_fn="importance_sampling")
    request = ForwardBackwardRequest(model_id="sess-1:train:0", seq_id=1, forward_backward_input=content)
    rows = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
    output = ForwardBackwardOutput(loss_fn_outputs=rows, metrics={"loss:sum": 1.0})
    print("| message | encoding | bytes | write ms | read ms |\n|---|---|---|---|---|")
    for name, message in (("request", request), ("result", output)):
        for form in wire.Encoding:
            body = wire.encode(message, form)
            write_ms = median_ms(lambda m=message, f=form: wire.encode(m, f))
            read_ms = median_ms(lambda m=message, f=form, b=body: wire.decode(type(m), b, f))
            print(f"| {name} | {form.name} | {len(body):,} | {write_ms:.1f} | {read_ms:.1f} |")


def median_ms(work: Callable[[], object], repeats: int = 9) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def latency(calls: int = 200) -> None:
    """From the result's existence in the server to the return of `.result()`, one call at a time."""
    with server() as (url, _, noted), mint.ServiceClient(base_url=url, api_key="tml-bench") as client:
        trainer = client.create_lora_training_client("mint/tiny", rank=8, seed=0)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]}
        )
        returned = {}
        for number in range(1, calls + 1):
            trainer.forward([datum], "cross_entropy").result()
            returned[f"{trainer.model_id}:{number}"] = time.monotonic()
        existed = dict(line.split() for line in noted.read_text().splitlines())
        waits_ms = sorted((moment - float(existed[name])) * 1000 for name, moment in returned.items())
    p95 = waits_ms[int(0.95 * calls)]
    print(f"future: result exists → result() returns: median {statistics.median(waits_ms):.2f} ms, p95 {p95:.2f} ms")


def crowd(clients: int = 20, calls: int = 10, rounds: int = 5) -> None:
    """20 clients, each with 10 `sample` calls under way, again and again: none lost, and the server's memory."""
    prompt = types.ModelInput.from_ints([1, 40, 60, 22])
    with server() as (url, process_id, _):
        opened = [mint.ServiceClient(base_url=url, api_key="tml-bench") for _ in range(clients)]
        samplers = [client.create_sampling_client(base_model="mint/tiny") for client in opened]
        params = types.SamplingParams(max_tokens=16, stop=[])
        samplers[0].sample(prompt, 1, params).result()
        held_mib, answered, lost = [memory_mib(process_id)], [], []

        def run(sampler: mint.SamplingClient) -> None:
            futures = [sampler.sample(prompt, 2, params) for _ in range(calls)]
            for future in futures:
                good = [len(sequence.tokens) == 16 for sequence in future.result(timeout=120).sequences] == [True, True]
                (answered if good else lost).append(1)

        began = time.perf_counter()
        for _ in range(rounds):
            threads = [threading.Thread(target=run, args=(sampler,)) for sampler in samplers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            held_mib.append(memory_mib(process_id))
        seconds = time.perf_counter() - began
        for client in opened:
            client.close()
    asked = clients * calls * rounds
    print(f"crowd: {clients} clients x {calls} samples at once x {rounds} rounds: {len(answered)} of {asked} answered,")
    print(f"  {asked / seconds:.0f} calls/s; the server's MiB after each round: {[round(mib) for mib in held_mib]}")


def main() -> None:
    """The parts that were named, or all."""
    parts = {"encoding": encoding, "latency": latency, "crowd": crowd}
    for name in sys.argv[1:] or parts:
        parts[name]()
    print(json.dumps({"load": os.getloadavg()[0], "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
