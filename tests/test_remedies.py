"""An error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mint import wire
from mint.cli.serve import _own_key
from mint.errors import InvalidRequestError
from mint.server.mirror.objects import open_objects
from mint.server.ops.preflight import open_socket
from mint.server.store.database import read_only
from mint.types import Datum, ModelInput, TensorData
from mint.wire.requests import ForwardBackwardInput, ForwardBackwardRequest


def _read_database(folder: Path) -> None:
    (folder / "journal").write_text("no database" * 100)
    with read_only(folder / "journal") as queries:
        queries.value("SELECT 1 FROM sessions")


def _open_unusable_folder(folder: Path) -> None:
    pytest.importorskip("obstore", reason="pip install 'mint[mirror]'")
    (folder / "file").touch()
    open_objects(f"file://{folder}/file/below", field="--mirror")


def _encode(seq_id: int, length: int) -> None:
    tensor = TensorData(data=[1], dtype="int64", shape=[length])
    datum = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": tensor})
    content = ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = ForwardBackwardRequest(model_id="m", seq_id=seq_id, forward_backward_input=content)
    wire.encode(request, wire.Encoding.PROTO)


@pytest.mark.parametrize(
    "fail",
    [
        _read_database,
        _open_unusable_folder,
        lambda _folder: open_socket("no such host", 0),
        lambda _folder: _encode(2**40, 1),
        lambda _folder: _encode(1, 2**70),
        lambda folder: _own_key(from_stdin=False, file=folder / "missing"),
    ],
    ids=["database", "storage", "host", "seq_id", "shape", "key-file"],
)
def test_what_cannot_be_used_is_told_with_a_remedy(tmp_path: Path, fail: Callable[[Path], None]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        fail(tmp_path)
    assert refusal.value.remedy
