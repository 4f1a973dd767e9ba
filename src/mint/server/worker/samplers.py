"""Runs sample requests: turns each into a `SampleJob`, and keeps the weights they need in the engine.

A sampler's weights never change: they are frozen when published, and their file brings them back after a restart or
when too many others were used since. Used on the worker's thread, except `info`. Knows no queue and no HTTP.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import mint.wire as wire
from mint.engine.protocol import CANCELLED, Engine, LoraSpec, SampleJob, SampleResult, StopRule, TokenTable
from mint.errors import NotFoundError, RequestFailedError
from mint.server.ids import sample_seed, session_of
from mint.server.queue.futures import Answer
from mint.server.store import checkpoints
from mint.server.store.journal import Journal
from mint.server.store.rows import SamplerRow
from mint.server.store.snapshot_files import read_weights
from mint.server.worker import validation
from mint.server.worker.base_models import Bases
from mint.tokenizer import token_bytes
from mint.types import PromptAltTokens, SampledSequence, SampleResponse, SamplingParams, TensorData, TopkLogprobs
from mint.wire.requests import SampleRequest

log = logging.getLogger("mint.sampling")

KEPT_IN_ENGINE = 16
"""Sets of weights that stay in the engine's memory; the others wait in their files."""

KEPT_OF_A_MODEL = 3
"""Of those, published while one model was trained: it samples from the newest, and what the engine keeps of the others
(weights, and keys and values of their prompts) is memory that the next can have."""

KEPT_PUBLISHED = 64
"""Nameless published weights that a session keeps, by last use; older ones are forgotten, file and all."""


@dataclass(frozen=True)
class SampleWork:
    """A sample request that waits."""

    request_id: str
    request: SampleRequest
    arrived_at: float
    on_token: Callable[[int, int, float], None] | None = None
    """Told of each token as it is sampled (sample, token, logprob), on the worker's thread: it must be quick."""
    cancelled: threading.Event | None = None
    """Set by whoever no longer wants the answer; the request fails then, and gives its room to others."""
    weights: SamplerRow | None = None
    """What to sample from, where that is no sampler of a session."""
    told: Counter[int] = field(default_factory=Counter, compare=False)
    """Tokens that `on_token` has had of each sample: where the engine breaks and runs again, none is told twice."""
    owner: str = ""


