"""The names of MinT's extensions of the protocol (`import mint.mint as mintx`).

None is supported: using one raises an error that says so. They are here so that scripts that import them for one branch
can run the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mint.errors import MissingExtraError

CAMERA_LAYOUT = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
OPENPI_FAST_MODEL = "openpi/pi0-fast"
OPENPI_FAST_LORA_RANK = 16
_INSTEAD = {
    "forward_backward_reverse_kl": "Sample from the student, read the reference's logprobs with compute_logprobs, and "
    "train with importance_sampling on their difference (`mint train distill`)",
    "interpolate_checkpoints": "Export both checkpoints with `mint export`, mix their tensors, and upload the result",
}
_NO_VISION = "The models here read only text; OpenPI's models read camera images"


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def refuse(*_arguments: Any, **_options: Any) -> NoReturn:
        raise MissingExtraError(f"mint.mint.{name} is not supported", remedy=_INSTEAD.get(name, _NO_VISION))

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


class ReverseKLDatum:
    """One example for `forward_backward_reverse_kl`."""

    def __init__(self, student_input: Any, reference_input: Any, target_tokens: Any, weights: Any = None) -> None:
        """Stores its arguments."""
        self.student_input = student_input
        self.reference_input = reference_input
        self.target_tokens = target_tokens
        self.weights = weights


class OpenPITrainingClient:
    """A client for OpenPI's models."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        """Raises `MissingExtraError`."""
        _unsupported("OpenPITrainingClient")()


forward_backward_reverse_kl = _unsupported("forward_backward_reverse_kl")
forward_backward_reverse_kl_async = _unsupported("forward_backward_reverse_kl")
interpolate_checkpoints = _unsupported("interpolate_checkpoints")
interpolate_checkpoints_async = _unsupported("interpolate_checkpoints")
create_openpi_training_client = _unsupported("create_openpi_training_client")
build_openpi_fast_datum = _unsupported("build_openpi_fast_datum")
