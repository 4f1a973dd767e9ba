"""Loras side by side in one buffer, so that one replay of a captured step serves the rows of several loras.

Each row has the number of a slot, and kernels read the lora of a row there: the segmented products of Punica (Chen et
al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285). All slots of a buffer have one rank and
the same sites. A lora of a smaller rank, or one that does not train a site, has zeros there, which add nothing.

Letters: L slots · T rows · I inputs · O outputs · S lora parts of one product · r rank · N parts of
the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mint.engine.lora import LoraWeights, Site, parameter_count
from mint.engine.protocol import LoraSpec

MAX_SLOTS = 16
"""Loras of one replay. A buffer begins with few slots, and doubles."""

TILE_ROWS = 16
"""So many rows of a step, from a multiple of it on, have one slot: a kernel multiplies a tile of rows with one lora."""


@dataclass(frozen=True)
class SiteSlots:
    """The loras of one product by slot; `scales` [L] are 32 / rank of each."""

    a: Tensor  # [L, S·r, I]
    bs: Tensor  # [L, O, r]
    scales: Tensor


@dataclass(frozen=True)
class LoraPart:
    """The second half of the loras' product at a site: for row t `scale · down[:, t].sum(0) · bs.T`, part by part, with
    the scale and the bs of the slot `slots[t]`; nothing where that is -1."""

    down: Tensor  # [N, T, S·r], float32: what each of N parts of the inputs adds
    bs: Tensor  # [L, O, r], float32
    scales: Tensor  # [L], float32
    slots: Tensor  # [T], int32


def common_spec(loras: Sequence[LoraWeights]) -> LoraSpec | None:
    """What slots must have for all of these loras in the layers of a model; None if there are none. The rank is a power
    of two, so that few kinds of buffers exist."""
    specs = [lora.layout.spec for lora in loras]
    if not any(spec.train_attn or spec.train_mlp for spec in specs):
        return None
    return LoraSpec(
        rank=1 << (max(spec.rank for spec in specs) - 1).bit_length(),
        seed=0,
        train_attn=any(spec.train_attn for spec in specs),
        train_mlp=any(spec.train_mlp for spec in specs),
        train_unembed=False,
    )


class LoraSlots:
    """The buffer of one kind of loras, and which loras are in it."""

    def __init__(self, sites: Sequence[Site], spec: LoraSpec, count: int, device: torch.device) -> None:
        """`count` empty slots for loras of no more than `spec.rank`, at no more than `sites`."""
        self.count = count
        self._rank = spec.rank
        width = parameter_count(sites, spec.rank)
        apart = _apart(sites, spec.rank)
        self.experts_apart = -(-width // apart)
        """Two slots lie as far apart as so many experts of one slot do: a slot and an expert are one number."""
        self._apart = apart
        self.flat = torch.zeros(count, self.experts_apart * apart, device=device)
        self.scales = torch.zeros(count, device=device)
        self.sites: dict[str, SiteSlots] = {}
        start = 0
        for site in sites:
            parts, outputs = len(site.outputs), sum(site.outputs)
            sizes = [parts * spec.rank * site.inputs, outputs * spec.rank]
            a, bs = self.flat[:, start : start + sum(sizes)].split(sizes, dim=1)
            a, bs = a.unflatten(1, (parts * spec.rank, site.inputs)), bs.unflatten(1, (outputs, spec.rank))
            self.sites[site.name] = SiteSlots(a, bs, self.scales)
            start += sum(sizes)
        # The loras that are in slots, with the version of their weights there; the last is the one used last.
        self._held: WeakKeyDictionary[LoraWeights, tuple[int, int | None]] = WeakKeyDictionary()

    def of_experts(self, first: str, count: int) -> SiteSlots:
        """The loras of the products of `count` experts, of which the first is at the site `first`; the lora in slot l
        of expert n has the number `l · experts_apart + n`."""
        site = self.sites[first]
        numbers = (self.count - 1) * self.experts_apart + count
        a, bs = (
            own.as_strided((numbers, *own.shape[1:]), (self._apart, *own.stride()[1:])) for own in (site.a, site.bs)
        )
        return SiteSlots(a, bs, self.scales.repeat_interleave(self.experts_apart)[:numbers])

    def place(self, loras: Sequence[LoraWeights]) -> list[int]:
        """The slots of different `loras`, no more than there are. Those that are not there yet, or have changed, are
        copied, in place of those that were not used for the longest time."""
        for lora in loras:
            if lora in self._held:
                self._held[lora] = self._held.pop(lora)
        slots = []
        for lora in loras:
            slot, version = self._held.pop(lora, None) or (self._free_slot(), _NEVER)
            if version != _version_of(lora):
                self._copy(slot, lora)
            self._held[lora] = slot, _version_of(lora)
            slots.append(slot)
        return slots

    def forget_uncounted(self) -> None:
        """The weights of loras whose changes torch does not count may have changed: they are copied again."""
        for lora in [lora for lora, (_, version) in self._held.items() if version is None]:
            del self._held[lora]

    def _free_slot(self) -> int:
        used = {slot for slot, _ in self._held.values()}
        if len(used) == self.count:
            slot, _ = self._held.pop(next(iter(self._held)))
            return slot
        return next(slot for slot in range(self.count) if slot not in used)

    def _copy(self, slot: int, lora: LoraWeights) -> None:
        """The weights of `lora`, in zeros."""
        rank, own = self._rank, lora.layout.spec.rank
        self.flat[slot].zero_()
        self.scales[slot] = lora.scale
        for name, site in self.sites.items():
            weights = lora.sites.get(name)
            if weights is None:
                continue
            parts = len(weights.bs)
            site.a[slot].view(parts, rank, -1)[:, :own].copy_(weights.a.detach().view(parts, own, -1))
            # the bs of a site lie behind one another
            first = weights.bs[0].detach()
            site.bs[slot, :, :own].copy_(first.as_strided((site.bs.shape[1], own), first.stride()))


def _apart(sites: Sequence[Site], rank: int) -> int:
    """Numbers from an expert's loras to those of the next one, which is the same in each layer; 1 without experts."""
    sizes: dict[str, int] = {}
    for site in sites:
        prefix, _, expert = site.name.rpartition(".")[0].rpartition(".")
        if prefix.endswith(".experts") and expert == "0":
            sizes[prefix] = sizes.get(prefix, 0) + parameter_count([site], rank)
    return next(iter(sizes.values()), 1)


_NEVER = -1


def _version_of(lora: LoraWeights) -> int | None:
    """What changes whenever the weights do; None where torch does not count, in inference mode."""
    return None if lora.flat.is_inference() else lora.flat._version
