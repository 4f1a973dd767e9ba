"""Ranks that divide the experts of a base: each keeps some of every layer, and runs micro-batches of its own.

For each layer of experts, forward and backward, a rank sends every row to the rank that has its expert (all-to-all),
and gets the results back. The owner computes the rows of each rank apart, and sends the gradients of its experts' loras
to the rank whose rows they are from. So a micro-batch has the bits of one process, and the order in which the results
of a token's experts are added is that of the router's choice.

Before each exchange every rank says what it is about to do: rows for a layer, or nothing more in this pass. The lowest
layer's forward goes first; ranks that wait for something else, or have ended, compute their experts for the others. A
rank that has failed says so, and the others end their pass.

All but the experts' matrices is whole on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from mint.cluster.collectives.chunk_ranks import PeerMemoryError
from mint.cluster.collectives.layer_edges import CountedLayers
from mint.cluster.collectives.progress import Progress
from mint.cluster.ranges import divide
from mint.engine.lora import LoraWeights
from mint.engine.model.linear import MovableMatrix
from mint.engine.model.weights import ExpertServer, LayerRun, LayerWeights, MixtureWeights, expert_site
from mint.engine.protocol import is_out_of_memory
from mint.engine.reductions.division import PassOutcome, PeerFailedError
from mint.errors import InvalidRequestError

log = logging.getLogger(__name__)


class _Kind(IntEnum):
    """The next step of a rank."""

    FORWARD = 0
    FORWARD_AND_KEEP = 1
    BACKWARD = 2
    NOTHING = 3


@dataclass(frozen=True)
class _Turn:
    """One rank's word before an exchange: what it does next, how its part of the pass goes, and how many of its rows
    each expert of the layer has."""

    kind: _Kind
    layer: int
    outcome: PassOutcome
    counts: Sequence[int]


class ExpertRanks:
    """`LayerSource` whose experts are divided among the ranks of the default process group."""

    def __init__(self, progress: Progress) -> None:
        """`progress` counts layers and exchanges."""
        self._progress = progress
        self._edges = CountedLayers(progress)
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        self._ranges: list[range] = []  # the experts of each rank
        self._experts = self._layers = 0
        self._exchanges: dict[int, _LayerExchange] = {}
        self.lora: LoraWeights | None = None

    # --- the layers ----------------------------------------------------------------------------------------------

    def keep(self, layer: LayerWeights) -> None:
        """Gives up the matrices of the experts that other ranks have.

        Raises:
            InvalidRequestError: there are fewer experts than ranks, or their layout cannot be moved.
        """
        index, mlp = self._layers, layer.mlp
        self._layers += 1
        if not isinstance(mlp, MixtureWeights):
            return
        count = len(mlp.experts)
        if count < self._world:
            _refuse(f"has {count} experts in layer {index}, fewer than ranks", value=self._world)
        self._ranges, self._experts = divide([1] * count, self._world), count
        for number, expert in enumerate(mlp.experts):
            for matrix in (expert.gate_up, expert.down):
                if not isinstance(matrix, MovableMatrix):
                    _refuse(f"has experts whose matrices are a {type(matrix).__name__}", value=True)
                if number not in self._ranges[self._rank]:
                    matrix.move(matrix.memory.new_empty(0))
        self._exchanges[index] = _LayerExchange(self, index, mlp.experts[0].down.outputs)

    def around(self, index: int, run: LayerRun) -> LayerRun:
        """See `LayerSource`."""
        return self._edges.around(index, run)

    def experts_of(self, index: int) -> _LayerExchange | None:
        """See `LayerSource`."""
        return self._exchanges.get(index)

    # --- a pass --------------------------------------------------------------------------------------------------

    def begin(self, lora: LoraWeights) -> None:
        """Before the first micro-batch of a pass, of which all rows have this lora."""
        self.lora = lora
        for exchange in self._exchanges.values():
            exchange.forget()

    def worst(self, own: PassOutcome) -> PassOutcome:
        """The worst outcome of the pass on all ranks. Until all have ended, this rank computes for the others."""
        while True:
            turns = self._hear(_Turn(_Kind.NOTHING, 0, own, ()))
            own = max(own, *(turn.outcome for turn in turns))
            if all(turn.kind is _Kind.NOTHING for turn in turns):
                return own
            if own is not PassOutcome.DONE:
                continue  # the others hear it with their next word, and end their part
            try:
                self._take_turn(turns, None, None)
            except Exception as error:  # the boundary of this rank's part: the others hear of it
                if not is_out_of_memory(error):
                    log.exception("this rank could not compute its experts for another one")
                own = PassOutcome.OUT_OF_MEMORY if is_out_of_memory(error) else PassOutcome.FAILED

    def exchange(self, kind: _Kind, layer: int, counts: Sequence[int], sent: Tensor) -> Tensor:
        """Sends the rows `sent` to the owners of their experts, once it is this layer's turn; returns their results.

        Raises:
            PeerMemoryError: memory has run out at another rank.
            PeerFailedError: another rank has failed.
        """
        own = _Turn(kind, layer, PassOutcome.DONE, counts)
        while True:
            turns = self._hear(own)
            worst = max(turn.outcome for turn in turns)
            if worst is PassOutcome.OUT_OF_MEMORY:
                raise PeerMemoryError("memory has run out at another rank")
            if worst is PassOutcome.FAILED:
                raise PeerFailedError("another process of the group could not run its part of the pass")
            result = self._take_turn(turns, own, sent)
            if result is not None:
                return result

    def _hear(self, own: _Turn) -> list[_Turn]:
        """The words of all ranks."""
        word = torch.zeros(3 + self._experts, dtype=torch.int64)
        word[:3] = torch.tensor([own.kind, own.layer, own.outcome])
        word[3 : 3 + len(own.counts)] = torch.tensor(list(own.counts), dtype=torch.int64)
        words = torch.empty(self._world * len(word), dtype=torch.int64)
        with self._progress.waiting():
            dist.all_gather_into_tensor(words, word)
        found = words.view(self._world, -1).tolist()
        return [_Turn(_Kind(kind), layer, PassOutcome(outcome), counts) for kind, layer, outcome, *counts in found]

    def _take_turn(self, turns: Sequence[_Turn], own: _Turn | None, sent: Tensor | None) -> Tensor | None:
        """Runs the exchange whose turn it is; None if this rank has no rows in it."""
        kind, layer = min((turn.kind, turn.layer) for turn in turns)
        exchange, mine = self._exchanges[layer], self._ranges[self._rank]
        width = exchange.width + (kind is _Kind.BACKWARD)  # with the routing weight of each row
        # By the rank that has rows: how many each expert of the layer has, and each of this rank's.
        counts = {rank: turn.counts for rank, turn in enumerate(turns) if (turn.kind, turn.layer) == (kind, layer)}
        served = {
            rank: [each if expert in mine else 0 for expert, each in enumerate(of_rank)]
            for rank, of_rank in counts.items()
        }
        to_me = [sum(served.get(rank, ())) for rank in range(self._world)]
        is_source = own is not None and (own.kind, own.layer) == (kind, layer)
        to_others = [sum(own.counts[each.start : each.stop]) if own and is_source else 0 for each in self._ranges]
        rows = self._send(sent if is_source else None, to_others, to_me, width)
        error: Exception | None = None
        results, gradients = dict[int, Tensor](), dict[int, Tensor]()
        try:
            results, gradients = self._compute(kind, exchange, rows, served)
        except Exception as raised:  # noqa: BLE001  the others wait for results: they get zeros, and hear of it next
            error = raised
        answers = [results.get(rank, torch.zeros(count, width)) for rank, count in enumerate(to_me)]
        returned = torch.cat(self._send(torch.cat(answers), to_me, to_others, width))
        if kind is _Kind.BACKWARD:
            self._return_gradients(layer, counts, gradients)
        if error is not None:
            raise error
        return returned if is_source else None

    def _compute(
        self, kind: _Kind, exchange: _LayerExchange, rows: Sequence[Tensor], served: Mapping[int, Sequence[int]]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The results of this rank's experts for the rows of each rank, and the gradients of their loras."""
        if kind is not _Kind.BACKWARD:
            keeps = kind is _Kind.FORWARD_AND_KEEP
            return {rank: exchange.forward(rank, rows[rank], own, keeps=keeps) for rank, own in served.items()}, {}
        targets = self.lora_gradients(exchange.layer, self._ranges[self._rank])
        before = _flat(targets)
        results, gradients = dict[int, Tensor](), dict[int, Tensor]()
        for rank, own in served.items():
            if rank != self._rank:
                for target in targets:
                    target.zero_()
                results[rank] = exchange.backward(rank, rows[rank], own)
                gradients[rank] = _flat(targets)
        for target, part in zip(targets, _parts(before, targets), strict=True):
            target.copy_(part)
        if self._rank in served:
            results[self._rank] = exchange.backward(self._rank, rows[self._rank], served[self._rank])
        return results, gradients

    def _return_gradients(self, layer: int, sources: Collection[int], gradients: Mapping[int, Tensor]) -> None:
        """Sends the ranks that had rows the gradients of this rank's loras for them, and adds those that come."""
        targets = [self.lora_gradients(layer, owned) for owned in self._ranges]
        sizes = [sum(target.numel() for target in own) for own in targets]
        own_size, has_rows = sizes[self._rank], self._rank in sources
        to = [own_size if rank in sources and rank != self._rank else 0 for rank in range(self._world)]
        back = [size if has_rows and rank != self._rank else 0 for rank, size in enumerate(sizes)]
        sent = [gradients.get(rank, torch.zeros(own_size)) for rank, size in enumerate(to) if size]
        for own, vector in zip(targets, self._send(_flat(sent).unsqueeze(1), to, back, 1), strict=True):
            if len(vector):
                for target, part in zip(own, _parts(vector.view(-1), own), strict=True):
                    target.add_(part)

    def lora_gradients(self, layer: int, experts: range) -> list[Tensor]:
        """The gradients of the pass's lora at some experts of a layer."""
        lora = self.lora
        names = [f"{expert_site(layer, expert)}.{part}" for expert in experts for part in ("gate_up", "down")]
        sites = [] if lora is None else [lora.sites[name] for name in names if name in lora.sites]
        return [matrix.grad for site in sites for matrix in (site.a, *site.bs) if matrix.grad is not None]

    def _send(self, rows: Tensor | None, to: Sequence[int], back: Sequence[int], width: int) -> list[Tensor]:
        """`to` of the rows go to each rank, in order; returns those of each rank, `back` of them."""
        sent = torch.empty(0, width) if rows is None else rows.contiguous()
        received = torch.empty(sum(back), width)
        with self._progress.waiting():
            dist.all_to_all_single(received, sent, list(back), list(to))
        return list(received.split(list(back)))


