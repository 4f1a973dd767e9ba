"""The tokenizer on a machine that has no copy of the model: from the server, kept by its contents, never executed."""

from __future__ import annotations

import copy
import inspect
import json
import operator
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from default_engine import fake_engine
from http_server import http_server
from transformers import PreTrainedTokenizerFast

import mint
from mint.client.tokenizers import store_files
from mint.errors import InvalidRequestError
from mint.models.registry import BUNDLED
from mint.tokenizer import TOKENIZER_FILES, load_tokenizer, tokenizer_files

TINY = BUNDLED["mint/tiny"]


def test_a_client_gets_the_tokenizer_of_a_model_that_only_the_server_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(TINY, tmp_path / "private model")
    home = tmp_path / "client-home"
    monkeypatch.setenv("MINT_MODELS", f"lab/our model={tmp_path / 'private model'}")
    with http_server(tmp_path / "data", engine=fake_engine()) as url:
        monkeypatch.setenv("MINT_HOME", str(home))
        with mint.ServiceClient(base_url=url) as client:
            tokenizer = client.create_lora_training_client("lab/our model", rank=4).get_tokenizer()
            again = client.create_sampling_client(base_model="lab/our model").get_tokenizer()
            (kept,) = (home / "tokenizers").iterdir()
            shutil.rmtree(kept)  # as a user may
            once_more = client.create_sampling_client(base_model="lab/our model").get_tokenizer()
    assert once_more is again is tokenizer
    assert str(home) in tokenizer.name_or_path
    assert {path.name for path in kept.iterdir()} <= TOKENIZER_FILES
    text = "Q: 3 + 5\nA: 8"
    with mint.ServiceClient(data_dir=tmp_path / "embedded") as local:
        embedded = local.create_sampling_client(base_model="mint/tiny").get_tokenizer()
    assert tokenizer.encode(text) == embedded.encode(text)
    conversation = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(conversation, tokenize=False) == embedded.apply_chat_template(
        conversation, tokenize=False
    )


def test_only_known_files_are_kept_and_no_code_is_named_in_them(tmp_path: Path) -> None:
    files = tokenizer_files(TINY)
    config = json.loads(files["tokenizer_config.json"])
    config["auto_map"] = {"AutoTokenizer": ["evil--tokenization.Evil", None]}
    hostile = {
        **files,
        "tokenizer_config.json": json.dumps(config),
        "../../outside.txt": "x",
        "/etc/evil": "x",
        "tokenization.py": "raise SystemExit",
        "tokenizer.json/../x": "x",
    }
    folder = store_files(hostile, tmp_path / "home" / "tokenizers")
    assert {path.name for path in folder.iterdir()} == set(files)
    assert "auto_map" not in (folder / "tokenizer_config.json").read_text()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(files)
    assert store_files(hostile, tmp_path / "home" / "tokenizers") == folder
    other = store_files({**files, "chat_template.jinja": "other"}, tmp_path / "home" / "tokenizers")
    assert other != folder and not list(folder.parent.glob("tmp*"))


@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": "{}"}])
def test_an_answer_without_a_tokenizer_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json") as caught:
        store_files(files, tmp_path)
    assert caught.value.remedy


CONVERSATION = [{"role": "user", "content": "3 + 5 ="}]


def test_a_rendered_conversation_is_a_list_of_ids_and_has_the_keys_of_a_dictionary() -> None:
    """Scripts of MinT add the answer's tokens to it and take its length; newer code reads its `input_ids`."""
    tokenizer = load_tokenizer(str(TINY), "mint/tiny")
    ids = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True)
    plain = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    assert isinstance(ids, list) and ids == plain and len(ids) > 5
    assert operator.add(ids, [7]) == [*plain, 7] and ids[:-1] == plain[:-1]
    assert ids["input_ids"] == ids.input_ids == plain and ids["attention_mask"] == [1] * len(plain)
    assert mint.ModelInput.from_ints(ids).to_ints() == plain


def test_what_a_caller_asks_of_a_chat_template_is_what_transformers_gives() -> None:
    tokenizer = load_tokenizer(str(TINY), "mint/tiny")
    given = tokenizer.apply_chat_template(CONVERSATION, return_dict=True)
    assert set(given) == {"input_ids", "attention_mask"} and not isinstance(given, list)
    assert isinstance(tokenizer.apply_chat_template(CONVERSATION, tokenize=False), str)
    assert len(tokenizer.apply_chat_template([CONVERSATION, CONVERSATION])["input_ids"]) == 2
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    assert {"conversation", "tools", "add_generation_prompt"} <= parameters.keys()


def test_a_copy_of_a_tokenizer_renders_with_its_own_template() -> None:
    tokenizer = load_tokenizer(str(TINY), "mint/tiny")
    changed = copy.copy(tokenizer)
    changed.chat_template = "{{ messages[0].content }}"
    assert changed.apply_chat_template(CONVERSATION, tokenize=False) == "3 + 5 ="
    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False) != "3 + 5 ="


def test_a_tokenizer_is_saved_as_the_class_that_transformers_has(tmp_path: Path) -> None:
    classes = set()
    for tokenizer in (load_tokenizer(str(TINY), "mint/tiny"), PreTrainedTokenizerFast.from_pretrained(TINY)):
        tokenizer.save_pretrained(tmp_path)
        classes.add(json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"])
    assert len(classes) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301
def test_a_copy_of_a_tokenizer_renders_conversations_alike(copied: Callable[[Any], Any]) -> None:
    tokenizer = load_tokenizer(str(TINY), "mint/tiny")
    assert copied(tokenizer).apply_chat_template(CONVERSATION) == tokenizer.apply_chat_template(CONVERSATION)


def test_a_model_input_is_made_of_a_tokenizers_dictionary() -> None:
    given = load_tokenizer(str(TINY), "mint/tiny").apply_chat_template(CONVERSATION, return_dict=True)
    assert mint.ModelInput.from_ints(given).to_ints() == given["input_ids"]
    with pytest.raises(InvalidRequestError, match=r"ModelInput\.tokens = \['ids'\]: is a dictionary without input_ids"):
        mint.ModelInput.from_ints({"ids": [1, 2]})
