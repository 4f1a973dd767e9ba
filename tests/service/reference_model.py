"""What a model's requests must give: each operation applied once, in its place, to a fake engine that nobody disturbs.

Knows no journal, no queue, no HTTP and no crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mint.engine.fake_engine import POISON_TOKEN, FakeEngine
from mint.engine.protocol import AdamSpec, LoraSpec, ModelState, SampleJob, StopRule, TrainDatum, resolve_loss
from mint.types import AdamParams

FOLDER = "tiny"
"""The last part of the base model's folder, from which the fake engine's chains start."""

CONTEXT_LENGTH = 512


@dataclass(frozen=True)
class Operation:
    """A request without its model and number. `kind` is that of the service."""

    kind: str
    tokens: tuple[int, ...] = ()
    learning_rate: float = 0.0
    name: str = ""
    path: str = ""
    number: int = 0
    flag: bool = False
    """Of a save: whether it may overwrite. Of a load: whether it loads the optimizer, too."""

    def body(self) -> dict[str, Any]:
        """The body of the request, without `model_id` and `seq_id`."""
        tensors = {"target_tokens": {"data": list(self.tokens[1:]), "dtype": "int64"}}
        data = [{"model_input": {"chunks": [{"tokens": list(self.tokens[:-1])}]}, "loss_fn_inputs": tensors}]
        content = {"data": data, "loss_fn": "cross_entropy"}
        match self.kind:
            case "forward":
                return {"forward_input": content}
            case "forward_backward":
                return {"forward_backward_input": content}
            case "optim_step":
                return {"adam_params": AdamParams(learning_rate=self.learning_rate).model_dump()}
            case "save_weights":
                return {"path": self.name, "overwrite": self.flag}
            case "load_weights":
                return {"path": self.path, "optimizer": self.flag}
            case _:
                return {"sampling_session_seq_id": self.number}


@dataclass(frozen=True)
class Expected:
    """What a result must say. `error` is the type of the error that it must be instead; "" for none."""

    error: str = ""
    logprobs: tuple[float, ...] | None = None
    digest: str | None = None
    path: str | None = None
    sampler_id: str | None = None


class Reference:
    """All models of all owners, undisturbed."""

    def __init__(self) -> None:
        self.engine = FakeEngine(context_length=CONTEXT_LENGTH)
        self.checkpoints: dict[str, tuple[str, ModelState]] = {}  # path → owner, state
        self._is_incomplete: dict[str, bool] = {}

    def create(self, model_id: str, *, seed: int, rank: int) -> None:
        self.engine.create_model(model_id, FOLDER, LoraSpec(rank, seed, True, True, True))
        self._is_incomplete[model_id] = False

    def digest(self, model_id: str) -> str:
        return self.engine.state_digest(model_id)

    def sample(self, sampler_id: str, prompt: Sequence[int], *, max_tokens: int, seed: int) -> list[int]:
        """The tokens that a request with these fields must give."""
        job = SampleJob(FOLDER, sampler_id, np.array(prompt), 1, max_tokens, 1.0, -1, 1.0, seed, StopRule())
        return self.engine.sample([job])[0].samples[0].tokens.tolist()

    def give_up(self, model_id: str, kinds: Sequence[str]) -> Expected:
        """Requests that are failed without being run, in their order; those that never arrived are "missing"."""
        for kind in kinds:
            self._note_failed(model_id, kind)
        return Expected("RequestFailedError")

    def apply(self, owner: str, model_id: str, operation: Operation) -> Expected:
        """The next operation of a model."""
        match operation.kind:
            case "forward" | "forward_backward":
                return self._pass(model_id, operation)
            case "optim_step":
                return self._step(model_id, operation.learning_rate)
            case "save_weights":
                path = f"tinker://{model_id}/weights/{operation.name}"
                if path in self.checkpoints and not operation.flag:
                    return Expected("ConflictError")
                self.checkpoints[path] = owner, self.engine.read_state(model_id)
                return Expected(path=path)
            case "load_weights":
                return self._load(owner, model_id, operation)
            case _:
                sampler_id = f"{model_id.split(':')[0]}:sample:{operation.number}"
                self.engine.publish(model_id, sampler_id)
                return Expected(sampler_id=sampler_id)

    def _pass(self, model_id: str, operation: Operation) -> Expected:
        tokens = np.array(operation.tokens, dtype=np.int64)
        if (tokens < 0).any() or POISON_TOKEN in tokens[:-1]:
            self._note_failed(model_id, operation.kind)
            return Expected("InvalidRequestError" if (tokens < 0).any() else "RequestFailedError")
        data = [TrainDatum(tokens[:-1], tokens[1:], np.ones(tokens.size - 1, np.float32))]
        run = self.engine.forward if operation.kind == "forward" else self.engine.forward_backward
        result = run(model_id, data, resolve_loss("cross_entropy", None))
        return Expected(logprobs=tuple(result.logprobs[0].tolist()))

    def _step(self, model_id: str, learning_rate: float) -> Expected:
        if self._is_incomplete[model_id]:
            self._note_failed(model_id, "optim_step")
            return Expected("StepRefusedError")
        if learning_rate < 0:
            return Expected("InvalidRequestError")
        plain = AdamParams(learning_rate=learning_rate)
        adam = AdamSpec(learning_rate, plain.beta1, plain.beta2, plain.eps, plain.weight_decay, plain.grad_clip_norm)
        self.engine.optim_step(model_id, adam)
        return Expected(digest=self.digest(model_id))

    def _load(self, owner: str, model_id: str, operation: Operation) -> Expected:
        path = operation.path.replace("MODEL", model_id)
        saved_by, state = self.checkpoints.get(path, ("", None))
        if state is None or saved_by != owner:
            return Expected("NotFoundError")
        if not operation.flag:
            state = ModelState(state.weights, 0)
        self.engine.write_state(model_id, state)
        self._is_incomplete[model_id] = False
        return Expected(path=path)

    def _note_failed(self, model_id: str, kind: str) -> None:
        if kind in ("forward_backward", "missing"):
            self.engine.clear_gradient(model_id)
            self._is_incomplete[model_id] = True
        elif kind == "optim_step" and self._is_incomplete[model_id]:
            self.engine.clear_gradient(model_id)
            self._is_incomplete[model_id] = False


def mismatch(expected: Expected, error: Exception | None, result: dict[str, Any]) -> str:
    """How a result differs from what it must say; "" if it does not."""
    if expected.error or error is not None:
        found = "" if error is None else type(error).__name__
        return "" if found == expected.error else f"{error!r} instead of {expected.error or 'a result'}"
    found = Expected(digest=result.get("state_digest") if expected.digest else None)
    if expected.logprobs is not None:
        found = Expected(logprobs=tuple(result["loss_fn_outputs"][0]["logprobs"]["data"]))
    if expected.path is not None:
        found = Expected(path=result["path"])
    if expected.sampler_id is not None:
        found = Expected(sampler_id=result["sampling_session_id"])
    return "" if found == expected else f"{found} instead of {expected}"
