"""What a case of the matrix is, and how one runs: in a thread, against the clock, with its outcome as data.

Run inside a tinker SDK's own environment: imports nothing of mint. Knows no case.
"""

from __future__ import annotations

import inspect
import threading
import time
import traceback
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

CASE_TIMEOUT_S = 150.0
"""A case that takes longer hangs: none needs more than seconds on an idle machine."""


class Refused(Exception):
    """The server said in a sentence that it does not offer this; the case has checked that it is the typed error."""


@dataclass(frozen=True)
class Lab:
    """What every case gets: the SDK, its one session, the base model and a folder of its own."""

    tinker: ModuleType
    service: Any
    base_model: str
    work_dir: Any

    @property
    def types(self) -> Any:
        return self.tinker.types

    def trainer(self, *, rank: int = 8, seed: int = 1) -> Any:
        """A new lora; what 0.38 returns is the client and its future at once, older ones return the client."""
        return self.service.create_lora_training_client(base_model=self.base_model, rank=rank, seed=seed)

    def sampler(self) -> Any:
        """A sampler over the base model."""
        return self.service.create_sampling_client(base_model=self.base_model)

    def rest(self) -> Any:
        return self.service.create_rest_client()


Run = Callable[[Lab], object]


@dataclass(frozen=True)
class Case:
    """One row of the matrix. `needs` is what the SDK must have for the case to be run at all."""

    section: str
    name: str
    run: Run
    needs: str = ""


@dataclass(frozen=True)
class Outcome:
    """One cell: `ok`, `refused`, `absent` (not in this SDK) or `failed`, and the reason."""

    section: str
    name: str
    outcome: str
    detail: str
    seconds: float


CASES: list[Case] = []


def case(section: str, name: str, *, needs: str = "") -> Callable[[Run], Run]:
    """Adds a function to the matrix."""

    def add(run: Run) -> Run:
        CASES.append(Case(section, name, run, needs))
        return run

    return add


def has(tinker: ModuleType, needs: str) -> bool:
    """Whether an SDK has `Class.method`, `Class.method(parameter)`, `types.Name[.method]` or `loss:name`."""
    if not needs:
        return True
    if needs.startswith("loss:"):
        return needs.removeprefix("loss:") in typing.get_args(tinker.types.LossFnType)
    path, _, parameter = needs.removesuffix(")").partition("(")
    owner, _, attribute = path.partition(".")
    if owner == "types":
        name, _, method = attribute.partition(".")
        return hasattr(tinker.types, name) and (not method or hasattr(getattr(tinker.types, name), method))
    found = getattr(client_class(tinker, owner), attribute, None)
    if found is None or found is getattr(object, attribute, None):
        return False
    return not parameter or parameter in inspect.signature(found).parameters


def client_class(tinker: ModuleType, name: str) -> Any:
    """A client class, wherever this SDK keeps it."""
    if hasattr(tinker, name):
        return getattr(tinker, name)
    import importlib  # deferred: only old SDKs keep RestClient there

    return getattr(importlib.import_module("tinker.lib.public_interfaces.rest_client"), name)


def run_case(row: Case, lab: Lab) -> Outcome:
    """Runs one case in a thread that is left behind if it hangs."""
    started_s = time.perf_counter()

    def cell(outcome: str, detail: str = "") -> Outcome:
        return Outcome(row.section, row.name, outcome, detail, round(time.perf_counter() - started_s, 2))

    if not has(lab.tinker, row.needs):
        return cell("absent", row.needs)
    ended: list[Outcome] = []

    def work() -> None:
        try:
            detail = row.run(lab)
            ended.append(cell("ok", str(detail or "")))
        except Refused as refusal:
            ended.append(cell("refused", str(refusal)))
        except BaseException as error:  # the boundary: whatever a case raises is its cell
            where = traceback.extract_tb(error.__traceback__)
            lines = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(where[-4:]))
            ended.append(cell("failed", f"{type(error).__name__}: {str(error)[:400]} [{lines}]"))

    thread = threading.Thread(target=work, daemon=True, name=row.name)
    thread.start()
    thread.join(CASE_TIMEOUT_S)
    return ended[0] if ended else cell("failed", f"no answer in {CASE_TIMEOUT_S:g} s")


def must_refuse(call: Callable[[], Any], *, words: str = "", within_s: float = 20.0) -> str:
    """The sentence of the error that `call` raises, soon and typed; a value or a hang is a failure."""
    started_s = time.perf_counter()
    try:
        value = call()
    except Exception as error:
        of_sdk = type(error).__module__.split(".")[0] in ("tinker", "pydantic", "pydantic_core")
        assert of_sdk or isinstance(error, (ValueError, RuntimeError)), repr(error)
        took_s = time.perf_counter() - started_s
        assert took_s < within_s, f"the error came after {took_s:.0f} s"
        sentence = " ".join(str(error).split())
        assert words.lower() in sentence.lower(), f"{words!r} is not in {sentence!r}"
        assert len(sentence) > 15, f"not a sentence: {sentence!r}"
        return f"{type(error).__name__}: {sentence[:200]}"
    raise AssertionError(f"accepted: {value!r}")
