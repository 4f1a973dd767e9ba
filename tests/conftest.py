"""Shared by all tests: no test touches the user's own `~/.mint`, network or settings."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from default_engine import use_clusters
from hypothesis import settings

from mint.config import Settings, shorten_thread_spinning
from mint.engine.instruction_sets import sum_in_one_order

settings.register_profile("mint", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("mint")

# also for tests that make an engine by themselves: the processes of a test run share few cores
shorten_thread_spinning()
sum_in_one_order()  # an engine may come after a test's own products

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell that starts something in the background makes it deaf to Ctrl-C, and all that it starts in its turn
    signal.signal(signal.SIGINT, signal.default_int_handler)

if sys.version_info < (3, 12):
    # Python 3.11 parses lines for the marks in a traceback, and counts the depth of trees for all threads together. If
    # garbage is collected while one thread parses, another may log a traceback: the first then raises SystemError.
    traceback._extract_caret_anchors_from_line_segment = lambda _line: None  # ty: ignore[unresolved-attribute]

MINT_VARIABLES = (
    "MINT_BASE_URL",
    "TINKER_BASE_URL",
    "MINT_API_KEY",
    "TINKER_API_KEY",
    "MINT_MODELS",
    "MINT_DTYPE",
    "MINT_THREADS",
    "MINT_PROJECT_ID",
    "TINKER_PROJECT_ID",
    "MINT_TAGS",
    "TINKER_TAGS",
)


CLUSTER = {"MINT_CLUSTER": "local", "MINT_TRAINERS": "2", "MINT_SAMPLERS": "1"}
"""What `--cluster local` sets for all that makes its engine from the settings, also in processes of their own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cluster", choices=("local",), help="services train on two ranks of a Ray on this machine")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cluster") is not None:
        os.environ.update(CLUSTER)
        use_clusters()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in MINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "mint-home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MINT_THREADS", "1")  # two threads on two busy cores wait for each other most of the time


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Whatever a test does to logging ends with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def native_folder() -> Path:
    """Where the kernels in C are compiled: the user's own cache, where a file is named by all that it is made of."""
    return Settings().kernels_dir
