"""Whether a grammar can be compiled with little time, memory and stack: tried in a process that a bad one may end."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from mint.errors import OverloadedError
from mint.server.child_process import ChildProcess
from mint.server.grammars.compiler import field_and_value, refusal, require_llguidance, require_short
from mint.types import StructuredOutputs

WAITING_PER_OWNER = 2
WALL_S = 60.0
"""For a machine that is so busy that half a second of a processor takes that long."""

KEPT_VERDICTS = 1024

_turn = threading.Lock()
_process = ChildProcess("mint.server.grammars.trial_process")
_counting = threading.Lock()
_waiting: Counter[str] = Counter()
_Key = tuple[str, str]  # an owner, and the hash of a task: its text may have 256 KiB
_same: WeakValueDictionary[_Key, threading.Lock] = WeakValueDictionary()
_verdicts: OrderedDict[_Key, dict[str, Any]] = OrderedDict()  # used longest ago first


def try_grammar(wanted: StructuredOutputs, folder: Path, *, owner: str) -> None:
    """Checks that a grammar compiles for the base model in `folder`, within the limits of `trial_process`.

    Verdicts are kept for each owner alone: the time of a request tells nobody what others have asked.

    Raises:
        InvalidRequestError: not exactly one field is given, or it cannot be read, or takes too much to compile.
        MissingExtraError: llguidance is not installed.
        OverloadedError: too many grammars of this owner wait, or the process cannot be started.
    """
    require_llguidance()
    field, value = field_and_value(wanted)
    require_short(field, value)
    task = json.dumps({"folder": str(folder), "field": field, "value": value}).encode()
    key = (owner, hashlib.sha256(task).hexdigest())
    with _counting:
        same = _same.setdefault(key, threading.Lock())
    with same:  # requests that bring the same grammar at once need one trial
        verdict = _known_verdict(key) or _new_verdict(key, task)
    if "excess" in verdict:
        problem = f"cannot be compiled: it takes {verdict['excess']}"
        raise refusal(field, value, problem, "Make it smaller, less deep, or less exact")
    if "problem" in verdict:
        raise refusal(field, value, f"cannot be compiled: {verdict['problem']}", "Correct it, or leave out that part")


def _known_verdict(key: _Key) -> dict[str, Any] | None:
    with _counting:
        if key in _verdicts:
            _verdicts.move_to_end(key)
        return _verdicts.get(key)


def _new_verdict(key: _Key, task: bytes) -> dict[str, Any]:
    """What `trial_process.answer` says of a task."""
    owner, _ = key
    with _counting:
        if _waiting[owner] >= WAITING_PER_OWNER:
            raise OverloadedError(
                f"{WAITING_PER_OWNER} other grammars of yours are being compiled", remedy="Send it again in a second"
            )
        _waiting[owner] += 1
    try:
        with _turn:
            verdict = _asked(task)
    finally:
        with _counting:
            _waiting[owner] -= 1
            if not _waiting[owner]:
                del _waiting[owner]
    with _counting:
        _verdicts[key] = verdict
        if len(_verdicts) > KEPT_VERDICTS:
            _verdicts.popitem(last=False)
    return verdict


def _asked(message: bytes) -> dict[str, Any]:
    for _ in range(2):  # it may have ended just before
        with suppress(EOFError, OSError):
            found = _process.ask([message], 1, limit_s=WALL_S)
            if found is None:
                break
            verdict: dict[str, Any] = json.loads(found[0])
            return verdict
        _process.close()
    _process.close()
    raise OverloadedError("the process that compiles grammars does not answer", remedy="Try again in a minute")
