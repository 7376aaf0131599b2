"""Serves model.onnx in Triton's Python backend by nnorm_export.load; ``nnorm-export serve-repo`` copies this file.

The server's Python must have nnorm_export and ONNX Runtime, onnxruntime-gpu for instances on GPUs.
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
        options: dict[str, Any] = {"intra_op_num_threads": int(threads)}
        if args.get("model_instance_kind") == "GPU":
            on_gpu = {"use_tf32": "0", "device_id": args["model_instance_device_id"]}
            providers = [("CUDAExecutionProvider", on_gpu), "CPUExecutionProvider"]
            options |= {"runtime": "onnxruntime-cuda", "providers": providers}
        folder = Path(args["model_repository"]) / args["model_version"]
        self._runner = nnorm_export.load(folder / "model.onnx", **options)
        self._batches = config["max_batch_size"] > 0

    def execute(self, requests: list[Any]) -> list[Any]:
        """All requests in one run where the model takes batches, else one after the other."""
        names = [info.name for info in self._runner.inputs]
        feeds = [
            [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names] for request in requests
        ]
        if self._batches and len(feeds) > 1:
            try:
                return self._together(feeds)
            except (nnorm_export.NnormExportError, ValueError):  # one of them is at fault, and the others are not
                pass
        return [self._alone(feed) for feed in feeds]

    def _alone(self, feed: list[Any]) -> Any:
        try:
            return self._response(self._run(feed))
        except nnorm_export.NnormExportError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))

    def _together(self, feeds: list[list[Any]]) -> list[Any]:
        results = self._run([np.concatenate(parts) for parts in zip(*feeds)])
        ends = np.cumsum([len(feed[0]) for feed in feeds])[:-1]
        return [self._response(parts) for parts in zip(*(np.split(result, ends) for result in results))]

    def _run(self, feed: list[Any]) -> list[Any]:
        results = self._runner(*feed)
        for info, result in zip(self._runner.outputs, results):
            if self._batches and len(result) != len(feed[0]):
                raise nnorm_export.InputError(f"{info.name} has {len(result)} rows, for inputs of {len(feed[0])}")
        return results

    def _response(self, results: Any) -> Any:
        outputs = [pb_utils.Tensor(info.name, part) for info, part in zip(self._runner.outputs, results)]
        return pb_utils.InferenceResponse(output_tensors=outputs)
