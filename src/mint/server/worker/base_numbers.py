"""Whether a base model still has the weights, dtype, quantization and kernels with which a model was trained.

A replay of the model's requests would find other numbers, too, but after a snapshot of the last step there is nothing
to replay; and nothing is replayed for a sampler.
"""

from __future__ import annotations

from collections.abc import Mapping

from mint.errors import RecoveryDivergedError
from mint.models.fingerprint import BASE_FINGERPRINT
from mint.server.store.rows import ModelRow, base_numbers


def recover_remedy(model_id: str) -> str:
    """The remedy in the error of a model that has stopped."""
    return f"The operator can let it go on with `mint recover {model_id}`; or load a checkpoint into a new model"


def require_same_numbers(row: ModelRow, settings: Mapping[str, object]) -> None:
    """Checks that the base model of a model has the numbers on which it was trained, as far as that is known.

    `settings` are those of the base model that took effect.

    Raises:
        RecoveryDivergedError: its weights are others, or its dtype, its quantization or its set of kernels.
    """
    trained_on, here = (row.effective or {}).get(BASE_FINGERPRINT), settings.get(BASE_FINGERPRINT)
    if None not in (trained_on, here) and trained_on != here:
        raise RecoveryDivergedError(
            f"model {row.model_id} was trained on other weights of {row.base_model}: their fingerprint was "
            f"{trained_on}, and that of the weights there now is {here}; put those of before back and use --retry, "
            "or go on with those of now by --accept",
            remedy=recover_remedy(row.model_id),
        )
    recorded, found = base_numbers(row.effective), base_numbers(settings)
    if recorded is None or found is None:
        return
    for variable, value in recorded.items():
        if found.get(variable, value) != value:
            raise RecoveryDivergedError(
                f"model {row.model_id} was trained on a base model with {variable}={value}, "
                f"and has {variable}={found[variable]} now; put the setting back and use --retry, or go on "
                "with the numbers of now by --accept",
                remedy=recover_remedy(row.model_id),
            )
