"""A model whose replay gives other bits stops, and goes on as its operator decides with `mint recover`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from default_engine import torch_engine
from service_harness import GOOD_PASS, STEP, Harness, datum, failure, make_sampler, open_service, pass_body
from typer.testing import CliRunner, Result

from mint.cli.main import app
from mint.engine.cpu.build import TESTED_HERE
from mint.engine.fake_engine import FakeEngine
from mint.engine.protocol import AdamSpec, Engine, LoraSpec
from mint.engine.torch_engine import TorchEngine
from mint.errors import DamagedDataError, MintError, RecoveryDivergedError, StepRefusedError
from mint.server.store.instances import ServerLock
from mint.server.store.journal import JOURNAL_FILE, Journal
from mint.server.worker import snapshots


class OtherSteps(FakeEngine):
    """As if torch had been updated: the same step gives other bits."""

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        return super().optim_step(model_id, AdamSpec(2 * adam.learning_rate, 0.9, 0.9, 1.0, 0.0, 0.0))


@pytest.fixture(autouse=True)
def only_the_first_step_is_saved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 0)
    yield


def mint(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["recover", *arguments])


def done(*arguments: str) -> Any:
    result = mint(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def step(harness: Harness, model_id: str, seq_id: int) -> str:
    harness.run("forward_backward", model_id, seq_id, pass_body(datum(1, 2, 3 + seq_id)))
    return harness.run("optim_step", model_id, seq_id + 1, STEP)["state_digest"]


def trained(folder: Path, engine: FakeEngine | None = None) -> tuple[Harness, str, list[str]]:
    """Three steps and a pass; the snapshot is that after the first step, request 2."""
    harness = Harness(open_service(folder, engine=engine or FakeEngine(), is_server=True))
    model_id = harness.create_model()
    digests = [step(harness, model_id, seq_id) for seq_id in (1, 3, 5)]
    harness.run("forward_backward", model_id, 7, GOOD_PASS)
    return harness, model_id, digests


def stopped(folder: Path) -> tuple[str, str, MintError]:
    """A model that has stopped at request 8: its session, its id and the error; and its server has ended."""
    harness, model_id, _ = trained(folder)
    harness.service.stop()
    harness = reopened(folder, harness.session_id)
    error = failure(lambda: harness.restore(model_id))
    harness.service.stop()
    return harness.session_id, model_id, error


def reopened(folder: Path, session_id: str, engine: Engine | None = None) -> Harness:
    return Harness(open_service(folder, engine=engine or OtherSteps(), is_server=True), session_id)


def test_a_stopped_model_is_listed_with_the_request_and_both_digests(tmp_path: Path) -> None:
    _, model_id, error = stopped(tmp_path)
    assert isinstance(error, RecoveryDivergedError) and f"mint recover {model_id}" in str(error)
    (found,) = done("--data-dir", str(tmp_path))["stopped_models"]
    journal = Journal(tmp_path / JOURNAL_FILE)
    acknowledged = journal.jobs(model_id, after=3)[0]
    journal.close()
    assert acknowledged.kind == "optim_step" and str(acknowledged.digest) in found["reason"]
    assert f"request 4 (optim_step) of {model_id} gave " in found["reason"]
    assert (found["model_id"], found["owner"], found["snapshot"]) == (model_id, "local", 2)
    assert [request["seq_id"] for request in found["requests"]] == [3, 4, 5, 6, 7]
    shown = mint("--data-dir", str(tmp_path)).stdout
    assert model_id in shown and "3 (forward_backward)" in shown and "--at-snapshot" in shown


def test_accepting_goes_on_from_what_the_replay_gives_and_is_kept(tmp_path: Path) -> None:
    session_id, model_id, _ = stopped(tmp_path / "one")
    aside = done(model_id, "--accept", "--data-dir", str(tmp_path / "one"))["checkpoint"]
    harness = reopened(tmp_path / "one", session_id)
    harness.restore(model_id)
    accepted = harness.digest(model_id)
    assert [row.seq_id for row in harness.stored(lambda journal: journal.snapshots(model_id))] == [6, 2]
    last = step(harness, model_id, 10)
    harness.service.stop()
    assert done("--data-dir", str(tmp_path / "one"))["stopped_models"] == []
    harness = reopened(tmp_path / "one", session_id)
    harness.restore(model_id)
    assert harness.digest(model_id) == last
    harness.service.stop()

    harness = Harness(open_service(tmp_path / "two", is_server=True))  # the same without an interruption in between
    other = harness.create_model()
    before = step(harness, other, 1)
    harness.service.stop()
    harness = reopened(tmp_path / "two", harness.session_id)
    assert [step(harness, other, seq_id) for seq_id in (3, 5)][-1] == accepted
    harness.service.stop()
    fresh = Harness(open_service(tmp_path / "one"))  # the state before the other bits is kept aside
    body = {"session_id": fresh.session_id, "model_seq_id": 0, "path": aside, "optimizer": True}
    loaded = fresh.wait(fresh.submit("load_weights", body))["model_id"]
    assert fresh.digest(loaded) == before
    fresh.service.stop()


def test_going_back_to_the_snapshot_names_what_is_lost_and_never_leaves_half_a_step(tmp_path: Path) -> None:
    harness, _, digests = trained(tmp_path / "clean")
    harness.service.stop()
    session_id, model_id, _ = stopped(tmp_path / "data")
    lost = done(model_id, "--at-snapshot", "--data-dir", str(tmp_path / "data"))
    assert lost["snapshot"] == 2 and [request["seq_id"] for request in lost["requests"]] == [3, 4, 5, 6, 7]
    fresh = Harness(open_service(tmp_path / "data"))  # another program, with a session of its own
    body = {"session_id": fresh.session_id, "model_seq_id": 0, "path": lost["checkpoint"], "optimizer": True}
    loaded = fresh.wait(fresh.submit("load_weights", body))["model_id"]
    assert fresh.digest(loaded) == digests[0]
    fresh.service.stop()
    for _ in range(2):  # a second restart finds the same
        harness = reopened(tmp_path / "data", session_id)
        harness.restore(model_id)
        assert harness.digest(model_id) == digests[0]
        assert json.loads(harness.answer(f"{model_id}:6"))["state_digest"] == digests[2]  # what was acknowledged stays
        harness.service.stop()
    harness = reopened(tmp_path / "data", session_id)
    # the pass 7 is lost: a step now would be made of nothing
    assert isinstance(failure(lambda: harness.run("optim_step", model_id, 11, STEP)), StepRefusedError)
    assert harness.digest(model_id) == digests[0]
    step(harness, model_id, 12)
    harness.service.stop()


def test_a_users_checkpoint_keeps_its_name_and_its_files(tmp_path: Path) -> None:
    harness, model_id, digests = trained(tmp_path)
    users = [
        harness.run("save_weights", model_id, 8 + n, {"path": f"recovered-2{end}"}) for n, end in enumerate(("", "-2"))
    ]
    harness.service.stop()
    harness = reopened(tmp_path, harness.session_id)
    failure(lambda: harness.restore(model_id))
    harness.service.stop()
    for _ in range(2):
        decided = done(model_id, "--at-snapshot", "--data-dir", str(tmp_path))
        assert decided["checkpoint"].endswith("/weights/recovered-2-3")
        with closing(Journal(tmp_path / JOURNAL_FILE)) as journal:  # as if it had stopped there again
            journal.mark_diverged(model_id, "again")
    fresh = Harness(open_service(tmp_path))
    for number, path in enumerate([*(user["path"] for user in users), decided["checkpoint"]]):
        body = {"session_id": fresh.session_id, "model_seq_id": number, "path": path, "optimizer": True}
        loaded = fresh.wait(fresh.submit("load_weights", body))["model_id"]
        assert fresh.digest(loaded) == (digests[0] if number == 2 else digests[2])
    fresh.service.stop()


def test_trying_again_under_the_old_conditions_loses_nothing(tmp_path: Path) -> None:
    session_id, model_id, _ = stopped(tmp_path)
    harness, _, digests = trained(tmp_path / "clean")
    harness.service.stop()
    done(model_id, "--retry", "--data-dir", str(tmp_path))
    harness = reopened(tmp_path, session_id, FakeEngine())
    harness.restore(model_id)
    assert harness.digest(model_id) == digests[-1]
    harness.service.stop()


def test_a_retry_that_fails_stops_the_model_again(tmp_path: Path) -> None:
    session_id, model_id, _ = stopped(tmp_path)
    done(model_id, "--retry", "--data-dir", str(tmp_path))
    harness = reopened(tmp_path, session_id)
    error = failure(lambda: harness.run("optim_step", model_id, 9, STEP))
    assert isinstance(error, RecoveryDivergedError) and "request 4" in str(error)
    harness.service.stop()


def test_a_damaged_request_is_given_up_with_what_follows_the_snapshot(tmp_path: Path) -> None:
    harness, model_id, digests = trained(tmp_path)
    harness.service.stop()
    journal = Journal(tmp_path / JOURNAL_FILE)
    journal.database.write("UPDATE jobs SET payload = x'00' WHERE seq_id = 5")
    journal.close()
    harness = reopened(tmp_path, harness.session_id, FakeEngine())
    error = failure(lambda: harness.run("optim_step", model_id, 8, STEP))
    assert isinstance(error, DamagedDataError) and f"mint recover {model_id}" in str(error)
    harness.service.stop()
    refused = mint(model_id, "--accept", "--data-dir", str(tmp_path))
    assert refused.exit_code == 1 and "request 5" in refused.stderr and "--at-snapshot" in refused.stderr
    done(model_id, "--at-snapshot", "--data-dir", str(tmp_path))
    harness = reopened(tmp_path, harness.session_id, FakeEngine())
    harness.restore(model_id)
    assert harness.digest(model_id) == digests[0]
    harness.service.stop()


def test_a_snapshot_with_a_flipped_bit_is_not_gone_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SMALL_STATE_BYTES", 20 << 20)  # every step is saved
    harness = Harness(open_service(tmp_path, engine=torch_engine(dtype="float32", threads=1), is_server=True))
    model_id = harness.create_model()
    digests = [step(harness, model_id, seq_id) for seq_id in (1, 3, 5)]
    harness.service.stop()
    (newest,) = (tmp_path / "snapshots").glob("*-6.safetensors")
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(content)
    journal = Journal(tmp_path / JOURNAL_FILE)
    journal.database.write("UPDATE jobs SET payload = x'00' WHERE seq_id = 5")  # so that it cannot be replayed, either
    journal.close()
    harness = reopened(tmp_path, harness.session_id, torch_engine(dtype="float32", threads=1))
    failure(lambda: harness.restore(model_id))
    harness.service.stop()
    decided = done(model_id, "--at-snapshot", "--data-dir", str(tmp_path))
    assert decided["snapshot"] == 4 and decided["checkpoint"].endswith("/weights/recovered-4")
    harness = reopened(tmp_path, harness.session_id, torch_engine(dtype="float32", threads=1))
    harness.restore(model_id)
    assert harness.digest(model_id) == digests[1]
    harness.service.stop()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"dtype": "bfloat16"}, "MINT_DTYPE=float32, and has MINT_DTYPE=bfloat16 now"),
        ({"quantize": "int8"}, "MINT_QUANTIZE=none, and has MINT_QUANTIZE=int8 now"),
        pytest.param(
            {"is_native": True},
            "MINT_NATIVE=0 (torch's kernels), and has MINT_NATIVE=1 (mint's kernels) now",
            marks=pytest.mark.skipif(not TESTED_HERE, reason="mint's kernels are not tested on this machine"),
        ),
    ],
)
def test_a_model_whose_base_has_other_numbers_stops_also_with_nothing_to_replay(
    tmp_path: Path, native_folder: Path, other: dict[str, Any], difference: str
) -> None:
    def engine(*, is_native: bool = False, **changed: Any) -> TorchEngine:
        kernels = native_folder if is_native else None
        return TorchEngine(native=kernels, **{"dtype": "float32", "threads": 1, "device": "cpu", **changed})

    harness = Harness(open_service(tmp_path, engine=engine(), is_server=True))
    model_id = harness.create_model()
    digest = step(harness, model_id, 1)
    harness.service.stop()

    harness = reopened(tmp_path, harness.session_id, engine(**other))
    error = failure(lambda: harness.restore(model_id))
    assert isinstance(error, RecoveryDivergedError) and difference in str(error)
    assert f"mint recover {model_id}" in str(error) and "into a new model" in str(error)
    harness.service.stop()
    (found,) = done("--data-dir", str(tmp_path))["stopped_models"]
    assert difference in found["reason"] and found["requests"] == []

    done(model_id, "--retry", "--data-dir", str(tmp_path))
    harness = reopened(tmp_path, harness.session_id, engine())  # the setting was put back
    harness.restore(model_id)
    assert harness.digest(model_id) == digest
    harness.service.stop()

    harness = reopened(tmp_path, harness.session_id, engine(**other))
    failure(lambda: harness.restore(model_id))
    harness.service.stop()
    done(model_id, "--accept", "--data-dir", str(tmp_path))
    for _ in range(2):  # the accepted numbers are the model's own from then on
        harness = reopened(tmp_path, harness.session_id, engine(**other))
        harness.restore(model_id)
        assert harness.digest(model_id) == digest
        harness.service.stop()
    harness = reopened(tmp_path, harness.session_id, engine())
    assert isinstance(failure(lambda: harness.restore(model_id)), RecoveryDivergedError)
    harness.service.stop()


class WithKernels(FakeEngine):
    """As if it computed by the kernels in C with these instructions, from sources of this digest."""

    def __init__(self, instructions: str, kernels: str = "1a2b") -> None:
        super().__init__()
        self._kernels = {"instructions": instructions, "kernels": kernels}

    def create_model(self, model_id: str, base: str, lora: LoraSpec) -> dict[str, Any]:
        found = super().create_model(model_id, base, lora)
        return {**found, "dtype": "float32", "attention": "native", **self._kernels}


def test_a_model_that_other_kernels_trained_stops_and_names_both(tmp_path: Path) -> None:
    own, other = "avx2", "avx512"
    harness = Harness(open_service(tmp_path, engine=WithKernels(own), is_server=True))
    model_id = harness.create_model()
    digest = step(harness, model_id, 1)
    harness.service.stop()

    harness = reopened(tmp_path, harness.session_id, WithKernels(other))
    error = failure(lambda: harness.restore(model_id))
    harness.service.stop()
    assert isinstance(error, RecoveryDivergedError)
    assert "MINT_INSTRUCTIONS=avx2, and has MINT_INSTRUCTIONS=avx512 now" in str(error) and "--accept" in str(error)
    done(model_id, "--retry", "--data-dir", str(tmp_path))
    harness = reopened(tmp_path, harness.session_id, WithKernels(own))  # the setting was put back
    harness.restore(model_id)
    assert harness.digest(model_id) == digest
    harness.service.stop()

    harness = reopened(tmp_path, harness.session_id, WithKernels(other))
    failure(lambda: harness.restore(model_id))
    harness.service.stop()
    done(model_id, "--accept", "--data-dir", str(tmp_path))
    harness = reopened(tmp_path, harness.session_id, WithKernels(other))
    harness.restore(model_id)
    assert harness.digest(model_id) == digest
    harness.service.stop()


def test_a_newer_mint_with_other_kernels_goes_on_where_nothing_is_replayed(tmp_path: Path) -> None:
    harness = Harness(open_service(tmp_path, engine=WithKernels("avx2", "1a2b"), is_server=True))
    model_id = harness.create_model()
    digest = step(harness, model_id, 1)
    harness.service.stop()
    harness = reopened(tmp_path, harness.session_id, WithKernels("avx2", "3c4d"))
    harness.restore(model_id)
    assert harness.digest(model_id) == digest
    harness.service.stop()


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"quantize": "int8"}])
def test_published_weights_are_not_sampled_on_other_numbers_until_the_operator_has_decided(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    def engine(**changed: Any) -> TorchEngine:
        return TorchEngine(**{"dtype": "float32", "threads": 1, **changed})

    harness = Harness(open_service(tmp_path, engine=engine(), is_server=True))
    model_id = harness.create_model()
    step(harness, model_id, 1)
    body = {"sampling_session_seq_id": 0}
    sampler = harness.run("save_weights_for_sampler", model_id, 3, body)["sampling_session_id"]
    expected = harness.sample(sampler, 0)["sequences"]
    harness.service.stop()

    harness = reopened(tmp_path, harness.session_id, engine(**other))
    error = failure(lambda: harness.sample(sampler, 0))
    assert isinstance(error, RecoveryDivergedError) and f"mint recover {model_id}" in str(error)
    assert harness.sample(make_sampler(harness, 1), 0)["sequences"]  # of the base model itself
    harness.service.stop()
    (found,) = done("--data-dir", str(tmp_path))["stopped_models"]
    assert found["model_id"] == model_id and found["reason"] in str(error)

    harness = reopened(tmp_path, harness.session_id, engine())  # the setting was put back
    assert harness.sample(sampler, 0)["sequences"] == expected
    harness.service.stop()
    done(model_id, "--accept", "--data-dir", str(tmp_path))
    for _ in range(2):  # the second time the model has these numbers
        harness = reopened(tmp_path, harness.session_id, engine(**other))
        assert harness.sample(sampler, 0)["sequences"] != expected
        harness.restore(model_id)
        harness.service.stop()


def test_a_running_server_and_a_running_program_are_left_alone(tmp_path: Path) -> None:
    _, model_id, _ = stopped(tmp_path)
    lock = ServerLock(tmp_path)  # as `mint serve` does
    refused = mint(model_id, "--accept", "--data-dir", str(tmp_path))
    assert refused.exit_code == 1 and "is served already, by process" in refused.stderr
    assert len(done("--data-dir", str(tmp_path))["stopped_models"]) == 1  # to look is possible
    lock.close()

    program = open_service(tmp_path, engine=OtherSteps(), is_server=True)
    refused = mint(model_id, "--accept", "--data-dir", str(tmp_path))
    assert refused.exit_code == 1 and "is in use by a running program" in refused.stderr
    program.stop()
    assert done(model_id, "--accept", "--data-dir", str(tmp_path))["decision"] == "accept"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--accept",), "MODEL = (none)"),
        (("other", "--retry"), "model = other: is not a model here"),
        (("other",), "model = other"),
        (("other", "--retry", "--accept"), "exclude each other"),
    ],
)
def test_a_wrong_call_is_refused_with_a_sentence(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    stopped(tmp_path)
    refused = mint(*arguments, "--data-dir", str(tmp_path))
    assert refused.exit_code == 1 and problem in refused.stderr


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    refused = mint("--data-dir", str(tmp_path))
    assert refused.exit_code == 1 and "holds no data of mint" in refused.stderr
