"""Without a server the same questions have the same answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine

import mint
from mint.compose.embedded import open_embedded
from mint.errors import InvalidRequestError


def embedded(folder: Path) -> mint.ServiceClient:
    return mint.ServiceClient(open_embedded=lambda: open_embedded(data_dir=folder, engine=fake_engine()))


def test_every_question_is_answered_in_process(tmp_path: Path) -> None:
    with embedded(tmp_path / "data") as client:
        trainer = client.create_lora_training_client("mint/tiny", rank=4)
        path = trainer.save_state("one").result().path
        rest = client.create_rest_client()
        assert rest.list_training_runs().result().training_runs[0].training_run_id == trainer.model_id
        assert rest.list_checkpoints(trainer.model_id).result().checkpoints[0].tinker_path == path
        assert rest.get_session(client.session_id).result().training_run_ids == [trainer.model_id]
        archive = rest.download_checkpoint(path, tmp_path / "one.tar.gz").result()
        assert archive.stat().st_size > 1000
        url = rest.get_checkpoint_archive_url_from_mint_path(path).result()
        assert url.expires.tzinfo is not None
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []


@pytest.mark.parametrize("wrong", ["", "..", 3, None, "half \ud800"])
def test_what_is_no_id_is_refused(tmp_path: Path, wrong: Any) -> None:
    with embedded(tmp_path / "data") as client:
        rest = client.create_rest_client()
        for ask in (rest.get_sampler, rest.get_session, rest.get_training_run, rest.list_checkpoints):
            with pytest.raises(InvalidRequestError, match=r"^id.*is not an id.*that a listing shows"):
                ask(wrong).result()


def test_the_async_twins_return_the_value(tmp_path: Path) -> None:
    async def ask(client: mint.ServiceClient) -> None:
        trainer = await client.create_lora_training_client_async("mint/tiny", rank=4)
        path = (await (await trainer.save_state_async("one"))).path
        rest = client.create_rest_client()
        assert (await rest.get_training_run_async(trainer.model_id)).lora_rank == 4
        assert (await rest.list_user_checkpoints_async()).checkpoints[0].tinker_path == path
        assert await rest.publish_checkpoint_from_tinker_path_async(path) is None
        copy = await rest.copy_weights_async(path)
        assert (await rest.get_training_run_by_tinker_path_async(copy)).base_model == "mint/tiny"
        assert await rest.set_checkpoint_ttl_from_tinker_path_async(copy, 60) is None
        assert (await rest.get_weights_info_by_tinker_path_async(copy)).lora_rank == 4
        assert await rest.delete_checkpoint_from_tinker_path_async(copy) is None
        assert (await rest.list_sessions_async()).sessions

    with embedded(tmp_path / "data") as client:
        asyncio.run(ask(client))


def test_management_types_are_reachable_as_types() -> None:
    names = ("TrainingRun", "Checkpoint", "Cursor", "ParsedCheckpointTinkerPath", "SessionSearchRequest")
    assert all(isinstance(getattr(mint.types, name), type) for name in names)
    parsed = mint.types.ParsedCheckpointTinkerPath.from_tinker_path("tinker://r:train:0/sampler_weights/x")
    assert (parsed.training_run_id, parsed.checkpoint_type, parsed.checkpoint_id) == (
        "r:train:0", "sampler", "sampler_weights/x",
    )  # fmt: skip
    assert parsed.tinker_path == "mint://r:train:0/sampler_weights/x"
