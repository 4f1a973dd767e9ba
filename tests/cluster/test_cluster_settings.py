"""The settings of a cluster: where they come from, and what is refused."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from ports import free_port

from mint.compose import cluster_engine
from mint.compose.embedded import torch_engine, watched_engine
from mint.config import prepare_ray, read_serve_settings, read_settings
from mint.errors import InvalidRequestError, MissingExtraError


def test_flags_of_the_server_come_before_the_variables_of_all_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_CLUSTER", "local")
    monkeypatch.setenv("MINT_TRAINERS", "3")
    monkeypatch.setenv("MINT_SAMPLERS", "2")
    base = read_settings()
    assert (base.cluster, base.trainers, base.samplers) == ("local", 3, 2)
    assert read_serve_settings({}).with_cluster(base) == base
    assert read_serve_settings({"trainers": 4}).with_cluster(base).trainers == 4
    assert read_serve_settings({"samplers": 0}).with_cluster(base).samplers == 0
    assert not base.shard_base and read_serve_settings({"shard_base": True}).with_cluster(base).shard_base
    assert base.tensor_parallel is None
    assert read_serve_settings({"tensor_parallel": 4}).with_cluster(base).tensor_parallel == 4
    with pytest.raises(InvalidRequestError, match="1, 2, 4 or 8"):
        read_serve_settings({"tensor_parallel": 3})
    with pytest.raises(InvalidRequestError, match="--cluster"):
        read_serve_settings({"cluster": "elsewhere"})


@pytest.mark.parametrize("where", ["auto", "ray://10.0.0.1:10001", "ray://head.cluster:10001"])
def test_a_cluster_of_others_is_an_address_and_keeps_its_own_rules(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert read_serve_settings({"cluster": where}).with_cluster(read_settings()).cluster == where
    prepare_ray(where)
    assert "RAY_AUTH_MODE" not in os.environ


@pytest.mark.parametrize("where", ["ray://10.0.0.1", "ray://", "10.0.0.1:10001", ""])
def test_an_address_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(InvalidRequestError, match="--cluster"):
        read_serve_settings({"cluster": where})


def test_a_cluster_that_does_not_answer_is_named_before_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_engine, "HEAD_PATIENCE_S", 0.1)
    monkeypatch.setattr(cluster_engine, "find_spec", lambda _name: ModuleSpec("ray", None))
    address = f"ray://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MINT_CLUSTER", address)
    with pytest.raises(InvalidRequestError, match=f"cluster = {address}.*ray start --head"):
        watched_engine(read_settings(), pytest.fail)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINT_CLUSTER", "local")
    monkeypatch.setattr(cluster_engine, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"\[local,cluster\]"):
        watched_engine(read_settings(), pytest.fail)
    assert torch_engine(read_settings()).lanes == 1


def test_a_cluster_gets_a_token_before_ray_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_worker_niceness"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    prepare_ray()
    assert os.environ["RAY_worker_niceness"] == "0"  # noqa: SIM112 - the name is Ray's
    token = os.environ["RAY_AUTH_TOKEN"]
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(token) == 64
    prepare_ray()
    assert os.environ["RAY_AUTH_TOKEN"] == token


def test_ray_that_was_loaded_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(InvalidRequestError, match="RAY_AUTH_MODE"):
        prepare_ray()
