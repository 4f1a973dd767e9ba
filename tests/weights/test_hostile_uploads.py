"""Every archive here is refused with a sentence and a 4xx, at once, in little memory, and leaves nothing behind."""

from __future__ import annotations

import gzip
import json
import random
import resource
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from archive_maker import (
    HIDDEN,
    Q_PROJ,
    adapter,
    bomb,
    config,
    entries,
    entry,
    header_of_size,
    lora,
    multipart,
    raw_safetensors,
    safetensors,
    tar,
    tar_gz,
)
from default_engine import fake_engine
from http_server import http_server
from waiting import HANG_S

from mint.errors import MintError
from mint.server.service.uploads import import_checkpoint
from mint.server.store.journal import Journal

MAX_S, MAX_RSS_BYTES = 2.0, 200 * 2**20
GIB = 2**30
GOOD = adapter()
A, B = lora()


@dataclass(frozen=True)
class Server:
    url: str
    data_dir: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("data")
    with http_server(data_dir, engine=fake_engine()) as url:
        warm_up, content_type = multipart(_config(r=5))  # the first look at a base model loads libraries
        httpx.post(
            f"{url}/api/v1/checkpoints/upload",
            content=warm_up,
            headers={"content-type": content_type},
            timeout=HANG_S,
        )
        yield Server(url, data_dir)


def _weights(content: bytes) -> bytes:
    return tar_gz(adapter(adapter_model__safetensors=content))


def _config(**changes: Any) -> bytes:
    return tar_gz(adapter(adapter_config__json=config(**changes)))


def _changed(**fields: Any) -> bytes:
    """The good tensors, the first one's entry changed."""
    header, data = entries(lora())
    header[A].update(fields)
    return _weights(raw_safetensors(header, data))


def _with(name: str, content: bytes) -> bytes:
    return tar_gz({**GOOD, name: content})


def _value(value: float) -> bytes:
    arrays = lora()
    arrays[B][3, 2] = value
    return _weights(safetensors(arrays))


def _whole(part: str = "attn") -> dict[str, np.ndarray]:
    """A lora on every layer of the attention of mint/tiny."""
    outputs = {"q": 192, "k": 64, "v": 64, "o": 192}
    found: dict[str, np.ndarray] = {}
    for layer in range(4):
        for name, size in outputs.items():
            found |= lora(Q_PROJ.replace(".0.", f".{layer}.").replace("q_proj", f"{name}_proj"), outputs=size)
    return found


def _optimizer(change: Callable[[dict[str, np.ndarray]], None], step: str | None = "3", **settings: Any) -> bytes:
    weights = _whole()
    own = {name.removeprefix("base_model.model."): array for name, array in weights.items()}
    moments = {f"{part}/{name}": np.abs(array) for part in ("exp_avg", "exp_avg_sq") for name, array in own.items()}
    change(moments)
    metadata = {} if step is None else {"step": step}
    files = {
        "adapter_config.json": config(**settings),
        "adapter_model.safetensors": safetensors(weights),
        "optimizer.safetensors": safetensors(moments, metadata),
    }
    return tar_gz(files)


def _manifest(**changes: Any) -> bytes:
    plain = {"format": 1, "base_model": "mint/tiny", "lora": {"seed": 1}, "seed_given": True, "step": 0}
    return _with("mint.json", json.dumps({**plain, **changes}).encode())


def _zip() -> bytes:
    target = BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in GOOD.items():
            archive.writestr(name, content)
    return target.getvalue()


def _pax(text: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return entry("pax", text, type=kind)


def _record(key: str, value: str) -> bytes:
    length = len(key) + len(value) + 3
    length += len(str(length + len(str(length))))
    return f"{length} {key}={value}\n".encode()


def _patched(at: int, content: bytes) -> bytes:
    """The good tar with some bytes of its first header replaced, and the checksum made right again."""
    block = bytearray(tar(GOOD))
    block[at : at + len(content)] = content
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block[:512]):06o}\0 ".encode()
    return bytes(block)


def _nothing(_moments: dict[str, np.ndarray]) -> None:
    pass


def _negative(moments: dict[str, np.ndarray]) -> None:
    name = next(name for name in moments if name.startswith("exp_avg_sq/"))
    moments[name] = -moments[name] - 1


def _not_a_number(moments: dict[str, np.ndarray]) -> None:
    next(iter(moments.values()))[0, 0] = np.nan


