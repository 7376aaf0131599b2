"""Serves model.onnx in Triton's Python backend by nnorm_export.load; ``nnorm-export serve-repo`` copies this file.

The server's Python must have nnorm_export and ONNX Runtime.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

import nnorm_export


class TritonPythonModel:
    """One instance of the model, as the backend makes and calls it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the file of the version that the server loads."""
        config = json.loads(args["model_config"])
        threads = config["parameters"].get("intra_op_thread_count", {"string_value": "0"})["string_value"]
        folder = Path(args["model_repository"]) / args["model_version"]
        self._runner = nnorm_export.load(folder / "model.onnx", intra_op_num_threads=int(threads))
        self._batches = config["max_batch_size"] > 0

    def execute(self, requests: list[Any]) -> list[Any]:
        """All requests in one run where the model takes batches, else one after the other."""
        names = [info.name for info in self._runner.inputs]
        feeds = [
            [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names] for request in requests
        ]
        if not self._batches:
            return [response for feed in feeds for response in self._respond([feed])]
        return self._respond(feeds)

    def _respond(self, feeds: list[list[Any]]) -> list[Any]:
        try:
            results = self._runner(*(np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*feeds)))
        except nnorm_export.NnormExportError as error:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))) for _ in feeds]
        ends = np.cumsum([len(feed[0]) for feed in feeds])[:-1] if len(feeds) > 1 else None
        split = zip(*(np.split(result, ends) for result in results)) if ends is not None else [results]
        return [
            pb_utils.InferenceResponse(
                output_tensors=[pb_utils.Tensor(info.name, part) for info, part in zip(self._runner.outputs, parts)]
            )
            for parts in split
        ]
