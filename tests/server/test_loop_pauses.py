"""Pauses of the event loop are measured, wherever they come from, and long ones are logged with what ran."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from server_harness import Person, running
from waiting import HANG_S

from mint.server.ops.loop_pauses import LOGGED_S, LoopPauses


def test_a_pause_is_measured_and_the_log_names_what_ran(caplog: pytest.LogCaptureFixture) -> None:
    observed: list[float] = []
    pauses = LoopPauses(observed.append)

    def wait_on_the_loop() -> None:
        time.sleep(2 * LOGGED_S)

    async def run() -> None:
        pauses.start()
        await asyncio.sleep(0.1)
        wait_on_the_loop()
        await asyncio.sleep(0.1)
        pauses.stop()

    with caplog.at_level(logging.WARNING, "mint.loop"):
        asyncio.run(run())
    assert max(observed) > LOGGED_S and pauses.worst_s() == max(observed)
    assert sum(each < LOGGED_S for each in observed) > 2, "the loop ran before and after"
    [line] = [record.message for record in caplog.records if "wait_on_the_loop" in record.message]
    assert "event loop: test_loop_pauses.py" in line


def test_the_worst_pause_is_that_of_the_last_minute() -> None:
    now = [0.0]
    pauses = LoopPauses(lambda _seconds: None, clock=lambda: now[0])
    for at, seconds in ((0.0, 0.3), (30.0, 0.1), (40.0, 0.2)):
        now[0] = at
        pauses.note(seconds)
    assert pauses.worst_s() == 0.3
    now[0] = 61.0
    assert pauses.worst_s() == 0.2
    now[0] = 101.0
    assert pauses.worst_s() == 0.0


def test_a_server_shows_its_pauses(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        give_up_at = time.monotonic() + HANG_S
        while True:
            lines = Person(server).send("GET", "/metrics").text.splitlines()
            found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
            if found["mint_event_loop_pause_seconds_count"] > 2:
                break
            assert time.monotonic() < give_up_at
    assert 0.0 <= found["mint_event_loop_worst_pause_seconds"] < HANG_S


COUNT_OBJECTS = """
import gc, sys
from mint.compose import serving
from mint.config import read_serve_settings
serving.Server.run = lambda server, announce: print(
    len(gc.get_objects()), gc.get_freeze_count(), gc.get_threshold()[-1]
)
serving.serve(read_serve_settings({"port": 0, "data_dir": sys.argv[1]}), announce=print)
"""


def test_full_collections_of_a_server_are_rare_and_do_not_look_at_libraries(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNT_OBJECTS, str(tmp_path)]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S)
    looked_at, left_out, middle_collections = map(int, result.stdout.split())
    assert looked_at < left_out / 100
    assert middle_collections >= 10 * gc.get_threshold()[-1]
