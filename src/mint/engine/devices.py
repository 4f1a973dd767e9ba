"""Chooses the implementations for a device, once for each base model: operations, decoding steps, drawing.

A choice is a function of device, dtype, the base's widths, and what is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from mint.engine.cpu.build import NativeBuild
from mint.engine.cpu.draw import NativeDraw
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.onednn import sums_in_one_order
from mint.engine.cpu.operations import CpuOperations, NativeOperations
from mint.engine.cpu.recorded_step import NativeSteps
from mint.engine.cuda.attention import MIN_HEAD_DIM, FlexPackedAttention
from mint.engine.cuda.fast_paths import (
    CAPTURE,
    CAPTURED_EXPERTS,
    EXPERTS,
    FLEX,
    FUSED,
    INVARIANT,
    LOGITS,
    OPTIMIZER,
    QUANTIZED,
    SETTING,
    TRAINED,
    TRITON,
    TRITONS,
    Shapes,
)
from mint.engine.cuda.graph_step import StepGraphs, StepKernels, StepMixture
from mint.engine.cuda.invariant_operations import InvariantOperations
from mint.engine.cuda.operations import CudaOperations, FlexOperations, TrainingPasses
from mint.engine.cuda.self_check import Verdict, check_paths
from mint.engine.drawing.draw import Draw, TorchDraw
from mint.engine.memory.machine_memory import free_memory_bytes, memory_bytes
from mint.engine.model.config import Activation, DecoderConfig, Family
from mint.engine.model.decoder import Decoder
from mint.engine.model.operations import Operations
from mint.engine.model.packed_attention import PackedAttention
from mint.engine.model.torch_operations import TorchOperations
from mint.engine.quantized.number_formats import Quantization
from mint.engine.quantized.quantized_matrix import QuantizedMatrix, Widen, widen_by_torch
from mint.engine.sampling.decode_step import DecodeSteps, EagerSteps
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.state_cache import StateCache
from mint.errors import InvalidRequestError, MissingExtraError

log = logging.getLogger(__name__)


class Device:
    """A device and the kernels that are installed for it."""

    def __init__(
        self,
        name: str | None,
        native: NativeBuild | Path | None,
        *,
        gpu_kernels: bool,
        batch_invariant: bool = False,
        gpu_off: Collection[str] = (),
    ) -> None:
        """`name` as torch names devices; None: the GPU, if there is one. `native` are kernels in C for a CPU, or the
        folder to compile them in. Without `gpu_kernels` a GPU runs plain operations of torch; those of the fast paths
        that `gpu_off` names (`SETTING`) it does not take. If it is `batch_invariant`, a sampled row on a GPU has
        the same bits in any batch, as it has on a CPU.

        Raises:
            MissingExtraError: native kernels are required and cannot be compiled.
        """
        self.torch = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._gpu_kernels = gpu_kernels
        self._invariant = batch_invariant and self.torch.type == "cuda"
        self._verdicts: dict[Shapes, list[Verdict]] = {}
        self.switched_off = {path: "MINT_GPU_OFF" for path, name in SETTING.items() if self.is_gpu and name in gpu_off}
        """The fast paths that failed the self-check of a base model, or that the user does not want, and why. No base
        model takes them from then on."""
        self._kernels = None if native is None or self.torch.type != "cpu" else _native_kernels(native)

    def check(self, config: DecoderConfig | None, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
        """Compares the fast paths that a base model would take with plain operations, in a process of its own; on a CPU
        there is nothing to check. Those that fail are switched off and named in the log. The `config` is None where
        transformers computes the model, which takes the optimizer alone."""
        names = self._paths_of(config, dtype, quantization)
        if not names:
            return
        shapes = Shapes.of(config, dtype, str(self.torch), names)
        if shapes not in self._verdicts:
            self._verdicts[shapes] = check_paths(shapes.source, is_timed=True)
        for verdict in self._verdicts[shapes]:
            if verdict.fault is None:
                continue
            # A check that could not begin has shown nothing.
            failed = [verdict.name] if verdict.name in names else names
            self.switched_off |= dict.fromkeys(failed, verdict.fault)
            log.warning(
                "%s switched off on this GPU: %s; %s",
                " and ".join(failed),
                verdict.fault,
                verdict.remedy or "`mint doctor gpu` prints a report to send",
            )

    def _paths_of(
        self, config: DecoderConfig | None, dtype: torch.dtype, quantization: Quantization | None
    ) -> list[str]:
        """The fast paths that such a base model would take, and the user wants."""
        if not self.is_gpu or not self._gpu_kernels:
            return []
        names = [OPTIMIZER]
        if config is not None:
            if dtype == torch.bfloat16:
                names.append(LOGITS)
            if config.head_dim >= MIN_HEAD_DIM and not config.family.sinks:
                names.append(FLEX)
            names += [TRITON, FUSED, CAPTURE, *([INVARIANT] if self._invariant else [])]
            if quantization is not None:
                names.append(QUANTIZED)
            if _has_experts(config):
                names += [EXPERTS, CAPTURED_EXPERTS]
        has_triton = _has_triton()
        return [
            name
            for name in names
            if (has_triton or name not in TRITONS) and self.switched_off.get(name) != "MINT_GPU_OFF"
        ]

    def _takes(self, *paths: str) -> bool:
        """Whether these fast paths may be used."""
        return self.is_gpu and self._gpu_kernels and not any(path in self.switched_off for path in paths)

    @property
    def paths_off(self) -> str | None:
        """The `MINT_GPU_OFF` that takes the paths of training which are taken now; None where there is no choice."""
        if not self.is_gpu or not self._gpu_kernels:
            return None
        is_there = _has_triton()
        found = [SETTING[path] for path in TRAINED if path in self.switched_off or (path in TRITONS and not is_there)]
        return ",".join(sorted(found)) or "none"

    @property
    def fuses_optimizer(self) -> bool:
        """Whether an optimizer step is one kernel."""
        return self._takes(OPTIMIZER)

    @property
    def default_dtype(self) -> torch.dtype:
        """The dtype of base weights where none is asked for: bfloat16 on GPUs that multiply it, and on one that is not
        here."""
        if not self.is_gpu or (
            torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            return torch.float32
        return torch.bfloat16

    @property
    def is_gpu(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a sampled row of mint's own decoder has the same bits in any batch."""
        return self._invariant or (self.torch.type == "cpu" and _sums_in_one_order())

    def require_batch_invariance(self, name: str, config: DecoderConfig | None, *, quantized: bool) -> None:
        """Refuses a base model that cannot keep what the batch-invariant mode promises; without the mode, none. The
        `config` is None where transformers computes the model.

        Raises:
            InvalidRequestError: its layers have operations whose bits depend on other rows, or the kernels are missing.
        """
        if not self._invariant:
            return
        if config is None or quantized or _has_experts(config) or not _fits_kernels(config):
            problem = f"is not for {name}: only dense, unquantized models with full attention have these kernels"
        elif not self._gpu_kernels or not _has_triton():
            problem = "needs mint's Triton kernels"
        elif not self._takes(TRITON, FUSED, INVARIANT):
            problem = f"needs kernels that failed the self-check: {', '.join(self.switched_off)}"
        else:
            return
        raise InvalidRequestError(
            problem,
            field="MINT_BATCH_INVARIANT",
            value=True,
            remedy="Unset it, or install triton and leave MINT_NATIVE unset (docs/gpu.md)",
        )

    @property
    def is_present(self) -> bool:
        """Whether torch sees it in this machine."""
        return not self.is_gpu or torch.cuda.is_available()

    def require(self) -> None:
        """Tries out whether torch computes on it.

        Raises:
            InvalidRequestError: this machine lacks it, the build of torch has no code for it, or others use it alone.
        """
        if self.torch.type == "cpu":
            return
        try:
            (torch.ones(1, device=self.torch) + 1).item()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0].partition(". ")[0]  # torch goes on with a list of all devices
            raise InvalidRequestError(
                f"is not a device on which torch {torch.__version__} computes here: {reason}",
                field="MINT_DEVICE",
                value=str(self.torch),
                remedy="Set MINT_DEVICE=cpu to compute on the processor, or install a build of torch for this device",
            ) from error

    @property
    def free_bytes(self) -> int | None:
        """The memory that is free on the device; None if unknown."""
        if not self.is_gpu:
            return free_memory_bytes()
        free, _ = torch.cuda.mem_get_info(self.torch)
        return free + torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)

    @property
    def memory_bytes(self) -> int | None:
        """The memory of the device; None if unknown."""
        if self.is_gpu:
            return torch.cuda.get_device_properties(self.torch).total_memory
        return memory_bytes()  # Apple's GPUs have the memory of the machine

    def runs(self, config: DecoderConfig) -> bool:
        """Whether mint's own decoder is the faster choice for such a model here. Its delta nets go row by row, which a
        GPU computes slower than the modules of transformers do."""
        return self.torch.type == "cpu" or config.delta_net is None

    def operations(self, config: DecoderConfig, dtype: torch.dtype) -> Operations:
        """The operations for a base model of this shape. On a GPU, sets the process's precision of float32 products."""
        activation = config.family.activation
        if self.torch.type == "cpu":
            if self._kernels is not None and NativeOperations.fit(config):
                return NativeOperations(dtype, self._kernels, activation)
            return CpuOperations(dtype, activation)
        if self.torch.type == "cuda":
            # Beside a bfloat16 base (7 bits of each factor) loras' products may use TF32 (10 bits); beside float32 all
            # 23.
            torch.set_float32_matmul_precision("high" if dtype == torch.bfloat16 else "highest")
            if self._invariant:
                return self._invariant_operations(dtype, activation)
            kernels = self._step_kernels() if _has_experts(config) and self._takes(TRITON, EXPERTS) else None
            fused = self._fused_passes() if self._takes(FUSED) else None
            has_flex = self._takes(FLEX) and config.head_dim >= MIN_HEAD_DIM and not config.family.sinks
            return (FlexOperations if has_flex else CudaOperations)(
                dtype,
                self.torch,
                activation,
                expert_kernels=kernels,
                fused=fused,
                wide_products=self._takes(LOGITS),
                widen=self._widening(),
            )
        return TorchOperations(dtype, self.torch, activation)

    def _invariant_operations(self, dtype: torch.dtype, activation: Activation) -> Operations:
        # Both import Triton.
        from mint.engine.cuda.fused_passes import FusedPasses
        from mint.engine.cuda.invariant_kernels import InvariantKernels

        attention = FlexPackedAttention if self._takes(FLEX) else PackedAttention
        kernels, fused = InvariantKernels(), FusedPasses()
        return InvariantOperations(dtype, self.torch, activation, kernels, fused, trained_attention=attention)

    def operations_beside_modules(self, dtype: torch.dtype) -> TorchOperations:
        """The operations for a base model whose layers are modules of transformers: by torch's own libraries."""
        return (CudaOperations if self.is_gpu else TorchOperations)(dtype, self.torch)

    def decode_steps(self, decoder: Decoder, cache: KVCache, states: StateCache | None) -> DecodeSteps:
        """The decoding steps of a base model over its KV cache, and the states of its delta nets."""
        if isinstance(decoder.operations, NativeOperations):
            return NativeSteps(decoder, decoder.operations, cache, states)
        if self._invariant:
            from mint.engine.cuda.invariant_kernels import InvariantKernels  # imports Triton

            return StepGraphs(
                decoder, cache, InvariantKernels(), capture=self._takes(CAPTURE), draw_rows_at_once=self._draw_rows
            )
        paths = [TRITON, CAPTURE, *([CAPTURED_EXPERTS] if decoder.mixtures else [])]
        if _is_quantized(decoder):
            paths.append(QUANTIZED)  # a graph would keep what torch's operations take to widen each matrix
        kernels = self._step_kernels() if self._takes(*paths) and _fits_graphs(decoder) else None
        return EagerSteps(decoder, cache, states) if kernels is None else StepGraphs(decoder, cache, kernels)

    def _fused_passes(self) -> TrainingPasses | None:
        """Those of Triton; None where it is not installed."""
        if not _has_triton():
            return None
        from mint.engine.cuda.fused_passes import FusedPasses  # imports Triton

        return FusedPasses()

    def _widening(self) -> Widen:
        """How quantized matrices are widened for their products."""
        if not self._takes(QUANTIZED) or not _has_triton():
            return widen_by_torch
        from mint.engine.quantized.triton_widening import widen_matrix  # imports Triton

        return widen_matrix

    def _step_kernels(self) -> StepKernels | None:
        """Those of Triton; None where it is not installed."""
        try:
            # Imports Triton, which only CUDA builds of torch bring with them.
            from mint.engine.cuda.kernels import TritonKernels
        except ModuleNotFoundError as error:
            log.warning("decoding by plain operations, which is several times slower: %s. Install triton", error)
            return None
        return TritonKernels()

    def draw(self, operations: Operations) -> Draw:
        """How tokens are drawn from the logits of these operations."""
        if isinstance(operations, NativeOperations):
            return NativeDraw(operations.kernels)
        return TorchDraw(operations, rows_at_once=self._draw_rows)

    @property
    def _draw_rows(self) -> int | None:
        """Rows that are drawn together. Torch chooses how it adds up rows by their number."""
        return 1 if self._invariant else None


