"""An adapter that PEFT trained comes in as the same function, and trains on."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policies import TINY, by_mint, by_torch, load, step

import mint
from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.server.service.uploads import import_checkpoint
from mint.server.store.journal import Journal
from mint.server.store.rows import CheckpointRow
from mint.types.checkpoint_path import CheckpointPath

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "all_layers": {"r": 8, "lora_alpha": 32, "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "query_and_value": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all_linear": {"r": 5, "lora_alpha": 7, "target_modules": "all-linear"},
    "with_the_unembedding": {"r": 3, "lora_alpha": 64, "target_modules": ["down_proj", "lm_head"]},
    "unembedding_alone": {"r": 16, "lora_alpha": 16, "target_modules": ["lm_head"]},
    "a_regular_expression": {"r": 2, "lora_alpha": 1.5, "target_modules": r".*\.[12]\.self_attn\.(q|o)_proj"},
    "some_layers": {"r": 64, "lora_alpha": 16, "target_modules": ["up_proj"], "layers_to_transform": [0, 3]},
}


@contextmanager
def journal() -> Iterator[tuple[Journal, Path]]:
    home = read_settings().home_dir
    home.mkdir(parents=True, exist_ok=True)
    opened = Journal(home / "journal.sqlite3")
    try:
        yield opened, home
    finally:
        opened.close()


def take(source: Path, **options: Any) -> CheckpointRow:
    with journal() as (opened, home):
        return import_checkpoint(opened, home, source, owner="local", **options)


def path_of(row: CheckpointRow) -> str:
    return CheckpointPath(row.model_id, row.kind, row.name).uri


def write_adapter(folder: Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> np.ndarray:
    """A PEFT adapter over mint/tiny whose A and B are both far from zero; what it makes of the text."""

    import peft  # deferred: loading it takes seconds, in every worker

    torch.manual_seed(0)
    model = peft.get_peft_model(load(), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype).float()
    logprobs = by_torch(model)
    model.to(dtype).save_pretrained(folder)
    return logprobs


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_is_the_same_function_here_and_trains_on(tmp_path: Path, kind: str) -> None:
    theirs = write_adapter(tmp_path / "adapter", **KINDS[kind])
    row = take(tmp_path / "adapter", base_model="mint/tiny")
    assert np.abs(theirs - by_torch(load())).max() > 0.05
    with mint.ServiceClient() as service:
        ours = by_mint(service, path_of(row))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        client = service.create_training_client_from_state(path_of(row))
        step(client)
        after = by_mint(service, client.save_weights_for_sampler("after").result().path or "")
    assert after.sum() > ours.sum()
    notes = " ".join((row.user_metadata or {})["notes"])
    assert ("lora_alpha" in notes) == (KINDS[kind]["lora_alpha"] != 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adapters_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = write_adapter(tmp_path / "adapter", dtype=dtype, r=8, lora_alpha=16, target_modules=ATTENTION)
    row = take(tmp_path / "adapter", base_model="mint/tiny")
    with mint.ServiceClient() as service:
        np.testing.assert_allclose(by_mint(service, path_of(row)), theirs, atol=1e-4)


@pytest.mark.parametrize("mode", ["w:gz", "w"])
@pytest.mark.parametrize("folder", ["", "adapter/", "./"])
def test_archives_of_python_and_of_tar_are_taken(tmp_path: Path, mode: str, folder: str) -> None:
    write_adapter(tmp_path / "adapter", **KINDS["query_and_value"])
    with tarfile.open(tmp_path / "a.tar", mode) as archive:  # ty: ignore[no-matching-overload]
        if folder == "adapter/":
            archive.add(tmp_path / "adapter", "adapter")
        else:
            for path in (tmp_path / "adapter").iterdir():
                archive.add(path, folder + path.name)
    row = take(tmp_path / "a.tar", base_model="mint/tiny", name="mine")
    assert row.name == "mine"


def test_the_adapter_names_its_base_model_where_it_can(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", **KINDS["query_and_value"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(TINY)
    assert take(tmp_path / "adapter").model_id
    config["base_model_name_or_path"] = "somebody/elses"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequestError, match="--model"):
        take(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_what_mint_does_not_compute_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], word: str) -> None:
    write_adapter(tmp_path / "adapter", r=4, target_modules=["q_proj"], **settings)
    with pytest.raises(InvalidRequestError, match=re.escape(word)):
        take(tmp_path / "adapter", base_model="mint/tiny")


def test_an_upload_without_an_optimizer_says_so_when_one_is_asked_for(tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", **KINDS["query_and_value"])
    row = take(tmp_path / "adapter", base_model="mint/tiny")
    with mint.ServiceClient() as service, pytest.raises(mint.MintError, match="holds no optimizer"):
        service.create_training_client_from_state_with_optimizer(path_of(row))
