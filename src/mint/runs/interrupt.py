"""How a user ends a run: by Ctrl-C, or from elsewhere by a file in its folder.

The first Ctrl-C ends a run after its step, which is saved; the second one ends it at once. A request to stop is the
first Ctrl-C of somebody who has only the folder, such as the dashboard; no signal is sent to a process id, which may
belong to another process by now.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

STOP_REQUEST = "stop_request"
"""The file whose presence ends a run after its step."""

_NOTICE = b"\nCtrl-C: mint ends the run after this step and saves it. Press Ctrl-C again to end it at once.\n"


class RunInterrupted(KeyboardInterrupt):
    """The user ended a run. `saved_step` is the last step that is saved in `folder`; 0: none is. `by` is what the user
    did: "Ctrl-C", or "a request to stop"."""

    def __init__(self, folder: Path, *, saved_step: int, steps: int, by: str = "Ctrl-C") -> None:
        self.folder = folder
        self.saved_step = saved_step
        self.by = by
        if saved_step:
            text = f"the run was ended by {by}; it is saved up to step {saved_step} of {steps} in {folder}"
        else:
            text = f"the run in {folder} was ended by {by} before a step was saved; it goes on at step 1"
        super().__init__(f"{text}. To go on, use the same call with resume=True and run_dir={str(folder)!r}")


def request_stop(folder: Path) -> None:
    """Asks the run in `folder` to end after its step and to save it."""
    (folder / STOP_REQUEST).touch(mode=0o600)


def is_stop_requested(folder: Path) -> bool:
    """Whether the run in `folder` was asked to end after its step."""
    return (folder / STOP_REQUEST).exists()


def forget_stop_request(folder: Path) -> None:
    """Removes a request to stop, if there is one."""
    (folder / STOP_REQUEST).unlink(missing_ok=True)


@dataclass
class Interrupt:
    """Whether the user has asked to end the run after its step."""

    requested: bool = False


@contextmanager
def deferred_interrupt() -> Generator[Interrupt]:
    """Within the block the first Ctrl-C only sets `requested`; the second one raises KeyboardInterrupt.

    Changes nothing outside the main thread, or where the program handles Ctrl-C itself.
    """
    interrupt = Interrupt()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return

    def request(number: int, frame: FrameType | None) -> None:
        interrupt.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not through a stream: the signal may have come while this thread writes to it.
        os.write(2, _NOTICE)

    signal.signal(signal.SIGINT, request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
