"""The weights of a lora: its matrices, their PEFT names, and their storage as one flat float32 vector.

Matrices that are multiplied together are one matrix (the A of query, key and value), so the decoder runs few products.
The optimizer, the digest and copies run over the one vector.

Letters: I inputs · O outputs of a linear layer · r rank · S layers fused into one product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mint.engine.protocol import LORA_ALPHA, LoraSpec
from mint.errors import CheckpointError

UNEMBED = "lm_head"

_OTHER_SHAPE = "Use weights of a lora with this rank and these layers, on this base model"


@dataclass(frozen=True)
class Site:
    """One product of a base model, perhaps of several layers (PEFT module names), all with the same inputs."""

    name: str
    modules: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class SiteWeights:
    """The trained matrices of a site: `a` [S·r, I] and one `b` [O, r] per layer."""

    a: Tensor
    bs: tuple[Tensor, ...]

    def parts(self) -> list[tuple[slice, slice, Tensor]]:
        """For each layer: its columns among the S·r ranks, its slice of the outputs, and its b."""
        rank = len(self.a) // len(self.bs)
        start = 0
        parts = []
        for index, b in enumerate(self.bs):
            parts.append((slice(index * rank, (index + 1) * rank), slice(start, start + b.shape[0]), b))
            start += b.shape[0]
        return parts


class SiteLora(NamedTuple):
    """A lora at one site, and the rows of a batch that it is for."""

    rows: slice
    weights: SiteWeights
    scale: float


def parameter_count(sites: Sequence[Site], rank: int) -> int:
    """The number of weights of a lora."""
    return sum(_size(site, rank) for site in sites)


class LoraLayout:
    """Where the matrices of a lora lie within one flat vector: of its weights, their gradient, or a moment."""

    def __init__(self, sites: Sequence[Site], spec: LoraSpec) -> None:
        """`sites` are those of the base model that `spec` trains, in the order of storage."""
        self.sites = sites
        self.spec = spec
        self.size = parameter_count(sites, spec.rank)

    @property
    def module_names(self) -> list[str]:
        """The trained layers, as PEFT names them."""
        return [module for site in self.sites for module in site.modules]

    @cached_property
    def arrays(self) -> dict[str, tuple[slice, tuple[int, int]]]:
        """Where each array of the named form lies within the vector, and its shape."""
        rank = self.spec.rank
        a = 0
        arrays = {}
        for site in self.sites:
            # As in `cut`: the As of all modules of a site, then their Bs.
            b = a + rank * len(site.modules) * site.inputs
            for module, outputs in zip(site.modules, site.outputs, strict=True):
                arrays[f"{module}.lora_A.weight"] = slice(a, a + rank * site.inputs), (rank, site.inputs)
                arrays[f"{module}.lora_B.weight"] = slice(b, b + outputs * rank), (outputs, rank)
                a, b = a + rank * site.inputs, b + outputs * rank
            a = b
        return arrays

    def cut(self, vector: Tensor) -> dict[str, SiteWeights]:
        """Views into `vector` [size], by site: of each site first `a`, then the bs."""
        start = 0
        sites = {}
        for site in self.sites:
            views = []
            for rows, columns in _shapes(site, self.spec.rank):
                views.append(vector[start : start + rows * columns].view(rows, columns))
                start += rows * columns
            sites[site.name] = SiteWeights(views[0], tuple(views[1:]))
        return sites

    def named(self, vector: Tensor) -> dict[str, np.ndarray]:
        """`vector` [size], cut into arrays by PEFT name: `{module}.lora_A.weight` [r, I], `lora_B` [O, r].

        On a CPU the arrays are read-only views of it.
        """
        entries = vector.detach().cpu().numpy().view()
        entries.flags.writeable = False
        return {name: entries[place].reshape(shape) for name, (place, shape) in self.arrays.items()}

    def assemble(self, arrays: Mapping[str, np.ndarray], what: str) -> Tensor:
        """The vector of which `arrays` is the named form, in the memory of the CPU: the inverse of `named`.

        Raises:
            CheckpointError: a name is missing or too many, or a shape differs; `what` says of which arrays.
        """
        if self.arrays.keys() != arrays.keys():
            differences = {
                "they lack": sorted(self.arrays.keys() - arrays.keys()),
                "the model has no": sorted(arrays.keys() - self.arrays.keys()),
            }
            told = " and ".join(f"{begin} {_first_of(names)}" for begin, names in differences.items() if names)
            raise CheckpointError(f"{what} do not fit the model: {told}", remedy=_OTHER_SHAPE)
        entries = np.empty(self.size, np.float32)
        for name, (place, shape) in self.arrays.items():
            if arrays[name].shape != shape:
                raise CheckpointError(
                    f"{what}: {name} has shape {arrays[name].shape}, not {shape}", remedy=_OTHER_SHAPE
                )
            entries[place] = arrays[name].reshape(-1)
        return torch.from_numpy(entries)


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ({len(names) - 1} more)"


class LoraWeights:
    """The weights of one lora: `flat` holds all, `sites` are views into it."""

    def __init__(self, layout: LoraLayout, flat: Tensor) -> None:
        """The weights that are in `flat` [layout.size], which is not copied: float32, or bfloat16 for sampling alone
        (`Operations.published_lora`)."""
        self.layout = layout
        self.scale = LORA_ALPHA / layout.spec.rank
        self.flat = flat
        self.sites = layout.cut(flat)

    @classmethod
    def zeros(cls, layout: LoraLayout, device: torch.device) -> LoraWeights:
        """All zeros; see `initialise`."""
        return cls(layout, torch.zeros(layout.size, device=device))

    def initialise(self) -> None:
        """A as PEFT does it (kaiming uniform with a=√5, so ±1/√inputs), from the seed of the spec alone; B zero."""
        generator = torch.Generator().manual_seed(self.layout.spec.seed)
        self.flat.zero_()
        for site in self.layout.sites:
            bound = 1 / math.sqrt(site.inputs)
            a = self.sites[site.name].a
            # Drawn on the CPU: a seed gives the same lora on every device.
            drawn = torch.empty(a.shape).uniform_(-bound, bound, generator=generator)
            with torch.no_grad():
                a.copy_(drawn)

    def enable_gradient(self) -> Tensor:
        """Makes every matrix a leaf whose gradient is a view into one vector of zeros, which is returned."""
        gradient = torch.zeros_like(self.flat)
        for name, parts in self.layout.cut(gradient).items():
            own = self.sites[name]
            for tensor, grad in zip((own.a, *own.bs), (parts.a, *parts.bs), strict=True):
                tensor.requires_grad_().grad = grad
        return gradient


@dataclass(frozen=True)
class LoraRows:
    """Rows `start:stop` of a batch run with `weights` (None: the base model alone)."""

    start: int
    stop: int
    weights: LoraWeights | None

    def site(self, name: str) -> SiteWeights | None:
        """The trained matrices of a site for these rows, if any."""
        return self.weights.sites.get(name) if self.weights is not None else None


def rows_of(weights: Sequence[LoraWeights | None], counts: Sequence[int] | None = None) -> list[LoraRows]:
    """Runs of equal weights in the row order of a batch. `weights[i]` are those of `counts[i]` rows, of one if None."""
    runs: list[LoraRows] = []
    stop = 0
    for index, own in enumerate(weights):
        start = stop
        stop = stop + (1 if counts is None else counts[index])
        if runs and runs[-1].weights is own:
            runs[-1] = LoraRows(runs[-1].start, stop, own)
        else:
            runs.append(LoraRows(start, stop, own))
    return runs


def _size(site: Site, rank: int) -> int:
    return rank * (len(site.modules) * site.inputs + sum(site.outputs))


def _shapes(site: Site, rank: int) -> list[tuple[int, int]]:
    """Those of `a` and the bs."""
    return [(rank * len(site.modules), site.inputs), *((outputs, rank) for outputs in site.outputs)]
