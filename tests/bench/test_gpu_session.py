"""What the script for a GPU measures, as far as it can be said without one."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.sample import PEERS
from benchmarks.compare.train import peers_of
from benchmarks.gpu_session import STAGES, Options, bench, facts, figures, read_options
from benchmarks.gpu_short import lines
from mint.errors import RequestFailedError
from mint.models.random_base import SHAPES

BENCHES = [stage for stage in STAGES if stage not in {"parity", "profile"}]


def _refuse(*, peers: list[str], **_: Any) -> list[dict[str, Any]]:
    if peers:
        raise RequestFailedError(", ".join(peers))
    return [{"contender": "mint"}]


def _options(stage: str, out: Path, *more: str) -> Options:
    return read_options([stage, str(out), "--home", str(out / "home"), *more])


@pytest.mark.parametrize("stage", BENCHES)
def test_every_figure_has_known_peers_and_fits_the_context(stage: str, tmp_path: Path) -> None:
    for figure in figures(_options(stage, tmp_path)):
        assert set(figure.peers) <= set(PEERS if figure.work == "sample" else peers_of(figure.shape, "cuda"))
        assert figure.shape.prompt_tokens + figure.shape.max_tokens <= figure.shape.model.context
        assert figure.shape.model.hidden == SHAPES[STAGES[stage]].hidden


def test_a_stage_runs_on_a_processor_with_another_shape(tmp_path: Path) -> None:
    options = _options("long", tmp_path, "--device", "cpu", "--shape", "tiny")
    (figure,) = figures(options)
    assert figure.shape.model.hidden == SHAPES["tiny"].hidden and options.dtype == "float32"
    assert json.loads(json.dumps(facts(options)))["device"] == "cpu"


def test_a_figure_that_fails_is_a_line_and_mint_is_measured_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = _options("bench-0.6b", tmp_path, "--device", "cpu", "--shape", "tiny")
    unknown = [replace(figure, peers=["nobody"]) for figure in figures(options)]
    monkeypatch.setattr("benchmarks.gpu_session.figures", lambda _: unknown)
    monkeypatch.setattr("benchmarks.gpu_session.run_train_bench", _refuse)
    monkeypatch.setattr("benchmarks.gpu_session.run_sample_bench", _refuse)
    lines = [(line["figure"], line.get("failure", "")[-7:-1], line.get("contender")) for line in bench(options)]
    expected = [[(figure.name, "nobody", None), (figure.name, "", "mint")] for figure in unknown]
    assert lines == [line for pair in expected for line in pair]


def test_the_short_session_measures_both_sides_on_the_same_work(tmp_path: Path) -> None:
    options = _options("bench-0.6b", tmp_path, "--device", "cpu", "--shape", "tiny", "--repeats", "1", "--threads", "1")
    found = list(lines(options))
    assert [line for line in found if "failure" in line] == []
    by_figure: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in found:
        by_figure[line["figure"]].append(line)
    assert [[line["contender"] for line in own] for own in by_figure.values()] == [
        *(["mint", "hf-best"], ["mint"], ["mint", "hf-best"], ["mint", "hf-best"], ["mint", "hf-best", "mint"])
    ]
    ours, theirs = (line["same_work"] for line in by_figure["train-64"])
    assert ours.keys() >= {"loss", "gradient_norm", "probe_logprob"}
    for name in ("loss", "gradient_norm", "probe_logprob"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name
