"""`import mint` is light, and the SDK needs no torch, no server and no database."""

from __future__ import annotations

import ast
import subprocess
import sys

HEAVY = ["torch", "transformers", "fastapi", "starlette", "tokenizers", "safetensors", "matplotlib"]


def loaded_by(code: str) -> list[str]:
    check = f"import sys; {code}; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    return list(ast.literal_eval(run.stdout))


def test_the_sdk_loads_nothing_heavy() -> None:
    assert loaded_by("import mint; mint.ServiceClient; mint.TrainingClient; from mint import types, errors") == []


def test_the_list_of_commands_loads_no_client_and_no_rl_library() -> None:
    heavy = ["httpx", "mint.client", "mint.wire", "mint.rl", "mint.recipes"]
    check = f"from mint.cli.main import app; import sys; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ast.literal_eval(run.stdout) == []


def test_a_client_of_a_server_loads_nothing_heavy() -> None:
    assert loaded_by("import mint; mint.ServiceClient(base_url='http://127.0.0.1:9')") == []


def test_the_service_loads_no_torch() -> None:
    assert "torch" not in loaded_by(
        "import mint.server.all_routes, mint.server.service.service, mint.compose.embedded, mint.engine.fake_engine"
    )


def test_a_tokenizer_needs_no_torch() -> None:
    code = (
        "from mint.tokenizer import load_tokenizer; import mint; from pathlib import Path; "
        "load_tokenizer(str(Path(mint.__file__).parent / 'models' / 'tiny'), '').encode('a')"
    )
    assert "torch" not in loaded_by(code)
