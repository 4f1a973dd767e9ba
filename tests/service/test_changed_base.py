"""A LoRA is never computed on other base weights than those it was trained on, unless somebody says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from default_engine import torch_engine
from service_harness import GOOD_PASS, STEP, Harness, failure, make_sampler, open_service
from typer.testing import CliRunner

from mint.cli.main import app
from mint.compose.export import export_checkpoint
from mint.errors import CheckpointError, RecoveryDivergedError, UnknownBaseModelError
from mint.models.fingerprint import fingerprint
from mint.models.peft_format import write_peft
from mint.models.random_base import SHAPES, write_random_base
from mint.models.registry import BUNDLED
from mint.server.service.downloads import ARCHIVE, open_file
from mint.server.service.uploads import import_checkpoint
from mint.server.store.checkpoint_folders import MANIFEST_FILE, read_manifest
from mint.server.store.checkpoints import find_checkpoint
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.worker import snapshots


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED["mint/tiny"], tmp_path / "base"))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def change_weights(base: Path) -> None:
    """The same names and shapes, other values."""
    file = base / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()  # what has the old one open keeps it
    file.write_bytes(content)


def make_model(harness: Harness, base_model: Path | str, number: int = 0) -> str:
    body = {"session_id": harness.session_id, "model_seq_id": number, "base_model": str(base_model)}
    return harness.wait(harness.submit("create_model", {**body, "lora_config": {"rank": 8, "seed": 7}}))["model_id"]


def step(harness: Harness, model_id: str, seq_id: int) -> str:
    harness.run("forward_backward", model_id, seq_id, GOOD_PASS)
    return harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"]


def saved(data_dir: Path, base: Path | str) -> tuple[str, str]:
    """A training state and weights for sampling, of a service that has ended."""
    harness = Harness(open_service(data_dir))
    model_id = make_model(harness, base)
    step(harness, model_id, 1)
    training = harness.run("save_weights", model_id, 3, {"path": "a"})["path"]
    sampling = harness.run("save_weights_for_sampler", model_id, 4, {"path": "a"})["path"]
    harness.service.stop()
    return training, sampling


def load_new(harness: Harness, path: str, **fields: Any) -> str:
    body = {"session_id": harness.session_id, "model_seq_id": 5, "path": path, "optimizer": True, **fields}
    return harness.wait(harness.submit("load_weights", body))["model_id"]


def folder_of(data_dir: Path, path: str) -> Path:
    journal = Journal(data_dir / JOURNAL_FILE)
    row = find_checkpoint(journal, path, reader=None)
    journal.close()
    return data_dir / row.folder


def test_a_manifest_holds_the_fingerprint_of_the_base(data_dir: Path, base: Path) -> None:
    training, sampling = saved(data_dir, base)
    for path in (training, sampling):
        assert read_manifest(folder_of(data_dir, path)).base_fingerprint == fingerprint(base)


def _into_a_new_model(harness: Harness, _base: Path, training: str, _sampling: str) -> None:
    load_new(harness, training)


def _into_a_new_model_on_a_named_base(harness: Harness, base: Path, training: str, _sampling: str) -> None:
    load_new(harness, training, base_model=str(base))


def _into_a_model(harness: Harness, base: Path, training: str, _sampling: str) -> None:
    harness.run("load_weights", make_model(harness, base), 1, {"path": training, "optimizer": False})


def _for_sampling(harness: Harness, _base: Path, _training: str, sampling: str) -> None:
    harness.sample(make_sampler(harness, path=sampling), 0)


def _for_sampling_on_a_loaded_base(harness: Harness, base: Path, _training: str, sampling: str) -> None:
    make_model(harness, base)
    make_sampler(harness, path=sampling)


LOADS: list[Callable[[Harness, Path, str, str], None]] = [
    _into_a_new_model,
    _into_a_new_model_on_a_named_base,
    _into_a_model,
    _for_sampling,
    _for_sampling_on_a_loaded_base,
]


@pytest.mark.parametrize("load", LOADS)
def test_a_checkpoint_is_not_loaded_on_a_base_whose_weights_have_changed(
    data_dir: Path, base: Path, load: Callable[[Harness, Path, str, str], None]
) -> None:
    training, sampling = saved(data_dir, base)
    before = fingerprint(base)
    change_weights(base)
    harness = Harness(open_service(data_dir))
    error = failure(lambda: load(harness, base, training, sampling))
    assert isinstance(error, CheckpointError)
    told = (sampling if "sampling" in load.__name__ else training, str(base), before, fingerprint(base), "MINT_MODELS")
    assert all(part in str(error) for part in told), error
    harness.service.stop()


@pytest.mark.parametrize("load", LOADS)
def test_a_checkpoint_is_loaded_on_the_weights_it_was_trained_on(
    data_dir: Path, base: Path, load: Callable[[Harness, Path, str, str], None]
) -> None:
    training, sampling = saved(data_dir, base)
    harness = Harness(open_service(data_dir))
    load(harness, base, training, sampling)
    harness.service.stop()


def test_the_same_weights_in_another_folder_are_the_same_base(data_dir: Path, base: Path, tmp_path: Path) -> None:
    training, _ = saved(data_dir, base)
    base.rename(tmp_path / "moved")
    harness = Harness(open_service(data_dir))
    _into_a_model(harness, tmp_path / "moved", training, "")
    load_new(harness, training, base_model=str(tmp_path / "moved"))
    harness.service.stop()


def test_a_checkpoint_of_an_older_mint_has_no_fingerprint_and_is_loaded(data_dir: Path, base: Path) -> None:
    training, _ = saved(data_dir, base)
    file = folder_of(data_dir, training) / MANIFEST_FILE
    content = json.loads(file.read_text())
    del content["base_fingerprint"], content["sha256"]
    file.write_text(json.dumps(content, indent=2))
    change_weights(base)
    harness = Harness(open_service(data_dir))
    load_new(harness, training)
    harness.service.stop()


@pytest.mark.parametrize("bytes_saved", [snapshots.SMALL_STATE_BYTES, 0], ids=["snapshot", "replay"])
def test_a_model_stops_whose_base_has_changed_and_goes_on_as_the_operator_decides(
    data_dir: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_saved: int
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", bytes_saved)
    shutil.copytree(base, tmp_path / "before")

    def decide(model_id: str, option: str) -> Any:
        result = CliRunner().invoke(app, ["recover", model_id, option, "--data-dir", str(data_dir), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def reopened() -> Harness:
        return Harness(open_service(data_dir, is_server=True), harness.session_id)

    harness = Harness(open_service(data_dir, is_server=True))
    model_id = make_model(harness, base)
    step(harness, model_id, 1)
    sampler = harness.run("save_weights_for_sampler", model_id, 3, {"sampling_session_seq_id": 0})
    harness.service.stop()
    before = fingerprint(base)
    change_weights(base)

    harness = reopened()
    error = failure(lambda: harness.restore(model_id))
    assert isinstance(error, RecoveryDivergedError)
    assert all(part in str(error) for part in (model_id, str(base), before, fingerprint(base), "mint recover"))
    refusal = failure(lambda: harness.sample(sampler["sampling_session_id"], 0))
    assert isinstance(refusal, RecoveryDivergedError)
    harness.service.stop()

    shutil.rmtree(base)
    shutil.copytree(tmp_path / "before", base)  # the weights of before are back
    decide(model_id, "--retry")
    harness = reopened()
    harness.restore(model_id)
    digest = harness.digest(model_id)
    harness.service.stop()

    change_weights(base)
    harness = reopened()
    failure(lambda: harness.restore(model_id))
    harness.service.stop()
    aside = decide(model_id, "--accept")["checkpoint"]
    assert read_manifest(folder_of(data_dir, aside)).base_fingerprint == before
    for _ in range(2):  # the weights of now count from here on
        harness = reopened()
        harness.restore(model_id)
        assert harness.digest(model_id) == digest
        assert harness.sample(sampler["sampling_session_id"], 0)
        harness.service.stop()


@pytest.mark.parametrize("option", ["--accept", "--at-snapshot"])
def test_a_lora_that_does_not_fit_the_base_of_now_stops_again_and_goes_on_with_that_of_before(
    data_dir: Path, base: Path, tmp_path: Path, option: str
) -> None:
    def opened(session_id: str | None = None) -> Harness:
        engine = torch_engine(dtype="float32", threads=1)
        return Harness(open_service(data_dir, engine=engine, is_server=True), session_id)

    def recover(option: str) -> str:
        result = CliRunner().invoke(app, ["recover", model_id, option, "--data-dir", str(data_dir)])
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split())

    shutil.copytree(base, tmp_path / "before")
    harness = opened()
    model_id = make_model(harness, base)
    step(harness, model_id, 1)
    digest = harness.digest(model_id)
    harness.service.stop()

    shutil.rmtree(base)
    write_random_base(base, SHAPES["tiny"], seed=3)
    harness = opened(harness.session_id)
    failure(lambda: harness.restore(model_id))
    harness.service.stop()
    assert "If its LoRA does not fit that base model, it stops again" in recover(option)
    harness = opened(harness.session_id)
    error = str(failure(lambda: harness.restore(model_id)))
    harness.service.stop()
    told = (
        "does not fit the base model that is there now",
        "layers.0.self_attn.q_proj",
        "put the base model of before back",
    )
    assert all(part in error for part in told), error

    shutil.rmtree(base)
    shutil.copytree(tmp_path / "before", base)
    recover("--retry")
    harness = opened(harness.session_id)
    harness.restore(model_id)
    assert harness.digest(model_id) == digest
    harness.service.stop()


def test_the_service_computes_on_what_it_has_loaded_whatever_becomes_of_the_files(data_dir: Path, base: Path) -> None:
    harness = Harness(open_service(data_dir))
    model_id = make_model(harness, base)
    loaded = fingerprint(base)
    change_weights(base)
    path = harness.run("save_weights", model_id, 1, {"path": "a"})["path"]
    load_new(harness, path)
    harness.service.stop()
    assert read_manifest(folder_of(data_dir, path)).base_fingerprint == loaded


@pytest.fixture
def checkpoint(data_dir: Path, base: Path) -> str:
    """A LoRA of zeros on the folder, with the names of the layers of a real one."""
    data_dir.mkdir()
    journal = Journal(data_dir / JOURNAL_FILE)
    row = import_checkpoint(journal, data_dir, write_adapter(data_dir.parent / "adapter"), owner="local",
                            base_model=str(base))  # fmt: skip
    journal.close()
    return f"mint://{row.model_id}/{row.kind}/{row.name}"


def write_adapter(folder: Path) -> Path:
    name = "model.layers.0.self_attn.q_proj"
    weights = {
        f"{name}.lora_A.weight": np.zeros((1, 192), np.float32),
        f"{name}.lora_B.weight": np.zeros((192, 1), np.float32),
    }
    write_peft(folder, weights, rank=1, alpha=32.0, base_model="mint/tiny")
    return folder


@pytest.mark.parametrize("form", ["peft", "hf", "gguf-ready"])
def test_a_checkpoint_is_not_exported_with_other_base_weights(
    data_dir: Path, base: Path, tmp_path: Path, checkpoint: str, form: Any
) -> None:
    export_checkpoint(checkpoint, output=tmp_path / "before", format=form, data_dir=data_dir)
    change_weights(base)
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        export_checkpoint(checkpoint, output=tmp_path / "after", format=form, data_dir=data_dir)
    assert not (tmp_path / "after").exists()


def test_the_adapter_alone_is_exported_where_its_base_is_not(
    data_dir: Path, base: Path, tmp_path: Path, checkpoint: str
) -> None:
    shutil.rmtree(base)
    export_checkpoint(checkpoint, output=tmp_path / "out", format="peft", data_dir=data_dir)


def test_an_archive_is_taken_back_on_other_weights_only_for_a_base_that_is_named(
    data_dir: Path, base: Path, tmp_path: Path, checkpoint: str
) -> None:
    _, content = open_file(folder_of(data_dir, checkpoint), ARCHIVE)
    archive = tmp_path / "checkpoint.tar.gz"
    archive.write_bytes(b"".join(content))
    trained_on = fingerprint(base)
    journal = Journal(data_dir / JOURNAL_FILE)

    def take(**options: Any) -> Any:
        return import_checkpoint(journal, data_dir, archive, owner="local", **options)

    same = take()
    assert read_manifest(data_dir / same.folder).base_fingerprint == trained_on
    change_weights(base)
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        take()
    other = take(base_model=str(base))
    assert any(trained_on in note for note in other.user_metadata["notes"])
    assert read_manifest(data_dir / other.folder).base_fingerprint == fingerprint(base)
    journal.close()


def test_a_folder_may_be_named_from_another_working_directory_afterwards(
    data_dir: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training, sampling = saved(data_dir, "./base")
    assert read_manifest(folder_of(data_dir, training)).base_model == str(base)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    harness = Harness(open_service(data_dir))
    for number, spelling in enumerate(["../base", str(base)]):
        model_id = make_model(harness, spelling, number)
        harness.run("load_weights", model_id, 1, {"path": training, "optimizer": True, "base_model": spelling})
    load_new(harness, training)
    harness.sample(make_sampler(harness, path=sampling), 0)
    harness.service.stop()


def test_a_sampler_of_a_relative_folder_is_the_one_of_its_absolute_path(
    data_dir: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    harness = Harness(open_service(data_dir))
    names = set()
    for spelling in ("base", "./base", str(base), "base"):  # the same request again, spelled otherwise
        body = {"session_id": harness.session_id, "sampling_session_seq_id": 0, "base_model": spelling}
        made = harness.service.sampling_sessions.create(harness.caller, json.dumps(body).encode())
        names.add(made.sampling_session_id)
        assert harness.service.sampling_sessions.info(harness.caller, made.sampling_session_id).base_model == str(base)
    assert len(names) == 1
    harness.service.stop()


def test_an_offered_folder_may_be_asked_for_as_it_is_offered_and_by_its_absolute_path(
    data_dir: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, tmp_path / "secret")
    harness = Harness(open_service(data_dir, offered=["./base"]))
    for number, spelling in enumerate(["./base", str(base)]):
        make_model(harness, spelling, number)
    assert harness.service.base_models.names == ["./base"]
    refusal = failure(lambda: make_model(harness, "secret", 2))
    assert isinstance(refusal, UnknownBaseModelError) and str(tmp_path) not in str(refusal)  # not whether it is there
    harness.service.stop()
