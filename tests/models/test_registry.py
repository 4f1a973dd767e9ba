"""Names of base models: aliases win, the message of a miss says what there is and how to add more."""

from __future__ import annotations

from pathlib import Path

import pytest

from mint.config import Settings
from mint.errors import InvalidRequestError, UnknownBaseModelError
from mint.models import registry
from mint.models.registry import available, recorded_name, resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_a_folder_is_its_own_name(folder: Path) -> None:
    assert resolve(str(folder), {}) == folder


def test_a_folder_with_an_adapter_names_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "lab/base"}')
    with pytest.raises(InvalidRequestError, match="an adapter of lab/base"):
        resolve(str(tmp_path), {})
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(InvalidRequestError, match="an adapter, not"):
        resolve(str(tmp_path), {})


def test_a_name_of_two_models_is_refused() -> None:
    assert Settings(models="a = x, b=y,a=x").model_aliases == {"a": "x", "b": "y"}
    with pytest.raises(InvalidRequestError, match="MINT_MODELS = a: names two models, x and y"):
        _ = Settings(models="a=x,b=y,a=y").model_aliases


def test_an_alias_may_name_a_folder_or_another_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "INDEX_MODELS", {})  # a slow test fetches them
    aliases = {"Qwen/Qwen3-0.6B": "mine", "mine": str(folder)}
    assert resolve("Qwen/Qwen3-0.6B", aliases) == folder
    assert available(aliases) == ["Qwen/Qwen3-0.6B", "mine", "mint/tiny"]


def test_an_alias_wins_over_a_bundled_model(folder: Path) -> None:
    assert resolve("mint/tiny", {"mint/tiny": str(folder)}) == folder


def test_an_alias_of_itself_is_just_a_name(folder: Path) -> None:
    assert resolve(str(folder), {str(folder): str(folder)}) == folder


def test_the_bundled_model_has_a_folder_in_the_package() -> None:
    assert registry.BUNDLED["mint/tiny"].parent == Path(registry.__file__).parent


def test_an_unknown_name_lists_what_there_is_and_how_to_add() -> None:
    with pytest.raises(UnknownBaseModelError) as caught:
        resolve("acme/nothing", {"Qwen/Qwen3-0.6B": "mint/tiny"})
    text = str(caught.value)
    assert all(part in text for part in ("acme/nothing", "mint/tiny", "Qwen/Qwen3-0.6B", "MINT_MODELS=name=path"))


def test_an_alias_of_a_path_that_is_not_there_names_the_path() -> None:
    with pytest.raises(
        UnknownBaseModelError, match="base_model = my/model: stands for /nope, which does not exist"
    ) as caught:
        resolve("my/model", {"my/model": "/nope"})
    assert "Did you mean" not in str(caught.value) and "mint models pull" not in str(caught.value)


def test_an_alias_of_a_model_of_the_hub_names_that_model() -> None:
    with pytest.raises(UnknownBaseModelError, match=r"stands for acme/nothing.*mint models pull acme/nothing"):
        resolve("my/model", {"my/model": "acme/nothing"})


def test_a_file_that_is_no_gguf_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(UnknownBaseModelError, match=r"is neither a folder nor a \.gguf file"):
        resolve(str(tmp_path / "model.bin"), {})


@pytest.mark.parametrize("name", ["", "no such thing", "../nowhere", "a/b/c", "x" * 500, "a\0b"])
def test_odd_names_are_unknown_names(name: str) -> None:
    with pytest.raises(UnknownBaseModelError):
        resolve(name, {})


def test_aliases_that_lead_in_a_circle_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a -> b -> a"):
        resolve("a", {"a": "b", "b": "a"})


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_says_what_is_missing(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(InvalidRequestError, match=name):
        resolve(str(folder), {})


def test_pickled_weights_are_named_with_the_way_to_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidRequestError, match=r"pytorch_model\.bin.*pickle.*save_pretrained") as refusal:
        resolve(str(folder), {})
    assert refusal.value.field == "base_model"


def test_a_tokenizer_in_other_files_is_told_with_the_way_to_its_own(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    for name in ("vocab.json", "merges.txt"):
        (folder / name).touch()
    with pytest.raises(
        InvalidRequestError, match=r"lacks tokenizer\.json\. .*AutoTokenizer\.from_pretrained\(DIR, use_fast"
    ):
        resolve(str(folder), {})


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'
    )
    (folder / "m-1.safetensors").write_text("")
    with pytest.raises(InvalidRequestError, match=r"lacks m-2\.safetensors"):
        resolve(str(folder), {})


def test_a_model_in_the_hugging_face_cache_is_found_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repo = tmp_path / "cache" / "models--acme--small"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    folder.rename(repo / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert resolve("acme/small", {}) == repo / "snapshots" / ("0" * 40)


def test_an_unknown_name_that_may_be_a_folder_or_a_model_of_the_hub_is_told_both() -> None:
    with pytest.raises(UnknownBaseModelError) as caught:
        resolve("m/c-one", {})
    text = str(caught.value)
    assert "If it is a model of the hub" in text and "`mint models pull m/c-one`" in text
    assert "If it is a Hugging Face folder or a .gguf file" in text and "working directory" in text


@pytest.mark.parametrize("spelling", ["m/x", "./m/x", "m/../m/x", "~/m/x", "{}/m/x", "link"])
def test_a_folder_is_stored_as_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    (tmp_path / "m" / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "m" / "x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert recorded_name(spelling.format(tmp_path), {}) == str(tmp_path / "m" / "x")


def test_a_gguf_file_is_stored_as_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert recorded_name("./a.gguf", {}) == str(tmp_path / "a.gguf")


def test_other_names_are_stored_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for name in ("mint/tiny", "acme/nothing", "x" * 500, "a\0b", "../nowhere"):
        assert recorded_name(name, {}) == name
    assert recorded_name("model", {"model": "mint/tiny"}) == "model"  # an alias comes before a folder
