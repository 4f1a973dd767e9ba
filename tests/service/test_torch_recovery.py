"""The torch engine behind the service: a restart, from a snapshot or by replay, continues with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from default_engine import torch_engine
from service_harness import Harness, datum, failure, open_service, pass_body

from mint.engine.devices import Device
from mint.engine.model.layer_parts import Mlp
from mint.engine.protocol import LossSpec, MicroBatching, PassResult, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.errors import OutOfMemoryError, RecoveryDivergedError
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.worker import snapshots

STEP: dict[str, Any] = {"adam_params": {"learning_rate": 0.003, "weight_decay": 0.01, "grad_clip_norm": 1.0}}


class NoMemory:
    """Stands in a block's backward: the first `times` calls find no memory."""

    def __init__(self, times: int) -> None:
        self.times, self.real = times, Mlp.backward

    def __call__(self, *arguments: Any) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise MemoryError
        return self.real(*arguments)


def torch_service(data_dir: Path, implementation: Literal["mint", "transformers"] = "mint") -> Any:
    return open_service(data_dir, engine=torch_engine(dtype="float32", threads=1, implementation=implementation))


def service_alone(data_dir: Path) -> Any:
    """Its engine is in this process, also with `--cluster`: tests change what it finds."""
    return open_service(data_dir, engine=TorchEngine(dtype="float32", threads=1))


def train(harness: Harness, model_id: str, steps: range) -> list[tuple[Any, str]]:
    """What each step answered: the pass's outputs, and the digest after it."""
    seen = []
    for step in steps:
        data = [datum(1 + step, 20, 30, 40 + step, 50), datum(7, 8, 9 + step)]
        output = harness.run("forward_backward", model_id, 3 * step + 1, pass_body(*data))
        more = harness.run("forward_backward", model_id, 3 * step + 2, pass_body(datum(100, 101, 102, 103)))
        digest = harness.run("optim_step", model_id, 3 * step + 3, STEP)["state_digest"]
        seen.append(((output["loss_fn_outputs"], more["loss_fn_outputs"]), digest))
    return seen


@pytest.mark.parametrize("implementation", ["mint", "transformers"])
@pytest.mark.parametrize("small_state_bytes", [snapshots.SMALL_STATE_BYTES, 0], ids=["snapshot", "replay"])
def test_a_restart_in_the_middle_changes_no_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_state_bytes: int,
    implementation: Literal["mint", "transformers"],
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", small_state_bytes)
    whole = Harness(torch_service(tmp_path / "whole", implementation))
    uninterrupted = train(whole, whole.create_model(), range(4))
    whole.service.stop()

    harness = Harness(torch_service(tmp_path / "cut", implementation))
    model_id = harness.create_model()
    seen = train(harness, model_id, range(2))
    data = [datum(3, 20, 30, 42, 50), datum(7, 8, 11)]
    harness.run("forward_backward", model_id, 7, pass_body(*data))  # a gradient is open
    harness.service.stop()
    harness = Harness(torch_service(tmp_path / "cut", implementation), harness.session_id)
    seen += train(harness, model_id, range(2, 4))
    assert seen == uninterrupted
    harness.service.stop()


def test_a_pass_that_was_split_for_lack_of_memory_is_replayed_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 0)
    harness = Harness(service_alone(tmp_path))
    model_id = harness.create_model()
    train(harness, model_id, range(2))
    data = [datum(*range(20 + row, 60 + row)) for row in range(6)]
    with monkeypatch.context() as shortage:
        shortage.setattr(Mlp, "backward", staticmethod(NoMemory(times=2)))
        output = harness.run("forward_backward", model_id, 7, pass_body(*data))
    assert output["metrics"]["memory_retries:sum"] == 2  # computed again, then cut in half
    harness.service.stop()
    harness = Harness(service_alone(tmp_path), harness.session_id)
    digest = harness.run("optim_step", model_id, 8, STEP)["state_digest"]
    harness.service.stop()

    other = Harness(service_alone(tmp_path / "other"))
    name = other.create_model()
    train(other, name, range(2))
    with monkeypatch.context() as shortage:
        shortage.setattr(Mlp, "backward", staticmethod(NoMemory(times=2)))
        other.run("forward_backward", name, 7, pass_body(*data))
    assert other.run("optim_step", name, 8, STEP)["state_digest"] == digest
    other.service.stop()


def test_a_machine_with_more_memory_replays_the_passes_of_a_small_one_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 0)
    data = [datum(*((7 * row + place) % 90 + 5 for place in range(60 + row))) for row in range(20)]
    digests = []
    for folder, memories in (("moved", (1 << 20, 64 << 30)), ("stayed", (1 << 20, 1 << 20))):
        monkeypatch.setattr(Device, "memory_bytes", property(lambda _, memory=memories[0]: memory))
        harness = Harness(service_alone(tmp_path / folder))
        model_id = harness.create_model()
        train(harness, model_id, range(2))
        harness.run("forward_backward", model_id, 7, pass_body(*data))  # 1,390 tokens, in micro-batches of 256 rows
        harness.service.stop()
        monkeypatch.setattr(Device, "memory_bytes", property(lambda _, memory=memories[1]: memory))
        harness = Harness(service_alone(tmp_path / folder), harness.session_id)
        digests.append(harness.run("optim_step", model_id, 8, STEP)["state_digest"])
        harness.service.stop()
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_shortage_of_memory_during_a_replay_does_not_give_the_model_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 0)
    harness = Harness(service_alone(tmp_path))
    model_id = harness.create_model()
    (*_, (_, digest)) = train(harness, model_id, range(2))
    harness.service.stop()
    harness = Harness(service_alone(tmp_path), harness.session_id)
    with monkeypatch.context() as shortage:
        shortage.setattr(Mlp, "backward", staticmethod(NoMemory(times=1000)))
        assert isinstance(failure(lambda: harness.restore(model_id)), OutOfMemoryError)
    harness.restore(model_id)
    assert harness.digest(model_id) == digest
    harness.service.stop()


