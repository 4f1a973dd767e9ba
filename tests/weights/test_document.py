"""The commands of docs/weights.md run as they are written, one after the other, against a server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from http_server import http_server
from policies import step

import mint

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "weights.md"
SOURCE = Path(mint.__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the document uses curl")
def test_the_commands_of_the_document_run(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "mint"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom mint.cli.main import app\napp()\n")
    command.chmod(0o755)
    blocks = re.findall(r"^```bash\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    with http_server(tmp_path / "data") as url, mint.ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client(base_model="mint/tiny", rank=8, seed=1)
        step(client)
        path = client.save_state("first").result().path
        env = {
            **os.environ,
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "CHECKPOINT": path,
            "RUN": path.split("/")[2],
            "MINT_BASE_URL": url,
            "MINT_API_KEY": "unused",
        }
        script = "\n".join(blocks)
        ran = subprocess.run(["bash", "-eu", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ckpt_") == 3
    assert (tmp_path / "archive.tar.gz").read_bytes() == (tmp_path / "first.tar.gz").read_bytes()