class Samplers:
    """The sampling side of the worker."""

    def __init__(self, engine: Engine, journal: Journal, bases: Bases, data_dir: Path) -> None:
        self._engine = engine
        self._journal = journal
        self._bases = bases
        self._data_dir = data_dir
        self._rows: dict[str, SamplerRow] = {}
        self._in_engine: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._model_of: dict[str, str] = {}  # published sampler → the model that it was made from
        self._used: OrderedDict[str, None] = OrderedDict()  # published samplers, least recently used first

    def row(self, sampler_id: str) -> SamplerRow:
        """The sampler.

        Raises:
            NotFoundError: there is none of that id (any more).
        """
        row = self._rows.get(sampler_id) or self._journal.sampler(sampler_id)
        if row is None:
            raise NotFoundError(
                "is not a sampler here",
                field="sampling_session_id",
                value=sampler_id,
                remedy="Weights published without a name are kept while they are used; save_weights_for_sampler(name) "
                "keeps them for good",
            )
        self._rows[sampler_id] = row
        return row

    def published(self, row: SamplerRow, model_id: str) -> tuple[str, ...]:
        """Notes weights that training this model has just put into the engine; the files that they push out."""
        self._rows[row.sampler_id] = row
        self._model_of[row.sampler_id] = model_id
        self._touch(row)
        mine = [known for known in self._used if session_of(known) == row.session_id]
        gone = mine[:-KEPT_PUBLISHED]
        files = tuple(self._rows[known].file or "" for known in gone)
        if gone:
            self._journal.drop_samplers(gone)
        for known in gone:
            self._forget(known)
        older = [name for name in self._in_engine if self._model_of.get(name) == model_id][:-KEPT_OF_A_MODEL]
        self._let_go(older)
        self._make_room(keep={row.weights_id or ""})
        return files

    def end_session(self, session_id: str) -> None:
        """Forgets everything that a session has published."""
        for sampler_id in list(self._rows):  # a copy: another thread may be adding rows
            if session_of(sampler_id) == session_id:
                self._forget(sampler_id)

    def withdraw(self, row: SamplerRow) -> None:
        """Takes back weights that were published for nobody; their file is the caller's to remove."""
        self._engine.drop_weights(row.weights_id or "")

    def job(self, work: SampleWork) -> SampleJob:
        """The request as the engine takes it; its weights are in the engine when this returns, and may leave later.

        Raises:
            MintError: the request, its sampler or its weights cannot be used.
        """
        row = work.weights or self.row(work.request.sampling_session_id)
        job = self._job(work.request, row)
        self._bring(row)
        self._make_room(keep={row.weights_id or ""})
        return job

    def _job(self, request: SampleRequest, row: SamplerRow) -> SampleJob:
        """Checks a request against its base model, and fills in what it left open."""
        base = self._bases.load(row.base_model)
        params = request.sampling_params
        max_tokens = validation.check_sample(request, base)
        seed = params.seed if params.seed is not None else sample_seed(row.seed_root, request.seq_id)
        return SampleJob(
            base=base.name,
            weights_id=row.weights_id,
            prompt=request.prompt.to_numpy(),
            num_samples=request.num_samples,
            max_tokens=max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=seed,
            stop=self._stop_rule(params, base.eos_token_ids, row.base_model),
            prompt_logprobs=bool(request.prompt_logprobs),
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            logprobs_mode=params.logprobs_mode,
            topk_sample_logprobs=request.topk_sample_logprobs,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            target_prompt_logprobs=validation.target_pairs(request, base),
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        )

    def _stop_rule(self, params: SamplingParams, eos: tuple[int, ...], base_model: str) -> StopRule:
        """None: the model's own end. A non-empty `stop` adds to it. `[]`: nothing but `stop_token_ids`."""
        extra = frozenset(params.stop_token_ids or ())
        stop = params.stop
        if stop is None:
            return StopRule(frozenset(eos) | extra)
        items = [stop] if isinstance(stop, str) else list(stop)
        ids = frozenset(item for item in items if isinstance(item, int))
        strings = tuple(item.encode() for item in items if isinstance(item, str))
        ends = frozenset(eos) if items else frozenset()
        vocabulary = token_bytes(self._bases.folder(base_model)) if strings else ()
        return StopRule(ids | ends | extra, strings, vocabulary)

    def _bring(self, row: SamplerRow) -> None:
        """Makes sure that the engine holds the sampler's weights."""
        if row.weights_id is None:
            return
        if row.weights_id not in self._in_engine:
            assert row.lora is not None  # whatever has weights of its own has the shape of a lora
            weights = self._read(row)
            self._engine.load_weights(row.weights_id, self._bases.key(row.base_model), LoraSpec(**row.lora), weights)
        self._touch(row)

    def _read(self, row: SamplerRow) -> dict[str, np.ndarray]:
        if row.file is not None:
            return read_weights(self._data_dir / row.file)
        # by its folder, not by its path: the name may have been deleted, or given to another checkpoint, meanwhile
        _, state = checkpoints.evaluate_checkpoint(self._data_dir / (row.weights_id or ""), optimizer=False)
        return dict(state.weights)

    def _touch(self, row: SamplerRow) -> None:
        self._in_engine[row.weights_id or ""] = None
        self._in_engine.move_to_end(row.weights_id or "")
        if row.file is not None:
            self._used[row.sampler_id] = None
            self._used.move_to_end(row.sampler_id)

    def _make_room(self, *, keep: set[str]) -> None:
        idle = [name for name in self._in_engine if name not in keep]
        self._let_go(idle[: max(0, len(self._in_engine) - KEPT_IN_ENGINE)])

    def _let_go(self, names: Sequence[str]) -> None:
        for weights_id in names:
            self._engine.drop_weights(weights_id)
            del self._in_engine[weights_id]

    def _forget(self, sampler_id: str) -> None:
        row = self._rows.pop(sampler_id)
        self._used.pop(sampler_id, None)
        self._model_of.pop(sampler_id, None)
        if row.file is not None and row.weights_id in self._in_engine:
            self._let_go([row.weights_id])


def answer_of(request: SampleRequest, result: SampleResult) -> Answer:
    """What the request is told of its result."""
    if result.error == CANCELLED:
        return Answer(wire.encode_error(RequestFailedError("The request was cancelled")), failed=True)
    if result.error is not None:
        return Answer(wire.encode_error(RequestFailedError(result.error)), failed=True)
    return Answer(wire.encode_result(_response(request, result)))


def _response(request: SampleRequest, result: SampleResult) -> SampleResponse:
    draws = result.prompt_alt_tokens
    return SampleResponse(
        [
            SampledSequence(
                sample.tokens, sample.logprobs, "stop" if sample.stopped else "length", _matrices(sample.topk)
            )
            for sample in result.samples
        ],
        prompt_logprobs=result.prompt_logprobs if request.prompt_logprobs else None,
        topk_prompt_logprobs=result.topk_prompt_logprobs,
        target_prompt_logprobs=_in_layout(request.target_prompt_logprobs, result.target_prompt_logprobs),
        prompt_alt_tokens=None
        if draws is None
        else PromptAltTokens(
            tokens=TensorData.from_numpy(draws.tokens), logprobs=TensorData.from_numpy(draws.logprobs)
        ),
    )


def _matrices(table: TokenTable | None) -> TopkLogprobs | None:
    return None if table is None else TopkLogprobs(table.tokens, table.logprobs)


def _in_layout(asked: TensorData | None, logprobs: np.ndarray | None) -> TensorData | None:
    """The logprobs of the cells that named a token, where `asked` has them; 0 in those that did not."""
    if asked is None or logprobs is None:
        return None
    cells = np.zeros(len(asked.values), np.float32)
    cells[asked.values != validation.UNASKED] = logprobs
    return asked.with_values(cells, "float32")
