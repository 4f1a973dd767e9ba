"""The public SDK, in an environment of its own, reads what we write and writes what we read; and protoc agrees."""

from __future__ import annotations

import base64
import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
from wire_examples import OUTPUT, SAMPLE, SDK_REQUEST

from mint import wire
from mint.types import TensorData

SDK = "tinker==0.38.0"
GENERATOR = "grpcio-tools==1.66.*"
SOURCE = Path(wire.__file__).parents[2]
pytestmark = pytest.mark.slow


def install(folder: Path, package: str) -> Path:
    """An environment with one package from the registry; its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True, timeout=600)
    return python


def exchange(python: Path) -> list[dict[str, Any]]:
    """What the SDK's script prints about its own request, our output and our sample."""
    asked = [
        {"read": "output", "body": base64.b64encode(wire.encode_result(OUTPUT)).decode()},
        {"read": "sample", "body": base64.b64encode(wire.encode_result(SAMPLE)).decode()},
    ]
    script = Path(__file__).with_name("tinker_script.py")
    done = subprocess.run(
        [python, script],
        input="".join(json.dumps(line) + "\n" for line in asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def shown(tensor: TensorData) -> dict[str, Any]:
    sparse = [tensor.sparse_crow_indices, tensor.sparse_col_indices]
    return {"data": list(map(float, tensor.data)), "dtype": tensor.dtype, "shape": tensor.shape, "sparse": sparse}


def check_exchange(lines: list[dict[str, Any]]) -> None:
    written, output, sample = lines
    assert base64.b64decode(written["body"]) == SDK_REQUEST
    assert output["type"] == OUTPUT.loss_fn_output_type
    assert output["metrics"] == OUTPUT.metrics
    assert output["rows"] == [{key: shown(value) for key, value in row.items()} for row in OUTPUT.loss_fn_outputs]
    for theirs, ours in zip(sample["sequences"], SAMPLE.sequences, strict=True):
        assert theirs["stop_reason"] == ours.stop_reason
        assert theirs["tokens"] == ours.tokens
        assert theirs["logprobs"] == ours.logprobs
        assert theirs["topk"] == (None if ours.topk_logprobs is None else _lists(ours.topk_logprobs))
    assert sample["prompt_logprobs"] == SAMPLE.prompt_logprobs
    assert sample["topk"] == _lists(SAMPLE.topk_prompt_logprobs or [])
    alternatives = SAMPLE.prompt_alt_tokens
    assert SAMPLE.target_prompt_logprobs is not None and alternatives is not None
    assert sample["target"] == shown(SAMPLE.target_prompt_logprobs)
    assert sample["alternatives"] == [shown(alternatives.tokens), shown(alternatives.logprobs)]


def _lists(rows: Any) -> Any:
    return json.loads(json.dumps(rows))


def test_the_public_sdk_and_we_read_what_the_other_writes(tmp_path: Path) -> None:
    check_exchange(exchange(install(tmp_path / "sdk", SDK)))


def test_the_generated_code_is_what_the_generator_makes_of_the_proto_file(tmp_path: Path) -> None:
    python = install(tmp_path / "generator", GENERATOR)
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    command = [python, "-m", "grpc_tools.protoc", "-I", SOURCE, *out, "mint/wire/tinker_public.proto"]
    subprocess.run(command, check=True, timeout=120)
    for name in ("tinker_public_pb2.py", "tinker_public_pb2.pyi"):
        assert (tmp_path / "mint" / "wire" / name).read_text() == (SOURCE / "mint" / "wire" / name).read_text()