@pytest.mark.parametrize("small_state_bytes", [snapshots.SMALL_STATE_BYTES, 0], ids=["snapshot", "replay"])
@pytest.mark.parametrize("is_sound", [True, False], ids=["sound", "another digest"])
def test_a_journal_with_digests_of_an_older_form_is_replayed_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_state_bytes: int, is_sound: bool
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", small_state_bytes)
    harness = Harness(service_alone(tmp_path))
    model_id = harness.create_model()
    real = TorchEngine.state_digest
    with monkeypatch.context() as older:
        older.setattr(TorchEngine, "state_digest", lambda self, name, like=None: real(self, name, like="old"))
        (*_, (_, digest)) = train(harness, model_id, range(4))
    assert ":" not in digest
    harness.service.stop()
    if not is_sound:
        journal = Journal(tmp_path / JOURNAL_FILE)
        journal.database.write("UPDATE jobs SET digest = 'x' || substr(digest, 2), result_sha256 = NULL")
        journal.database.write("UPDATE models SET settings_sha256 = NULL")
        journal.database.write("DELETE FROM snapshots WHERE seq_id > 6")
        journal.close()
    harness = Harness(service_alone(tmp_path), harness.session_id)
    if is_sound:
        harness.restore(model_id)
        assert harness.engine.state_digest(model_id, like=digest) == digest
    else:
        assert isinstance(failure(lambda: harness.restore(model_id)), RecoveryDivergedError)
    harness.service.stop()


class OlderEngine(TorchEngine):
    """Adds micro-batches one after the other, as older versions did, in micro-batches of 40 rows."""

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[TrainDatum],
        loss: LossSpec,
        *,
        micro_batching: MicroBatching | None = None,
    ) -> PassResult:
        older = MicroBatching(40, recompute=None, order="running")
        return super().forward_backward(model_id, data, loss, micro_batching=older)


def older_service(data_dir: Path) -> Any:
    return open_service(data_dir, engine=OlderEngine(dtype="float32", threads=1))


def train_in_parts(harness: Harness, model_id: str, last: int) -> str:
    """Passes in several micro-batches and steps, up to request `last`; returns the digest after the last step."""
    data = [datum(*range(20 + row, 60 + row)) for row in range(6)]
    digest = ""
    for seq_id in range(1, last + 1):
        if seq_id % 2:
            harness.run("forward_backward", model_id, seq_id, pass_body(*data))
        else:
            digest = harness.run("optim_step", model_id, seq_id, STEP)["state_digest"]
    return digest


@pytest.mark.parametrize("order", [None, "tree"], ids=["of that time", "as if of now"])
def test_a_journal_of_the_older_sum_is_replayed_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str | None
) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 0)
    whole = Harness(older_service(tmp_path / "whole"))
    digest = train_in_parts(whole, whole.create_model(), 8)
    whole.service.stop()
    harness = Harness(older_service(tmp_path / "cut"))
    model_id = harness.create_model()
    train_in_parts(harness, model_id, 7)  # a gradient is open
    harness.service.stop()
    journal = Journal(tmp_path / "cut" / JOURNAL_FILE)
    change = (
        "json_remove(micro_batching, '$.order')" if order is None else f"json_set(micro_batching, '$.order', '{order}')"
    )
    journal.database.write(f"UPDATE jobs SET micro_batching = {change}, result_sha256 = NULL")
    journal.database.write("UPDATE models SET settings_sha256 = NULL")  # else a request without checksum is damage
    journal.close()

    harness = Harness(service_alone(tmp_path / "cut"), harness.session_id)
    if order is None:
        assert harness.run("optim_step", model_id, 8, STEP)["state_digest"] == digest
    else:  # the two sums do differ here, and a replay notices it
        assert isinstance(failure(lambda: harness.restore(model_id)), RecoveryDivergedError)
    harness.service.stop()


def test_a_sampler_survives_a_restart_with_the_same_samples(tmp_path: Path) -> None:
    harness = Harness(torch_service(tmp_path))
    model_id = harness.create_model()
    train(harness, model_id, range(2))
    body = {"sampling_session_seq_id": 0}
    sampler = harness.run("save_weights_for_sampler", model_id, 7, body)["sampling_session_id"]
    asked: dict[str, Any] = {"num_samples": 4, "prompt": [10, 11, 12], "prompt_logprobs": True}
    first = harness.sample(sampler, 0, **asked)
    harness.service.stop()
    harness = Harness(torch_service(tmp_path), harness.session_id)
    assert harness.sample(sampler, 0, **asked) == first
    harness.service.stop()
