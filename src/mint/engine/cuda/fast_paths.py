"""The fast paths of a GPU, each beside plain operations of torch, on random inputs of a model's shapes.

`self_check` runs them. Sizes of rows are those at which kernels go wrong: one row, a tile, and one row more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.cuda.attention import FlexPackedAttention
from mint.engine.cuda.capture import capture
from mint.engine.cuda.graph_step import FIRST_PAGE, SPLIT_PAGES, StepContext, StepKernels
from mint.engine.cuda.grouped_experts import ExpertsProduct, StackedLora, tile_pairs, trained_tile_rows
from mint.engine.cuda.guarded_memory import GuardedMemory
from mint.engine.cuda.invariant_operations import InvariantPackedAttention, RowKernels
from mint.engine.cuda.lora_slots import TILE_ROWS, LoraPart
from mint.engine.cuda.operations import TrainingPasses, WideUnembedding
from mint.engine.cuda.plain_kernels import PlainKernels
from mint.engine.cuda.self_check import FastPath, PathSource, rounding_limit
from mint.engine.drawing.device_draw import RULES, draw_rows
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.config import DecoderConfig
from mint.engine.model.linear import DenseMatrix, Float32Product
from mint.engine.model.operations import Attention
from mint.engine.model.packed_attention import PackedAttention
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.model.weights import AttentionWeights
from mint.engine.optimizer import AdamState, step_adam
from mint.engine.packing import Span, attention_blocks
from mint.engine.protocol import AdamSpec
from mint.engine.quantized.number_formats import Quantization, QuantizedWeight, codes_per_word, keep_mxfp4, quantize
from mint.engine.quantized.quantized_matrix import Widen, widen_by_torch
from mint.engine.sampling.kv_cache import side_by_side

FLEX, TRITON, CAPTURE, OPTIMIZER = "FlexAttention", "Triton kernels", "captured steps", "fused optimizer"
EXPERTS, FUSED, INVARIANT = "grouped experts", "fused passes", "batch-invariant kernels"
CAPTURED_EXPERTS, LOGITS, QUANTIZED = "captured experts", "logits of bfloat16 products", "quantized matrices"
NAMES = (LOGITS, FLEX, TRITON, FUSED, CAPTURE, EXPERTS, CAPTURED_EXPERTS, QUANTIZED, OPTIMIZER, INVARIANT)
TRAINED = (LOGITS, FLEX, FUSED, EXPERTS, OPTIMIZER)
"""The paths of training, on which its last bits depend. Quantized matrices have the same bits in both ways."""

SETTING = {
    LOGITS: "logits",
    FLEX: "flex",
    TRITON: "triton",
    FUSED: "fused",
    CAPTURE: "capture",
    EXPERTS: "experts",
    CAPTURED_EXPERTS: "captured-experts",
    QUANTIZED: "quantized",
    OPTIMIZER: "optimizer",
}
"""How `MINT_GPU_OFF` names a path."""

TRITONS = (TRITON, FUSED, CAPTURE, CAPTURED_EXPERTS, QUANTIZED, INVARIANT)
"""The paths that need Triton."""

RANK, WIDE_RANK = 16, 144
"""Of a lora; the second is more than a kernel adds at a time, and no multiple of that."""

SLOTS = 3
"""The lora of each tile of rows: the first tile has the last lora, the next has none, the third has the first lora."""

SUMS = 3
"""Parts of a lora's first half, which the second half adds up."""

QUANTIZED_ROWS, EDGE_INPUTS = 130, 1088
"""Rows of the matrices that are widened, and inputs that two programs widen: 1,024 of them, and the rest."""

VOCABULARY = 4099
"""Of the draw: no multiple of anything."""

ROWS = (1, 64, 65)
SPLIT = SPLIT_PAGES * PAGE_POSITIONS
LENGTHS = (1, PAGE_POSITIONS, PAGE_POSITIONS + 1, SPLIT, SPLIT + PAGE_POSITIONS - 1)
"""Keys of decoded rows."""

WITH_LORA = ("shrink", "heads", "swiglu", "add")
"""Kernels of a lora's product."""

SPANS = {
    "257 rows": [Span(0, 257)],
    "300 rows with a shared prefix": [Span(0, 100), Span(100, 170, (0, 100)), Span(170, 230, (0, 100)), Span(230, 300)],
    "5 rows and others": [Span(0, 5), Span(5, 389)],
}
"""Padded to one size, because torch compiles for seconds at each."""

ROW = 4
BATCHES = ([3, ROW], [ROW, 3], list(range(17)), list(reversed(range(70))))
"""A row, and batches in which it must have the bits that it has alone."""

KERNEL_ROUNDINGS = {"norm": 1, "shrink": 0, "heads": 1, "attend": 2, "swiglu": 1, "add": 0}
"""To the dtype of the base, within a kernel of a step: of its result, and in attention of the weights."""

