"""Settings, and the only file that reads the environment.

| variable | meaning | default |
|---|---|---|
| `MINT_BASE_URL` (or `TINKER_BASE_URL`) | the server to talk to; unset means embedded | unset |
| `MINT_API_KEY` (or `TINKER_API_KEY`) | the key for that server | unset |
| `MINT_HOME` | where embedded runs keep journal, checkpoints and runs | `~/.mint` |
| `MINT_MODELS` | comma-separated `name=path-or-name`: which weights a base-model name stands for | unset |
| `MINT_DTYPE` | dtype of the base model: `float32` or `bfloat16` | `float32` on a CPU |
| `MINT_THREADS` | threads of the engine; part of what makes a run reproducible | all cores |
| `MINT_BASE_MODEL`, `MINT_LORA_RANK`, `MINT_RL_STEPS`, … (`_RL_VARIABLES`) | `run_grpo` without a config | `RLConfig` |
| `MINT_JUDGE_API_KEY` (or `OPENAI_API_KEY`) | the key for a judge behind an OpenAI-compatible endpoint | unset |

The environment is read when a client is made, not at import, so that `load_dotenv()` after the import works.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from mint.errors import InvalidRequestError

EMBEDDED_URL = "http://mint.embedded"
"""The address under which the in-process app is mounted."""


class Settings(BaseSettings):
    """What the environment says, checked."""

    model_config = SettingsConfigDict(env_prefix="MINT_", extra="ignore", populate_by_name=True)

    base_url: str | None = Field(None, validation_alias=AliasChoices("MINT_BASE_URL", "TINKER_BASE_URL"))
    api_key: str | None = Field(None, validation_alias=AliasChoices("MINT_API_KEY", "TINKER_API_KEY"), repr=False)
    home: Path = Path("~/.mint")
    models: str = ""
    dtype: Literal["float32", "bfloat16"] | None = None
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)

    judge_api_key: str | None = Field(
        None, validation_alias=AliasChoices("MINT_JUDGE_API_KEY", "OPENAI_API_KEY"), repr=False
    )

    @property
    def home_dir(self) -> Path:
        """`home` with `~` expanded; not created here."""
        return self.home.expanduser()

    @property
    def model_aliases(self) -> dict[str, str]:
        """`MINT_MODELS` as a dict.

        Raises:
            InvalidRequestError: an entry is not of the form `name=path-or-name`.
        """
        aliases: dict[str, str] = {}
        for entry in filter(None, (part.strip() for part in self.models.split(","))):
            name, separator, target = entry.partition("=")
            if not (separator and name and target):
                raise InvalidRequestError(
                    "is not of the form name=path-or-name",
                    field="MINT_MODELS",
                    value=entry,
                    remedy="Write for example MINT_MODELS=Qwen/Qwen3-0.6B=mint/tiny",
                )
            aliases[name.strip()] = target.strip()
        return aliases


def read_settings() -> Settings:
    """The settings of this process, read now.

    Raises:
        InvalidRequestError: a variable has a value that cannot be used.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "MINT_*"
        variable = name if name.isupper() else f"MINT_{name.upper()}"
        raise InvalidRequestError(first["msg"], field=variable, value=first.get("input")) from error


def let_waiting_threads_sleep() -> None:
    """Shortens how long OpenMP's threads spin before they give their core away; to be called before torch is loaded.

    The default spins for so long that, where another program holds a core, two threads are several times slower than
    one. On a quiet machine the difference is within the noise. A variable that is set already is left alone.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


_RL_VARIABLES: dict[str, tuple[str, type]] = {
    "MINT_BASE_MODEL": ("base_model", str),
    "MINT_LORA_RANK": ("rank", int),
    "MINT_RL_STEPS": ("steps", int),
    "MINT_RL_BATCH": ("batch_size", int),
    "MINT_RL_GROUP": ("group_size", int),
    "MINT_RL_LR": ("learning_rate", float),
    "MINT_RL_MAX_TOKENS": ("max_tokens", int),
    "MINT_RL_TEMPERATURE": ("temperature", float),
}


def rl_variables() -> dict[str, str | int | float]:
    """What the environment says about an RL run, by the names of `RLConfig`; variables that are not set are left out.

    Raises:
        InvalidRequestError: a variable is not a number where it must be.
    """
    found: dict[str, str | int | float] = {}
    for variable, (name, kind) in _RL_VARIABLES.items():
        text = os.environ.get(variable, "").strip()
        if not text:
            continue
        try:
            found[name] = kind(text)
        except ValueError as error:
            raise InvalidRequestError(
                f"is not a {'whole ' if kind is int else ''}number", field=variable, value=text, remedy="Set a number"
            ) from error
    return found
