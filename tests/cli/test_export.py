"""A lora trained with mint, exported, and loaded by others: the same logprobs."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import transformers

import mint
from mint import types
from mint.compose.export import export_checkpoint
from mint.errors import InvalidRequestError
from mint.models import registry
from mint.models.package_index import INDEX_MODELS
from mint.models.registry import BUNDLED

TEXT = "Q: What is 34 + 58?\nA: 92"


def datum(tokens: list[int], weight: float = 1.0) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)},
    )


@pytest.fixture
def trained() -> tuple[str, list[int], np.ndarray]:
    """(checkpoint, tokens, their logprobs under the trained policy); all layers, the tied unembedding too."""
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=8, seed=1)
        tokens = client.get_tokenizer().encode(TEXT)
        for _ in range(3):
            client.forward_backward([datum(tokens)], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        logprobs = client.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        path = client.save_state(name="trained").result().path
    return path, tokens, logprobs


def reference_logprobs(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0].double()
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).numpy()


def load(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_peft_computes_the_same_from_an_exported_adapter(
    trained: tuple[str, list[int], np.ndarray], tmp_path: Path
) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    path, tokens, logprobs = trained
    export_checkpoint(path, output=tmp_path / "adapter", format="peft")
    base = load(BUNDLED["mint/tiny"])
    before = reference_logprobs(base, tokens)
    after = reference_logprobs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), tokens)
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(after, logprobs, atol=1e-4)


def test_transformers_computes_the_same_from_an_exported_merged_model(
    trained: tuple[str, list[int], np.ndarray], tmp_path: Path
) -> None:
    path, tokens, logprobs = trained
    export_checkpoint(path, output=tmp_path / "merged", format="hf")
    np.testing.assert_allclose(reference_logprobs(load(tmp_path / "merged"), tokens), logprobs, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.encode(TEXT) == tokens


@pytest.mark.parametrize("output", ["/proc/x", "/dev/null/x"])
def test_a_folder_that_cannot_be_written_is_refused(output: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"--output = {output}: cannot be written"):
        export_checkpoint("mint://any:train:0/weights/one", output=Path(output), format="peft")


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("format", ["peft", "hf", "gguf-ready"])
def test_those_may_read_an_export_whom_the_umask_lets(
    trained: tuple[str, list[int], np.ndarray], tmp_path: Path, format: Literal["peft", "hf", "gguf-ready"], umask: int
) -> None:
    before = os.umask(umask)
    try:
        export_checkpoint(trained[0], output=tmp_path / "out", format=format)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~umask}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == (0o755 if umask == 0o022 else 0o700)


def test_an_adapter_on_a_model_of_the_package_index_names_the_folder_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(INDEX_MODELS))
    tiny = registry.resolve("mint/tiny", {})
    monkeypatch.setitem(BUNDLED, name, BUNDLED["mint/tiny"])
    with mint.ServiceClient() as service:
        path = (
            service.create_lora_training_client(base_model=name, rank=2).save_state(name="of-the-index").result().path
        )
    monkeypatch.delitem(BUNDLED, name)
    monkeypatch.setattr(registry, "resolve", lambda *_: tiny)
    for is_gguf, base in ((True, str(tiny)), (False, name)):
        monkeypatch.setattr(registry, "gguf_file", lambda *_, found=is_gguf: tiny if found else None)
        output = str(tmp_path / f"adapter-{is_gguf}")
        export_checkpoint(path, output=output, format="peft")
        assert json.loads((Path(output) / "adapter_config.json").read_text())["base_model_name_or_path"] == base


def test_an_export_does_not_replace_a_link_to_nothing(
    trained: tuple[str, list[int], np.ndarray], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(InvalidRequestError, match="exists already"):
        export_checkpoint(trained[0], output=tmp_path / "link", format="peft")


def test_an_export_does_not_overwrite(trained: tuple[str, list[int], np.ndarray], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="exists already"):
        export_checkpoint(trained[0], output=tmp_path, format="peft")
