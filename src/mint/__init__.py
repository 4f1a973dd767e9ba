"""mint: LoRA fine-tuning and reinforcement learning of language models, on your own machine.

    import mint
    from mint import types

    client = mint.ServiceClient()                                    # the service in this process, or MINT_BASE_URL
    trainer = client.create_lora_training_client("mint/tiny", rank=16)
    sampler = trainer.save_weights_and_get_sampling_client()

`import mint as tinker` serves scripts that were written for that package: its names are here, too. `public_names` lists
the names; they are loaded when one of them is first used, so that `import mint` costs little.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mint.version import VERSION

if TYPE_CHECKING:
    from mint.public_names import *  # noqa: F403

__version__ = VERSION

_MODULES = ("errors", "types")
_TINKER_NAMES = {
    "BackcompatSamplingClientFuture": ("mint.client.sampling_client", "SamplingClientFuture"),
    "BackcompatTrainingClientFuture": ("mint.client.training_client", "TrainingClientFuture"),
}
"""Tinker's names for a client that is also the future of its making."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"mint.{name}")
    if name == "__all__":
        return __dir__()
    if name in _TINKER_NAMES:
        module, own_name = _TINKER_NAMES[name]
        return getattr(import_module(module), own_name)
    # Private names are asked for by the import system and by tools; they must not load the SDK.
    found = None if name.startswith("_") else vars(import_module("mint.public_names")).get(name)
    if found is None:
        raise AttributeError(f"module 'mint' has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    names = {name for name in vars(import_module("mint.public_names")) if not name.startswith("_")} - {"annotations"}
    return sorted({*names, *_MODULES, "__version__"})