ATTENTION_ROUNDINGS = 6
"""In attention and its gradient: of the weights, the result and the scores' gradient, each once in both directions."""

LAYER_ROUNDINGS = 4
"""Gate, up, the activated gate, and their product."""

TRAINED_ROUNDINGS = 2
"""Of a product's result, or of the gradient before and after the product with it."""

OPTIMIZER_ERROR = 1e-5
"""Two steps of AdamW are some 40 float32 operations on each number, of 2^-23 each in two ways."""


@dataclass(frozen=True)
class Shapes:
    """The widths that decide how kernels are compiled; `dtype` and `device` as torch names them."""

    hidden: int
    inner: int
    query_heads: int
    kv_heads: int
    head_dim: int
    side_by_side: int
    eps: float
    biased: bool
    normed: bool
    dtype: str
    device: str
    names: tuple[str, ...] = NAMES
    experts: int = 64
    experts_of_row: int = 4
    expert_inner: int = 256

    @classmethod
    def of(cls, config: DecoderConfig | None, dtype: torch.dtype, device: str, names: Sequence[str]) -> Shapes:
        """Those of a base model; `names` are the paths that it would take. Without a `config`, any."""
        own_dtype = str(dtype).removeprefix("torch.")
        if config is None:
            return cls.usual(own_dtype, device, names)
        mixture = config.experts_of(config.num_hidden_layers - 1)
        own = (
            {}
            if mixture is None
            else {
                "experts": mixture.count,
                "experts_of_row": mixture.per_token,
                "expert_inner": mixture.intermediate_size,
            }
        )
        return cls(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            side_by_side=side_by_side(config),
            eps=config.rms_norm_eps,
            biased=config.family.qkv_bias,
            normed=config.family.head_norms,
            dtype=own_dtype,
            device=device,
            names=tuple(names),
            **own,
        )

    @classmethod
    def usual(cls, dtype: str, device: str, names: Sequence[str]) -> Shapes:
        """Those of Qwen3-0.6B."""
        return cls(1024, 3072, 16, 8, 128, 1, 1e-6, True, True, dtype=dtype, device=device, names=tuple(names))

    @property
    def source(self) -> PathSource:
        """Where a process of the self-check finds the paths."""
        return PathSource(__name__, "paths", asdict(self))


def paths(argument: dict[str, Any]) -> Iterator[FastPath]:
    """The paths of `Shapes` that came as JSON."""
    shapes = replace(Shapes(**argument), names=tuple(argument["names"]))
    if LOGITS in shapes.names:
        yield from _logits(shapes)
    if FLEX in shapes.names:
        yield from _attention(shapes)
    if TRITON in shapes.names:
        # Only CUDA builds of torch bring Triton with them.
        from mint.engine.cuda.kernels import TritonKernels

        yield from step_kernel_paths(shapes, TritonKernels(), ROWS)
    if FUSED in shapes.names:
        from mint.engine.cuda.fused_passes import FusedPasses

        yield from fused_paths(shapes, FusedPasses(), ROWS)
    if CAPTURE in shapes.names:
        from mint.engine.cuda.kernels import TritonKernels

        yield from _captured(shapes, TritonKernels())
    if INVARIANT in shapes.names:
        from mint.engine.cuda.fused_passes import FusedPasses
        from mint.engine.cuda.invariant_kernels import InvariantKernels

        kernels = InvariantKernels()
        yield from invariant_paths(shapes, kernels, ROWS)
        yield from company_paths(shapes, kernels, kernels, FusedPasses())
    if EXPERTS in shapes.names:
        yield from _experts(shapes)
    if CAPTURED_EXPERTS in shapes.names:
        yield from _captured_experts(shapes)
    if QUANTIZED in shapes.names:
        from mint.engine.quantized.triton_widening import widen_matrix

        yield from quantized_paths(shapes, widen_matrix)
    if OPTIMIZER in shapes.names:
        yield from _optimizer(shapes)