def _has_experts(config: DecoderConfig) -> bool:
    return any(config.experts_of(layer) is not None for layer in range(config.num_hidden_layers))


@cache
def _sums_in_one_order() -> bool:
    found = sums_in_one_order()
    if not found:
        log.warning(
            "What torch multiplies here has other bits beside other rows, so logprobs of sampler and trainer may "
            "differ in their last bits. On an Intel processor, make the client before torch first multiplies, or set "
            "MKL_CBWR=AVX512,STRICT (AVX2,STRICT without AVX-512) in the environment"
        )
    return found


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _fits_graphs(decoder: Decoder) -> bool:
    """Whether the kernels of the CUDA graphs compute all that the decoder does."""
    config = decoder.config
    fits_mixtures = not any(
        mixture is not None and mixture.shared_intermediate_size is not None
        for mixture in map(config.experts_of, range(config.num_hidden_layers))
    ) and all(isinstance(mixture, StepMixture) for mixture in decoder.mixtures.values())
    return _fits_kernels(config) and fits_mixtures


def _is_quantized(decoder: Decoder) -> bool:
    return any(isinstance(matrix, QuantizedMatrix) for matrix in decoder.weights.matrices.values())


def _fits_kernels(config: DecoderConfig) -> bool:
    """Whether the kernels of the CUDA graphs compute all layers of such a model, but for its experts."""
    is_plain = len(set(config.ropes)) == 1 and config.rotary_dim == config.head_dim and not config.windows
    usual = Family(config.family.name)
    is_usual = config.family.norms == usual.norms and config.family.activation == usual.activation
    is_attention = config.delta_net is None and not config.family.output_gates
    return is_plain and is_usual and is_attention and not config.family.fused


def _native_kernels(native: NativeBuild | Path) -> NativeKernels | None:
    """The kernels, or None where they cannot be had and need not be."""
    try:
        return NativeKernels(native)
    except MissingExtraError as error:
        if isinstance(native, Path) or native.required:
            raise
        log.warning("computing with torch's kernels alone, which are slower on a CPU: %s", error)
        return None
