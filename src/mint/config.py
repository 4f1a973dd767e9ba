"""Settings from the environment, command-line flags and files. No other module reads the environment.

| variable | meaning | default |
|---|---|---|
| `MINT_BASE_URL` (or `TINKER_BASE_URL`) | the server to talk to; unset means embedded | unset |
| `MINT_API_KEY` (or `TINKER_API_KEY`) | the key for that server | unset |
| `MINT_PROJECT_ID`, `MINT_TAGS` (or `TINKER_…`) | a label and comma-separated tags, stored with sessions | unset |
| `MINT_HOME` | journal, checkpoints and runs of embedded use | `~/.mint` |
| `MINT_MODELS` | comma-separated `name=path-or-name`: the weights that a base-model name stands for | unset |
| `MINT_DTYPE` | dtype of the base model: `float32` or `bfloat16` | `float32` on a CPU |
| `MINT_QUANTIZE` | bits of the base's layers: `nf4` (4), `int8` or `fp8` (8); `mxfp4` where files have it | none |
| `MINT_THREADS` | threads of the engine; results depend on it in the last bits | all cores |
| `MINT_KV_CACHE_MIB` | memory for the KV cache and cached prompts, per base model | a quarter of what is free |
| `MINT_LORA_CACHE_MIB` | memory for LoRAs to sample from; others are read when asked for | an eighth of what is free |
| `MINT_MODEL_MEMORY_MIB` | memory for models and copies to sample from; others wait in files | half of what is free |
| `MINT_DISK_RESERVE_MIB` | space on the disk that nothing new may use | 2 % of the disk, at most 2048 |
| `MINT_UNNAMED_SAMPLERS` | samplers without a name that are kept for each model, at most | `64` |
| `MINT_RECOMPUTE` | recompute activations in training: less memory, a third more time | for long sequences |
| `MINT_OFFLOAD_ACTIVATIONS` | recomputed layers keep their inputs in the host's memory (GPU) or in a file (CPU) | off |
| `MINT_MICRO_BATCH_ROWS` | rows of a micro-batch in training; results depend on it in the last bits | by the memory |
| `MINT_CLUSTER` | several processes work: `local` (this machine), `auto` (this Ray) or `ray://HOST:PORT` | none |
| `MINT_TRAINERS` | how many processes train; results do not depend on it | `2` |
| `MINT_SAMPLERS` | how many processes sample beside them; `0`: the one that serves does | `0` |
| `MINT_SHARD_BASE` | with a cluster: processes that train divide the layers of the base; same results | off |
| `MINT_TENSOR_PARALLEL` | layers are cut into fixed chunks, which 1, 2, 4 or 8 processes that train divide | uncut |
| `MINT_EXPERT_PARALLEL` | with a cluster: processes that train divide the experts of the base; same results | off |
| `MINT_REDUCTIONS` | with a cluster: `exact` (same results on any number of processes) or `ordinary` | `exact` |
| `MINT_COLLECTIVE_TIMEOUT_S` | with a cluster: seconds without a step of training while a process waits | `30` |
| `MINT_LEASE_S` | in another's Ray cluster: seconds for which a server's processes live on without it | `120` |
| `MINT_SAMPLER` | what samples, separated by commas: `vllm=http://HOST:PORT`, or `workers` that join | none |
| `MINT_SAMPLER_FOLDER` | where external samplers read LoRAs; they must see it under the same path | a temporary one |
| `MINT_SAMPLER_API_KEY` | the API key of the external samplers | unset |
| `MINT_NATIVE` | use mint's own kernels (C or Triton): faster, other bits | on Linux and x86-64, with a C compiler |
| `MINT_BATCH_INVARIANT` | on a GPU, a sampled row has the same bits in any batch; slower | off |
| `MINT_GPU_OFF` | comma-separated fast paths that a GPU does not take (docs/gpu.md); other bits | none |
| `MINT_DEVICE` | where torch computes: `cpu`, `cuda`, or `mps` on Apple | `cuda` if torch sees one, else `cpu` |
| `MINT_INSTRUCTIONS` | vector instructions of the kernels in C; results depend on them in the last bits | the fastest |
| `XDG_CACHE_HOME` | compiled kernels are cached in `mint/native` below it | `~/.cache` |
| `MINT_BASE_MODEL`, `MINT_LORA_RANK`, `MINT_RL_STEPS`, … (`_RL_VARIABLES`) | `run_grpo` without a config | `RLConfig` |
| `MINT_JUDGE_API_KEY` (or `OPENAI_API_KEY`) | the key for a judge behind an OpenAI-compatible endpoint | unset |
| `MINT_SERVE_HOST`, `MINT_SERVE_PORT` | the address of `mint serve` | `127.0.0.1`, `8500` |
| `MINT_SERVE_DATA_DIR` | its journal, checkpoints and keys | `MINT_HOME` |
| `MINT_SERVE_MODELS` | comma-separated `NAME[=PATH]`: the base models that it offers | all registered |
| `MINT_SERVE_API_KEYS` | whether it requires API keys | if any was ever made |
| `MINT_SERVE_INSECURE` | lets it listen beyond this machine without keys | `false` |
| `MINT_SERVE_PUBLIC_URL` | its address outside, behind a proxy: links to files begin with it | the address called |
| `MINT_SERVE_OPERATORS` | comma-separated owners whose keys open dashboard and metrics | the owner of all keys |
| `MINT_SERVE_MAX_SESSIONS`, `MINT_SERVE_MAX_MODELS` | how many may live at once, of all owners | `4096`, `1024` |
| `MINT_SERVE_OWNER_SESSIONS`, `MINT_SERVE_OWNER_MODELS` | of an owner whose key says nothing else | `256`, `256` |
| `MINT_SERVE_OWNER_CHECKPOINTS_MIB` | the space for the checkpoints of such an owner | a quarter of what is free |
| `MINT_SERVE_OWNER_SNAPSHOTS_MIB` | the space for the snapshots of such an owner's models | a quarter of what is free |
| `MINT_SERVE_OWNER_JOURNAL_MIB` | the space in the journal for such an owner | a quarter of what is free at the start |
| `MINT_SERVE_MAX_BODY_MB`, `MINT_SERVE_BODY_TIMEOUT_S` | limits of one request's body | `64`, `30` |
| `MINT_SERVE_STOP_WITHIN_S` | the longest time of a shutdown | `20` |
| `MINT_SERVE_STUCK_AFTER_S` | `/readyz` fails while a request runs longer than this | `600` |
| `MINT_SERVE_LOGPROBS_MODE` | `raw` or `processed`: of samples whose request names none | `raw` |
| `MINT_SERVE_CLUSTER`, `MINT_SERVE_TRAINERS`, `MINT_SERVE_SAMPLERS` | as the variables without `SERVE` | those |
| `MINT_SERVE_SHARD_BASE` | as `MINT_SHARD_BASE` | that |
| `MINT_SERVE_TENSOR_PARALLEL` | as `MINT_TENSOR_PARALLEL` | that |
| `MINT_SERVE_EXPERT_PARALLEL` | as `MINT_EXPERT_PARALLEL` | that |
| `MINT_SERVE_REDUCTIONS` | as `MINT_REDUCTIONS` | that |
| `MINT_SERVE_SAMPLER`, `MINT_SERVE_SAMPLER_FOLDER` | as the variables without `SERVE` | those |
| `MINT_SERVE_MIRROR` | the object storage that gets a copy of the data | none |
| `MINT_SERVE_LOG_FORMAT` | `console` or `json` | `console` |
| `MINT_SERVE_LOG_LEVEL` | `debug`, `info`, `warning` or `error` | `info` |

A TOML file can set every `MINT_SERVE_…` variable under its name in lower case without the prefix (`mint serve --config
mint.toml`). Flags override the environment, and the environment overrides the file.

A variable whose name is nearly that of one above, or that begins with `MINT_SERVE_` or `MINT_RL_` and is none of them,
is refused. Other names that begin with `MINT_` may be a script's own; `mint` commands name them in a warning.

The environment is read when a client is made, not at import, so `load_dotenv()` works after the import, too.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from mint.errors import InvalidRequestError
from mint.types.validation_errors import wording

EMBEDDED_URL = "http://mint.embedded"
"""The base URL of the app in this process."""


def _cluster(text: str) -> str:
    if text not in ("local", "auto") and re.fullmatch(r"ray://[^/?#@\s]+:\d+", text) is None:
        raise ValueError("is not local, auto or an address like ray://10.0.0.1:10001")
    return text


Cluster = Annotated[str, AfterValidator(_cluster)]
"""Where the processes of a cluster run."""


_SAMPLER = re.compile(r"vllm=(https?://[^/?#@\s,]+(?:/[^?#@\s,]*)?)")


WORKERS = "workers"
"""Instead of an address: samplers join, by `mint worker --join URL`."""


def _samplers(text: str) -> str:
    for part in text.split(","):
        if part.strip() not in ("", WORKERS) and _SAMPLER.fullmatch(part.strip()) is None:
            raise ValueError(f"is not of the form vllm=http://HOST:PORT, and not {WORKERS}")
    return text


def _tensor_parallel(count: int) -> int:
    if count not in (1, 2, 4, 8):
        raise ValueError("is not 1, 2, 4 or 8: layers are cut into as many chunks at most")
    return count


GPU_PATHS = ("logits", "flex", "triton", "fused", "capture", "experts", "captured-experts", "quantized", "optimizer")
"""The fast paths of a GPU that a user can switch off; `engine/cuda/fast_paths.py` says what they are."""


def _gpu_paths(text: str) -> str:
    for name in text.split(","):
        if name.strip() not in ("", *GPU_PATHS):
            raise ValueError(f"has {name.strip()!r}, which is none of {', '.join(GPU_PATHS)}")
    return text


TensorParallel = Annotated[int, AfterValidator(_tensor_parallel)]
"""How many processes compute each layer together."""

Reductions = Literal["exact", "ordinary"]
"""In which order processes add up: in a fixed one, or in that of the library, which depends on their number."""

Samplers = Annotated[str, AfterValidator(_samplers)]
"""Model servers that sample, separated by commas; `workers`: those that join."""


class Settings(BaseSettings):
    """The checked settings of a client and of the embedded service."""

    # An empty variable counts as unset: it is how a shell takes back one that is exported.
    model_config = SettingsConfigDict(env_prefix="MINT_", env_ignore_empty=True, extra="ignore", populate_by_name=True)

    base_url: str | None = Field(None, validation_alias=AliasChoices("MINT_BASE_URL", "TINKER_BASE_URL"))
    api_key: str | None = Field(None, validation_alias=AliasChoices("MINT_API_KEY", "TINKER_API_KEY"), repr=False)
    project_id: str | None = Field(None, validation_alias=AliasChoices("MINT_PROJECT_ID", "TINKER_PROJECT_ID"))
    tags: str = Field("", validation_alias=AliasChoices("MINT_TAGS", "TINKER_TAGS"))
    home: Path = Path("~/.mint")
    models: str = ""
    dtype: Literal["float32", "bfloat16"] | None = None
    quantize: Literal["nf4", "int8", "fp8", "mxfp4"] | None = None
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    kv_cache_mib: int | None = Field(None, ge=1)
    lora_cache_mib: int | None = Field(None, ge=1)
    model_memory_mib: int | None = Field(None, ge=1)
    disk_reserve_mib: int | None = Field(None, ge=0)
    unnamed_samplers: int = Field(64, ge=1)
    recompute: bool | None = None
    offload_activations: bool | None = None
    micro_batch_rows: int | None = Field(None, ge=1, le=1 << 20)
    native: bool | None = None
    batch_invariant: bool | None = None
    gpu_off: Annotated[str, AfterValidator(_gpu_paths)] = ""
    device: Literal["cpu", "cuda", "mps"] | None = None
    instructions: Literal["avx512-amx", "avx512-bf16", "avx512", "avx2", "neon", "portable"] | None = None
    cluster: Cluster | None = None
    trainers: int = Field(2, ge=1, le=64)
    samplers: int = Field(0, ge=0, le=64)
    shard_base: bool = False
    tensor_parallel: TensorParallel | None = None
    expert_parallel: bool = False
    reductions: Reductions = "exact"
    collective_timeout_s: float = Field(30.0, gt=0)
    lease_s: float = Field(120.0, ge=10, le=86_400)
    sampler: Samplers = ""
    sampler_folder: Path | None = None
    sampler_api_key: str | None = Field(None, repr=False)

    judge_api_key: str | None = Field(
        None, validation_alias=AliasChoices("MINT_JUDGE_API_KEY", "OPENAI_API_KEY"), repr=False
    )

    @property
    def sampler_addresses(self) -> list[str]:
        """The addresses in `sampler`."""
        parts = [part.strip() for part in self.sampler.split(",")]
        return [part.partition("=")[2].rstrip("/") for part in parts if part not in ("", WORKERS)]

    @property
    def home_dir(self) -> Path:
        """`home` with `~` expanded; not created here."""
        return self.home.expanduser()

    @property
    def cache_dir(self) -> Path:
        """Where mint keeps files that it can compute again: in the user's cache folder, or in `home` if the user has no
        home directory. Not created here."""
        try:
            return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mint"
        except RuntimeError:
            return self.home_dir

    @property
    def kernels_dir(self) -> Path:
        """The cache of compiled kernels."""
        return self.cache_dir / "native"

    @property
    def native_folder(self) -> Path | None:
        """`kernels_dir`, or None if mint's own kernels are switched off."""
        return None if self.native is False else self.kernels_dir

    @property
    def gpu_off_list(self) -> list[str]:
        """`MINT_GPU_OFF` as a list."""
        return [name for name in (part.strip() for part in self.gpu_off.split(",")) if name]

    @property
    def tag_list(self) -> list[str]:
        """`MINT_TAGS` as a list."""
        return [tag for tag in (part.strip() for part in self.tags.split(",")) if tag]

    @property
    def model_aliases(self) -> dict[str, str]:
        """`MINT_MODELS` as a dict.

        Raises:
            InvalidRequestError: an entry is not of the form `name=path-or-name`, or a name has two models.
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
            name, target = name.strip(), target.strip()
            if aliases.setdefault(name, target) != target:
                raise InvalidRequestError(
                    f"names two models, {aliases[name]} and {target}",
                    field="MINT_MODELS",
                    value=name,
                    remedy="Give each model a name of its own",
                )
        return aliases


def read_settings() -> Settings:
    """The settings, read from the environment now.

    Raises:
        InvalidRequestError: a variable has a value that cannot be used, or a misspelt name.
    """
    unknown_variables()
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "MINT_*"
        variable = name if name.isupper() else f"MINT_{name.upper()}"
        raise InvalidRequestError(wording(first), field=variable, value=first.get("input")) from error


def _http_address(text: str) -> str:
    if re.fullmatch(r"https?://[^/?#@\s]+(/[^?#@\s]*)?", text) is None:
        raise ValueError("is not an address like https://mint.example.org")
    return text.rstrip("/")


class ServeSettings(BaseSettings):
    """The checked settings of `mint serve`, from flags, environment and file."""

    model_config = SettingsConfigDict(env_prefix="MINT_SERVE_", env_ignore_empty=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(8500, ge=0, le=65535)
    data_dir: Path | None = None
    models: Annotated[tuple[str, ...], NoDecode] = ()
    api_keys: bool | None = None
    insecure: bool = False
    public_url: Annotated[str, AfterValidator(_http_address)] | None = None
    operators: Annotated[tuple[str, ...], NoDecode] = ()
    max_sessions: int = Field(4096, ge=1, le=1_000_000)
    max_models: int = Field(1024, ge=1, le=1_000_000)
    owner_sessions: int = Field(256, ge=1, le=1_000_000)
    owner_models: int = Field(256, ge=1, le=1_000_000)
    owner_checkpoints_mib: int | None = Field(None, ge=0, le=1 << 40)
    owner_journal_mib: int | None = Field(None, ge=1, le=1 << 40)
    owner_snapshots_mib: int | None = Field(None, ge=0, le=1 << 40)
    max_body_mb: int = Field(64, ge=1, le=1024)
    body_timeout_s: float = Field(30.0, ge=1, le=3600)
    stop_within_s: float = Field(20.0, ge=1, le=3600)
    stuck_after_s: float = Field(600.0, ge=1)
    logprobs_mode: Literal["raw", "processed"] = "raw"
    cluster: Cluster | None = None
    trainers: int | None = Field(None, ge=1, le=64)
    samplers: int | None = Field(None, ge=0, le=64)
    shard_base: bool | None = None
    tensor_parallel: TensorParallel | None = None
    expert_parallel: bool | None = None
    reductions: Reductions | None = None
    sampler: Samplers | None = None
    sampler_folder: Path | None = None
    mirror: str | None = None
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("models", "operators", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @property
    def folder(self) -> Path:
        """The data directory; not created here."""
        return (self.data_dir or read_settings().home).expanduser().resolve()

    @property
    def offered(self) -> dict[str, str]:
        """`models` as name → path or name of the weights; a name alone stands for itself.

        Raises:
            InvalidRequestError: an entry has no name, or nothing after its `=`.
        """
        found: dict[str, str] = {}
        for entry in self.models:
            name, separator, target = (part.strip() for part in entry.partition("="))
            if not name or (separator and not target):
                raise InvalidRequestError(
                    "is not of the form NAME or NAME=PATH", field="model", value=entry, remedy="Name a base model"
                )
            found[name] = target or name
        return found

    def with_cluster(self, base: Settings) -> Settings:
        """`base` with the cluster and the samplers that these settings ask for, if they do.

        Raises:
            InvalidRequestError: they say how a cluster is to be, and none is asked for.
        """
        of_cluster = ("trainers", "samplers", "shard_base", "tensor_parallel", "expert_parallel", "reductions")
        given = {name: getattr(self, name) for name in ("cluster", *of_cluster, "sampler", "sampler_folder")}
        merged = base.model_copy(update={name: value for name, value in given.items() if value is not None})
        for name in of_cluster:
            if given[name] and merged.cluster is None:
                raise InvalidRequestError(
                    "has no effect without a cluster",
                    field=f"--{name.replace('_', '-')}",
                    value=given[name],
                    remedy="Add --cluster local",
                )
        return merged

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags override the environment, and the environment overrides the file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def read_serve_settings(flags: Mapping[str, Any], config: Path | None = None) -> ServeSettings:
    """The settings of `mint serve` from the given flags, the environment, and the file `config`.

    Raises:
        InvalidRequestError: the file cannot be read or has an unknown key, or a value cannot be used.
    """
    if config is None:
        written: dict[str, Any] = {}
    else:
        written = _read_toml(config)

    class FromFile(ServeSettings):
        model_config = SettingsConfigDict(toml_file=config)

    try:
        return FromFile(**flags)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        if name in flags:
            field = f"--{name.replace('_', '-')}"
        else:
            field = f"{config}: {name}" if name in written else f"MINT_SERVE_{name.upper()}"
        raise InvalidRequestError(wording(first), field=field, value=first.get("input")) from error


def _read_toml(path: Path) -> dict[str, Any]:
    known = sorted(ServeSettings.model_fields)
    try:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequestError(
            f"cannot be read: {error}", field="--config", value=path, remedy="Give a TOML file"
        ) from error
    for key in written:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            remedy = f"Did you mean {close[0]}?" if close else f"The settings are {', '.join(known)}"
            raise InvalidRequestError("is not a setting", field=str(path), value=key, remedy=remedy)
    return written


def shorten_thread_spinning() -> None:
    """Makes idle OpenMP threads sleep sooner. Call it before torch is loaded.

    By default they spin so long that, when another program uses a core, two threads are several times slower than one.
    On an idle machine the difference is within the noise. A variable that is already set is not changed.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def prepare_ray(cluster: str = "local") -> None:
    """Makes a cluster that this process starts refuse whoever lacks its token: Ray's ports are open to the network, and
    it runs what it is sent. Another's cluster has its own rules.

    Ray's usage statistics are not sent, it does not print the stack when the process gets a signal, and the processes
    that it starts here are as urgent as the one that serves (by default, less than any other program). Ray reads these
    variables when it is loaded. Those that are already set are not changed.

    Raises:
        InvalidRequestError: ray is loaded already, and has no token.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    os.environ.setdefault("RAY_worker_niceness", "0")
    if cluster != "local":
        return
    if "RAY_AUTH_MODE" not in os.environ and "ray" in sys.modules:
        raise InvalidRequestError(
            "must be set before ray is imported: other users of the network could run programs in the cluster",
            field="RAY_AUTH_MODE",
            value="(not set)",
            remedy="Import mint and open the ServiceClient first, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        )
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def use_interface(name: str) -> None:
    """Makes the collectives of this process use a network interface; by default they take that of the host's name.
    Call it before the process joins a group."""
    os.environ["GLOO_SOCKET_IFNAME"] = name


def allocator_is_set() -> bool:
    """Whether the user has configured or replaced malloc, so that mint must not configure it."""
    return any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)


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


_OWN_PREFIXES = ("MINT_SERVE_", "MINT_RL_")
"""All names that begin so are mint's."""

