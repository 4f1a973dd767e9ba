"""Notices that the device is lost: after some errors of a GPU, every later call in the same process fails, too.

CUDA's documentation says of these errors that the process must be ended to use the device again. Such an error may be
raised by a later call than the one that caused it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mint.engine.protocol import Engine, SampleBatch

FATAL_CODES = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})
"""Codes of `cudaError_t` that leave a process without its device: uncorrectable ECC and NVLink errors, illegal address,
launch timeout, destroyed context, device-side assert, hardware stack error, illegal instruction, misaligned address,
invalid address space, invalid program counter, launch failure, contained error."""

FATAL_MESSAGES = (
    "device-side assert",
    "an illegal memory access",
    "an illegal instruction was encountered",
    "unspecified launch failure",
    "the launch timed out",
    "misaligned address",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "context is destroyed",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
)
"""How the same errors begin in messages, of torch, Triton, cuBLAS and NCCL alike."""

QUIET = frozenset({"clear_gradient", "drop_model", "drop_weights"})
"""Calls that give memory back. On a lost device there is nothing to give back."""

ON_HOST = frozenset({"has_model"})
"""Calls that do not reach the device."""


class DeviceLostError(RuntimeError):
    """The device gives no more results in this process."""


def is_device_lost(error: BaseException) -> bool:
    """Whether the device gives no more results after an error, or after the one that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError):
            text = str(seen)
            if getattr(seen, "error_code", None) in FATAL_CODES or any(part in text for part in FATAL_MESSAGES):
                return True
        seen = seen.__cause__ or seen.__context__
    return False


def guarded(engine: Engine, on_lost: Callable[[str], None]) -> Engine:
    """The same engine. When its device is lost, `on_lost` is called once, with the reason.

    If that returns, this call and all later ones raise `DeviceLostError`, and do not reach the device.
    """
    return cast("Engine", _Guarded(engine, on_lost))


class _Guarded:
    def __init__(self, engine: Engine, on_lost: Callable[[str], None]) -> None:
        self._engine = engine
        self._on_lost = on_lost
        self._reason: str | None = None

    def __getattr__(self, name: str) -> Any:
        return self.call_of(self._engine, name)

    def open_batch(self) -> SampleBatch:
        """A batch that is guarded, too."""
        return cast("SampleBatch", _GuardedBatch(self, self.call_of(self._engine, "open_batch")()))

    def call_of(self, target: object, name: str) -> Any:
        """An attribute; what can be called is guarded."""
        function = getattr(target, name)
        if not callable(function) or name in ON_HOST:
            return function

        def call(*arguments: Any, **named: Any) -> Any:
            if self._reason is not None:
                if name in QUIET:
                    return None
                raise self._lost()
            try:
                return function(*arguments, **named)
            except Exception as error:
                if not is_device_lost(error):
                    raise
                self._reason = f"the device has failed, and gives no more results in this process: {_first_line(error)}"
                self._on_lost(self._reason)
                raise self._lost() from error

        return call

    def _lost(self) -> DeviceLostError:
        return DeviceLostError(f"{self._reason}. End this process, and start it again")


class _GuardedBatch:
    def __init__(self, guard: _Guarded, batch: SampleBatch) -> None:
        self._guard = guard
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        return self._guard.call_of(self._batch, name)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
