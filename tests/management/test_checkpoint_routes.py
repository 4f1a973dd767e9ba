"""What can be done to a checkpoint, and what goes on regardless."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from owners import Place, refusal

import mint
from mint.errors import InvalidRequestError, NotFoundError
from mint.server.store.checkpoint_catalog import EXPIRED_S, CheckpointCatalog
from mint.server.store.training_run_catalog import TrainingRunCatalog
from mint.server.worker import samplers
from mint.types.records import CopyWeightsRequest

PROMPT = mint.types.ModelInput.from_ints([1, 2, 3])
PARAMS = mint.types.SamplingParams(max_tokens=3, seed=5)


class Clocks:
    """A time of day that can be set, and seconds that pass."""

    def __init__(self) -> None:
        self.now, self.seconds, self._housekeeping_at = 1_800_000_000.0, 50.0, 50.0

    def catalog(self, place: Place) -> CheckpointCatalog:
        return CheckpointCatalog(place.journal(), place.data_dir, clock=lambda: self.now)

    def training_run_catalog(self, place: Place) -> TrainingRunCatalog:
        return TrainingRunCatalog(place.journal(), place.data_dir, clock=lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.seconds += seconds

    def remove_expired(self, catalog: CheckpointCatalog) -> int:
        """As the service does: with the seconds since the last time."""
        running_s, self._housekeeping_at = self.seconds - self._housekeeping_at, self.seconds
        return catalog.remove_expired(running_s)


# --- deleting ----------------------------------------------------------------------------------------------------


def test_a_deleted_checkpoint_is_gone_with_its_files(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    rest = place.rest("alice")
    rest.delete_checkpoint(trainer.model_id, "weights/one").result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    assert place.folders() == set()
    again = refusal(lambda: rest.delete_checkpoint_from_tinker_path(path).result())
    assert isinstance(again, NotFoundError)
    assert trainer.save_state("one").result().path == path  # the name is free again


@pytest.fixture
def no_lora_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine holds the LoRA that was used last, and only files have the others."""
    monkeypatch.setattr(samplers, "LEAST_CACHE_BYTES", 1)
    monkeypatch.setattr(samplers, "CACHE_SHARE", 0)


