"""The base models that this service offers: their folders, and what the engine knows of them.

Any thread may resolve names; weights are loaded on a lane of the engine, when first needed. Names of the same folder
share its weights. The fingerprint of a base is that of the files from which it was loaded, whatever becomes of them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from mint.engine.protocol import BaseInfo, Engine
from mint.errors import InvalidRequestError, NotFoundError, UnknownBaseModelError
from mint.models import registry
from mint.models.fingerprint import BASE_FINGERPRINT, fingerprint
from mint.models.folder import ModelFolder, context_length
from mint.models.hub import is_hub_name
from mint.server.store.checkpoint_folders import Manifest
from mint.tokenizer.vocabulary_check import require_within_vocabulary


class BaseModels:
    """Base models by name."""

    def __init__(self, engine: Engine, aliases: Mapping[str, str], offered: Collection[str] | None = None) -> None:
        """`aliases` is `MINT_MODELS` as a mapping; with `offered`, all other names are refused."""
        self._engine = engine
        self._aliases = dict(aliases)
        self._offered = None if offered is None else frozenset(offered)
        self._accepted = frozenset({*(offered or ()), *map(self.recorded_name, offered or ())})
        self._folders: dict[str, Path] = {}
        self._infos: dict[str, BaseInfo] = {}
        self._with_fitting_tokenizer: set[str] = set()
        self._loading = threading.Lock()

    def folder(self, name: str) -> Path:
        """The folder with the weights.

        Raises:
            UnknownBaseModelError: there is no such model.
            InvalidRequestError: its folder is incomplete.
        """
        self._require_offered(name)
        if name in self._folders:
            return self._folders[name]
        folder = registry.resolve(name, self._aliases)
        if name in self._accepted or self.recorded_name(name) == name:  # another one may mean something else later
            self._folders[name] = folder
        return folder

    def _require_offered(self, name: str) -> None:
        if self._offered is not None and name not in self._accepted:
            raise UnknownBaseModelError(
                f"is not a base model of this server; it offers {', '.join(self.names)}",
                field="base_model",
                value=name,
                remedy="Name one of these, or have it added: mint serve --model NAME[=PATH]",
            )

    def recorded_name(self, name: str) -> str:
        """The name under which a base model is stored: of a folder or file its absolute path."""
        return registry.recorded_name(name, self._aliases)

    def require(self, name: str) -> str:
        """The `recorded_name` of a base model that a request names.

        Raises:
            UnknownBaseModelError, InvalidRequestError: as `folder`, with the name as it was given.
        """
        self.folder(name)
        return self.recorded_name(name)

    def offered_base(self, name: str) -> tuple[str, Path]:
        """The `recorded_name` and the folder of a base model that an uploaded file names: it must not make the server
        read other folders.

        Raises:
            NotFoundError: no offered base model has this name or this folder.
        """
        if name in self.names or name in self._accepted or is_hub_name(name):
            return self.require(name), self.folder(name)
        for offered in self.names:
            if self.key(offered) == name:
                return self.require(offered), self.folder(offered)
        raise NotFoundError("is not offered here", field="base_model", value=name)

    def key(self, name: str) -> str:
        """The name under which the engine holds this base."""
        return str(self.folder(name))

    def load(self, name: str) -> BaseInfo:
        """The engine's description of a base model, loaded if it is not yet. For the lanes of the engine.

        Its fingerprint is among the settings.
        """
        key = str(self.folder(name))
        with self._loading:
            if key not in self._infos:
                info = self._engine.load_base(key, key)
                if BASE_FINGERPRINT not in info.settings:  # an engine that reads no files does not tell it
                    info = replace(info, settings={**info.settings, BASE_FINGERPRINT: fingerprint(Path(key))})
                self._infos[key] = info
            return self._infos[key]

    def fingerprint(self, name: str) -> str:
        """The fingerprint of a base model, loaded if it is not yet. For the lanes of the engine."""
        return str(self.load(name).settings[BASE_FINGERPRINT])

    def fingerprint_of_folder(self, folder: Path) -> str:
        """The fingerprint of the base model in a folder: of what is loaded, else of the files. Any thread may ask."""
        info = self._infos.get(str(folder))
        return fingerprint(folder) if info is None else str(info.settings[BASE_FINGERPRINT])

    def is_base_of(self, manifest: Manifest, name: str) -> bool:
        """Whether a base model has the weights on which a checkpoint was trained; whether it is in the same folder, if
        an older mint saved the checkpoint. Loads it. For the lanes of the engine."""
        if manifest.base_fingerprint is None:
            return self.key(name) == self.key(manifest.base_model)
        return self.fingerprint(name) == manifest.base_fingerprint

    def require_base_of(self, manifest: Manifest, name: str) -> str:
        """Checks `is_base_of`; returns the `recorded_name`.

        Raises:
            UnknownBaseModelError: there is no such base model.
            InvalidRequestError: it is another one than that of the checkpoint.
            CheckpointError: it is that one by name, and has other weights than when the checkpoint was trained.
        """
        if self.is_base_of(manifest, name):
            return self.recorded_name(name)
        if self.recorded_name(name) == self.recorded_name(manifest.base_model):
            manifest.require_base(self.fingerprint(name))
        raise InvalidRequestError(
            f"does not fit the checkpoint, which was saved from {manifest.base_model}",
            field="base_model",
            value=name,
            remedy="Leave it out",
        )

    def require_readable(self, name: str) -> None:
        """Checks configuration and weight files of a base model by their headers, before anybody asks for it.

        Raises:
            UnknownBaseModelError, InvalidRequestError: as `folder`; or its configuration is impossible.
            CheckpointError: a weight file is missing or cut off.
        """
        ModelFolder(self.folder(name)).tensors()

    def require_fitting_tokenizer(self, name: str) -> None:
        """Checks, before a model is made, that its base has all tokens of its tokenizer; loads the base. Models that
        are there already may go on without.

        Raises:
            InvalidRequestError: the tokenizer has tokens that the base does not have.
        """
        key = self.key(name)
        if key not in self._with_fitting_tokenizer:
            require_within_vocabulary(Path(key), self.load(name).vocab_size)
            self._with_fitting_tokenizer.add(key)

    def loaded(self, name: str) -> BaseInfo | None:
        """The engine's description of a base model; None while it is not loaded."""
        return self._infos.get(self.key(name))

    @property
    def loaded_count(self) -> int:
        """How many base models the engine holds."""
        return len(self._infos)

    @property
    def implementations(self) -> dict[str, str]:
        """Of the names on offer whose weights are loaded: what computes them, `mint` or `transformers`."""
        loaded = {path: info.settings.get("implementation", "") for path, info in list(self._infos.items())}
        folders = list(self._folders.items())
        return {name: str(loaded[str(folder)]) for name, folder in folders if loaded.get(str(folder))}

    def context_length(self, name: str) -> int | None:
        """The longest sequence, read from the folder's config, or from the header of a GGUF file.

        Raises:
            UnknownBaseModelError, InvalidRequestError: as `folder`; or its configuration cannot be read.
        """
        self._require_offered(name)
        return context_length(name, self._aliases)

    @cached_property
    def names(self) -> list[str]:
        """The names on offer; by default those that can be resolved without a path."""
        return registry.available(self._aliases) if self._offered is None else sorted(self._offered)
