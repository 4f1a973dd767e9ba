"""A checkpoint whose manifest is damaged is refused by name on every route, with a status that nobody retries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_harness import API, BASE, Person, pass_input, running


def changed(**fields: Any) -> Any:
    return lambda content: json.dumps({**json.loads(content), **fields}).encode()


DAMAGES = {
    "missing": None,
    "empty": lambda _content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "one bit": lambda content: content.replace(b'"', b"\xa2", 1),
    "a list": lambda _content: b"[1, 2]",
    "nested": lambda _content: b"[" * 100_000,
    "no lora": changed(lora={}),
    "other types": changed(lora={"rank": "8", "seed": 1, "train_attn": 1, "train_mlp": 1, "train_unembed": 1}),
    "a number as a name": changed(base_model=5),
    "files as a list": changed(files=["weights.safetensors"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_refused_by_name_and_all_else_goes_on(tmp_path: Path, damage: str) -> None:
    with running(tmp_path) as server:
        person = Person(server)
        session_id = person.session()
        model_id = person.model(session_id)
        paths = [
            person.done("save_weights", {"model_id": model_id, "seq_id": seq_id, "path": f"s{seq_id}"})["path"]
            for seq_id in (1, 2)
        ]
        listed = person.send("GET", f"{API}/training_runs/{model_id}/checkpoints").json()["checkpoints"]
        alias = next(row["alias"] for row in listed if row["checkpoint_id"] == "weights/s1")
        manifests = tmp_path.glob("checkpoints/*/manifest.json")
        (file,) = (path for path in manifests if json.loads(path.read_text())["path"].endswith("/weights/s1"))
        change = DAMAGES[damage]
        if change is None:
            file.unlink()
        else:
            file.write_bytes(change(file.read_bytes()))

        sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": paths[0]}
        chat = {"model": paths[0], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        answers = [
            person.send("POST", f"{API}/weights_info", {"tinker_path": paths[0]}),
            person.send("POST", f"{API}/create_sampling_session", sampler),
            person.send("GET", f"{API}/training_runs/{model_id}/checkpoints/weights/s1/archive"),
            person.send("POST", f"{API}/weights/copy", {"source_path": paths[0]}),
            person.send("POST", "/v1/chat/completions", chat),
        ]
        for answer in answers:
            assert 400 <= answer.status_code < 500, (answer.request.url, answer.status_code, answer.text)
            assert str(tmp_path) not in answer.text
        assert alias in answers[0].text and "damaged" in answers[0].text and "Use another checkpoint" in answers[0].text
        assert alias in answers[1].text
        load = {"model_id": model_id, "seq_id": 3, "path": paths[0], "optimizer": True}
        name = person.post("load_weights", load)["request_id"]
        failed = person.send("POST", f"{API}/retrieve_future", {"request_id": name})
        assert failed.status_code == 200 and alias in failed.json()["error"]
        assert str(tmp_path) not in failed.text

        assert person.send("POST", f"{API}/weights_info", {"tinker_path": paths[1]}).json()["base_model"] == BASE
        assert person.done("load_weights", {**load, "seq_id": 4, "path": paths[1]})
        step = {"model_id": model_id, "seq_id": 5, "forward_backward_input": pass_input()}
        assert person.done("forward_backward", step)["metrics"]