def _random(shapes: Shapes, *shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(shapes.device, dtype or torch.float32)


def _dtype(shapes: Shapes) -> torch.dtype:
    found: torch.dtype = getattr(torch, shapes.dtype)
    return found


def _attention(shapes: Shapes) -> Iterator[FastPath]:
    """Forward and gradient of packed rows, and the forward of prefill, which torch compiles apart. The masks are made
    by the first run, as by the first layer of a pass."""
    dtype, device = _dtype(shapes), torch.device(shapes.device)
    total = shapes.query_heads + 2 * shapes.kv_heads

    def ways(
        spans: list[Span], run: Callable[[Attention, list[Span]], list[Tensor]]
    ) -> list[Callable[[], list[Tensor]]]:
        sizes = attention_blocks(spans), shapes.query_heads, shapes.kv_heads, device
        made = [cache(partial(kind, *sizes)) for kind in (FlexPackedAttention, PackedAttention)]
        return [lambda own=own: run(own(), spans) for own in made]

    def heads_of(spans: list[Span]) -> Tensor:
        return _random(shapes, spans[-1].stop, total, shapes.head_dim, seed=1, dtype=dtype)

    def train(attention: Attention, spans: list[Span]) -> list[Tensor]:
        heads = heads_of(spans).requires_grad_()
        out = attention(0, heads, None)
        out.backward(_random(shapes, *out.shape, seed=2, dtype=dtype))
        return [out.detach(), *([] if heads.grad is None else [heads.grad])]

    def prefill(attention: Attention, spans: list[Span]) -> list[Tensor]:
        with torch.inference_mode():
            return [attention(0, heads_of(spans), None).clone()]

    for case, spans in SPANS.items():
        for words, run in (("", train), (", without a gradient", prefill)):
            terms = spans[-1].stop + shapes.head_dim
            limit = rounding_limit(dtype, terms=terms, roundings=ATTENTION_ROUNDINGS, tf32=True)
            fast, plain = ways(spans, run)
            yield FastPath(FLEX, case + words, fast, plain, limit)


def _logits(shapes: Shapes) -> Iterator[FastPath]:
    """The unembedding in bfloat16, whose sums are not rounded."""
    weight = _random(shapes, VOCABULARY, shapes.hidden, seed=1, dtype=torch.bfloat16) / math.sqrt(shapes.hidden)
    for count in ROWS:
        x = _random(shapes, count, shapes.hidden, seed=2, dtype=torch.bfloat16).float()
        fast, plain = (
            lambda own=own, x=x: [own.product(x)] for own in (WideUnembedding(weight), Float32Product(weight))
        )
        limit = rounding_limit(torch.float32, terms=shapes.hidden, tf32=True)
        yield FastPath(LOGITS, f"{count} rows", fast, plain, limit)


def step_kernel_paths(shapes: Shapes, kernels: StepKernels, counts: Sequence[int]) -> Iterator[FastPath]:
    """Each kernel of a captured step for `counts` of rows, in guarded memory; with several ranks of a lora, and without
    one, for the last of them: Triton compiles each anew."""
    dtype = _dtype(shapes)
    plain = PlainKernels()
    terms = dict.fromkeys(("norm", "shrink"), shapes.hidden) | {
        "heads": shapes.head_dim,
        "attend": shapes.head_dim + max(LENGTHS),
        "swiglu": 1,
        "add": 1,
    }
    for count in counts:
        ranks = (0, RANK, WIDE_RANK) if count == counts[-1] else (RANK,)
        for rank in ranks:
            for name, run in _kernel_runs(shapes, count, rank).items():
                has_lora = name in WITH_LORA
                if (name == "shrink" and not rank) or (not has_lora and rank != ranks[0]):
                    continue
                ways = partial(_guarded, run, kernels), partial(_guarded, run, plain)
                limit = rounding_limit(dtype, terms=terms[name] + rank, roundings=KERNEL_ROUNDINGS[name])
                case = f"{name}, {count} rows" + (f", rank {rank}" if has_lora else "")
                yield FastPath(TRITON, case, *ways, limit)


def quantized_paths(shapes: Shapes, widen: Widen) -> Iterator[FastPath]:
    """Matrices of each number format with inputs of the model's widths, and with more than a program widens, in guarded
    memory, to the dtype of the base and to float32, as the unembedding. Both ways round the same products of a code's
    value and its scale, so their bits are the same."""
    for inputs in dict.fromkeys((shapes.hidden, shapes.inner, EDGE_INPUTS)):
        for kind, matrix in _quantized(shapes, inputs).items():
            if matrix is None:
                continue
            run = partial(_widened, matrix, dict.fromkeys((_dtype(shapes), torch.float32)))
            ways = partial(_guarded, run, widen), partial(_guarded, run, widen_by_torch)
            yield FastPath(QUANTIZED, f"{kind}, {inputs} inputs", *ways, 0.0)


def _quantized(shapes: Shapes, inputs: int) -> dict[Quantization, QuantizedWeight | None]:
    """A matrix of each format; None where so many inputs do not fit it. MXFP4 has random codes, and a random scale for
    each word of them."""
    weight = _random(shapes, QUANTIZED_ROWS, inputs, seed=2)
    kinds: tuple[Quantization, ...] = ("nf4", "int8", "fp8")
    found: dict[Quantization, QuantizedWeight | None] = {kind: quantize(weight, kind) for kind in kinds}
    generator = torch.Generator().manual_seed(1)
    words = inputs // codes_per_word("mxfp4")
    codes = torch.randint(256, (QUANTIZED_ROWS, 4 * words), generator=generator, dtype=torch.uint8)
    scales = torch.randint(-8, 1, (QUANTIZED_ROWS, words), generator=generator).float().exp2()
    found["mxfp4"] = keep_mxfp4(codes.to(shapes.device), scales.to(shapes.device))
    return found


def _widened(weight: QuantizedWeight, dtypes: Iterable[torch.dtype], widen: Widen) -> list[Tensor]:
    return [widen(weight, dtype) for dtype in dtypes]


def fused_paths(shapes: Shapes, fused: TrainingPasses, counts: Sequence[int]) -> Iterator[FastPath]:
    """Each fused pass of a training step for `counts` of rows, in guarded memory."""
    plain = TorchOperations(_dtype(shapes), torch.device(shapes.device))
    weight = _random(shapes, shapes.hidden, seed=1)
    for count in counts:
        x, grad, residual = (_random(shapes, count, shapes.hidden, seed=seed) for seed in (2, 3, 4))
        inverse = plain.rms_norm(x, weight, shapes.eps)[1]
        inner_grad = _random(shapes, count, shapes.inner, seed=5)
        wide = _random(shapes, count, 2 * shapes.inner, seed=6)
        runs: dict[str, Callable[[TrainingPasses], list[Tensor]]] = {
            "norm": lambda own, x=x, r=residual: [
                *own.rms_norm(x, weight, shapes.eps),
                *own.rms_norm(x, weight, shapes.eps, r),
            ],
            # torch's overwrites its gradient
            "norm's gradient": lambda own, x=x, g=grad, i=inverse, r=residual: [
                own.rms_norm_backward(g.clone(), x, i, weight),
                own.rms_norm_backward(g.clone(), x, i, weight, r),
            ],
            "swiglu": lambda own, w=wide: [own.swiglu(w)],
            "swiglu's gradient": lambda own, g=inner_grad, w=wide: [own.swiglu_backward(g.clone(), w)],
        }
        for name, run in runs.items():
            ways = partial(_guarded, run, fused), partial(_guarded, run, plain)
            yield FastPath(FUSED, f"{name}, {count} rows", *ways, rounding_limit(torch.float32, terms=shapes.hidden))
        for name, own in _head_runs(shapes, count).items():
            ways = partial(_guarded, own, fused), partial(_guarded, own, None)
            limit = rounding_limit(_dtype(shapes), terms=2 * shapes.head_dim)
            yield FastPath(FUSED, f"{name}, {count} rows", *ways, limit)


def _head_runs(shapes: Shapes, count: int) -> dict[str, Callable[[TrainingPasses | None], list[Tensor]]]:
    """The heads of attention and their gradient, by fused passes, or by plain operations where there are none."""
    plain, dtype = TorchOperations(_dtype(shapes), torch.device(shapes.device)), _dtype(shapes)
    rotated, dim = shapes.query_heads + shapes.kv_heads, shapes.head_dim
    qkv, width = _random(shapes, count, rotated + shapes.kv_heads, dim, seed=7), (rotated + shapes.kv_heads) * dim
    weights = _attention_weights(shapes, width)
    bias, norms = weights.qkv_bias, weights.head_norms
    angles = _random(shapes, count, 1, dim // 2, seed=8)
    cos, sin = angles.cos(), angles.sin()
    grad = _random(shapes, *qkv.shape, seed=9, dtype=dtype)
    of_heads = None if norms is None else plain.head_inverse_rms(qkv[:, :rotated], shapes.eps, 0)

    def heads(own: TrainingPasses | None) -> list[Tensor]:
        product = qkv.clone()  # the bias is added in place
        if own is None:
            found = plain.finish_heads(product, bias, norms, cos, sin, eps=shapes.eps, rotated_heads=rotated)
        else:
            found = own.finish_heads(product, bias, norms, cos, sin, eps=shapes.eps, rotated_heads=rotated, dtype=dtype)
        return [part for part in (*found, product) if part is not None]

    def gradient(own: TrainingPasses | None) -> list[Tensor]:
        chosen = plain if own is None else own
        return [chosen.finish_heads_backward(grad, qkv, of_heads, norms, cos, sin, rotated_heads=rotated)]

    return {"heads": heads, "heads' gradient": gradient}


def invariant_paths(
    shapes: Shapes, kernels: RowKernels, counts: Sequence[int], layouts: Mapping[str, list[Span]] = SPANS
) -> Iterator[FastPath]:
    """The batch-invariant product for `counts` of rows, and attention in `layouts`, in guarded memory. Who asks for the
    same bits in any batch accepts what they cost, so times are not judged."""
    dtype = _dtype(shapes)
    weight = _random(shapes, shapes.inner, shapes.hidden, seed=1, dtype=dtype) / math.sqrt(shapes.hidden)
    for count in counts:
        x = _random(shapes, count, shapes.hidden, seed=2, dtype=dtype)
        for rounded in {dtype, torch.float32}:
            ways = (
                partial(_guarded, lambda own, x=x, r=rounded: [own.product(x, weight, r)], kernels),
                lambda x=x, r=rounded: [F.linear(x.float(), weight.float()).to(r), torch.tensor(0)],
            )
            limit = rounding_limit(rounded, terms=shapes.hidden)
            yield FastPath(INVARIANT, f"product to {rounded}, {count} rows", *ways, limit, is_timed=False)
    for case, spans in layouts.items():
        heads = _heads_of(shapes, spans[-1].stop)
        ways = (
            partial(_guarded, partial(_attended, shapes, spans, heads), kernels),
            lambda spans=spans, heads=heads: [*_attended(shapes, spans, heads, None), torch.tensor(0)],
        )
        limit = rounding_limit(dtype, terms=spans[-1].stop + shapes.head_dim, roundings=2)
        yield FastPath(INVARIANT, f"attention, {case}", *ways, limit, is_timed=False)


def company_paths(shapes: Shapes, kernels: RowKernels, steps: StepKernels, fused: TrainingPasses) -> Iterator[FastPath]:
    """Each kernel of the batch-invariant mode on a row in several batches, and on the row alone: the same bits."""
    dtype, most = _dtype(shapes), max(map(len, BATCHES))
    weight = _random(shapes, shapes.inner, shapes.hidden, seed=1, dtype=dtype)
    x = _random(shapes, most, shapes.hidden, seed=2)
    wide = _random(shapes, most, 2 * shapes.inner, seed=3)
    queries = _random(shapes, most, shapes.query_heads, shapes.head_dim, seed=4, dtype=dtype)
    norm = _random(shapes, shapes.hidden, seed=5)
    rows = _context(shapes, most)
    planes = _page_contents(shapes, rows.inputs[FIRST_PAGE:].numel())
    runs: dict[str, Callable[[list[int]], Tensor]] = {
        "product": lambda own: kernels.product(x[own].to(dtype), weight, torch.float32),
        "norm of a step": lambda own: steps.norm(x[own], norm, shapes.eps, dtype)[0],
        "swiglu of a step": lambda own: steps.swiglu(wide[own].to(dtype), None)[0],
        "attention of a step": lambda own: steps.attend(
            queries[own], replace(rows, inputs=rows.inputs[:, own].contiguous()), *planes
        )[0],
        "norm": lambda own: fused.rms_norm(x[own], norm, shapes.eps)[0],
        "swiglu": lambda own: fused.swiglu(wide[own]),
        "heads": lambda own: _fused_heads(shapes, fused, own, most),
    }
    for name, run in runs.items():
        batches = BATCHES[:2] if run is runs["attention of a step"] else BATCHES
        yield FastPath(
            INVARIANT,
            f"{name} in company",
            lambda run=run, batches=batches: [run(own)[own.index(ROW)] for own in batches],
            lambda run=run, batches=batches: [run([ROW])[0] for _ in batches],
            tolerance=0,
            is_timed=False,
        )
    ways = _attention_in_company(shapes, kernels)
    yield FastPath(INVARIANT, "attention in company", *ways, tolerance=0, is_timed=False)


def _fused_heads(shapes: Shapes, fused: TrainingPasses, own: list[int], most: int) -> Tensor:
    """The rows `own` of heads [most, H, D] for attention."""
    rotated = shapes.query_heads + shapes.kv_heads
    weights = _attention_weights(shapes, (rotated + shapes.kv_heads) * shapes.head_dim)
    angles = _random(shapes, most, 1, shapes.head_dim // 2, seed=6)[own]
    qkv = _random(shapes, most, rotated + shapes.kv_heads, shapes.head_dim, seed=7)[own]
    norms, turns = (weights.qkv_bias, weights.head_norms), (angles.cos(), angles.sin())
    return fused.finish_heads(qkv, *norms, *turns, eps=shapes.eps, rotated_heads=rotated, dtype=_dtype(shapes))[0]


def _attention_in_company(
    shapes: Shapes, kernels: RowKernels
) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    """The last rows of a sequence behind another one, and behind rows that are read from the cache; and alone."""
    heads = _heads_of(shapes, 71)
    own, last = heads[5:], slice(60, 66)

    def together() -> list[Tensor]:
        behind = _attended(shapes, [Span(0, 5), Span(5, 71)], heads, kernels)[0][5:]
        cached = _attended(shapes, [Span(60, 66, (0, 60))], own, kernels)[0]
        return [behind[last], cached]

    def alone() -> list[Tensor]:
        return [_attended(shapes, [Span(0, 66)], own, kernels)[0][last] for _ in range(2)]

    return together, alone


def _heads_of(shapes: Shapes, count: int) -> Tensor:
    total = shapes.query_heads + 2 * shapes.kv_heads
    return _random(shapes, count, total, shapes.head_dim, seed=1, dtype=_dtype(shapes))


def _attended(shapes: Shapes, spans: list[Span], heads: Tensor, kernels: RowKernels | None) -> list[Tensor]:
    """By the batch-invariant kernels, or by plain operations where there are none."""
    sizes = attention_blocks(spans), shapes.query_heads, shapes.kv_heads, torch.device(shapes.device)
    if kernels is None:
        return [PackedAttention(*sizes)(0, heads)]
    return [InvariantPackedAttention(*sizes, kernels, PackedAttention)(0, heads)]


def _guarded(run: Callable[[Any], list[Tensor]], kernels: object) -> list[Tensor]:
    """The results, and how many numbers were written out of bounds."""
    with GuardedMemory() as memory:
        found = run(kernels)
    return [*found, memory.overwritten()]


def _kernel_runs(shapes: Shapes, count: int, rank: int) -> dict[str, Callable[[StepKernels], list[Tensor]]]:
    """Results of each kernel; of those that write into pages, all pages."""
    dtype = _dtype(shapes)
    rows = _context(shapes, count)
    contents = _page_contents(shapes, rows.inputs[FIRST_PAGE:].numel())
    width = (shapes.query_heads + 2 * shapes.kv_heads) * shapes.head_dim
    x = _random(shapes, count, shapes.hidden, seed=1)
    real = rows.inputs[1] >= 0

    def lora(parts: int, outputs: int) -> LoraPart | None:
        if not rank:
            return None
        down, bs = _random(shapes, SUMS, count, parts * rank, seed=5), _random(shapes, SLOTS, outputs, rank, seed=6)
        return LoraPart(down, bs, torch.linspace(0.5, 1.0, SLOTS, device=shapes.device) / rank, rows.slots)

    def shrink(kernels: StepKernels) -> list[Tensor]:
        a = _random(shapes, SLOTS, 3 * rank, shapes.hidden, seed=15) / math.sqrt(shapes.hidden)
        return [kernels.shrink(x, a, rows.slots).sum(0)]

    def norm(kernels: StepKernels) -> list[Tensor]:
        return list(kernels.norm(x, _random(shapes, shapes.hidden, seed=2), shapes.eps, dtype))

    def heads(kernels: StepKernels) -> list[Tensor]:
        planes = _copies(contents)
        product = _random(shapes, count, width, seed=3, dtype=dtype)
        queries = kernels.heads(product, lora(3, width), _attention_weights(shapes, width), rows, *planes)
        return [queries[real], *planes]

    def attend(kernels: StepKernels) -> list[Tensor]:
        queries = _random(shapes, count, shapes.query_heads, shapes.head_dim, seed=4, dtype=dtype)
        return [found[real] for found in kernels.attend(queries, rows, *_copies(contents))]

    def swiglu(kernels: StepKernels) -> list[Tensor]:
        product = _random(shapes, count, 2 * shapes.inner, seed=7, dtype=dtype)
        return list(kernels.swiglu(product, lora(2, 2 * shapes.inner)))

    def add(kernels: StepKernels) -> list[Tensor]:
        product = _random(shapes, count, shapes.hidden, seed=8, dtype=dtype)
        return [kernels.add(product, x, lora(1, shapes.hidden))]

    return {"norm": norm, "shrink": shrink, "heads": heads, "attend": attend, "swiglu": swiglu, "add": add}


def _context(shapes: Shapes, count: int) -> StepContext:
    """Rows of several lengths, in pages of their own in mixed order; where there are several, the last is padding."""
    lengths = torch.tensor([LENGTHS[row % len(LENGTHS)] for row in range(count)])
    if count > 1:
        lengths[-1] = 0
    columns = -(-max(LENGTHS) // PAGE_POSITIONS)
    table = torch.randperm(count * columns, generator=torch.Generator().manual_seed(9)).view(columns, count)
    slots = torch.tensor([SLOTS - 1, -1, *range(SLOTS - 1)])[torch.arange(count) // TILE_ROWS % (SLOTS + 1)]
    inputs = torch.stack([torch.zeros(count), lengths - 1, slots, *table]).int().to(shapes.device)
    angles = _random(shapes, max(LENGTHS) + 1, shapes.head_dim // 2, seed=10)
    splits = 1 << (math.ceil(columns / SPLIT_PAGES) - 1).bit_length()
    heads = shapes.query_heads, shapes.kv_heads, shapes.head_dim, shapes.side_by_side
    return StepContext(inputs, angles.cos(), angles.sin(), *heads, eps=shapes.eps, splits=splits)


@lru_cache(maxsize=2)
def _page_contents(shapes: Shapes, pages: int) -> tuple[Tensor, Tensor]:
    """Keys and values. They are most of the random numbers, and drawing them takes longer than the kernels."""
    shape = (pages, shapes.kv_heads // shapes.side_by_side, PAGE_POSITIONS, shapes.side_by_side * shapes.head_dim)
    keys, values = (_random(shapes, *shape, seed=seed, dtype=_dtype(shapes)) for seed in (11, 12))
    return keys, values


def _copies(contents: Sequence[Tensor]) -> list[Tensor]:
    """Made empty first, which gives them guards."""
    return [torch.empty(own.shape, dtype=own.dtype, device=own.device).copy_(own) for own in contents]


def _attention_weights(shapes: Shapes, width: int) -> AttentionWeights:
    empty = DenseMatrix(torch.zeros(1, 1, device=shapes.device))
    normed = shapes.query_heads + shapes.kv_heads, shapes.head_dim
    return AttentionWeights(
        qkv=empty,
        qkv_bias=_random(shapes, width, seed=13) if shapes.biased else None,
        head_norms=_random(shapes, *normed, seed=14) if shapes.normed else None,
        o=empty,
        sinks=None,
    )


def _captured(shapes: Shapes, kernels: StepKernels) -> Iterator[FastPath]:
    """A layer of these kernels, and a draw, captured as a step is, and replayed on other contents of their inputs."""
    dtype = _dtype(shapes)
    weight = _random(shapes, 2 * shapes.inner, shapes.hidden, seed=1, dtype=dtype) / math.sqrt(shapes.hidden)
    norm = _random(shapes, shapes.hidden, seed=4)

    def layer(own: StepKernels, x: Tensor) -> Tensor:
        narrow = own.norm(x, norm, shapes.eps, dtype)[1]
        return own.swiglu(own.linear(narrow, weight), None)[0]

    batches = [_random(shapes, 64, shapes.hidden, seed=seed) for seed in (2, 3)]
    limit = rounding_limit(dtype, terms=shapes.hidden, roundings=LAYER_ROUNDINGS)
    fast, plain = _replays(partial(layer, kernels), batches, partial(layer, PlainKernels()))
    yield FastPath(CAPTURE, "two replays", fast, plain, limit)
    rules = torch.ones(RULES, 64, dtype=torch.float64)
    rules[0] = torch.rand(64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rules[2, ::2], rules[3, ::3] = 5, 0.8
    placed = rules.to(shapes.device)
    logits = [_random(shapes, 64, VOCABULARY, seed=seed) for seed in (5, 6)]
    ways = _replays(lambda own: draw_rows(own, placed, is_restricted=True), logits)
    yield FastPath(CAPTURE, "draw", *ways, tolerance=0)


def _captured_experts(shapes: Shapes) -> Iterator[FastPath]:
    """A grouped product in a graph. On GPUs for which torch has no kernel for it, it reads sizes back, which cannot be
    captured."""
    dtype = _dtype(shapes)
    weight = _random(shapes, shapes.experts, 2 * shapes.expert_inner, shapes.hidden, seed=1, dtype=dtype)
    weight /= math.sqrt(shapes.hidden)
    chosen = _random(shapes, 64, shapes.experts, seed=3).topk(shapes.experts_of_row).indices

    def layer(x: Tensor) -> Tensor:
        pairs = tile_pairs(chosen, shapes.experts)
        wide = x.new_zeros(len(pairs.experts), x.shape[1])
        wide.index_copy_(0, pairs.places.reshape(-1), x.repeat_interleave(shapes.experts_of_row, dim=0))
        return F.grouped_mm(wide, weight.mT, offs=pairs.ends)[pairs.places]

    batches = [_random(shapes, 64, shapes.hidden, seed=seed, dtype=dtype) for seed in (2, 4)]
    limit = rounding_limit(dtype, terms=shapes.hidden)
    yield FastPath(CAPTURED_EXPERTS, "two replays", *_replays(layer, batches), limit)


def _replays(
    function: Callable[[Tensor], Tensor],
    batches: Sequence[Tensor],
    plain: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    """`function` of each batch by a graph, and `plain` (None: the same) without one."""
    held = batches[0].clone()
    uncaptured = plain or function

    @cache
    def captured() -> tuple[torch.cuda.CUDAGraph, Tensor]:
        return capture(lambda: function(held), pool=torch.cuda.graph_pool_handle())

    def replayed() -> list[Tensor]:
        graph, out = captured()
        found = []
        for x in batches:
            held.copy_(x)
            graph.replay()
            found.append(out.clone())
        return found

    return replayed, lambda: [uncaptured(x) for x in batches]


def _experts(shapes: Shapes) -> Iterator[FastPath]:
    """Grouped products of rows that lie in tiles by expert, of whom many have no row."""
    dtype = _dtype(shapes)
    weight = _random(shapes, shapes.experts, 2 * shapes.expert_inner, shapes.hidden, seed=1, dtype=dtype)
    for count in ROWS:
        x = _random(shapes, count, shapes.hidden, seed=2, dtype=dtype)
        chosen = _random(shapes, count, shapes.experts, seed=3).topk(shapes.experts_of_row).indices

        def grouped(x: Tensor = x, chosen: Tensor = chosen) -> list[Tensor]:
            pairs = tile_pairs(chosen, shapes.experts)
            wide = x.new_zeros(len(pairs.experts), x.shape[1])
            wide.index_copy_(0, pairs.places.reshape(-1), x.repeat_interleave(shapes.experts_of_row, dim=0))
            return [F.grouped_mm(wide, weight.mT, offs=pairs.ends)[pairs.places]]

        def looped(x: Tensor = x, chosen: Tensor = chosen) -> list[Tensor]:
            out = x.new_zeros(*chosen.shape, weight.shape[1])
            for row, choice in enumerate(chosen.tolist()):
                for place, expert in enumerate(choice):
                    out[row, place] = weight[expert] @ x[row]
            return [out]

        limit = rounding_limit(dtype, terms=shapes.hidden)
        yield FastPath(EXPERTS, f"{count} rows", grouped, looped, limit)
        ways = partial(_trained_together, shapes, weight, chosen), partial(_trained_one_by_one, shapes, weight, chosen)
        terms = shapes.hidden + 2 * shapes.expert_inner + chosen.numel()
        limit = rounding_limit(dtype, terms=terms, roundings=TRAINED_ROUNDINGS)
        yield FastPath(EXPERTS, f"{count} rows with a gradient", *ways, limit)


def _expert_lora(shapes: Shapes) -> tuple[Tensor, Tensor]:
    """A lora on the gate and up of all experts: A [N, 2R, E] and B [N, 2I, R]."""
    a = _random(shapes, shapes.experts, 2 * RANK, shapes.hidden, seed=4) / math.sqrt(shapes.hidden)
    return a, _random(shapes, shapes.experts, 2 * shapes.expert_inner, RANK, seed=5)


def _lora_parts(shapes: Shapes) -> list[tuple[slice, slice]]:
    """Ranks and outputs of gate and of up."""
    inner = shapes.expert_inner
    return [(slice(RANK), slice(inner)), (slice(RANK, 2 * RANK), slice(inner, 2 * inner))]


def _trained_together(shapes: Shapes, weight: Tensor, chosen: Tensor) -> list[Tensor]:
    """The product [T, K, 2I] of the rows' experts, and the gradients of the rows, A and B, by grouped products."""
    rows, width = trained_tile_rows(chosen.numel(), shapes.experts), weight.shape[1]
    pairs = tile_pairs(chosen, shapes.experts, rows)
    pairs.ends[-1:] = len(pairs.experts)  # as in a pass: the last expert takes the tiles of nobody
    experts = pairs.experts[::rows].long()
    a, b = _expert_lora(shapes)
    gradients = torch.zeros_like(a), torch.zeros_like(b)
    lora = StackedLora(a, b, *gradients, _lora_parts(shapes), 1 / RANK, a)
    product = ExpertsProduct(weight, None, lora, pairs.ends, experts.masked_fill(experts < 0, shapes.experts - 1))
    x, grad = (
        _random(shapes, len(chosen), columns, seed=seed).repeat_interleave(chosen.shape[1], dim=0)
        for columns, seed in ((shapes.hidden, 2), (width, 6))
    )
    wide, wide_grad = (
        own.new_zeros(len(pairs.experts), own.shape[1]).index_copy_(0, pairs.places.reshape(-1), own)
        for own in (x, grad)
    )
    of_rows = product.gradient(wide_grad, wide, for_input=True)
    found = [product.product(wide)[pairs.places], *gradients]
    return found if of_rows is None else [*found, of_rows[pairs.places]]


def _trained_one_by_one(shapes: Shapes, weight: Tensor, chosen: Tensor) -> list[Tensor]:
    """`_trained_together`, expert after expert, with torch's own gradients."""
    a, b = (own.requires_grad_() for own in _expert_lora(shapes))
    x, grad = (
        _random(shapes, len(chosen), columns, seed=seed)[:, None].repeat(1, chosen.shape[1], 1)
        for columns, seed in ((shapes.hidden, 2), (weight.shape[1], 6))
    )
    x.requires_grad_()
    out = x.new_zeros(*chosen.shape, weight.shape[1])
    for expert in range(shapes.experts):
        own = chosen == expert
        product = F.linear(x[own].to(weight.dtype), weight[expert]).float()
        down = F.linear(x[own], a[expert])
        parts = [F.linear(down[:, columns], b[expert, rows]) for columns, rows in _lora_parts(shapes)]
        out = out.masked_scatter(own[:, :, None], product + torch.cat(parts, 1) / RANK)
    gradients = torch.autograd.grad(out, (a, b, x), grad)
    return [out.detach(), *gradients]


def _optimizer(shapes: Shapes) -> Iterator[FastPath]:
    """Two steps of AdamW on a number of weights that is no multiple of anything."""

    def run(*, fused: bool) -> list[Tensor]:
        weights, gradient = (_random(shapes, 100_003, seed=seed) for seed in (1, 2))
        state = AdamState.fresh(weights)
        for _ in range(2):
            step_adam(weights, gradient, state, AdamSpec(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0), fused=fused)
            gradient = _random(shapes, 100_003, seed=3)
        return [weights, state.exp_avg, state.exp_avg_sq]

    yield FastPath(OPTIMIZER, "100003 weights", partial(run, fused=True), partial(run, fused=False), OPTIMIZER_ERROR)
