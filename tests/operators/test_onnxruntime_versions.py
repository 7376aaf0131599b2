"""The library of kernels in other versions of ONNX Runtime, each in an environment of its own, and under sanitizers.

``make test-all`` runs the oldest supported version and the newest, ``make test-onnxruntime-versions`` more of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from node_models import ATTRIBUTES, BATCH_OPERATORS, ELEMENTS, make_values, single_node_model
from onnx import TensorProto, helper
from operator_cases import BOUNDS, expected_output
from test_quantized_operators import (
    TYPES,
    dequantized,
    expected as quantized_output,
    make_values as quantized_values,
    model_of,
)

from nnorm_export import get_library_path, library
from nnorm_export.domain import OPERATORS, QUANTIZED_OPERATORS
from nnorm_export.names import DOMAIN, DOMAIN_VERSION

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "support" / "kernels_in_onnxruntime.py"
# Interpreters of other environments, and the sanitized build, as the Makefile makes and names them.
ENVIRONMENTS = list(filter(None, os.environ.get("NNORM_ONNXRUNTIME_ENVIRONMENTS", "").split(os.pathsep)))
SANITIZED = os.environ.get("NNORM_SANITIZED_LIBRARY") or None  # empty if make finds none

SHAPES = {
    **{op_type: [(4, 8), (0, 8, 3), (2, 8, 0), (5, 8, 3, 3), (3, 8, 83, 61)] for op_type in BATCH_OPERATORS},
    "LayerNormalNorm": [(0, 8), (3, 5, 8), (67, 768)],
    "GroupNormalNorm": [(3, 8), (0, 8, 5), (3, 8, 3, 3), (2, 8, 43, 53)],
}


def write_case(folder: Path, op_type: str, shape: tuple[int, ...], dtype: str, name_axes: bool) -> None:
    """Cast → the node, twice → Cast → Add: what one of the nodes may overwrite, the other still needs.

    One node has no body, and the other calls an overload whose body is wrong, so that kernels alone are right.
    Half precision is inside of the model only: older versions cannot be given bfloat16.
    """
    values = make_values(op_type, shape, dtype)
    tensors = ("X", *OPERATORS[op_type].operands)
    element, outside = ELEMENTS[dtype][0], TensorProto.DOUBLE if dtype == "float64" else TensorProto.FLOAT
    attributes = ATTRIBUTES.get(op_type, {})
    axes = [f"axis{axis}" if name_axes else None for axis in range(len(shape))]
    nodes = [helper.make_node("Cast", [name], [f"{name}_cast"], to=element) for name in tensors]
    inputs = [f"{name}_cast" if name in tensors else name for name in values]
    nodes += [
        helper.make_node(
            op_type, inputs, [f"y{copy}"], name=f"node{copy}", domain=DOMAIN, overload=overload, **attributes
        )
        for copy, overload in enumerate(("", "wrong"))
    ]
    nodes += [helper.make_node("Cast", [f"y{copy}"], [f"y{copy}_cast"], to=outside) for copy in (0, 1)]
    nodes.append(helper.make_node("Add", ["y0_cast", "y1_cast"], ["Y"]))
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in values.items() if name not in tensors]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, outside, axes) for name in tensors],
        [helper.make_tensor_value_info("Y", outside, None)],
        initializers,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    stem = f"{op_type}-{dtype}-{'x'.join(map(str, shape))}-{'named' if name_axes else 'nameless'}"
    wrong = helper.make_function(
        DOMAIN, op_type, OPERATORS[op_type].inputs, ["Y"], [helper.make_node("Neg", ["X"], ["Y"])], opsets,
        [*attributes], overload="wrong",
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=opsets, functions=[wrong], ir_version=10)
    onnx.save(model, folder / f"{stem}.onnx")
    wide = np.float64 if dtype == "float64" else np.float32
    feeds = {name: values[name].astype(wide) for name in tensors}
    expected = 2 * expected_output(op_type, values, 4, 1)
    np.savez(folder / f"{stem}.npz", **feeds, expected=expected, bound=2 * BOUNDS[dtype])


def write_quantized_case(folder: Path, op_type: str, types: Any, axis: int, name_axes: bool) -> None:
    """QuantizeLinear → the node, twice → DequantizeLinear → Add, for the same reasons."""
    operator, values = QUANTIZED_OPERATORS[op_type], quantized_values(op_type, types, 9, axis)
    tensors = {name: dequantized(values, name).astype(np.float32) for name in ("X", *operator.operands)}
    quantizations = {name: [f"{name.lower()}_scale", f"{name.lower()}_zero_point"] for name in tensors}
    nodes = [helper.make_node("QuantizeLinear", [f"{name}_float", *quantizations[name]], [name]) for name in tensors]
    for copy, overload in enumerate(("", "wrong")):
        nodes += [
            helper.make_node(op_type, operator.inputs, [f"y{copy}"], f"node{copy}", overload=overload, domain=DOMAIN,
                             axis=axis),
            helper.make_node("DequantizeLinear", [f"y{copy}", "y_scale", "y_zero_point"], [f"y{copy}_float"]),
        ]  # fmt: skip
    nodes.append(helper.make_node("Add", ["y0_float", "y1_float"], ["Y"]))
    weights = [onnx.numpy_helper.from_array(value, name) for name, value in values.items() if name not in tensors]
    axes = [f"axis{axis}" if name_axes else None for axis in range(4)]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(f"{name}_float", TensorProto.FLOAT, axes) for name in tensors],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
        weights,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    wrong = helper.make_function(
        DOMAIN, op_type, operator.inputs, ["Y"],
        [helper.make_node("Add", ["y_zero_point", "y_zero_point"], ["Y"])], opsets, ["axis"], overload="wrong",
    )  # fmt: skip
    path = folder / f"{op_type}-{'-'.join(kind.__name__ for kind in types[:3])}-{axis}-{name_axes}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=[wrong], ir_version=10), path)
    wanted, _ = quantized_output(op_type, values, axis)
    expected = 2 * (wanted - float(values["y_zero_point"])) * values["y_scale"]
    feeds = {f"{name}_float": value for name, value in tensors.items()}
    np.savez(path.with_suffix(".npz"), **feeds, expected=expected, bound=1e-5)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    for op_type in OPERATORS:
        for shape in SHAPES[op_type]:
            for dtype in ELEMENTS:
                for name_axes in (True, False):
                    write_case(folder, op_type, shape, dtype, name_axes)
    for op_type in QUANTIZED_OPERATORS:
        for types in TYPES:
            for axis in (1, -1):
                for name_axes in (True, False):
                    write_quantized_case(folder, op_type, types, axis, name_axes)
    return folder


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nodes with their bodies, each operator's under an overload of its own."""
    folder = tmp_path_factory.mktemp("bodies")
    for op_type, operator in OPERATORS.items():
        for variant in operator.statements:
            axes = int(variant.partition("_")[0]) if op_type == "LayerNormalNorm" and variant else 1
            for shape in (shape for shape in SHAPES[op_type] if len(shape) > axes):
                values = make_values(op_type, shape, "float32", axes)
                if op_type in BATCH_OPERATORS and not variant:
                    values["exponent_pos"][:] = np.linspace(0.25, 1.75, shape[1])
                    values["exponent_neg"][:] = 2 - values["exponent_pos"]
                    assert operator.variant(values) == variant
                path = folder / f"{op_type}-{variant}-{'x'.join(map(str, shape))}.onnx"
                attributes = ATTRIBUTES.get(op_type, {}) | ({"axis": -axes} if op_type == "LayerNormalNorm" else {})
                single_node_model(path, op_type, values, variant=variant, **attributes)
                expected = expected_output(op_type, values, 4, axes)
                # Exp and Tanh of ONNX Runtime 1.18 are less accurate than those of the newest.
                np.savez(path.with_suffix(".npz"), **values, expected=expected, bound=2 * BOUNDS["float32"])
    for op_type in QUANTIZED_OPERATORS:
        for axis in (1, -1):
            values = quantized_values(op_type, TYPES[2], 9, axis)
            path = folder / f"{op_type}-{axis}.onnx"
            onnx.save(model_of(op_type, values, axis), path)
            feeds = {name: values[name] for name in ("X", *QUANTIZED_OPERATORS[op_type].operands)}
            # Bodies may differ by one step.
            np.savez(path.with_suffix(".npz"), **feeds, expected=quantized_output(op_type, values, axis)[0], bound=1)
    return folder


