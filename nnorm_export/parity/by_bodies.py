"""The second implementation that a portable file has: its bodies, run where kernels ran."""

from __future__ import annotations

from pathlib import Path

from nnorm_export.files import onnx_file
from nnorm_export.files.optimized_for import OPTIMIZED
from nnorm_export.names import DOMAIN
from nnorm_export.runtimes import Runner
from nnorm_export.runtimes.onnxruntime.session import OnnxRuntimeRunner


def run_by_bodies(path: str | Path, runner: Runner) -> Runner | None:
    """The file in the same runtime without kernels; None if ``runner`` runs no kernel, or the file has no bodies.

    Files in the forms ``custom`` and ``optimized`` have none, and engines and files of PyTorch run one implementation.

    Raises:
        ModelFileError: the runtime cannot run the bodies.
    """
    if not isinstance(runner, OnnxRuntimeRunner):
        return None
    file = onnx_file.read(path)
    # The implementations of nodes in functions are not known.
    in_functions = len(file.normalizations) < sum(node.domain == DOMAIN for node in onnx_file.all_nodes(file.proto))
    if "kernel" not in runner.implementations.values() and not in_functions:
        return None
    if file.form == OPTIMIZED or not file.has_bodies:
        return None
    return type(runner)(path, kernels=False)
