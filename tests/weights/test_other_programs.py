"""Programs that users load exports with continue prompts as mint's sampler does: the same tokens, without chance.

vLLM and llama.cpp come from the package registry, once. The table of docs/weights.md is written from these runs:
`pytest -m slow tests/weights/test_other_programs.py`.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from exported import NEW_TOKENS, PROMPTS, RANK, Continuation, Exported, train_and_export
from llama_cpp_files import SOURCE, Converters, get_converters, llama_cpp_python
from policies import TINY, load
from vllm_environment import vllm_python

from tests.generated_page import replace_part

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "weights.md"

LORAS = {"attention and MLP": False, "attention, MLP and unembedding": True}
"""What is trained, and whether the unembedding is among it."""

ROUNDING = {"gguf-ready": 0.02}
"""The largest difference of logprobs by format; the others are in float32. `gguf-ready` is in float16."""

REFUSED = {
    ("llama.cpp", "peft", "attention, MLP and unembedding"): "LoRA tensor 'output.weight' does not exist in base model"
}
"""What a program does not load, and the words of its error: here the base's embeddings are tied."""

ROWS: dict[tuple[str, str, str], tuple[str, str]] = {}
"""(program, format, what is trained) -> version, and what was found."""


@pytest.fixture(scope="module", params=LORAS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    folder = tmp_path_factory.mktemp("exported")
    found = train_and_export(folder, name=request.param, train_unembed=LORAS[request.param])
    tokens, of_base = ([each.tokens for each in part] for part in (found.with_lora, found.without))
    assert all(one != other for one, other in zip(tokens, of_base, strict=True))  # the lora decides tokens
    yield found


@pytest.fixture(scope="module")
def converters(tmp_path_factory: pytest.TempPathFactory) -> Converters:
    return get_converters(tmp_path_factory.mktemp("llama"))


def compare(program: str, version: str, format: str, exported: Exported, found: Sequence[Continuation]) -> None:
    """Holds the continuations to mint's, and notes a row of the table."""
    assert [each.tokens for each in found] == [each.tokens for each in exported.with_lora]
    gap = max(
        float(np.abs(np.subtract(one.logprobs, other.logprobs)).max())
        for one, other in zip(found, exported.with_lora, strict=True)
    )
    assert gap < ROUNDING.get(format, 1e-4)
    ROWS[program, format, exported.name] = (version, f"equal | {gap:.1e}")


def continuations(model: torch.nn.Module) -> list[Continuation]:
    """What a model of transformers generates."""
    model.generation_config.eos_token_id = None  # ty: ignore[invalid-assignment] (as `ignore_eos`)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out: Any = model.generate(  # ty: ignore[call-non-callable]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, len(prompt) :].tolist()
        logprobs = torch.log_softmax(torch.cat(out.logits).double(), 1)
        found.append(Continuation(tokens, logprobs[torch.arange(len(tokens)), tokens].tolist()))
    return found


def answer(python: Path, script: str, spec: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Runs a script of this folder in another environment; its answer, or `error`, what it wrote before it failed."""
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"prompts": PROMPTS, "new_tokens": NEW_TOKENS, **spec}))
    done = subprocess.run([python, HERE / script, path], capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        return {"error": done.stderr}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_peft_continues_as_mint(exported: Exported) -> None:
    import peft  # deferred: loading it takes seconds, in every worker

    model = peft.PeftModel.from_pretrained(load(), exported.folder / "peft").eval()
    compare("PEFT", peft.__version__, "peft", exported, continuations(model))


def test_transformers_continues_as_mint(exported: Exported) -> None:
    model = load(exported.folder / "hf").eval()
    compare("transformers", transformers.__version__, "hf", exported, continuations(model))


@pytest.mark.parametrize("format", ["peft", "hf"])
def test_vllm_continues_as_mint(exported: Exported, format: str, tmp_path: Path) -> None:
    folder = str(exported.folder / format)
    spec = {"model": folder, "lora": None} if format == "hf" else {"model": str(TINY), "lora": folder, "rank": RANK}
    found = answer(vllm_python(), "run_vllm.py", spec, tmp_path)
    assert "error" not in found, found["error"][-3000:]
    compare("vLLM", found["version"], format, exported, [Continuation(*each) for each in found["answers"]])


FILES: dict[str, Callable[[Converters, Exported, Path], dict[str, str | None]]] = {
    "gguf-ready": lambda converters, exported, folder: {
        "model": str(converters.model(exported.folder / "gguf-ready", folder / "model.gguf", dtype="f16")),
        "lora": None,
    },
    "peft": lambda converters, exported, folder: {
        "model": str(converters.model(TINY, folder / "base.gguf", dtype="f32")),
        "lora": str(converters.lora(exported.folder / "peft", TINY, folder / "lora.gguf")),
    },
}


@pytest.mark.parametrize("format", FILES)
def test_llama_cpp_continues_as_mint(exported: Exported, format: str, converters: Converters, tmp_path: Path) -> None:
    files = FILES[format](converters, exported, tmp_path)
    found = answer(llama_cpp_python(), "run_llama_cpp.py", files, tmp_path)
    version = SOURCE.replace("==", " ")
    words = REFUSED.get(("llama.cpp", format, exported.name))
    if words is not None:
        assert words in found["error"]
        ROWS["llama.cpp", format, exported.name] = (version, f"refused: `{words}` | –")
        return
    assert "error" not in found, found["error"][-3000:]
    compare("llama.cpp", version, format, exported, [Continuation(*each) for each in found["answers"]])


def test_the_page_shows_what_was_run() -> None:
    """Last of this file: writes the table if every program has run."""
    programs = {("PEFT", "peft"), ("transformers", "hf"), ("vLLM", "peft"), ("vLLM", "hf")}
    programs |= {("llama.cpp", format) for format in FILES}
    if ROWS.keys() != {(*each, name) for each in programs for name in LORAS}:
        pytest.skip("not every program has run")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        f"Run on {date}: {len(PROMPTS)} prompts, {NEW_TOKENS} tokens each.",
        "",
        "| program | version | format | LoRA on | tokens | largest difference of logprobs |",
        "|---|---|---|---|---|---|",
    ]
    for (program, format, name), (version, result) in sorted(ROWS.items(), key=lambda row: (row[0][0].lower(), row[0])):
        lines.append(f"| {program} | {version} | `{format}` | {name} | {result} |")
    replace_part(PAGE, "programs", "\n".join(lines))
