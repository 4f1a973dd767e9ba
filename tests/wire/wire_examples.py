"""Messages with every field filled, and a request as the public SDK 0.38.0 wrote it."""

from __future__ import annotations

import base64

from mint.types import ForwardBackwardOutput, PromptAltTokens, SampledSequence, SampleResponse, TensorData

SDK_REQUEST = base64.b64decode(
    "CgxzZXNzOnRyYWluOjAQAxpkChAKDgoMAQAAAAIAAAADAAAAEjAKDXRhcmdldF90b2tlbnMSHwoYAgAAAAAAAAADAAAAAAAAAAQAAAAAAAAAGAIiAQMS"
    "HgoHd2VpZ2h0cxITCgwAAAAAAACAPwAAAL8YASIBAxqyAQoMCgoKCAUAAAAGAAAAElcKDXRhcmdldF90b2tlbnMSRhI+ChAHAAAAAAAAAAgAAAAAAAAA"
    "EhgAAAAAAAAAAAEAAAAAAAAAAgAAAAAAAAAaEAAAAAAAAAAAAgAAAAAAAAAYAiICAgMSSQoHd2VpZ2h0cxI+EjYKCAAAgD4AAEA/EhgAAAAAAAAAAAEA"
    "AAAAAAAAAgAAAAAAAAAaEAAAAAAAAAAAAgAAAAAAAAAYASICAgMiA3BwbyodChJjbGlwX2xvd190aHJlc2hvbGQRAAAAAAAA4D86HwoSY2xpcF9sb3df"
    "dGhyZXNob2xkEgkJAAAAAAAA4D8="
)


def floats(*values: float, shape: list[int] | None = None) -> TensorData:
    return TensorData(data=list(values), dtype="float32", shape=shape or [len(values)])


OUTPUT = ForwardBackwardOutput(
    loss_fn_outputs=[
        {"logprobs": floats(-0.5, -1.25)},
        {"logprobs": floats(-2.0)},
        {"logprobs": floats(-1.0, -2.0, -3.0, -4.0, shape=[2, 2])},
        {"logprobs": floats(-4.0, -5.0, -6.0)},
    ],
    metrics={"loss:sum": 3.5, "tokens:sum": 3.0},
    warnings=["shift: looks wrong"],
)
SAMPLE = SampleResponse(
    sequences=[
        SampledSequence(
            tokens=[5, 6],
            logprobs=[-0.5, -0.25],
            stop_reason="stop",
            topk_logprobs=[[(5, -0.5), (7, -1.5)], [(6, -0.25), (0, -2.5)]],
            processed_logprobs=[-0.125, 0.0],
        ),
        SampledSequence(tokens=[9], logprobs=[-1.5], stop_reason="length"),
    ],
    prompt_logprobs=[None, -1.0, -2.5],
    topk_prompt_logprobs=[None, [(1, -0.5), (2, -1.0)], [(3, -0.25), (0, -4.0)]],
    target_prompt_logprobs=TensorData(
        data=[-0.5, -0.75],
        dtype="float32",
        shape=[3, 4],
        sparse_crow_indices=[0, 0, 1, 2],
        sparse_col_indices=[1, 3],
    ),
    prompt_alt_tokens=PromptAltTokens(
        tokens=TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2]),
        logprobs=floats(-0.5, -1.0, -1.5, -2.0, shape=[2, 2]),
    ),
)