_SIMILAR = 0.75
"""From this share of equal letters on (difflib's ratio, without the prefix `MINT_`), a name counts as misspelt:
KV_CACHE_MB and KV_CACHE_MIB have 0.96, KV_CACHE_BYTES and KV_CACHE_MIB 0.77."""


def unknown_variables() -> list[str]:
    """The variables in the environment that begin with `MINT_` and that mint does not read, sorted.

    Raises:
        InvalidRequestError: one of them has nearly the name of a variable that mint reads, or begins with
            `MINT_SERVE_` or `MINT_RL_`.
    """
    known = {name.removeprefix("MINT_") for name in _variables()}
    unknown = []
    for name in sorted(os.environ):
        given = name.upper().removeprefix("MINT_")
        if not name.upper().startswith("MINT_") or given in known:
            continue
        similar = difflib.get_close_matches(given, sorted(known), n=1, cutoff=_SIMILAR)
        own = [prefix for prefix in _OWN_PREFIXES if name.upper().startswith(prefix)]
        if similar or own:
            names = ", ".join(sorted(each for each in _variables() if own and each.startswith(own[0])))
            raise InvalidRequestError(
                "is not a variable of mint",
                field="environment",
                value=name,
                remedy=f"Did you mean MINT_{similar[0]}?" if similar else f"The variables of this kind are {names}",
            )
        unknown.append(name)
    return unknown


def _variables() -> set[str]:
    """Every variable that mint reads, by its first name."""
    client = {
        str(field.validation_alias.choices[0]) if isinstance(field.validation_alias, AliasChoices) else name.upper()
        for name, field in Settings.model_fields.items()
    }
    served = {f"MINT_SERVE_{name.upper()}" for name in ServeSettings.model_fields}
    return {name if name.startswith("MINT_") else f"MINT_{name}" for name in client} | served | _RL_VARIABLES.keys()


def keep_home() -> None:
    """Makes a relative `MINT_HOME` absolute, before this process goes to another directory."""
    home = read_settings().home_dir
    if not home.is_absolute():
        os.environ["MINT_HOME"] = str(home.resolve())


def environment_of(home: Path) -> dict[str, str]:
    """The environment of a process of mint whose data lies in `home`: this one's, with another `MINT_HOME`."""
    return {**os.environ, "MINT_HOME": str(home)}


def rl_variables() -> dict[str, str | int | float]:
    """The settings of an RL run in the environment, by the names of `RLConfig`; without the variables that are not set.

    Raises:
        InvalidRequestError: a variable is not a number where it must be, or has a misspelt name.
    """
    unknown_variables()
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