@pytest.mark.usefixtures("no_lora_cache")
def test_what_already_samples_a_deleted_checkpoint_goes_on(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_weights_for_sampler("one").result().path
    client = place.client("alice")
    sampler = client.create_sampling_client(model_path=path)
    before = sampler.sample(PROMPT, 1, PARAMS).result()
    rest = place.rest("alice")
    rest.delete_checkpoint_from_tinker_path(path).result()
    for number in range(2):  # push the weights out of memory: only the files have them now
        trainer.forward_backward([_datum(number)], "cross_entropy").result()
        trainer.optim_step(mint.types.AdamParams(learning_rate=1e-3)).result()
        trainer.save_weights_and_get_sampling_client().sample(PROMPT, 1, PARAMS).result()
    assert sampler.sample(PROMPT, 1, PARAMS).result() == before
    assert isinstance(refusal(lambda: client.create_sampling_client(model_path=path).result()), NotFoundError)
    assert len(place.folders()) == 1
    client.close()
    place.service.checkpoints.remove_expired(0.0)
    assert place.folders() == set()


def _datum(number: int) -> mint.types.Datum:
    inputs = {"target_tokens": [2, 3, 4 + number], "weights": [1.0, 1.0, 1.0]}
    return mint.types.Datum(model_input=PROMPT, loss_fn_inputs=inputs)


# --- time to live ------------------------------------------------------------------------------------------------


def test_a_ttl_is_shown_changed_and_cleared(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one", ttl_seconds=3600).result().path
    rest = place.rest("alice")
    saved = rest.get_checkpoint(path).result()
    assert saved.expires_at is not None
    assert (saved.expires_at - saved.time).total_seconds() == pytest.approx(3600, abs=1)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    longer = rest.get_checkpoint(path).result().expires_at
    assert longer is not None
    assert (longer - saved.time).total_seconds() > 7100
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.get_checkpoint(path).result().expires_at is None
    for wrong in (0, -5, 10**12):
        error = refusal(lambda wrong=wrong: rest.set_checkpoint_ttl_from_tinker_path(path, wrong).result())
        assert isinstance(error, InvalidRequestError)
        assert error.field == "ttl_seconds"


def test_an_expired_checkpoint_is_hidden_at_once_and_its_files_go_later(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    clocks = Clocks()
    catalog = clocks.catalog(place)
    catalog.set_ttl("alice", path, 100)
    clocks.wait(101)
    assert isinstance(refusal(lambda: catalog.checkpoint("alice", path)), NotFoundError)
    assert catalog.checkpoints("alice").checkpoints == []
    assert clocks.training_run_catalog(place).run("alice", trainer.model_id).last_checkpoint is None
    assert clocks.remove_expired(catalog) == 0
    assert len(place.folders()) == 1
    clocks.wait(EXPIRED_S)
    assert clocks.remove_expired(catalog) == 1
    assert place.folders() == set()


def test_a_clock_that_jumps_and_comes_back_removes_nothing(place: Place) -> None:
    path = place.trainer("alice").save_state("one").result().path
    clocks = Clocks()
    catalog = clocks.catalog(place)
    catalog.set_ttl("alice", path, 3600)
    for jump in (10 * 365 * 86400.0, -10 * 365 * 86400.0):
        clocks.now += jump
        for _ in range(23):
            clocks.wait(3600)
            clocks.remove_expired(catalog)
        clocks.now -= jump + 23 * 3600
        clocks.wait(60)
        clocks.remove_expired(catalog)
    assert catalog.checkpoint("alice", path).checkpoint_id == "weights/one"
    clocks.wait(3600)
    clocks.remove_expired(catalog)
    clocks.wait(EXPIRED_S)
    assert clocks.remove_expired(catalog) == 1


def test_the_time_since_a_checkpoint_expired_counts_on_after_a_restart(place: Place) -> None:
    place.trainer("alice").save_state("one", ttl_seconds=1).result()
    clocks = Clocks()
    for _ in range(int(EXPIRED_S / 3600)):
        clocks.remove_expired(clocks.catalog(place))  # each time as a new process would
        assert len(place.folders()) == 1
        clocks.wait(3600)
    assert clocks.remove_expired(clocks.catalog(place)) == 1
    assert place.folders() == set()


def test_an_expired_checkpoint_comes_back_with_another_ttl_and_only_for_its_owner(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    clocks = Clocks()
    catalog = clocks.catalog(place)
    catalog.publish("alice", path, public=True)
    catalog.set_ttl("alice", path, 1)
    clocks.wait(EXPIRED_S)
    clocks.remove_expired(catalog)
    clocks.wait(EXPIRED_S - 60)
    clocks.remove_expired(catalog)
    assert isinstance(refusal(lambda: catalog.set_ttl("bob", path, None)), NotFoundError)
    assert isinstance(refusal(lambda: catalog.delete("bob", path)), NotFoundError)
    catalog.set_ttl("alice", path, None)
    assert catalog.checkpoint("alice", path).checkpoint_id == "weights/one"
    catalog.set_ttl("alice", path, 1)
    clocks.wait(60)
    assert clocks.remove_expired(catalog) == 0  # counted from its new expiry
    catalog.delete("alice", path)
    assert place.folders() == set()


def test_what_a_living_session_samples_does_not_expire(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_weights_for_sampler("one").result().path
    client = place.client("alice")
    sampler = client.create_sampling_client(model_path=path)
    before = sampler.sample(PROMPT, 1, PARAMS).result()
    clocks = Clocks()
    catalog = clocks.catalog(place)
    catalog.set_ttl("alice", path, 1)
    for _ in range(3):
        clocks.wait(EXPIRED_S)
        assert clocks.remove_expired(catalog) == 0
    assert sampler.sample(PROMPT, 1, PARAMS).result() == before
    client.close()
    clocks.remove_expired(catalog)
    clocks.wait(EXPIRED_S)
    assert clocks.remove_expired(catalog) == 1
    assert place.folders() == set()


# --- copying -----------------------------------------------------------------------------------------------------


def test_a_copy_is_ones_own_and_outlives_its_source(place: Place) -> None:
    trainer = place.trainer("alice")
    trainer.forward_backward([_datum(1)], "cross_entropy").result()
    step = trainer.optim_step(mint.types.AdamParams(learning_rate=1e-3)).result()
    path = trainer.save_state("one", ttl_seconds=3600).result().path
    alice, bob = place.rest("alice"), place.rest("bob")
    alice.publish_checkpoint_from_tinker_path(path).result()
    copy = bob.copy_weights(path, "archive").result()
    alice.delete_checkpoint_from_tinker_path(path).result()
    kept = bob.get_checkpoint(copy).result()
    assert (kept.checkpoint_id, kept.public, kept.expires_at) == ("weights/one", False, None)
    run = bob.get_training_run_by_tinker_path(copy).result()
    assert (run.model_owner, run.base_model, run.lora_rank) == ("bob", "mint/tiny", 4)
    filed = bob.list_training_runs(project_id="archive").result().training_runs
    assert [one.training_run_id for one in filed] == [run.training_run_id]
    resumed = place.client("bob").create_training_client_from_state_with_optimizer(copy)
    assert resumed.get_info().lora_rank == 4
    assert resumed.optim_step(mint.types.AdamParams(learning_rate=0.0)).result().metrics["step"] == (
        step.metrics["step"] + 1
    )
    assert isinstance(refusal(lambda: alice.get_checkpoint(copy).result()), NotFoundError)


def test_the_same_idempotency_key_gives_the_same_copy(place: Place) -> None:
    path = place.trainer("alice").save_state("one").result().path.replace("mint://", "tinker://")

    def copy(key: str | None, **fields: object) -> httpx.Response:
        headers = {"x-api-key": "alice", **({} if key is None else {"X-Idempotency-Key": key})}
        return httpx.post(f"{place.url}/api/v1/copy_weights", json={"source_path": path, **fields}, headers=headers)

    first = copy("k1").json()["tinker_path"]
    assert first.startswith("tinker://")
    assert copy("k1").json()["tinker_path"] == first
    others = {copy(None).json()["tinker_path"], copy("k2").json()["tinker_path"], first}
    others.add(copy("k1", ttl_seconds=60).json()["tinker_path"])
    assert len(others) == 4


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"weights_access_token": "t"}, "weights_access_token"),
        ({"session_id": "sess-1"}, "model_seq_id"),
        ({"ttl_seconds": -1}, "ttl_seconds"),
        ({"source_path": "mint://a/b"}, "path"),
        ({"source_path": 3}, "CopyWeightsRequest.source_path"),
    ],
)
def test_a_copy_that_cannot_be_made_says_why(place: Place, fields: dict[str, object], field: str) -> None:
    path = place.trainer("alice").save_state("one").result().path
    headers = {"x-api-key": "alice"}
    answer = httpx.post(f"{place.url}/api/v1/copy_weights", json={"source_path": path, **fields}, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (400, field)
    assert len(place.folders()) == 1


def test_a_copy_into_a_session_takes_a_free_slot_there(place: Place) -> None:
    client = place.client("alice")
    trainer = client.create_lora_training_client("mint/tiny", rank=4)
    path = trainer.save_state("one").result().path
    catalog, session_id = place.service.checkpoints, client.session_id
    copy = catalog.copy("alice", CopyWeightsRequest(source_path=path, session_id=session_id, model_seq_id=1))
    assert copy == f"tinker://{session_id}:train:1/weights/one"
    error = refusal(
        lambda: catalog.copy("alice", CopyWeightsRequest(source_path=path, session_id=session_id, model_seq_id=0))
    )
    assert "model_seq_id" in str(error)


def test_a_copy_counts_for_the_quota(place: Place) -> None:
    path = place.trainer("alice").save_state("one").result().path
    size = place.rest("alice").get_checkpoint(path).result().size_bytes
    assert size is not None
    request = CopyWeightsRequest(source_path=path)
    reservations = place.service.reservations
    with reservations.open("alice", 2 * size - 1) as short:
        error = refusal(lambda: place.service.checkpoints.copy("alice", request, hold=short.hold))
    assert error.field == "max_checkpoint_bytes"
    assert error.status == 400
    with reservations.open("alice", 2 * size) as enough:
        place.service.checkpoints.copy("alice", request, hold=enough.hold)


# --- ids ---------------------------------------------------------------------------------------------------------


def test_a_ckpt_id_is_taken_wherever_a_path_is(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    rest, client = place.rest("alice"), place.client("alice")
    alias = rest.get_checkpoint(path).result().alias
    assert alias is not None
    assert alias.startswith("ckpt_")
    assert rest.get_checkpoint(alias).result().tinker_path == path
    assert rest.get_weights_info_by_tinker_path(alias).result().lora_rank == 4
    assert client.create_training_client_from_state_with_optimizer(alias).get_info().lora_rank == 4
    assert client.create_sampling_client(model_path=alias).sample(PROMPT, 1, PARAMS).result().sequences
    rest.publish_checkpoint_from_tinker_path(alias).result()
    assert rest.get_checkpoint(alias).result().public
    assert rest.copy_weights(alias).result().endswith("/weights/one")
    rest.delete_checkpoint_from_tinker_path(alias).result()
    assert isinstance(refusal(lambda: rest.get_checkpoint(alias).result()), NotFoundError)


@pytest.mark.parametrize("alias", ["ckpt_", "ckpt_xyz", "ckpt_" + "0" * 31, "ckpt_" + "A" * 32, "ckpt_../../etc"])
def test_what_only_looks_like_a_ckpt_id_is_refused(shared: Place, alias: str) -> None:
    answer = httpx.post(f"{shared.url}/api/v1/weights_info", json={"tinker_path": alias})
    assert answer.status_code == 400


def test_an_unknown_ckpt_id_is_not_found(shared: Place) -> None:
    answer = httpx.get(f"{shared.url}/api/v1/checkpoints/ckpt_{'0' * 32}")
    assert answer.status_code == 404


# --- files -------------------------------------------------------------------------------------------------------


def test_a_download_is_whole_or_is_not_there(place: Place, tmp_path: Path) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    rest = place.rest("alice")
    archive = rest.download_checkpoint(path, tmp_path).result()
    run = path.removeprefix("mint://").partition("/")[0]
    assert archive == tmp_path / f"{run.replace(':', '-')}-weights-one.tar.gz"
    archive.write_bytes(b"mine")
    taken = refusal(lambda: rest.download_checkpoint(path, tmp_path).result())
    assert isinstance(taken, InvalidRequestError) and archive.name in str(taken) and "overwrite" in str(taken)
    assert archive.read_bytes() == b"mine"
    assert rest.download_checkpoint(path, tmp_path, overwrite=True).result().stat().st_size > len(b"mine")
    assert [kept.name for kept in tmp_path.iterdir() if kept.is_file()] == [archive.name]
    missing = refusal(lambda: rest.download_checkpoint(path.replace("one", "two"), tmp_path / "two").result())
    assert isinstance(missing, NotFoundError)
    assert not (tmp_path / "two").exists()
    unreadable = refusal(lambda: rest.upload_checkpoint(tmp_path / "nothing.tar.gz").result())
    assert isinstance(unreadable, InvalidRequestError)


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_lora_cache")
def test_an_overwritten_checkpoint_goes_on_being_sampled_as_it_was(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("rolling").result().path
    sampler = place.client("alice").create_sampling_client(model_path=path)
    before = sampler.sample(PROMPT, 1, PARAMS).result()
    for number in range(2):
        trainer.forward_backward([_datum(number)], "cross_entropy").result()
        trainer.optim_step(mint.types.AdamParams(learning_rate=1e-2)).result()
        trainer.save_state("rolling", overwrite=True).result()
        trainer.save_weights_and_get_sampling_client().sample(PROMPT, 1, PARAMS).result()
    assert sampler.sample(PROMPT, 1, PARAMS).result() == before
    fresh = place.client("alice").create_sampling_client(model_path=path).sample(PROMPT, 1, PARAMS).result()
    assert fresh.sequences[0].logprobs != before.sequences[0].logprobs


def test_the_name_of_an_expired_checkpoint_is_free_again(place: Place) -> None:
    trainer = place.trainer("alice")
    path = trainer.save_state("one").result().path
    CheckpointCatalog(place.journal(), place.data_dir, clock=lambda: 0.0).set_ttl("alice", path, 60)
    assert trainer.save_state("one").result().path == path
    assert place.rest("alice").get_checkpoint(path).result().expires_at is None
