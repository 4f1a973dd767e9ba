"""The loras of a model whose layers are cut: each chunk multiplies with its own part of a lora, and the gradients of
the parts are put together.

A chunk has the rows of B that make its outputs, or the columns of A that read its inputs, and all of the other matrix.
So the gradient of one matrix is put together from the chunks', and that of the other is their sum, in the tree of
`chunk_sums`. A chunk has its own experts' loras whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mint.engine.chunked.chunk_shapes import output_runs
from mint.engine.lora import LoraLayout, LoraRows, LoraWeights, Site, SiteWeights, parameter_count
from mint.engine.model.config import DecoderConfig
from mint.engine.model.linear import Linear, LoraLinears, Matrix
from mint.engine.reductions.chunk_sums import Chunks


class ChunkedLoras:
    """`LoraLinears` of what is whole, with the parts of loras for the chunks."""

    def __init__(self, chunks: Chunks, whole: LoraLinears, parts: Sequence[LoraLinears], config: DecoderConfig) -> None:
        """`parts` are those of the own chunks of a model with this `config`."""
        self._chunks = chunks
        self._whole = whole
        self._parts = parts
        self._cut = _Cut(chunks.count, config)
        self._loras: dict[LoraWeights, _CutLora] = {}

    def linear(self, site: str, matrix: Matrix, loras: Sequence[LoraRows]) -> Linear:
        return self._whole.linear(site, matrix, loras)

    def multiply(self, x: Tensor, matrix: Matrix, site: str, loras: Sequence[LoraRows]) -> Tensor:
        return self._whole.multiply(x, matrix, site, loras)

    def versions(self, loras: Sequence[LoraRows]) -> list[int]:
        return self._whole.versions(loras)

    def kept_bytes(self, sites: Sequence[Site], *, with_gradient: bool) -> int:
        """Parts and their gradients, and what `parts` keep for them."""
        total = 0
        for chunk, part in zip(self._chunks.own, self._parts, strict=True):
            cut = [own for site in sites if (own := self._cut.site(site, chunk)) is not None]
            total += part.kept_bytes(cut, with_gradient=with_gradient)
        return total

    def part_bytes(self, sites: Sequence[Site], rank: int, *, with_gradient: bool) -> int:
        """The memory of the parts of a lora, with their gradients."""
        cuts = [[self._cut.site(site, chunk) for site in sites] for chunk in self._chunks.own]
        count = sum(parameter_count([site for site in cut if site is not None], rank) for cut in cuts)
        return 4 * count * (2 if with_gradient else 1)

    def forget(self, lora: LoraWeights) -> None:
        found = self._loras.pop(lora, None)
        if found is not None:
            for part, weights in zip(self._parts, found.parts, strict=True):
                part.forget(weights)
        self._whole.forget(lora)

    def by_chunk(self, loras: Sequence[LoraRows]) -> list[list[LoraRows]]:
        """The same rows with the part of their loras for each of the own chunks."""
        found = [None if rows.weights is None else self._current(rows.weights).parts for rows in loras]
        return [
            [
                LoraRows(rows.start, rows.stop, None if parts is None else parts[place])
                for rows, parts in zip(loras, found, strict=True)
            ]
            for place in range(len(self._parts))
        ]

    def clear_gradient(self, lora: LoraWeights, prefix: str) -> None:
        """Clears the gradients of the parts at these sites: a pass that has failed leaves some."""
        for part in self._loras[lora].parts:
            for name, site in part.sites.items():
                if name.startswith(prefix):
                    for grad in _grads(site):
                        grad.zero_()

    def collect_gradient(self, lora: LoraWeights, prefix: str) -> None:
        """Adds the gradients of the parts to those of the lora, at the sites of that name or prefix. All
        processes call it."""
        cut, found = self._cut, self._loras[lora]
        names = [name for name in lora.sites if name.startswith(prefix)]
        # Of each own chunk the matrices that all chunks have, and those that are its alone.
        shared: list[list[Tensor]] = [[] for _ in found.parts]
        apart: list[list[Tensor]] = [[] for _ in found.parts]
        for place, part in enumerate(found.parts):
            for name, site in part.sites.items():
                if name.startswith(prefix):
                    grads = _grads(site)
                    for own, is_shared in zip(grads, cut.shared(name, grads), strict=True):
                        (shared if is_shared else apart)[place].append(own)
        if shared[0]:
            total = self._chunks.total([_flat(own) for own in shared])
            _add(self._targets(lora, names, self._chunks.own.start, are_shared=True), total)
        if apart[0]:
            for chunk, vector in enumerate(self._chunks.gather([_flat(own) for own in apart])):
                _add(self._targets(lora, names, chunk, are_shared=False), vector)

    def _targets(self, lora: LoraWeights, names: Sequence[str], chunk: int, *, are_shared: bool) -> list[Tensor]:
        """The gradients of a lora for what a chunk has: with all others, or alone."""
        sites = self._loras[lora].whole
        views = [own for name in names for own in self._cut.views(sites[name], _grads(lora.sites[name]), chunk)]
        return [view for own in views if own.is_shared == are_shared for view in own.views]

    def _current(self, lora: LoraWeights) -> _CutLora:
        """The parts of a lora as it is now."""
        found = self._loras.get(lora)
        if found is None:
            found = self._loras[lora] = self._new(lora)
        if found.version != lora.flat._version:
            found.version = lora.flat._version
            with torch.inference_mode(mode=False), torch.no_grad():
                for chunk, part in zip(self._chunks.own, found.parts, strict=True):
                    for name, own in part.sites.items():
                        name_in_whole = self._cut.name_in_whole(name, chunk)
                        whole = lora.sites[name_in_whole]
                        sources = self._cut.views(found.whole[name_in_whole], (whole.a, *whole.bs), chunk)
                        for target, source in zip((own.a, *own.bs), sources, strict=True):
                            _copy(target, source.views)
        return found

    def _new(self, lora: LoraWeights) -> _CutLora:
        """Zeros; the numbers of the parts are copied next."""
        is_trained = any(site.a.requires_grad for site in lora.sites.values())
        parts = []
        with torch.inference_mode(mode=False), torch.no_grad():
            for chunk in self._chunks.own:
                sites = [own for site in lora.layout.sites if (own := self._cut.site(site, chunk)) is not None]
                parts.append(LoraWeights.zeros(LoraLayout(sites, lora.layout.spec), lora.flat.device))
                if is_trained:
                    parts[-1].enable_gradient()
        return _CutLora(parts, {site.name: site for site in lora.layout.sites})


@dataclass
class _CutLora:
    """The parts of one lora for the own chunks, its sites by name, and the version of the lora of which they are."""

    parts: list[LoraWeights]
    whole: dict[str, Site]
    version: int | None = None


@dataclass(frozen=True)
class _CutMatrix:
    """The part that a chunk has of one matrix of a lora. Its rows are those of the `views`, in their order. If it is
    shared, every chunk has the whole matrix."""

    views: Sequence[Tensor]
    is_shared: bool


class _Cut:
    """Which part of a site's matrices a chunk has. Names of experts' sites count from 0 in each chunk, as those of its
    matrices do."""

    def __init__(self, count: int, config: DecoderConfig) -> None:
        self._count = count
        self._config = config
        self._experts = 0 if config.experts is None else config.experts.count // count

    def site(self, site: Site, chunk: int) -> Site | None:
        """The site of a chunk; None where it has nothing of it."""
        expert = _expert_of(site.name)
        if expert is not None:
            if expert // self._experts != chunk:
                return None
            name = _renamed(site.name, expert % self._experts)
            return Site(name, site.modules, site.inputs, site.outputs)
        if _is_whole(site.name):
            return None
        if _by_outputs(site.name):
            return Site(site.name, site.modules, site.inputs, tuple(size // self._count for size in site.outputs))
        return Site(site.name, site.modules, site.inputs // self._count, site.outputs)

    def name_in_whole(self, name: str, chunk: int) -> str:
        """The name of a chunk's site among all."""
        expert = _expert_of(name)
        return name if expert is None else _renamed(name, expert + chunk * self._experts)

    def views(self, site: Site, matrices: Sequence[Tensor], chunk: int) -> list[_CutMatrix]:
        """The parts that a chunk has of `matrices`, which are the a and the bs of a site, or the gradients of these."""
        a, *bs = matrices
        expert = _expert_of(site.name)
        if expert is not None:
            is_own = expert // self._experts == chunk
            return [_CutMatrix([own], is_shared=False) for own in (a, *bs)] if is_own else []
        if not _by_outputs(site.name):
            columns = a.chunk(self._count, dim=1)[chunk]
            return [_CutMatrix([columns], is_shared=False), *(_CutMatrix([b], is_shared=True) for b in bs)]
        found = [_CutMatrix([a], is_shared=True)]
        for module, b in zip(site.modules, bs, strict=True):
            runs = b.split(output_runs(self._config, module) or (len(b),))
            found.append(_CutMatrix([run.chunk(self._count)[chunk] for run in runs], is_shared=False))
        return found

    def shared(self, name: str, matrices: Sequence[Tensor]) -> list[bool]:
        """Which of a site's matrices all chunks have, a and the bs."""
        if _expert_of(name) is not None:
            return [False] * len(matrices)
        return [_by_outputs(name), *[not _by_outputs(name)] * (len(matrices) - 1)]


def _expert_of(name: str) -> int | None:
    """The expert of `3.experts.17.gate_up`; None for other sites."""
    parts = name.split(".")
    return int(parts[2]) if len(parts) == 4 and parts[1] == "experts" else None


def _renamed(name: str, expert: int) -> str:
    layer, experts, _, part = name.split(".")
    return f"{layer}.{experts}.{expert}.{part}"


def _is_whole(name: str) -> bool:
    """Whether a site is of no layer."""
    return "." not in name


def _by_outputs(name: str) -> bool:
    return name.endswith((".qkv", ".in", ".gate_up"))


def _grads(site: SiteWeights) -> list[Tensor]:
    grads = [matrix.grad for matrix in (site.a, *site.bs)]
    return [grad for grad in grads if grad is not None]


def _copy(target: Tensor, parts: Sequence[Tensor]) -> None:
    """The parts, one below the other, into the target."""
    for own, part in zip(target.split([len(part) for part in parts]), parts, strict=True):
        own.copy_(part)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _add(targets: Sequence[Tensor], vector: Tensor) -> None:
    """Adds consecutive parts of `vector` to the targets."""
    for target, part in zip(targets, vector.split([target.numel() for target in targets]), strict=True):
        target.add_(part.view(target.shape))