class _LayerExchange:
    """`ExpertExchange` of one layer, and what this rank's experts of it compute for all ranks."""

    def __init__(self, ranks: ExpertRanks, layer: int, width: int) -> None:
        self._ranks = ranks
        self._server: ExpertServer | None = None
        self._kept: dict[int, Any] = {}  # by the rank whose rows they are of
        self.layer = layer
        self.width = width

    def serve(self, server: ExpertServer) -> None:
        """See `ExpertExchange`."""
        self._server = server

    def run_rows(self, rows: Tensor, counts: Sequence[int], *, keeps: bool) -> Tensor:
        """See `ExpertExchange`."""
        return self._ranks.exchange(_Kind.FORWARD_AND_KEEP if keeps else _Kind.FORWARD, self.layer, counts, rows)

    def gradient_of(self, grads: Tensor, weights: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `ExpertExchange`."""
        sent = torch.cat([grads, weights.unsqueeze(1)], dim=1)
        found = self._ranks.exchange(_Kind.BACKWARD, self.layer, counts, sent)
        return found[:, :-1].contiguous(), found[:, -1].contiguous()

    def forward(self, rank: int, rows: Tensor, counts: Sequence[int], *, keeps: bool) -> Tensor:
        """The results of a rank's rows."""
        assert self._server is not None, "nothing computes the experts"
        results, kept = self._server.run_rows(rows, counts, self._ranks.lora, keeps=keeps)
        if keeps:
            self._kept[rank] = kept
        return results

    def backward(self, rank: int, sent: Tensor, counts: Sequence[int]) -> Tensor:
        """The gradients for a rank's rows and for their routing weights."""
        assert self._server is not None, "nothing computes the experts"
        grads, weights = sent[:, :-1].contiguous(), sent[:, -1].contiguous()
        found = self._server.gradient_of(grads, weights, counts, self._ranks.lora, self._kept.pop(rank))
        return torch.cat([found[0], found[1].unsqueeze(1)], dim=1)

    def forget(self) -> None:
        """Frees what is kept of a pass."""
        self._kept.clear()


def _refuse(reason: str, value: object) -> NoReturn:
    raise InvalidRequestError(
        f"cannot divide a base that {reason}",
        field="expert_parallel",
        value=value,
        remedy="Leave it out; or start fewer ranks, do not set MINT_QUANTIZE, and install a C compiler for the kernels",
    )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0), *(tensor.reshape(-1) for tensor in tensors)])


def _parts(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive parts of a vector, in the shapes of some tensors."""
    parts = vector.split([tensor.numel() for tensor in like]) if like else []
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