def _renamed(moments: dict[str, np.ndarray]) -> None:
    moments["exp_avg/other"] = moments.pop(next(iter(moments)))


def _endless_name() -> bytes:
    return b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (16 * 2**20)


EMBEDDING = np.ones((1024, HIDDEN), np.float32)
HUGE_TENSOR = {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 2**64]}

ARCHIVES: dict[str, Callable[[], bytes]] = {
    # places and kinds of entries
    "dot_dot": lambda: tar_gz({**GOOD, "../evil": b"x"}),
    "dot_dot_known_name": lambda: tar_gz({f"../{name}": content for name, content in GOOD.items()}),
    "absolute": lambda: tar_gz({f"/tmp/{name}": content for name, content in GOOD.items()}),
    "backslash": lambda: tar_gz({**GOOD, "..\\adapter_config.json": b"x"}),
    "deep_folders": lambda: tar_gz({f"a/b/{name}": content for name, content in GOOD.items()}),
    "two_folders": lambda: tar_gz({"a/adapter_config.json": config(), "b/README.md": b"x"}),
    "empty_name": lambda: tar_gz({**GOOD, "": b"x"}),
    "dot_name": lambda: tar_gz({**GOOD, ".": b"x"}),
    "symlink": lambda: tar_gz(GOOD, entry("README.md", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "symlink_for_config": lambda: tar_gz({}, entry("adapter_config.json", type=tarfile.SYMTYPE, linkname="/x")),
    "symlinked_folder": lambda: tar_gz({}, entry("a", type=tarfile.SYMTYPE, linkname="/"), tar({"a/README.md": b""})),
    "hard_link": lambda: tar_gz(GOOD, entry("README.md", type=tarfile.LNKTYPE, linkname="/etc/shadow")),
    "character_device": lambda: tar_gz(GOOD, entry("README.md", type=tarfile.CHRTYPE)),
    "block_device": lambda: tar_gz(GOOD, entry("README.md", type=tarfile.BLKTYPE)),
    "fifo": lambda: tar_gz(GOOD, entry("README.md", type=tarfile.FIFOTYPE)),
    "contiguous": lambda: tar_gz(GOOD, entry("README.md", type=tarfile.CONTTYPE)),
    "sparse": lambda: tar_gz(GOOD, entry("README.md", type=tarfile.GNUTYPE_SPARSE)),
    "gnu_long_name": lambda: tar_gz(GOOD, entry("././@LongLink", b"../evil\0", type=tarfile.GNUTYPE_LONGNAME)),
    "unknown_kind": lambda: tar_gz(GOOD, entry("README.md", type=b"Z")),
    "folder_with_content": lambda: tar_gz(GOOD, entry("folder", b"x" * 100, type=tarfile.DIRTYPE)),
    "duplicate": lambda: tar_gz([*GOOD.items(), ("adapter_config.json", config(r=8))]),
    "unknown_name": lambda: _with("run.sh", b"rm -rf /"),
    "pickled_adapter": lambda: tar_gz({"adapter_config.json": config(), "adapter_model.bin": b"\x80\x04."}),
    "pickled_beside": lambda: _with("training_args.bin", b"\x80\x04."),
    "pickled_optimizer": lambda: _with("optimizer.pt", b"\x80\x04."),
    "a_million_entries": lambda: gzip.compress(b"".join(entry(f"._{i}") for i in range(500)) * 200, 1),
    "pax_path": lambda: tar_gz({}, _pax(_record("path", "../../evil")), tar(GOOD)),
    "pax_global_path": lambda: tar_gz({}, _pax(_record("path", "/evil"), tarfile.XGLTYPE), tar(GOOD)),
    "pax_size": lambda: tar_gz({}, _pax(_record("size", str(2**50))), tar(GOOD)),
    "pax_link": lambda: tar_gz({}, _pax(_record("linkpath", "/etc/passwd")), tar(GOOD)),
    "pax_sparse": lambda: tar_gz({}, _pax(_record("GNU.sparse.size", str(2**50))), tar(GOOD)),
    "pax_of_a_gigabyte": lambda: bomb(
        tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT)[:124] + b"10000000000\0", 16
    ),
    "pax_bomb": lambda: bomb(_pax_header(GIB), 1024),
    "negative_size": lambda: _patched(124, b"\xff" * 12),
    "size_of_a_terabyte": lambda: _patched(124, b"\x80" + (2**40).to_bytes(11, "big")),
    "size_beyond_the_end": lambda: _patched(124, b"00000777777\0"),
    "size_not_octal": lambda: _patched(124, b"zzzzzzzzzzz\0"),
    "wrong_checksum": lambda: tar(GOOD)[:150] + b"9" + tar(GOOD)[151:],
    # what is no archive, or not a whole one
    "empty": lambda: b"",
    "text": lambda: b"hello\n" * 1000,
    "zip": _zip,
    "gzip_of_text": lambda: gzip.compress(b"hello\n" * 1000),
    "gzip_of_gzip": lambda: gzip.compress(tar_gz(GOOD)),
    "only_the_magic": lambda: b"\x1f\x8b",
    "cut_tar": lambda: tar(GOOD)[:3000],
    "cut_gzip": lambda: tar_gz(GOOD)[:-500],
    "gzip_without_trailer": lambda: tar_gz(GOOD)[:-8],
    "wrong_crc": lambda: tar_gz(GOOD)[:-8] + bytes(8),
    "flipped_bit": lambda: tar_gz(GOOD)[:900] + bytes([tar_gz(GOOD)[900] ^ 1]) + tar_gz(GOOD)[901:],
    "endless_gzip_name": _endless_name,
    "goes_on_after_its_end": lambda: gzip.compress(tar(GOOD) + bytes(2**20), 1),
    "bomb_in_weights": lambda: bomb(header_of_size("adapter_model.safetensors", 8 * GIB), 8192),
    "bomb_within_bounds": lambda: bomb(header_of_size("adapter_model.safetensors", 60 * 2**20), 60),
    "bomb_in_readme": lambda: bomb(header_of_size("README.md", GIB), 1024),
    "bomb_in_config": lambda: bomb(header_of_size("adapter_config.json", GIB), 1024),
    "bomb_of_a_thousand": lambda: bomb(header_of_size("optimizer.safetensors", 15 * GIB), 2048),
    "lacks_weights": lambda: tar_gz({"adapter_config.json": config()}),
    "lacks_config": lambda: tar_gz({"adapter_model.safetensors": safetensors(lora())}),
    # safetensors
    "header_of_100_mb": lambda: _weights((100 * 2**20).to_bytes(8, "little") + b"{}"),
    "header_beyond_the_file": lambda: _weights((2000).to_bytes(8, "little") + b"{}"),
    "header_of_2_64": lambda: _weights(b"\xff" * 8 + b"{}"),
    "header_of_2_mb": lambda: _weights(raw_safetensors(b"{" + b" " * (2 * 2**20) + b"}", b"")),
    "header_not_json": lambda: _weights(raw_safetensors(b"{nonsense}", b"")),
    "header_a_list": lambda: _weights(raw_safetensors([1, 2], b"")),
    "header_nested": lambda: _weights(raw_safetensors(b"[" * 1_000_000, b"")),
    "header_with_nan": lambda: _weights(raw_safetensors(b'{"a": NaN}', b"")),
    "header_long_number": lambda: _weights(raw_safetensors(b'{"a": ' + b"9" * 900_000 + b"}", b"")),
    "repeated_key": lambda: _weights(raw_safetensors(b'{"a": {}, "a": {}}', b"")),
    "many_tensors": lambda: _weights(raw_safetensors({f"t{i}": 0 for i in range(40_000)}, b"")),
    "metadata_not_text": lambda: _weights(safetensors(lora(), {"format": 1})),
    "shape_overflow": lambda: _weights(raw_safetensors({A: HUGE_TENSOR}, b"")),
    "shape_negative": lambda: _changed(shape=[-4, -192]),
    "shape_of_floats": lambda: _changed(shape=[4.0, 192.0]),
    "shape_of_booleans": lambda: _changed(shape=[True, True]),
    "shape_three_dimensional": lambda: _changed(shape=[4, 192, 1]),
    "shape_other_bytes": lambda: _changed(shape=[4, 191]),
    "offsets_overlap": lambda: _changed(data_offsets=[4, 4 * 192 * 4 + 4]),
    "offsets_beyond": lambda: _changed(data_offsets=[2**40, 2**40 + 4 * 192 * 4]),
    "offsets_backwards": lambda: _changed(data_offsets=[3072, 0]),
    "offsets_of_text": lambda: _changed(data_offsets=["0", "3072"]),
    "more_keys": lambda: _changed(extra=1),
    "trailing_bytes": lambda: _weights(safetensors(lora()) + b"x" * 64),
    "dtype_int64": lambda: _weights(safetensors({name: array.astype(np.int64) for name, array in lora().items()})),
    "dtype_unknown": lambda: _changed(dtype="F8_E4M3"),
    "dtype_no_text": lambda: _changed(dtype=["F32"]),
    "nan": lambda: _value(np.nan),
    "infinity": lambda: _value(np.inf),
    "no_tensors": lambda: _weights(raw_safetensors({}, b"")),
    "lone_half": lambda: _weights(safetensors({A: lora()[A]})),
    "lora_on_the_embedding": lambda: _weights(safetensors(lora("base_model.model.model.embed_tokens", outputs=1024))),
    "lora_on_no_layer": lambda: _weights(safetensors(lora(Q_PROJ.replace(".0.", ".99.")))),
    "changed_embedding": lambda: _weights(
        safetensors({**lora(), "base_model.model.model.embed_tokens.weight": EMBEDDING})
    ),
    "wrong_rank": lambda: _weights(safetensors(lora(rank=5))),
    "other_base_model": lambda: _weights(safetensors(lora(inputs=4096, outputs=4096))),
    # adapter_config.json
    "config_not_json": lambda: tar_gz(adapter(adapter_config__json=b"{")),
    "config_a_list": lambda: tar_gz(adapter(adapter_config__json=b"[]")),
    "config_nested": lambda: tar_gz(adapter(adapter_config__json=b"[" * 1_000_000)),
    "other_method": lambda: _config(peft_type="IA3"),
    "dora": lambda: _config(use_dora=True),
    "rslora": lambda: _config(use_rslora=True),
    "whole_layers": lambda: _config(modules_to_save=["lm_head"]),
    "biases": lambda: _config(bias="all"),
    "rank_pattern": lambda: _config(rank_pattern={"q_proj": 8}),
    "pissa": lambda: _config(init_lora_weights="pissa"),
    "rank_0": lambda: _config(r=0),
    "rank_true": lambda: _config(r=True),
    "rank_of_a_million": lambda: _config(r=10**6),
    "alpha_0": lambda: _config(lora_alpha=0),
    "alpha_nan": lambda: tar_gz(adapter(adapter_config__json=config().replace(b": 32", b": NaN"))),
    "alpha_text": lambda: _config(lora_alpha="32"),
    "no_base_model": lambda: _config(base_model_name_or_path=None),
    "unknown_base_model": lambda: _config(base_model_name_or_path="nobody/knows"),
    "base_model_of_the_servers_disk": lambda: _config(base_model_name_or_path="/etc"),
    "base_model_above": lambda: _config(base_model_name_or_path="../../models"),
    # optimizer.safetensors and mint.json
    "optimizer_nan": lambda: _optimizer(_not_a_number),
    "optimizer_negative": lambda: _optimizer(_negative),
    "optimizer_renamed": lambda: _optimizer(_renamed),
    "optimizer_without_step": lambda: _optimizer(_nothing, step=None),
    "optimizer_step_negative": lambda: _optimizer(_nothing, step="-1"),
    "optimizer_step_huge": lambda: _optimizer(_nothing, step="9" * 40),
    "optimizer_of_another_scale": lambda: _optimizer(_nothing, lora_alpha=16),
    "optimizer_not_safetensors": lambda: _with("optimizer.safetensors", b"\x80\x04."),
    "optimizer_of_part": lambda: _with("optimizer.safetensors", safetensors(lora(), {"step": "1"})),
    "manifest_not_json": lambda: _with("mint.json", b"{"),
    "manifest_a_list": lambda: _with("mint.json", b"[]"),
    "manifest_seed": lambda: _manifest(lora={"seed": -1}),
    "manifest_seed_text": lambda: _manifest(lora={"seed": "1"}),
    "manifest_base": lambda: _manifest(base_model=["mint/tiny"]),
    "manifest_newer": lambda: _manifest(format=2),
}  # fmt: skip


def _pax_header(size: int) -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, size
    return info.tobuf(tarfile.GNU_FORMAT)


def _left_behind(data_dir: Path) -> list[Path]:
    return [path for folder in ("tmp", "checkpoints") for path in (data_dir / folder).rglob("*")]


def _refused(server: Server, body: bytes, content_type: str) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()  # the server is in this process; other tests may hold the cores
    response = httpx.post(
        f"{server.url}/api/v1/checkpoints/upload", content=body, headers={"content-type": content_type}, timeout=HANG_S
    )
    seconds = time.process_time() - started
    assert 400 <= response.status_code < 500, response.text
    sentence = response.json()["error"]
    assert len(sentence.split()) >= 5, sentence
    assert _left_behind(server.data_dir) == []
    assert seconds < MAX_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_RSS_BYTES
    return sentence


@pytest.mark.parametrize("attack", ARCHIVES)
def test_a_hostile_archive_is_refused_and_leaves_nothing(server: Server, attack: str) -> None:
    sentence = _refused(server, *multipart(ARCHIVES[attack]()))
    assert "Traceback" not in sentence and str(server.data_dir) not in sentence


BODIES: dict[str, Callable[[], tuple[bytes, str]]] = {
    "no_file": lambda: multipart(b"x", part="name"),
    "unknown_part": lambda: multipart(tar_gz(GOOD), more=[("path", b"/etc")]),
    "two_files": lambda: multipart(tar_gz(GOOD), more=[("file", tar_gz(GOOD))]),
    "name_with_a_path": lambda: multipart(tar_gz(GOOD), more=[("name", b"../../evil")]),
    "name_of_a_megabyte": lambda: multipart(tar_gz(GOOD), more=[("name", b"n" * 2**20)]),
    "cut_off": lambda: (multipart(tar_gz(GOOD))[0][:-40], multipart(b"")[1]),
    "other_boundary": lambda: (multipart(tar_gz(GOOD))[0], "multipart/form-data; boundary=other"),
    "no_boundary": lambda: (multipart(tar_gz(GOOD))[0], "multipart/form-data"),
    "no_multipart": lambda: (tar_gz(GOOD), "application/gzip"),
    "json": lambda: (b"{}", "application/json"),
    "header_of_a_megabyte": lambda: (
        b'--frontier-3f1c\r\nX: ' + b"x" * 2**20 + b"\r\n\r\n", multipart(b"")[1]
    ),
    "many_headers": lambda: (b"--frontier-3f1c\r\n" + b"A: b\r\n" * 100_000 + b"\r\n", multipart(b"")[1]),
}  # fmt: skip


@pytest.mark.parametrize("attack", BODIES)
def test_a_malformed_upload_is_refused_and_leaves_nothing(server: Server, attack: str) -> None:
    _refused(server, *BODIES[attack]())


def test_the_same_upload_without_a_flaw_is_taken(server: Server) -> None:
    body, content_type = multipart(tar_gz(GOOD))
    response = httpx.post(
        f"{server.url}/api/v1/checkpoints/upload", content=body, headers={"content-type": content_type}, timeout=HANG_S
    )
    assert response.status_code == 200, response.text
    (folder,) = (server.data_dir / "checkpoints").iterdir()
    assert response.json()["checkpoint_id"] == f"ckpt_{folder.name.replace('-', '')}"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_archives_with_random_bytes_changed_are_taken_or_refused_and_nothing_else(tmp_path: Path) -> None:
    optimizer = _optimizer(_nothing)
    seeds = (tar(GOOD), gzip.decompress(optimizer), optimizer)
    rng = random.Random(0)
    journal = Journal(tmp_path / "journal.sqlite3")
    taken = 0
    for round in range(450):
        content = bytearray(seeds[round % 3])
        for _ in range(rng.choice((1, 1, 3, 20))):
            # headers are where the danger is: half of the changes hit the first blocks
            at = rng.randrange(len(content) if rng.random() < 0.5 else 2500)
            content[at] = rng.choice((0, 0x30, 0x39, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del content[rng.randrange(len(content)) :]
        try:
            import_checkpoint(journal, tmp_path, BytesIO(bytes(content)), owner="fuzz", base_model="mint/tiny")
            taken += 1
        except MintError as error:
            assert error.category == "user", error
    journal.close()
    assert 0 < taken < 450
    assert len(list((tmp_path / "checkpoints").iterdir())) == taken
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_number_of_attacks_is_what_the_documents_say() -> None:
    assert len(ARCHIVES) + len(BODIES) >= 100
