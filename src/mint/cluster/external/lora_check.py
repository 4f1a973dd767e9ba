"""Whether samplers apply loras as the trainer does: one forward of the same tokens at both, before all else.

vLLM refuses the loras of some layers of some models, and ignores those of others. A policy that is trained on samples
of other weights learns nothing, or the wrong thing, and no error says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mint.cluster.external.host import Host, HostRefusedError, HostUnreachableError
from mint.cluster.external.samplers import ExternalSamplers
from mint.cluster.external.vllm_protocol import BadAnswerError
from mint.cluster.versions import Version, packed
from mint.engine.protocol import BaseInfo, Engine, LoraSpec, ModelState, TrainDatum, resolve_loss
from mint.errors import InvalidRequestError

log = logging.getLogger(__name__)

PROBE_TOKENS = 48
"""The forward has so many tokens."""

PROBE_SHIFT = 0.3
"""The lora of the check changes logprobs by at least so much in the mean, so that it can be told from none."""

STARTS_AT = 0.01
"""The standard deviation of its B matrices to begin with; it is doubled until logprobs change enough."""

APPLIED_SHARE = 0.25
"""The logprobs must be nearer to the trainer's than this share of what the lora changes."""

START_S = 120.0
"""How long a start waits for a sampler."""

PROBE = "lora-check"


@dataclass(frozen=True)
class _Expected:
    """Logprobs of the trainer for the same tokens, with and without the lora, float32 [N]."""

    tokens: list[int]
    with_lora: np.ndarray
    without: np.ndarray
    version: Version
    base: Version
    """A lora of zeros: where many loras are loaded, vLLM's CPU build (0.32.0) applies one of them to the base, too."""


def check_lora(
    engine: Engine,
    samplers: ExternalSamplers,
    info: BaseInfo,
    lora: LoraSpec,
    *,
    within_s: float,
    address: str | None = None,
) -> float:
    """Refuses samplers, or the one at `address`, that do not apply loras of this shape; returns the mean distance of
    their logprobs.

    Raises:
        InvalidRequestError: no sampler answers or has the base; or one refuses the lora, does not apply it, or computes
            something else.
    """
    expected = _expected(engine, info, lora)
    folders = samplers.folders
    name = folders.name(expected.version)
    named = {folders.name(version): folders.write(version) for version in (expected.base, expected.version)}

    async def ask(host: Host, _base: str) -> tuple[str, np.ndarray, np.ndarray] | tuple[str, str]:
        try:
            found = {}
            for own, path in named.items():
                await host.load_lora(own, str(path))
                try:
                    found[own] = np.array(await host.prompt_logprobs(expected.tokens, own), np.float32)
                finally:
                    await host.unload_lora(own)
            return host.address, found[name], found[folders.name(expected.base)]
        except (HostUnreachableError, HostRefusedError, BadAnswerError) as error:
            return host.address, str(error)

    try:
        answers = samplers.ask_each(info.name, ask, within_s=within_s, address=address)
    finally:
        for own in named:
            folders.remove(own)
    return max(_gap(expected, lora, *answer) for answer in answers)


def _gap(
    expected: _Expected, lora: LoraSpec, address: str, with_lora: np.ndarray | str, without: np.ndarray | None = None
) -> float:
    parts = [name for name in ("attn", "mlp", "unembed") if getattr(lora, f"train_{name}")]
    remedy = "Choose another model server, or serve this base model with LoRAs"
    if lora.train_unembed:
        remedy = f"Train without it: train_unembed=False. Else: {remedy[0].lower()}{remedy[1:]}"

    def refuse(text: str) -> InvalidRequestError:
        shape = f"a LoRA of rank {lora.rank} on {', '.join(parts)}"
        return InvalidRequestError(f"{text}, with {shape}", field="sampler", value=address, remedy=remedy)

    if isinstance(with_lora, str):
        raise refuse(f"cannot be used: {with_lora}")
    assert without is not None, "it has answered twice"
    shift = float(np.abs(expected.with_lora - expected.without).mean())
    base_gap = float(np.abs(without - expected.without).mean())
    gap = float(np.abs(with_lora - expected.with_lora).mean())
    if base_gap > APPLIED_SHARE * shift:
        raise refuse(
            f"computes other logprobs for the base model itself (|Δ| {base_gap:.2g} nats in the mean): does it serve "
            "the same weights?"
        )
    if gap > APPLIED_SHARE * shift:
        ignored = float(np.abs(with_lora - without).mean()) < APPLIED_SHARE * shift
        found = "does not apply the LoRA" if ignored else "applies only a part of the LoRA, or another"
        raise refuse(
            f"{found}: its logprobs are {gap:.2g} nats from the trainer's in the mean, and the LoRA changes them "
            f"by {shift:.2g}"
        )
    log.info("the sampler %s applies a lora on %s: |Δ logprob| %.2g in the mean", address, ", ".join(parts), gap)
    return gap


def _expected(engine: Engine, info: BaseInfo, lora: LoraSpec) -> _Expected:
    rng = np.random.default_rng(0)
    length = min(PROBE_TOKENS, info.context_length)
    tokens = rng.integers(0, info.vocab_size, length)
    datum = TrainDatum(tokens[:-1], tokens[1:], np.ones(length - 1, np.float32))
    loss = resolve_loss("cross_entropy")
    engine.create_model(PROBE, info.name, lora)
    try:
        start = engine.read_weights(PROBE)
        [without] = engine.forward(PROBE, [datum], loss).logprobs
        parts = {part: _of_part(start, part) for part in ("unembed", "rest")}
        noise = {name: rng.normal(0, 1, array.shape).astype(np.float32) for name, array in start.items()}
        scale = dict.fromkeys(parts, STARTS_AT)
        for part in [part for part, names in parts.items() if names]:  # each must change enough by itself
            for _ in range(12):
                weights = {
                    name: noise[name] * np.float32(scale[part]) if name in parts[part] and ".lora_B." in name else array
                    for name, array in start.items()
                }
                engine.write_state(PROBE, ModelState(weights))
                [changed] = engine.forward(PROBE, [datum], loss).logprobs
                if float(np.abs(changed - without).mean()) >= PROBE_SHIFT:
                    break
                scale[part] *= 2
        weights = {
            name: noise[name] * np.float32(scale["unembed" if name in parts["unembed"] else "rest"])
            if ".lora_B." in name
            else array
            for name, array in start.items()
        }
        engine.write_state(PROBE, ModelState(weights))
        [with_lora] = engine.forward(PROBE, [datum], loss).logprobs
    finally:
        engine.drop_model(PROBE)
    return _Expected(
        tokens.tolist(),
        with_lora,
        without,
        _version(f"check-{lora.rank}", info.name, lora, weights),
        _version(f"check-{lora.rank}-zero", info.name, lora, start),
    )


def _version(name: str, base: str, lora: LoraSpec, weights: Mapping[str, np.ndarray]) -> Version:
    layout, vector = packed(weights)
    return Version(name, base, lora, layout, vector.nbytes, vector)


def _of_part(weights: Mapping[str, np.ndarray], part: str) -> set[str]:
    unembed = {name for name in weights if name.startswith("lm_head.")}
    return unembed if part == "unembed" else set(weights) - unembed