def run_cases(interpreter: str, kernels: str, cases: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What the program reports."""
    run = subprocess.run(
        [interpreter, str(PROGRAM), kernels, str(cases)],
        capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert report["cases"] == len(list(cases.glob("*.onnx"))) > 0
    return report


def test_the_newest_version(cases: Path, bodies: Path) -> None:
    assert run_cases(sys.executable, get_library_path(), cases)["failures"] == []
    assert run_cases(sys.executable, "-", bodies)["failures"] == []


@pytest.mark.skipif(
    not ENVIRONMENTS, reason="no environments with other versions of ONNX Runtime are named; `make test-all` makes one"
)
@pytest.mark.parametrize("interpreter", ENVIRONMENTS)
def test_other_versions(interpreter: str, cases: Path, bodies: Path) -> None:
    report = run_cases(interpreter, get_library_path(), cases)
    assert report["failures"] == [], report["version"]
    assert run_cases(interpreter, "-", bodies)["failures"] == [], report["version"]
    # The operators of a provider that this ONNX Runtime lacks do no harm.
    assert report["has_cuda_library"] == (library.find_cuda_library() is not None)


@pytest.mark.skipif(SANITIZED is None, reason="no sanitized build is named; `make test-sanitizers` makes one")
def test_under_sanitizers(cases: Path) -> None:
    """Python was built without AddressSanitizer, so its run-time is loaded first; the leaks are Python's own."""
    libasan = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert SANITIZED is not None
    environment = {"LD_PRELOAD": libasan, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    assert run_cases(sys.executable, SANITIZED, cases, environment)["failures"] == []
