"""A Ray that does not start in time is started again, so that no request fails for it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="pip install 'mint[cluster]'")

from mint.cluster import ray_runtime
from mint.cluster.ray_runtime import START_ATTEMPTS, Place, RayStartError, start_ray


class SlowRay:
    """Ray of which the first starts fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.starts = self.shutdowns = 0

    def is_initialized(self) -> bool:
        return False

    def init(self, **_options: object) -> None:
        self.starts += 1
        if self.starts <= self.failures:
            raise RuntimeError("The current node timed out during startup.")

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.mark.parametrize("place", [Place(), Place("auto")])
def test_a_start_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    slow = SlowRay(START_ATTEMPTS - 1)
    monkeypatch.setattr(ray_runtime, "ray", slow)
    monkeypatch.setattr(ray_runtime, "_joined", None)
    start_ray(place)
    assert (slow.starts, slow.shutdowns) == (START_ATTEMPTS, START_ATTEMPTS - 1)


def test_a_client_asks_once_because_ray_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(1)
    monkeypatch.setattr(ray_runtime, "ray", slow)
    monkeypatch.setattr(ray_runtime, "_joined", None)
    with pytest.raises(RayStartError, match="no Ray answers at ray://head:10001"):
        start_ray(Place("ray://head:10001"))
    assert slow.starts == 1


def test_what_never_starts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(START_ATTEMPTS)
    monkeypatch.setattr(ray_runtime, "ray", slow)
    monkeypatch.setattr(ray_runtime, "_joined", None)
    with pytest.raises(RayStartError, match="timed out during startup"):
        start_ray(Place("auto"))
    assert slow.starts == START_ATTEMPTS


PROGRAM = """
import os, stat, mint
from mint import types
from mint.cluster import ray_runtime
training = mint.ServiceClient().create_lora_training_client(base_model="mint/tiny", rank=4, seed=0)
datum = types.Datum(
    model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0] * 3}
)
training.forward_backward([datum], loss_fn="cross_entropy").result()
(folder,) = ray_runtime._folders
print(oct(stat.S_IMODE(os.stat(folder).st_mode)), folder)
"""


@pytest.mark.slow
def test_a_program_that_does_not_close_ends_in_order_and_what_ray_writes_is_private(tmp_path: Path) -> None:
    own = {"MINT_HOME": str(tmp_path / "home"), "MINT_CLUSTER": "local", "MINT_SAMPLERS": "1"}
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    mode, folder = done.stdout.split()
    assert mode == "0o700" and not Path(folder).exists()


def test_a_long_path_for_temporary_files_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_runtime, "LONGEST_FOLDER", len(str(tmp_path)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Path(ray_runtime._ray_folder()).parent == tmp_path
    monkeypatch.setattr(ray_runtime, "LONGEST_FOLDER", len(str(tmp_path)) - 1)
    other = Path(ray_runtime._ray_folder())
    assert other.parent == Path("/tmp")
    other.rmdir()
