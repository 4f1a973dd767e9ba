"""A named checkpoint gives back exactly what was saved, in this process and in the next, or says that it is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from service_harness import GOOD_PASS, STEP, Harness, datum, failure, open_service, pass_body

from mint.errors import CheckpointError, ConflictError, InvalidRequestError, NotFoundError
from mint.server.callers import LOCAL
from mint.server.store.checkpoints import open_checkpoint


def step(harness: Harness, model_id: str, seq_id: int) -> str:
    harness.run("forward_backward", model_id, seq_id, GOOD_PASS)
    return harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"]


def load_new(harness: Harness, number: int, path: str, *, optimizer: bool) -> str:
    body = {"session_id": harness.session_id, "model_seq_id": number, "path": path, "optimizer": optimizer}
    return harness.wait(harness.submit("load_weights", body))["model_id"]


def test_a_checkpoint_with_its_optimizer_goes_on_bit_for_bit_in_another_process(tmp_path: Path) -> None:
    first = Harness(open_service(tmp_path))
    model_id = first.create_model()
    saved = step(first, model_id, 1)
    path = first.run("save_weights", model_id, 3, {"path": "a"})["path"]
    assert path == f"tinker://{model_id}/weights/a"
    uninterrupted = step(first, model_id, 4)
    first.service.sessions.finish(LOCAL, first.session_id)
    first.service.stop()

    second = Harness(open_service(tmp_path))
    loaded = load_new(second, 0, path.replace("tinker://", "mint://"), optimizer=True)
    assert second.digest(loaded) == saved
    assert step(second, loaded, 1) == uninterrupted
    second.service.stop()


def test_without_the_optimizer_it_starts_afresh(harness: Harness) -> None:
    model_id = harness.create_model()
    step(harness, model_id, 1)
    path = harness.run("save_weights", model_id, 3, {"path": "a"})["path"]
    fresh = load_new(harness, 1, path, optimizer=False)
    state, original = (
        harness.engine.read_state(fresh),
        harness.engine.read_state(model_id),
    )
    assert np.array_equal(state.weights["chain"], original.weights["chain"])
    assert state.step == 0 and not state.exp_avg["chain"].any()
    harness.run("load_weights", model_id, 4, {"path": path, "optimizer": False})
    assert harness.digest(model_id) == harness.digest(fresh)


def test_sampler_weights_hold_no_optimizer_and_say_so(harness: Harness) -> None:
    model_id = harness.create_model()
    path = harness.run("save_weights_for_sampler", model_id, 1, {"path": "s"})["path"]
    assert path == f"tinker://{model_id}/sampler_weights/s"
    error = failure(lambda: load_new(harness, 1, path, optimizer=True))
    assert isinstance(error, CheckpointError) and "no optimizer" in str(error) and error.remedy
    load_new(harness, 2, path, optimizer=False)


def test_a_name_is_taken_until_it_is_overwritten(harness: Harness) -> None:
    model_id = harness.create_model()
    path = harness.run("save_weights", model_id, 1, {"path": "a"})["path"]
    digest = step(harness, model_id, 2)
    error = failure(lambda: harness.run("save_weights", model_id, 4, {"path": "a"}))
    assert isinstance(error, ConflictError) and "overwrite" in str(error)
    harness.run("save_weights", model_id, 5, {"path": "a", "overwrite": True})
    assert harness.digest(load_new(harness, 1, path, optimizer=True)) == digest
    assert len(list((harness.service.data_dir / "checkpoints").iterdir())) == 1


def test_a_checkpoint_of_another_shape_is_refused_and_the_weights_stay(harness: Harness) -> None:
    path = harness.run("save_weights", harness.create_model(0, rank=4), 1, {"path": "a"})["path"]
    model_id = harness.create_model(1, rank=8)
    digest = step(harness, model_id, 1)
    error = failure(lambda: harness.run("load_weights", model_id, 3, {"path": path, "optimizer": True}))
    assert isinstance(error, InvalidRequestError)
    assert "rank 4" in str(error) and "rank 8" in str(error) and error.remedy
    assert harness.digest(model_id) == digest
    step(harness, model_id, 4)


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["bit", "cut", "gone"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_model_stays(
    harness: Harness, caplog: pytest.LogCaptureFixture, file: str, how: str
) -> None:
    model_id = harness.create_model()
    path = harness.run("save_weights", model_id, 1, {"path": "a"})["path"]
    digest = step(harness, model_id, 2)
    (target,) = (harness.service.data_dir / "checkpoints").glob(f"*/{file}")
    content = target.read_bytes()
    if how == "gone":
        target.unlink()
    elif how == "cut":
        target.write_bytes(content[:-5])
    else:
        target.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    error = failure(lambda: harness.run("load_weights", model_id, 4, {"path": path, "optimizer": True}))
    assert isinstance(error, CheckpointError) and "Use another checkpoint" in str(error)
    name = f"ckpt_{target.parent.name.replace('-', '')}" if file == "manifest.json" else path
    assert name in str(error) and str(harness.service.data_dir) not in str(error)
    assert str(target.parent) in caplog.text  # for the operator
    assert harness.digest(model_id) == digest
    step(harness, model_id, 5)


def test_a_path_can_be_opened_without_a_service(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path))
    model_id = harness.create_model()
    step(harness, model_id, 1)
    path = harness.run("save_weights_for_sampler", model_id, 3, {"path": "s"})["path"]
    expected = harness.engine.read_state(model_id).weights
    harness.service.stop()
    manifest, weights = open_checkpoint(tmp_path, path)
    assert manifest.path == path and manifest.lora_spec.rank == 8 and manifest.step == 1
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in weights)
    with pytest.raises(NotFoundError):
        open_checkpoint(tmp_path, path + "x")


def test_users_names_never_become_file_names(harness: Harness) -> None:
    model_id = harness.create_model()
    harness.run("save_weights", model_id, 1, {"path": "CON"})
    harness.run("forward_backward", model_id, 2, pass_body(datum(1, 2)))
    names = [path.name for path in harness.service.data_dir.rglob("*")]
    assert not [name for name in names if "CON" in name or "train" in name]
    info = harness.service.weights_info(LOCAL, json.dumps({"tinker_path": f"mint://{model_id}/weights/CON"}).encode())
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("mint/tiny", 8, True)
