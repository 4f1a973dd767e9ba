"""A sampler of weights that are named: a base model, weights for sampling, or a training state."""

from __future__ import annotations

from mint.client.sampling_client import SamplingClient
from mint.client.service_client import ServiceClient


def checkpoint_sampler(service: ServiceClient, weights: str) -> SamplingClient:
    """A sampler of a checkpoint (`mint://…`, `tinker://…`), or of the base model of that name.

    A training state is loaded as a model of its own, because other servers of the protocol sample from no state.
    """
    if not weights.startswith(("mint://", "tinker://")):
        return service.create_sampling_client(base_model=weights)
    if "/sampler_weights/" in weights:
        return service.create_sampling_client(model_path=weights)
    return service.create_training_client_from_state(weights).save_weights_and_get_sampling_client(name="frozen")
