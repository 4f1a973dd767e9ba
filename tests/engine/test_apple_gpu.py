"""The plain path on a device of Apple (`mps`), as far as it shows without one: torch's `meta` stands for it.

Such a device has no float64, and not every operation of torch. Which ones it has is said in the table from which torch
itself is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchgen
from decoders import new_lora, open_decoder
from engine_data import ADAM, CROSS_ENTROPY, LORA, job, random_data
from one_device import OneDevice
from small_models import write_model

from mint.engine import transfers
from mint.engine.devices import Device
from mint.engine.protocol import MicroBatching, StopRule
from mint.engine.torch_engine import TorchEngine
from mint.engine.training_pass import run_pass
from mint.errors import InvalidRequestError

yaml = pytest.importorskip("yaml")
TABLE = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
DENSE = ("qwen3", "qwen2", "gemma3_text")
OTHERS = ("gpt_oss", "qwen3_moe", "qwen3_5_text", "qwen3_next")
"""Mixtures read back which experts were chosen, and `meta` has no numbers."""


def _has_kernel(name: str, table: dict[str, dict[str, Any]]) -> bool:
    """Whether `mps` has a kernel of its own, or torch makes the operation of others."""
    own = table[name.removeprefix("aten::")]
    if "structured_delegate" in own:
        return _has_kernel(own["structured_delegate"], table)
    keys = [key.strip() for line in own.get("dispatch", {"CompositeImplicitAutograd": ""}) for key in line.split(",")]
    return any(key == "MPS" or key.startswith("Composite") for key in keys)


def _is_composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


class AppleDevice(OneDevice):
    """Also takes operations apart that torch makes of others, which it does not do itself in inference mode; and has
    those whose sizes follow from numbers, which `meta` does not have. `names` are those of all operations, also on the
    CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        if _is_composite(func.name()):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func is torch.ops.aten.bincount.default and args[0].is_meta:
            self.operations.setdefault(func.name(), set()).add(torch.int64)
            return torch.zeros((*args, None, 0)[2], dtype=torch.int64, device="meta")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, Any]]:
    rows = yaml.load(TABLE.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {row["func"].split("(")[0]: row for row in rows}


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_and_sampling_use_what_such_a_device_has(
    family: str, dtype: Any, table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "WITHOUT_FLOAT64", frozenset({"mps", "meta"}))
    write_model(tmp_path, "tied", family=family)
    with AppleDevice() as mode:
        engine = TorchEngine(dtype=dtype, threads=1, device="meta", implementation="mint")
        info = engine.load_base("base", str(tmp_path))
        assert info.settings["device"] == "meta" and info.settings["attention"] == "torch"
        engine.create_model("m", "base", LORA)
        engine.forward_backward("m", random_data(0, count=4, shared=12), CROSS_ENTROPY)
        engine.optim_step("m", ADAM)
        engine.publish("m", "w")
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.0},
            {"top_k": 5},
            {"top_p": 0.9},
            {"prompt_logprobs": True},
        ]
        jobs = [job(np.arange(20, 40), weights_id="w", max_tokens=3, stop=StopRule(), **kind) for kind in kinds]
        assert [len(result.samples[0].tokens) for result in engine.sample(jobs)] == [3] * len(kinds)
    assert {name for name in mode.operations if name.startswith("aten::") and not _has_kernel(name, table)} == set()
    assert {name for name, made in mode.operations.items() if torch.float64 in made} == set()


@pytest.mark.parametrize("family", OTHERS)
def test_experts_sinks_and_delta_nets_train_by_operations_that_such_a_device_has(
    family: str, table: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, "tied", family=family)
    decoder = open_decoder(tmp_path)
    lora = new_lora(decoder, LORA)
    gradient, data = lora.enable_gradient(), random_data(0, count=4, shared=12)
    with AppleDevice() as mode:
        run_pass(decoder, lora, data, CROSS_ENTROPY, gradient=gradient, micro_batching=MicroBatching(64, None))
    taken_apart = {name for name in mode.names if _is_composite(name)}
    names = {name for name in mode.names - taken_apart if name.startswith("aten::")}
    assert len(names) > 30 and {name for name in names if not _has_kernel(name, table)} == set()


def test_the_table_tells_what_is_missing_there(table: dict[str, Any]) -> None:
    assert _has_kernel("aten::index_copy_", table) and _has_kernel("aten::searchsorted.Tensor", table)
    assert not _has_kernel("aten::mm.dtype", table)


@pytest.mark.parametrize("name", ["mps", "cuda"])
def test_a_device_on_which_torch_does_not_compute_is_refused_by_name_with_its_own_words(name: str) -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(
        InvalidRequestError, match=f"MINT_DEVICE = {name}: is not a device .*(Could not run|Torch not compiled)"
    ) as refused:
        TorchEngine(device=name)
    assert len(str(refused.value)) < 400, "torch goes on with a list of all devices"


def test_only_gpus_that_multiply_bfloat16_have_bases_in_it_by_default() -> None:
    """One that is not here is planned for as if it did."""
    found = {name: Device(name, None, gpu_kernels=True).default_dtype for name in ("cpu", "mps")}
    assert set(found.values()) == {torch.float32}
    if not torch.cuda.is_available():
        assert Device("cuda", None, gpu_kernels=True).default_dtype == torch.bfloat16
