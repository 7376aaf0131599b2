"""What may be to blame where a file differs from PyTorch: inputs that the file ignores, and operators of it.

The operators are those that exporters translate wrongly (:mod:`nnorm_export.exporting.passes.exact_operators` has them
in PyTorch's words), and those of which runtimes have several right results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx

from nnorm_export.dtypes import Array, to_numpy
from nnorm_export.errors import InputError, ModelFileError
from nnorm_export.files.archive import is_archive
from nnorm_export.files.onnx_file import name_of, read, with_nested
from nnorm_export.files.parts import scopes_of
from nnorm_export.models.arguments import tensors_in, to_tensor, with_tensors
from nnorm_export.names import layer_name
from nnorm_export.parity.reference.changed_inputs import SEED, Run
from nnorm_export.parity.reference.pytorch_model import PyTorchModel
from nnorm_export.parity.verdict.dependence import changed_inputs, dependence
from nnorm_export.runtimes import Runner

_MOST_INPUTS = 16  # that are changed one by one; each takes a run of the model and one of the file


def suspects(path: Path, runner: Runner, pytorch: PyTorchModel, run: Run) -> list[str]:
    """What may be to blame, in words, the likeliest first.

    Args:
        path: the file that ``runner`` has opened.
        run: inputs, and PyTorch's results on them.
    """
    ignored = [
        f"the file ignores the input {info.name}, which changes PyTorch's result; export it with an example in which "
        f"{info.name} matters, such as a mask that is not all ones"
        for index, info in enumerate(runner.inputs[:_MOST_INPUTS])
        if _is_ignored(index, runner, pytorch, run)
    ]
    return [*ignored, *_operators(path)]


def _is_ignored(index: int, runner: Runner, pytorch: PyTorchModel, run: Run) -> bool:
    """Whether the file returns the same bits for another input ``index``, and PyTorch something else."""
    example, expected = run
    tensors = tensors_in(dict(example))
    given = [to_numpy(tensor) for tensor in tensors]
    generator = np.random.default_rng(SEED)
    for (array,) in changed_inputs([given[index]], lambda shape: generator.random(shape, np.float32)):
        if np.array_equal(array, given[index]):
            continue
        arrays = [*given[:index], array, *given[index + 1 :]]
        moved = [*tensors[:index], to_tensor(array).to(tensors[index].device), *tensors[index + 1 :]]
        try:
            results = pytorch.run(with_tensors(dict(example), moved))
            if len(results) == len(expected) and any(dependence(expected, results)):
                return _bits(runner(*arrays)) == _bits(runner(*given))
        except InputError:  # the input is a size or an index, and the model refuses this value
            continue
    return False


def _bits(results: Sequence[Array]) -> list[bytes]:
    return [result.tobytes() for result in results]


def _operators(path: Path) -> Iterator[str]:
    try:
        nodes = [] if is_archive(path) else [*with_nested(read(path).proto.graph.node)]
    except ModelFileError:  # it is an engine or behind a URL
        return
    makers = {name: node.op_type for node in nodes for name in node.output}
    for why, is_suspect in _SUSPECTS.items():
        found = [node for node in nodes if node.domain in ("", "ai.onnx") and is_suspect(node, makers)]
        if found:
            first, more = found[0], f" and {len(found) - 1} more" if len(found) > 1 else ""
            scopes = scopes_of(first)
            where = f"in layer {layer_name(scopes[-1])}" if scopes else f"the node {name_of(first)}"
            yield f"{first.op_type} ({where}{more}): {why}"


_Test = Callable[[onnx.NodeProto, dict[str, str]], bool]


def _is_a(*op_types: str) -> _Test:
    return lambda node, _: node.op_type in op_types


def _of(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def _reduces(node: onnx.NodeProto, _: dict[str, str]) -> bool:
    reduction = _of(node, "reduction")
    return node.op_type in ("ScatterElements", "ScatterND") and reduction is not None and reduction.s != b"none"


def _floors_a_quotient(node: onnx.NodeProto, makers: dict[str, str]) -> bool:
    return node.op_type == "Floor" and makers.get(node.input[0]) == "Div"


def _has_beta_0(node: onnx.NodeProto, _: dict[str, str]) -> bool:
    beta = _of(node, "beta")
    return node.op_type == "Gemm" and beta is not None and beta.f == 0


def _trains(node: onnx.NodeProto, _: dict[str, str]) -> bool:
    mode = _of(node, "training_mode")
    return node.op_type == "BatchNormalization" and mode is not None and mode.i == 1


_SUSPECTS: dict[str, _Test] = {
    "it draws random numbers": _is_a(
        "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"
    ),
    "it computes in int8": _is_a(
        "QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger"
    ),
    "exporters shift uint8 as int8, and ONNX has no shift by less than 0 or beyond the width": _is_a("BitShift"),
    "a quotient is rounded before it is floored: 1 // 0.1 is 10 in the file, and 9 in PyTorch": _floors_a_quotient,
    "its remainder may have another sign or rounding than PyTorch's": _is_a("Mod"),
    "exporters translate means wrongly, and runtimes add indices that occur twice in any order": _reduces,
    "0 times a bias that is NaN or infinite is NaN, and PyTorch ignores the bias": _has_beta_0,
    "it takes the statistics of the batch": _trains,
    "runtimes put equal values in any order": _is_a("TopK", "ArgMax", "ArgMin", "NonMaxSuppression", "Unique"),
    "runtimes round the places between pixels, and those at the borders, differently": _is_a(
        "Resize", "GridSample", "RoiAlign", "AffineGrid"
    ),
}
