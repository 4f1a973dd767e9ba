"""A bug: a step that was skipped because of a NaN is reported as taken."""

from typing import Any

from mint.engine.bases import trained_model

_step_adam = trained_model.step_adam


def _step_and_hide(*arguments: Any, **named: Any) -> dict[str, float]:
    metrics = _step_adam(*arguments, **named)
    return {**metrics, "grad_norm": 0.0, "skipped_nonfinite": 0.0} if metrics["skipped_nonfinite"] else metrics


trained_model.step_adam = _step_and_hide
