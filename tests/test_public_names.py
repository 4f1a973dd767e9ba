"""The names, types and defaults that users rely on. A change here is a change of the product."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

import mint
import mint.mint as mintx
import mint.tinker as mint_tinker
from mint import errors, rl, types
from mint.config import Settings
from mint.rl import RLConfig


def test_the_public_names_of_mint_are_exactly_these() -> None:
    assert sorted(mint.__all__) == sorted(
        [
            "APIConnectionError", "APIError", "APIFuture", "APIResponseValidationError", "APIStatusError",
            "APITimeoutError", "AdamParams", "AuthenticationError", "BadRequestError", "BillingError", "Checkpoint",
            "CheckpointType", "ConflictError", "Datum", "DmelChunk", "EncodedTextChunk", "ForwardBackwardOutput",
            "ImageAssetPointerChunk", "ImageChunk", "InternalServerError", "LoraConfig", "MintError", "ModelID",
            "ModelInput", "ModelInputChunk", "NotFoundError", "OptimParams", "OptimStepRequest", "OptimStepResponse",
            "ParsedCheckpointTinkerPath", "PermissionDeniedError", "PromptProvenanceSpan", "ProvenanceSpans",
            "RateLimitError", "RequestFailedError", "RestClient", "SampleRequest", "SampleResponse",
            "SampledProvenanceSpan", "SampledSequence", "SamplingClient", "SamplingParams",
            "ServiceClient", "StopReason", "TensorData", "TensorDtype", "TinkerError", "TrainingClient",
            "TrainingRun", "UnprocessableEntityError", "__version__", "errors", "types",
        ]
    )  # fmt: skip
    assert all(hasattr(mint, name) for name in mint.__all__)
    assert set(dir(mint)) == set(mint.__all__)


def test_mint_s_own_extensions_are_under_mint_mint_and_not_at_the_top() -> None:
    names = {
        "CAMERA_LAYOUT", "OPENPI_FAST_LORA_RANK", "OPENPI_FAST_MODEL", "OpenPITrainingClient", "ReverseKLDatum",
        "build_openpi_fast_datum", "create_openpi_training_client", "forward_backward_reverse_kl",
        "interpolate_checkpoints",
    }  # fmt: skip
    assert all(hasattr(mintx, name) for name in names)
    assert not names & set(mint.__all__)
    for name in ("OpenPITrainingClient", "build_openpi_fast_datum", "interpolate_checkpoints"):
        with pytest.raises(mint.MintError, match="is not supported"):
            getattr(mintx, name)()


def test_mint_tinker_has_the_names_of_mint() -> None:
    assert mint_tinker.__all__ == mint.__all__
    assert all(getattr(mint_tinker, name) is getattr(mint, name) for name in mint.__all__)


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert mint.__version__ == project["version"]


CAUGHT_AS = {
    "APIError": errors.NotFoundError, "APIStatusError": errors.StepRefusedError,
    "APIConnectionError": errors.ConnectionLostError, "APITimeoutError": errors.ResultTimeoutError,
    "BadRequestError": errors.PromptTooLongError, "AuthenticationError": errors.AuthenticationError,
    "PermissionDeniedError": errors.ForeignPageError, "NotFoundError": errors.NotFoundError,
    "ConflictError": errors.ConflictError, "UnprocessableEntityError": errors.InvalidRequestError,
    "RateLimitError": errors.OverloadedError, "InternalServerError": errors.CheckpointError,
    "RequestFailedError": errors.StepRefusedError, "TinkerError": errors.ConnectionLostError,
}  # fmt: skip
"""The name that a script catches → what this SDK raises."""


@pytest.mark.parametrize(("name", "kind"), CAUGHT_AS.items())
def test_errors_are_caught_by_the_names_that_other_sdks_of_the_protocol_have(
    name: str, kind: type[mint.MintError]
) -> None:
    with pytest.raises(getattr(mint, name)) as caught:
        raise errors.from_wire(kind("wrong", request_id="r-1").to_wire())
    assert type(caught.value) is kind
    assert caught.value.status_code == kind.status and caught.value.category == kind.category
    assert caught.value.request_id == "r-1"


def test_a_connection_or_a_time_out_is_not_caught_as_an_answer() -> None:
    for kind in (errors.ConnectionLostError, errors.ResultTimeoutError, errors.MissingExtraError):
        assert not issubclass(kind, mint.APIStatusError)


def test_types_that_scripts_import_are_there() -> None:
    for name in (
        "ModelInput", "EncodedTextChunk", "ImageChunk", "ImageAssetPointerChunk", "DmelChunk", "Datum", "TensorData",
        "AdamParams", "LoraConfig", "SamplingParams", "SampleResponse", "SampledSequence", "ForwardBackwardOutput",
        "Checkpoint", "TrainingRun", "ParsedCheckpointTinkerPath", "GetInfoResponse", "Cursor", "LossFnType",
        "StopReason", "OptimStepResponse", "SaveWeightsResponse", "LoadWeightsResponse", "TopkLogprobs",
    ):  # fmt: skip
        assert getattr(types, name) is not None, name
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path("tinker://sess-1:train:0/sampler_weights/a")
    assert (parsed.training_run_id, parsed.checkpoint_type) == ("sess-1:train:0", "sampler")
    with pytest.raises(AttributeError):
        _ = types.NoSuchType


def test_images_and_sound_may_be_built_and_are_refused_with_a_sentence() -> None:
    for chunk in (
        types.ImageChunk(data=b"x", format="png", expected_tokens=3),
        types.ImageAssetPointerChunk(location="x", format="jpeg"),
        types.DmelChunk(dmel=b"x"),
    ):
        with pytest.raises(errors.InvalidRequestError, match="read text alone"):
            types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), chunk])


def test_an_input_with_more_tokens_or_chunks_is_a_new_one() -> None:
    prompt = types.ModelInput.from_ints([1, 2])
    chunks = [types.EncodedTextChunk(tokens=[3]), types.EncodedTextChunk(tokens=[4, 5])]
    assert prompt.append(chunks[0]).to_ints() == prompt.append_int(3).to_ints() == [1, 2, 3]
    assert prompt.append_chunks(chunks).to_ints() == prompt.append_tokens([3, 4, 5]).to_ints() == [1, 2, 3, 4, 5]
    assert len(prompt.append_chunks(chunks).chunks) == 3
    assert prompt.to_ints() == [1, 2]


def test_results_are_there_as_arrays_too() -> None:
    sequence = types.SampledSequence(
        tokens=[3, 4], logprobs=[-1.0, -2.0], stop_reason="stop", topk_logprobs=[[(3, -1.0), (5, -1.5)], [(4, -2.0)]]
    )
    response = types.SampleResponse(sequences=[sequence], prompt_logprobs=[None, -0.5])
    assert sequence.tokens_np.dtype == np.int32 and sequence.tokens_np.tolist() == [3, 4]
    assert sequence.logprobs_np.dtype == np.float32 and sequence.logprobs_np.tolist() == [-1.0, -2.0]
    top = sequence.topk_logprobs_np
    assert top is not None and top.token_ids.tolist() == [[3, 5], [4, 0]]
    assert top.logprobs.tolist() == [[-1.0, -1.5], [-2.0, -99999.0]]
    prompt = response.prompt_logprobs_np
    assert prompt is not None and np.isnan(prompt[0]) and prompt[1] == np.float32(-0.5)
    assert response.topk_prompt_logprobs_np is None


def test_the_public_names_of_the_rl_library_are_exactly_these() -> None:
    assert rl.__all__ == [
        "Costs", "Estimate", "Examination", "Finding", "Group", "LiveProgress", "LoadedRun", "Message", "MessageEnv",
        "MessageEnvAdapter", "MessageStepResult", "PairwiseJudge", "RLAdapter", "RLConfig", "Reward", "Rollout",
        "Rubric", "RunRecord", "RunResult", "Search", "Task", "Tool", "ToolEnv", "Turn", "UnsupportedError",
        "calculator", "diagnose", "examine", "load_run", "mixture", "run_grpo", "tool",
    ]  # fmt: skip


def test_import_mint_loads_little_and_no_torch() -> None:
    """Modules are what the time goes to: some 300 are loaded, nearly all of them numpy's, pydantic's and Python's."""
    code = "import sys; import mint; from mint import types; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(loaded) < 400, loaded
    named = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    own = {"mint", "numpy", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    assert {name for name in named if not name.startswith("_")} <= own


def test_the_command_line_prints_its_help_without_a_heavy_package() -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic", "httpx", "starlette", "matplotlib")
    code = (
        "import sys; from mint.cli.main import app; app(['--help'], standalone_mode=False);"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


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
        "create_sampling_client", "get_info", "save_weights_external",
    ):  # fmt: skip
        assert callable(getattr(mint.TrainingClient, name))
        assert inspect.iscoroutinefunction(getattr(mint.TrainingClient, f"{name}_async")), name
    for name in ("sample", "compute_logprobs"):
        assert inspect.iscoroutinefunction(getattr(mint.SamplingClient, f"{name}_async")), name


ARGUMENTS = {
    mint.ServiceClient: {
        "__init__": "user_metadata project_id display_name base_url api_key default_headers_overrides",
        "create_lora_training_client": "base_model rank seed train_mlp train_attn train_unembed user_metadata "
        "optimizer",
        "create_training_client_from_state": "path base_model user_metadata weights_access_token optimizer",
        "create_training_client_from_state_with_optimizer": "path base_model user_metadata weights_access_token",
        "create_sampling_client": "model_path base_model retry_config record_stability_info",
        "create_sampling_client_from_checkpoint": "checkpoint_name",
    },
    mint.TrainingClient: {
        "forward_backward": "data loss_fn loss_fn_config",
        "optim_step": "optim_params adam_params",
        "save_state": "name ttl_seconds overwrite user_metadata",
        "save_weights_for_sampler": "name ttl_seconds user_metadata",
        "save_weights_and_get_sampling_client": "name retry_config record_stability_info kind",
        "save_weights_external": "name ttl_seconds age_encryption_recipients",
        "load_state": "path weights_access_token",
        "load_state_with_optimizer": "path weights_access_token",
    },
    mint.SamplingClient: {
        "sample": "prompt num_samples sampling_params include_prompt_logprobs topk_prompt_logprobs "
        "topk_sample_logprobs target_prompt_logprobs prompt_alt_tokens_k prompt_logprobs_last_n",
        "compute_logprobs": "prompt prompt_logprobs_last_n",
    },
}
"""Class → method → the names of its arguments, in their order."""


def test_arguments_have_the_names_and_the_order_of_the_protocol_s_other_sdks() -> None:
    for owner, methods in ARGUMENTS.items():
        for method, names in methods.items():
            for twin in (method, f"{method}_async"):
                if hasattr(owner, twin):
                    given = list(inspect.signature(getattr(owner, twin)).parameters)[1:]
                    assert given[: len(names.split())] == names.split(), (owner, twin)


def test_a_twin_that_gives_the_result_itself_says_so_at_runtime() -> None:
    twin = mint.RestClient.list_checkpoints_async
    assert get_type_hints(twin)["return"] is types.CheckpointsListResponse
    assert inspect.signature(twin).return_annotation == "CheckpointsListResponse"
    assert get_type_hints(mint.TrainingClient.save_weights_and_get_sampling_client_async)["return"] is (
        mint.SamplingClient
    )
    assert get_type_hints(mint.TrainingClient.forward_async)["return"] == mint.APIFuture[types.ForwardBackwardOutput]


def test_the_settings_are_exactly_these() -> None:
    assert sorted(Settings.model_fields) == [
        "api_key", "base_url", "batch_invariant", "cluster", "collective_timeout_s", "device", "disk_reserve_mib",
        "dtype", "expert_parallel", "gpu_off", "home", "instructions", "judge_api_key", "kv_cache_mib", "lease_s",
        "lora_cache_mib", "micro_batch_rows", "model_memory_mib", "models", "native", "offload_activations",
        "project_id", "quantize", "recompute", "reductions", "sampler", "sampler_api_key", "sampler_folder",
        "samplers", "shard_base", "tags", "tensor_parallel", "threads", "trainers", "unnamed_samplers",
    ]  # fmt: skip
