"""The runtimes that ``quantize(…, target=…)`` writes for, and what each of them computes in int8.

ONNX Runtime computes node by node. A network stays in 8 bits from product to product there, and a norm between them is
a table. TensorRT makes what follows a product a part of its kernel, in float, as long as nothing is rounded in between;
it requires zero points of 0. OpenVINO computes attention in ONNX Runtime's way wrongly (a signal-to-noise ratio of
6 dB, with plain norms too), and rightly in TensorRT's: 8 bits in front of products alone.

On x86 processors without VNNI the sums of both ONNX Runtime and OpenVINO overflow (:mod:`.onnxruntime.overflow`) unless
second factors have 7 bits. With weights none does then; in attention a number far beyond its range may.
"""

from __future__ import annotations

from dataclasses import dataclass

from nnorm_export.errors import ExportError
from nnorm_export.names import FORMS
from nnorm_export.runtimes.onnxruntime.overflow import IN_FLOAT

DEFAULT_TARGET = "onnxruntime"
ACTIVATIONS = ("uint8", "int8")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a runtime computes in int8.

    Attributes:
        name: as ``target=`` takes it.
        title: the name of the runtime in messages.
        forms: the forms that it reads; the first is the default.
        activations: the types that tensors may have; the first is the default.
        reduce_range: whether the second factors of products have 7 bits by default, because processors exist on which
            the runtime's sums of products of 8 bits overflow.
        products_alone: whether only what products read is quantized, with the zero point 0.
    """

    name: str
    title: str
    forms: tuple[str, ...]
    activations: tuple[str, ...]
    reduce_range: bool
    products_alone: bool = False

    @property
    def session_config(self) -> dict[str, str]:
        """What lets ONNX Runtime show what the runtime computes: without its own int8 kernels, if it is another."""
        return {IN_FLOAT: "1"} if self.products_alone else {}


SCHEMES = {
    row.name: row
    for row in (
        Scheme(
            name="onnxruntime",
            title="ONNX Runtime",
            forms=("portable", "custom", "primitives"),
            activations=ACTIVATIONS,
            reduce_range=True,
        ),
        Scheme(
            name="tensorrt",
            title="TensorRT",
            forms=("portable", "custom", "primitives"),
            activations=("int8",),
            reduce_range=False,
            products_alone=True,
        ),
        Scheme(
            name="openvino",
            title="OpenVINO",
            forms=("primitives",),
            activations=("int8",),
            reduce_range=True,
            products_alone=True,
        ),
    )
}


def scheme_of(target: str) -> Scheme:
    """The row of the runtime ``target``.

    Raises:
        ExportError: there is no such target.
    """
    if target not in SCHEMES:
        raise ExportError(f"unknown target {target!r}; choose one of {', '.join(SCHEMES)}")
    return SCHEMES[target]


def chosen(scheme: Scheme, option: str, value: str | None) -> str:
    """``value`` of ``option``, ``form`` or ``activation``; by default the first that ``scheme`` has.

    Raises:
        ExportError: ``value`` is unknown, or the target does not take it.
    """
    choices, known = (scheme.forms, FORMS) if option == "form" else (scheme.activations, ACTIVATIONS)
    if value is None or value in choices:
        return value or choices[0]
    if value in known:
        raise ExportError(
            f"the target {scheme.name} takes {option} {' or '.join(choices)}: leave out {option}={value!r} "
            f"(--{option} {value}), or choose another target"
        )
    raise ExportError(f"unknown {option} {value!r}; choose one of {', '.join(known)}")
