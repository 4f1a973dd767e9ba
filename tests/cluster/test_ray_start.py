"""A Ray that does not start in time is started again, so that no request fails for it."""

from __future__ import annotations

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


def test_what_never_starts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(START_ATTEMPTS)
    monkeypatch.setattr(ray_runtime, "ray", slow)
    monkeypatch.setattr(ray_runtime, "_joined", None)
    with pytest.raises(RayStartError, match="timed out during startup"):
        start_ray(Place("auto"))
    assert slow.starts == START_ATTEMPTS
