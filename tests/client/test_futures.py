"""Waiting: time-outs, threads, event loops, Ctrl-C, and the end of the session."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from default_engine import fake_engine
from waiting import HANG_S, wait_until

import mint
from mint.client.futures import wait_async
from mint.engine.fake_engine import FakeEngine
from mint.engine.protocol import LossSpec, PassResult, TrainDatum
from mint.errors import ResultTimeoutError, SessionEndedError
from mint.types import AdamParams, Datum, ModelInput, SamplingParams

DATA = [Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})]


class Gated(FakeEngine):
    """Passes wait until they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.begun = 0

    def forward(self, model_id: str, data: Sequence[TrainDatum], loss: LossSpec) -> PassResult:
        self.begun += 1
        self.gate.wait(HANG_S)
        return super().forward(model_id, data, loss)


@pytest.fixture
def gated(make_client: Any) -> tuple[Gated, mint.ServiceClient, mint.TrainingClient]:
    engine = Gated()
    client = make_client(engine=engine)
    return engine, client, client.create_lora_training_client("mint/tiny", rank=4, seed=1)


def test_a_time_out_is_typed_and_the_request_goes_on(gated: Any) -> None:
    engine, _, training = gated
    future = training.forward_backward(DATA, "cross_entropy")
    with pytest.raises(ResultTimeoutError, match=r"0\.05 s"):
        future.result(timeout=0.05)
    with pytest.raises(TimeoutError):
        asyncio.run(future.result_async(timeout=0.05))
    assert not future.done()
    engine.gate.set()
    assert future.result(timeout=HANG_S).metrics["tokens:sum"] == 2.0
    assert future.done() and future.result(timeout=0) is future.result()


def test_a_future_may_be_waited_for_in_every_way_at_once(gated: Any) -> None:
    engine, _, training = gated
    future = training.forward_backward(DATA, "cross_entropy")
    threading.Timer(0.05, engine.gate.set).start()

    async def wait() -> list[Any]:
        return await asyncio.gather(future.result_async(), asyncio.wrap_future(future.future()), _awaited(future))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        threads = [pool.submit(future.result) for _ in range(3)]
        seen = [*asyncio.run(wait()), *(thread.result() for thread in threads)]
    assert all(value is seen[0] for value in seen)


async def _awaited(future: Any) -> Any:
    return await future


def test_cancelling_a_waiter_does_not_cancel_the_request(gated: Any) -> None:
    engine, _, training = gated
    future = training.forward_backward(DATA, "cross_entropy")

    async def give_up() -> None:
        waiter = asyncio.ensure_future(future.result_async())
        await asyncio.sleep(0.02)
        waiter.cancel()

    asyncio.run(give_up())
    engine.gate.set()
    assert future.result(timeout=HANG_S).metrics


def test_a_future_asked_for_after_the_session_has_ended_is_a_typed_error(gated: Any) -> None:
    engine, client, training = gated
    waiting = [training.forward_backward(DATA, "cross_entropy"), training.optim_step(AdamParams())]
    wait_until(lambda: engine.begun == 1)
    engine.gate.set()
    waiting[0].result()
    engine.gate.clear()
    open_future = training.forward_backward(DATA, "cross_entropy")
    wait_until(lambda: engine.begun == 2)
    threading.Timer(0.1, engine.gate.set).start()
    client.close()
    for future in (open_future, training.forward_backward(DATA, "cross_entropy"), training.optim_step()):
        with pytest.raises(SessionEndedError) as caught:
            future.result(timeout=HANG_S)
        assert caught.value.field == "session_id" and caught.value.remedy
    with pytest.raises(SessionEndedError):
        client.create_lora_training_client("mint/tiny")
    with pytest.raises(SessionEndedError):
        training.get_info()
    client.close()


def test_a_client_that_was_never_used_opens_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "never"))
    with mint.ServiceClient():
        pass
    assert not (tmp_path / "never").exists()


def test_many_threads_share_one_client(make_client: Any) -> None:
    training = make_client().create_lora_training_client("mint/tiny", rank=4, seed=1)
    sampler = training.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=2)

    def work(place: int) -> Any:
        return sampler.sample(ModelInput.from_ints([1 + place]), 1, params.model_copy(update={"seed": place})).result()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        concurrent_answers = list(pool.map(work, range(64)))
    assert concurrent_answers == [work(place) for place in range(64)]


SCRIPT = """
import sys, threading
import mint
from mint.compose.embedded import open_embedded
from mint.client.futures import wait_async
from mint.engine.fake_engine import FakeEngine
from mint.types import Datum, ModelInput
from pathlib import Path

interrupted = threading.Event()

class Slow(FakeEngine):
    def forward(self, *args):
        interrupted.wait()
        return super().forward(*args)

folder = Path(sys.argv[1])
client = mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=folder, engine=Slow()))
training = client.create_lora_training_client("mint/tiny", rank=4)
data = [Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})]
future = training.forward_backward(data, "cross_entropy")
try:
    print("waiting", flush=True)
    future.result()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    interrupted.set()
"""


def test_ctrl_c_ends_a_wait_and_the_program_ends_cleanly(tmp_path: Any) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=HANG_S)
    assert (out, err, child.returncode) == ("interrupted\n", "", 0)
    assert not list((tmp_path / "instances").glob("?" * 32 + ".lock"))


TWO_SESSIONS = """
import sys
from pathlib import Path
import mint
from mint.compose.embedded import open_embedded
from mint.engine.fake_engine import FakeEngine

class Stubborn:
    def __init__(self, folder):
        self.opened = open_embedded(data_dir=folder, engine=FakeEngine())
        self.app = self.opened.app

    def release(self):
        self.opened.release()
        print("released", flush=True)
        raise OSError("but not quite")

def open_one(name):
    client = mint.ServiceClient(open_embedded=lambda: Stubborn(Path(sys.argv[1]) / name))
    client.get_server_capabilities()
    return client

clients = [open_one("a"), open_one("b")]
"""


def test_a_session_that_cannot_be_closed_keeps_no_other_from_it_at_the_end_of_a_program(tmp_path: Any) -> None:
    child = subprocess.run(
        [sys.executable, "-c", TWO_SESSIONS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    assert child.stdout == "released\n" * 2
    assert child.stderr.count("a session could not be closed") == child.stderr.count("but not quite") == 2


def test_an_error_that_comes_as_the_loop_of_a_program_ends_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """As where a second Ctrl-C ends a program in which tasks wait."""
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(wait_async(future, None))
    loop.run_until_complete(asyncio.sleep(0.01))
    future.set_exception(ValueError("lost"))
    loop.stop()
    loop.run_forever()  # once: the waiter has the error, and the task that waits does not run any more
    loop.close()
    del waiting, future
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_future_that_is_cancelled_while_its_session_closes_leaves_no_unread_error(
    make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As where Ctrl-C ends a program that waits."""
    service = make_client(engine=fake_engine())
    service.get_server_capabilities()
    session = service._session
    waits, held, go_on = threading.Event(), threading.Event(), threading.Event()

    async def wait() -> None:
        waits.set()
        await asyncio.Event().wait()

    async def hold_the_loop() -> None:
        held.set()
        go_on.wait(HANG_S)

    waiting = session.run(wait(), may_cancel=True)
    assert waits.wait(HANG_S)
    session.run(hold_the_loop())
    assert held.wait(HANG_S)
    closing = threading.Thread(target=service.close)
    closing.start()
    wait_until(lambda: session._closed)
    waiting.cancel()
    go_on.set()
    closing.join(HANG_S)
    del waiting
    gc.collect()
    assert "never retrieved" not in caplog.text
