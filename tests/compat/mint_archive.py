"""MinT's archive round trip by its shape: save, download the tar, upload it, train on with its optimizer.

`python mint_archive.py` with MINT_BASE_URL and MINT_API_KEY set; prints one JSON line.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import urllib.request
from pathlib import Path

import httpx
from dotenv import load_dotenv

import mint
from mint import types

load_dotenv(".env")


def datum() -> types.Datum:
    tokens = [40, 73, 61, 82, 55, 90, 44, 67]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def step(training_client) -> float:
    passed = training_client.forward_backward([datum()], "cross_entropy").result()
    training_client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return passed.metrics["loss:sum"]


def download(service_client, path: str) -> Path:
    rest = service_client.create_rest_client()
    answer = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
    archive = Path("checkpoint.tar.gz")
    with urllib.request.urlopen(answer.url, timeout=60) as response:
        archive.write_bytes(response.read())
    return archive


def as_gzip(archive: Path) -> Path:
    """What the upload's content type promises, whatever the download's was."""
    again = Path("upload.tar.gz")
    with tarfile.open(archive, mode="r:*") as source, tarfile.open(again, mode="w:gz") as target:
        for member in source.getmembers():
            content = source.extractfile(member)
            target.addfile(member, io.BytesIO(content.read()) if content else None)
    return again


def upload(archive: Path) -> str:
    with archive.open("rb") as handle:
        response = httpx.post(
            f"{os.environ['MINT_BASE_URL'].rstrip('/')}/api/v1/checkpoints/upload",
            headers={"X-API-Key": os.environ["MINT_API_KEY"]},
            files={"file": (archive.name, handle, "application/gzip")},
            timeout=300.0,
        )
    assert response.status_code < 400, response.text
    answer = response.json()
    return answer.get("path") or answer["checkpoint_id"]


def main() -> None:
    service_client = mint.ServiceClient()
    training_client = service_client.create_lora_training_client(base_model="mint/tiny", rank=8, seed=1)
    for _ in range(2):
        step(training_client)
    path = training_client.save_state(name="before").result().path
    expected = [step(training_client) for _ in range(3)]
    uploaded = upload(as_gzip(download(service_client, path)))
    other = service_client.create_lora_training_client(base_model="mint/tiny", rank=8, seed=2)
    other.load_state_with_optimizer(uploaded).result()
    measured = [step(other) for _ in range(3)]
    print(json.dumps({"uploaded": uploaded, "expected": expected, "measured": measured}))


if __name__ == "__main__":
    main()
