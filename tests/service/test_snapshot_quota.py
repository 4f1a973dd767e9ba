"""The snapshots of an owner's models take a bounded part of the disk; models that exist already always go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from default_engine import torch_engine
from service_harness import BASE, GOOD_PASS, STEP, Harness, failure, open_service, stored
from waiting import wait_until

from mint.engine.fake_engine import FakeEngine
from mint.engine.protocol import LoraSpec
from mint.errors import MintError, QuotaExceededError
from mint.server.callers import Caller, Quotas
from mint.server.disk_space import folder_bytes
from mint.server.limits import MAX_SNAPSHOTS
from mint.server.service.service import Service
from mint.server.service.sessions import SILENCE_S
from mint.server.store.database import OpenFor
from mint.server.store.journal import JOURNAL_FILE, Journal, snapshot_bytes
from mint.server.worker import snapshots

LORA = LoraSpec(8, 7, train_attn=True, train_mlp=True, train_unembed=True)
OF_ONE = MAX_SNAPSHOTS * FakeEngine().state_bytes(BASE, LORA)
"""What the snapshots of one model of the fake engine take."""

HEADER_BYTES = 65_536
"""More than the header of a snapshot has beside its arrays."""


def owner_with(quota: int | None) -> Caller:
    return Caller("ann", quotas=Quotas(max_snapshot_bytes=quota))


@pytest.fixture
def ann(tmp_path: Path) -> Iterator[Harness]:
    """Her quota is for two models and a half."""
    service = open_service(tmp_path)
    yield Harness(service, caller=owner_with(int(2.5 * OF_ONE)))
    service.stop()


def used(service: Service, owner: str = "ann") -> int:
    return stored(service.data_dir, lambda journal: snapshot_bytes(journal.database, owner))


def step(harness: Harness, model_id: str, number: int) -> str:
    harness.run("forward_backward", model_id, 2 * number + 1, GOOD_PASS)
    return harness.run("optim_step", model_id, 2 * number + 2, STEP)["state_digest"]


def require_refused(error: MintError, quota: int) -> None:
    assert isinstance(error, QuotaExceededError) and error.status == 403 and error.category == "user"
    assert error.field == "max_snapshot_bytes" and str(quota) in str(error)
    assert "mint sessions end" in str(error) and "mint keys update" in str(error)


def test_a_model_whose_snapshots_exceed_its_owners_quota_is_refused_and_the_others_train_on(ann: Harness) -> None:
    quota = int(2.5 * OF_ONE)
    models = [ann.create_model(0), ann.create_model(1)]
    assert used(ann.service) == 2 * OF_ONE
    error = failure(lambda: ann.create_model(2))
    require_refused(error, quota)
    assert str(2 * OF_ONE) in str(error) and f"need {OF_ONE} more" in str(error)
    assert not ann.engine.has_model(f"{ann.session_id}:train:2")
    for number in range(MAX_SNAPSHOTS + 2):
        for model_id in models:
            step(ann, model_id, number)
    last = 2 * (MAX_SNAPSHOTS + 2)
    saved = ann.run("save_weights", models[0], last + 1, {"path": "kept"})["path"]
    assert ann.run("load_weights", models[0], last + 2, {"path": saved, "optimizer": True})
    bob = Harness(ann.service, caller=Caller("bob", quotas=Quotas(max_snapshot_bytes=OF_ONE)))
    step(bob, bob.create_model(), 0)


def test_a_model_that_ends_makes_room_for_another(ann: Harness) -> None:
    first = ann.create_model(0)
    ann.create_model(1)
    require_refused(failure(lambda: ann.create_model(2)), int(2.5 * OF_ONE))
    ann.service.sessions.unload_model(ann.caller, first)
    assert used(ann.service) == OF_ONE
    ann.create_model(3)
    ann.service.sessions.finish(ann.caller, ann.session_id)
    assert used(ann.service) == 0


def test_a_model_made_of_a_checkpoint_counts_and_is_refused_in_the_same_way(ann: Harness) -> None:
    path = ann.run("save_weights", ann.create_model(0), 1, {"path": "kept"})["path"]

    def create(number: int) -> dict[str, Any]:
        body = {"session_id": ann.session_id, "model_seq_id": number, "path": path, "optimizer": True}
        return ann.wait(ann.submit("load_weights", body))

    assert create(1)["model_id"]
    assert used(ann.service) == 2 * OF_ONE
    require_refused(failure(lambda: create(2)), int(2.5 * OF_ONE))
    assert len(list((ann.service.data_dir / "snapshots").iterdir())) == 1  # a load writes one at once


def test_the_models_of_a_suspended_session_count(tmp_path: Path) -> None:
    clock = [0.0]
    service = open_service(tmp_path, clock=lambda: clock[0])
    silent = Harness(service, caller=owner_with(OF_ONE))
    step(silent, silent.create_model(), 0)
    clock[0] += SILENCE_S + 1
    service.call_soon(lambda: None)  # wakes the worker, which keeps house
    wait_until(lambda: silent.session_id not in service.session_owners)
    require_refused(failure(Harness(service, caller=silent.caller).create_model), OF_ONE)
    service.sessions.finish(silent.caller, silent.session_id)
    assert Harness(service, caller=silent.caller).create_model()
    service.stop()


def test_models_go_on_beyond_a_quota_that_was_lowered_and_over_a_restart(tmp_path: Path) -> None:
    ann = Harness(open_service(tmp_path), caller=owner_with(None))
    models = [ann.create_model(number) for number in range(2)]
    digests = [step(ann, model_id, 0) for model_id in models]
    ann.service.stop()
    ann = Harness(open_service(tmp_path), ann.session_id, caller=owner_with(1))
    for model_id, digest in zip(models, digests, strict=True):
        ann.restore(model_id)  # with request 3
        assert ann.digest(model_id) == digest
        ann.run("forward_backward", model_id, 4, GOOD_PASS)
        ann.run("optim_step", model_id, 5, STEP)
    require_refused(failure(lambda: ann.create_model(2)), 1)
    ann.service.stop()


def test_a_model_of_an_older_mint_goes_on_and_counts_once_it_is_restored(tmp_path: Path) -> None:
    ann = Harness(open_service(tmp_path), caller=owner_with(OF_ONE))
    model_id = ann.create_model()
    digest = step(ann, model_id, 0)
    ann.service.stop()
    with closing(Journal(tmp_path / JOURNAL_FILE)) as journal:  # as the older mint has left it
        journal.database.write("UPDATE models SET effective = json_remove(effective, '$.state_bytes')")
    ann = Harness(open_service(tmp_path), ann.session_id, caller=ann.caller)
    assert used(ann.service) == 0
    ann.restore(model_id)
    assert ann.digest(model_id) == digest and used(ann.service) == OF_ONE
    require_refused(failure(lambda: ann.create_model(1)), OF_ONE)
    ann.service.stop()


def test_a_damaged_row_of_one_model_does_not_stop_the_creation_of_others(ann: Harness) -> None:
    ann.create_model(0)
    with closing(Journal(ann.service.data_dir / JOURNAL_FILE, OpenFor.COMMAND)) as journal:
        journal.database.write("UPDATE models SET effective = substr(effective, 2)")
    assert ann.create_model(1)


def test_models_that_wait_over_a_restart_have_their_owners_quota(tmp_path: Path) -> None:
    idle = Service(FakeEngine(), tmp_path, aliases={})  # it was not started: what it accepts waits
    ann = Harness(idle, caller=owner_with(None))
    config = {"rank": LORA.rank, "seed": LORA.seed}
    create = {"session_id": ann.session_id, "base_model": BASE, "lora_config": config}
    waiting = [ann.submit("create_model", {"model_seq_id": number, **create}) for number in range(3)]
    idle.stop()
    service = Service(FakeEngine(), tmp_path, aliases={})
    service.start(lambda _owner: Quotas(max_snapshot_bytes=2 * OF_ONE))  # before ann calls again
    ann = Harness(service, ann.session_id, caller=ann.caller)
    for name in waiting[:2]:
        assert ann.wait(name)["model_id"]
    require_refused(failure(lambda: ann.wait(waiting[2])), 2 * OF_ONE)
    service.stop()


def test_the_files_of_a_models_snapshots_take_what_is_counted_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "is_due", lambda times, *, is_small: True)
    service = open_service(tmp_path, engine=torch_engine(dtype="float32", threads=1))
    ann = Harness(service, caller=owner_with(1 << 40))
    model_id = ann.create_model()
    folder = tmp_path / "snapshots"
    for number in range(MAX_SNAPSHOTS + 2):
        step(ann, model_id, number)
    wait_until(lambda: len(list(folder.iterdir())) == MAX_SNAPSHOTS)
    assert 0 <= folder_bytes(folder) - used(service) < MAX_SNAPSHOTS * HEADER_BYTES < used(service) / 2
    service.stop()
