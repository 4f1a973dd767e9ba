"""Runs inside an environment that holds the public SDK: writes its messages, and reads ours. One JSON object per line.

Lines on stdin: {"read": "output" | "sample", "body": base64}; the first line on stdout is the request that the SDK
itself writes, then one line per message read.
"""

from __future__ import annotations

import base64
import json
import sys

from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest


def _request() -> bytes:
    dense = {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, -0.5]}
    sparse = {
        "target_tokens": types.TensorData(
            data=[7, 8], dtype="int64", shape=[2, 3], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[0, 2]
        ),
        "weights": types.TensorData(
            data=[0.25, 0.75], dtype="float32", shape=[2, 3], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[0, 2]
        ),
    }
    first = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=dense)
    second = types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs=sparse)
    content = ForwardBackwardInput(data=[first, second], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    message = forward_backward_request_to_proto(
        ForwardBackwardRequest(model_id="sess:train:0", seq_id=3, forward_backward_input=content)
    )
    return message.SerializeToString(deterministic=True)


def _tensor(tensor: types.TensorData) -> dict[str, object]:
    sparse = [tensor.sparse_crow_indices, tensor.sparse_col_indices]
    return {"data": list(map(float, tensor.data)), "dtype": tensor.dtype, "shape": tensor.shape, "sparse": sparse}


def _read(kind: str, body: bytes) -> dict[str, object]:
    if kind == "output":
        output = deserialize_proto_response(body, types.ForwardBackwardOutput)
        rows = [{key: _tensor(value) for key, value in row.items()} for row in output.loss_fn_outputs]
        return {"type": output.loss_fn_output_type, "rows": rows, "metrics": output.metrics}
    sample = deserialize_proto_response(body, types.SampleResponse)
    sequences = [
        {"stop_reason": part.stop_reason, "tokens": part.tokens, "logprobs": part.logprobs, "topk": part.topk_logprobs}
        for part in sample.sequences
    ]
    target, alternatives = sample.target_prompt_logprobs, sample.prompt_alt_tokens
    return {
        "sequences": sequences,
        "prompt_logprobs": sample.prompt_logprobs,
        "topk": sample.topk_prompt_logprobs,
        "target": None if target is None else _tensor(target),
        "alternatives": None
        if alternatives is None
        else [_tensor(alternatives.tokens), _tensor(alternatives.logprobs)],
    }


print(json.dumps({"body": base64.b64encode(_request()).decode()}))
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(_read(asked["read"], base64.b64decode(asked["body"]))))
