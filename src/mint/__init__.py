"""mint: LoRA fine-tuning and reinforcement learning of language models, on your own machine.

    import mint
    from mint import types

    client = mint.ServiceClient()                                    # the service in this process, or MINT_BASE_URL
    trainer = client.create_lora_training_client("mint/tiny", rank=16)
    sampler = trainer.save_weights_and_get_sampling_client()

The names are loaded when first used, so that `import mint` costs little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mint.errors as errors
    import mint.types as types
    from mint.client.futures import APIFuture
    from mint.client.sampling_client import SamplingClient
    from mint.client.service_client import ServiceClient
    from mint.client.training_client import TrainingClient
    from mint.errors import MintError

__version__ = "0.1.0"

__all__ = [
    "APIFuture",
    "MintError",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
    "__version__",
    "errors",
    "types",
]

_HOMES = {
    "APIFuture": "mint.client.futures",
    "MintError": "mint.errors",
    "SamplingClient": "mint.client.sampling_client",
    "ServiceClient": "mint.client.service_client",
    "TrainingClient": "mint.client.training_client",
    "errors": "mint.errors",
    "types": "mint.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mint' has no attribute {name!r}")
    module = import_module(_HOMES[name])
    return module if name in ("errors", "types") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
