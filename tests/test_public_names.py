"""The names, types and defaults that users rely on. A change here is a change of the product."""

from __future__ import annotations

import inspect
import subprocess
import sys

import mint
from mint import rl, types
from mint.config import Settings
from mint.rl import RLConfig


def test_the_public_names_of_mint_are_exactly_these() -> None:
    assert sorted(mint.__all__) == sorted(
        [
            "APIFuture",
            "MintError",
            "SamplingClient",
            "ServiceClient",
            "TrainingClient",
            "__version__",
            "errors",
            "types",
        ]
    )
    assert all(hasattr(mint, name) for name in mint.__all__)


def test_the_public_names_of_the_rl_library_are_exactly_these() -> None:
    assert rl.__all__ == [
        "Costs", "Estimate", "Examination", "Finding", "Group", "LiveProgress", "Message", "MessageEnv",
        "MessageEnvAdapter", "MessageStepResult", "PairwiseJudge", "RLAdapter", "RLConfig", "Reward", "Rollout",
        "Rubric", "RunRecord", "RunResult", "Search", "Task", "Tool", "ToolEnv", "Turn", "UnsupportedError",
        "calculator", "diagnose", "examine", "run_grpo", "tool",
    ]  # fmt: skip


def test_import_mint_is_fast_and_without_torch() -> None:
    code = (
        "import time, sys; t = time.process_time(); import mint; from mint import types; d = time.process_time() - t;"
        "heavy = [m for m in ('torch', 'transformers', 'fastapi', 'sqlalchemy', 'matplotlib') if m in sys.modules];"
        "print(d, heavy)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    for run in runs:
        assert run.stdout.strip().endswith("[]"), run.stdout
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.5


def test_the_command_line_answers_without_torch() -> None:
    code = "import sys; from mint.cli import app; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


TABLE = {
    "loss_fn": (str, "importance_sampling"),
    "group_size": (int, 4),
    "batch_size": (int, 8),
    "max_tokens": (int, 16),
    "learning_rate": (float, 2e-5),
    "temperature": (float, 0.8),
    "kl_penalty_coef": (float, 0.0),
    "betas": (tuple, (0.9, 0.999)),
    "eps": (float, 1e-8),
    "weight_decay": (float, 0.0),
    "base_model": (str, "Qwen/Qwen3-0.6B"),
    "rank": (int, 16),
    "train_mlp": (bool, True),
    "train_attn": (bool, True),
    "train_unembed": (bool, True),
}
"""The parameter table of the RL overview: name → (type, default)."""


def test_every_row_of_the_parameter_table_has_its_name_type_and_default() -> None:
    config = RLConfig()
    for name, (kind, default) in TABLE.items():
        value = getattr(config, name)
        assert type(value) is kind, name
        assert value == default, name
    assert config.groups_per_batch == 8
    assert RLConfig(groups_per_batch=3).batch_size == 3


def test_adam_defaults_are_the_table_s_and_betas_may_be_a_pair() -> None:
    adam = types.AdamParams(learning_rate=2e-5)
    assert (adam.betas, adam.eps, adam.weight_decay) == ((0.9, 0.999), 1e-8, 0.0)
    assert types.AdamParams(betas=(0.8, 0.95)) == types.AdamParams(beta1=0.8, beta2=0.95)


def test_the_sdk_methods_have_the_names_and_defaults_of_the_documents() -> None:
    create = inspect.signature(mint.ServiceClient.create_lora_training_client).parameters
    assert [create[name].default for name in ("rank", "seed", "train_mlp", "train_attn", "train_unembed")] == [
        16, None, True, True, True,
    ]  # fmt: skip
    for name in (
        "forward", "forward_backward", "forward_backward_custom", "optim_step", "save_state", "load_state",
        "load_state_with_optimizer", "save_weights_for_sampler", "save_weights_and_get_sampling_client",
        "create_sampling_client", "get_info",
    ):  # fmt: skip
        assert callable(getattr(mint.TrainingClient, name))
        assert inspect.iscoroutinefunction(getattr(mint.TrainingClient, f"{name}_async")), name
    for name in ("sample", "compute_logprobs"):
        assert inspect.iscoroutinefunction(getattr(mint.SamplingClient, f"{name}_async")), name


def test_the_settings_are_exactly_these() -> None:
    assert sorted(Settings.model_fields) == [
        "api_key", "base_url", "dtype", "home", "judge_api_key", "models", "threads",
    ]  # fmt: skip
