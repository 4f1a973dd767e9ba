"""The tokenizer of a model, from the models of this process or from the server.

Files from a server are kept under `MINT_HOME/tokenizers`, in a folder named by the hash of their contents. Only files
with known names are accepted, and nothing in them is executed.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mint.client.futures import wait
from mint.client.session import Session
from mint.config import read_settings
from mint.errors import InvalidRequestError, NotFoundError
from mint.tokenizer import TOKENIZER_FILES, load_tokenizer
from mint.types import TokenizerFilesResponse

_folders: dict[tuple[str, str], Path] = {}


def tokenizer_of(session: Session, tokenizer_id: str, base_model: str) -> Any:
    """The Hugging Face tokenizer of a base model of the session's server.

    Raises:
        MissingExtraError: transformers is not installed.
        NotFoundError: the server, this machine and the Hugging Face cache do not have it.
    """
    if session.is_embedded:
        return load_tokenizer(tokenizer_id, base_model)
    key = (session.endpoint.url, base_model)
    if key not in _folders or not _folders[key].is_dir():  # a user may have removed what is kept under MINT_HOME
        try:
            answer = wait(
                session.run(session.server.get(f"tokenizers/{quote(base_model)}", TokenizerFilesResponse)), None
            )
        except NotFoundError:  # another server of this protocol, which sends no tokenizers
            return load_tokenizer("", tokenizer_id or base_model)
        _folders[key] = store_files(answer.files, read_settings().home_dir / "tokenizers")
    return load_tokenizer(str(_folders[key]), base_model)


def store_files(files: dict[str, str], home: Path) -> Path:
    """Writes the files into a folder named by their contents; the folder appears whole or not at all."""
    contents = {name: _harmless(name, text).encode() for name, text in sorted(files.items()) if name in TOKENIZER_FILES}
    if "tokenizer.json" not in contents:
        raise InvalidRequestError(
            "holds no tokenizer.json",
            field="tokenizer",
            value=sorted(files),
            remedy="Put a tokenizer.json into the folder of the base model on the server",
        )
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    folder = home / digest.hexdigest()[:32]
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as draft:
        made = Path(draft) / "made"
        made.mkdir()
        for name, content in contents.items():
            (made / name).write_bytes(content)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have been first, with the same bytes
                raise
    return folder


def _harmless(name: str, text: str) -> str:
    """The file without references to code."""
    if name != "tokenizer_config.json":
        return text
    config = json.loads(text)
    config.pop("auto_map", None)
    return json.dumps(config, sort_keys=True)
