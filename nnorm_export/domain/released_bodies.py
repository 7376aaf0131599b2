"""Which bodies the releases of this package have written, by a digest of what each computes.

A kernel computes what the operator's name says, and a body may say something else: it can be edited, or damaged by a
tool. A file whose bodies have these digests means by its nodes what the kernels compute.

When a body changes, its digest is added in front of the older ones, for as long as the kernels compute those too. An
operator may have several bodies at a time, see :attr:`.Operator.statements`. An
operator may have several bodies at a time, see :attr:`.Operator.statements`. An
operator may have several bodies at a time, see :attr:`.Operator.statements`. An
operator may have several bodies at a time, see :attr:`.Operator.statements`. An
operator may have several bodies at a time, see :attr:`.Operator.statements`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import onnx
from onnx import numpy_helper
from onnx.external_data_helper import uses_external_data

_STANDARD = ("", "ai.onnx")
_PLAIN_VALUES = (
    onnx.AttributeProto.INT,
    onnx.AttributeProto.FLOAT,
    onnx.AttributeProto.STRING,
    onnx.AttributeProto.INTS,
)

OLDEST_OPSET = 18  # the bodies are the same from this opset of the standard operators on

# Name of the operator -> arithmetic -> digests, those of this version first, in the order of Operator.statements.
RELEASED: dict[str, dict[str, tuple[str, ...]]] = {
    "BatchNormalNorm": {
        "float": (
            "67fe8d4108123e0dd39799f09fc2c4e2d2d829abf1d6a29c1e629fb693e056b3",
            "645cc5b6479fefabc3130acc7f1c844ac04fdd1b3241d1730b22a5f329b6c474",
            "f41a81bc6a50f861a310e902d7b7b835ac057648d272d07703544c272ce69f54",
        ),
        "double": (
            "6dac57fa99bd484a66085296176d34fd1560cf258f64f0d8771eef46ca0144b9",
            "fb5ba8cf1779b1f0566fd1322252fa629db5683293e9ca64a7cf079ba94285d5",
            "e386882c645df5f0510179094e71bb7ec0ce372f7f2003a535f21eb0817a1214",
        ),
    },
    "LayerNormalNorm": {
        "float": (
            "35e688c0e122566d87c266de1c83b1a6d0fb74a19a0a76d33dc5c2c5d1d9e097",
            "9ae9c9b9079dbeb3902dad49f7bef566a945bcadaf1aa1ce280336c0995ffebe",
            "ab73d45a56986f46af55a44c4a6ffcd2fb7431ca1528f8735a2745d9e5a4c14a",
            "9ec45e5bd5a83d8b7d2dd01816de62c82f2125bf8df5b7e3f770dd2f7e519de2",
            "3d5c4b40ba26d46b9f1e05e0ed7a5c9ccd62c289d58c2253e2a872620a214326",
            "005d4963c71d7e5e769cd7d3649df59c77043f4bec5a0ae1518df2dd361b2ac4",
            "cc8935202519d29019e4fdf43f491e44955489da13b33e89ca6ce39623e8652c",
            "418cde7c2a713bfc417bf962edaca4d58fc8af76f987875186af35450b190227",
            "ae900c602bfdb026a1d1c6b7a4363edbcbaca35a49ee0932f0085710abd618cf",
            "27ea936d56167cf24fee0eefcfedc1a7b59f2f8695b4afc747a9a117857f9d3f",
            "344f8b94bb8e4e370a2836f6c8f9a6386a3df2c9d5cb08de8478b8f097dd5064",
        ),
        "double": (
            "5aed4e0ca9083e0e7648536132ec885107c4c0e50bb1685df5c0affb5192ea21",
            "a4108f6f0a325a86e4ea660d1f9e52bd870c23ea9de4ae7b2da156fdffa2638b",
            "1586cbe36a190cce80574fb2e4ec7f7060c31341ad796dc6a9caf399b42cc62c",
            "826c55471969540f0b2fcb2ed545dffbe7c78991d5d36fac2c47218a5379d8d3",
            "a42ba2d5286970b749794cc8a5c624538aeb34c99d917089369cc803ff834fac",
            "55bb83326a8ac3fffde47b960e936f6052ee1b4dbd6400f0df916c3efa7ddb18",
            "ae0247bc71d94f7f4a5bf2713107d6e60cfa50e7065a74b55136c3c3e3546b63",
            "306b97d18c383dc462a9e9296ef73a65e5b377857e5225f9f3eead6c2bf4cd01",
            "d93776a865a90ed63090308c46f138aaf3c79e50813f641ef304867ee073194b",
            "d3a8c0c4997c68b3d806d2882511c8d4a4324cbe1d3fbd87f16436dc13a2fc95",
            "6fb735af97f95246026cae466713a7c664b487a52a093edf4bc9cf4ff694dacb",
        ),
    },
    "GroupNormalNorm": {
        "float": (
            "c1494c178b949f77b6652c5d9b5e1d907f1d0627009c0db010a45a27d11dc603",
            "66a1e7526f37bc6ce8801eec98e58d41a0c42dc07f59c68c1d2816881a110600",
            "9265b03df3f50791b9ff6b68e0eded8e1d36a962eec885845e42486c657c7814",
            "015cde0c46e68914dfa7dc02d9d03c8699fa8c5033cb58a364f6c3a7b28274e6",
        ),
        "double": (
            "6a1753f580fec1bbf740c221ecf5342bc0f34e0eafe25e820ac40085d131b615",
            "f5ca0a6cce1d610f91f0928a80b12a8b0758702a862bf473279466d623fa1b49",
            "c69b21de72873431defb70188657db4dca3cce16f225711a16fb8e0a2edcf2c5",
            "004afc70b6ecf5ec4ebdedf73256bfa7324f7ec9a60f58162bcfa32c312edb99",
        ),
    },
    "BatchNormalNormRelu": {
        "float": (
            "305322dd61ae268225929ce5a1284f0e0b0d2a187075b0141971c23df2756f7e",
            "abf929c6b8f24bfe929d0aade4061c987ac86c56c40c36c0ee1bd0a1d7045480",
            "9eddb58ccc18e7bb20344d4c975fd1d76dff4285db1150b5003c982184e4812f",
        ),
        "double": (
            "a138ef9a5f5ce7df853a4032cc58a63e553182b6ccaf72e6a2f3568fc0a010bb",
            "e0bd6bec69ce2556798742ac788a7ce318b207fe0f4e10cce9d2b5e761f37569",
            "f3fcc4a81c15405d416d778008486295cedd33869f882dce156a32c451b66be5",
        ),
    },
    "BatchNormalNormAddRelu": {
        "float": (
            "a10625518f5ce567f5c85d478094de1a301be241d14036e63bb520942a764b54",
            "e8e55ab19ea37fb20d25c388bdda9b99dad2ac4231034bdbf674fb06343c52f7",
            "0a5dcf3e7fb8d71071c92278cfa940ba726ca091b7b9a93c5290d25e38c85f52",
        ),
        "double": (
            "0006a0b52b4c6eb1632601ace7b34a1a7a2fb406dd2044669c5be92f2d8c84f5",
            "63258baf90705935102afb8ebeb51bde155b050da610d4c4601be60c72dba415",
            "3d9380219a8378366ec686bbed1a43b1b5e81016da2c8f2920f622f3ab017a28",
        ),
    },
}


def arithmetic_of(function: onnx.FunctionProto) -> str | None:
    """The arithmetic, ``float`` or ``double``, of a body that a release has written; None for any other body."""
    opset = next((entry.version for entry in function.opset_import if entry.domain in _STANDARD), 0)
    if opset < OLDEST_OPSET:
        return None
    found = digests(function)
    bodies = RELEASED.get(function.name, {})
    return next((arithmetic for arithmetic, digests in bodies.items() if not found.isdisjoint(digests)), None)


def digests(function: onnx.FunctionProto) -> set[str]:
    """The digests of ``function`` as it is and as a body would be written; see :func:`digest`."""
    return {digest(function), digest(_with_lists(function))}


def _with_lists(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """``function`` with vectors of integers as lists, as the bodies are written. onnxslim makes tensors of them."""
    written = onnx.FunctionProto()
    written.CopyFrom(function)
    for node in written.node:
        if node.op_type != "Constant" or len(node.attribute) != 1:
            continue
        tensor = node.attribute[0].t
        if tensor.data_type == onnx.TensorProto.INT64 and len(tensor.dims) == 1 and not uses_external_data(tensor):
            try:
                numbers = numpy_helper.to_array(tensor).tolist()
            except (ValueError, TypeError):  # a damaged tensor
                continue
            node.attribute[0].CopyFrom(onnx.helper.make_attribute("value_ints", numbers))
    return written


def digest(function: onnx.FunctionProto) -> str:
    """A hash of what ``function`` computes.

    It depends on the operators, their attributes, how they are connected, and the defaults of the function's own
    attributes. It does not depend on the names of values, on the order of nodes, or on documentation: tools change
    those. Nodes that no output needs do not enter.
    """
    known = {name: f"input {index}" for index, name in enumerate(function.input)}
    twice = []  # a name that is given twice is invalid, and runtimes differ in which value they take
    for node in function.node:
        about = [
            "" if node.domain in _STANDARD else node.domain,
            node.op_type,
            node.overload,
            [known.get(name, f"unknown {name}") if name else "" for name in node.input],
            sorted(map(_attribute, node.attribute)),
        ]
        computed = _hash(about)
        for index, name in enumerate(node.output):
            twice += [name] if name in known else []
            known[name] = f"{computed} {index}"
    outputs = [known.get(name, "") for name in function.output]
    defaults = sorted([*function.attribute, *map(_attribute, function.attribute_proto)])
    return _hash([len(function.input), outputs, defaults, twice])


def _attribute(attribute: onnx.AttributeProto) -> str:
    """What an attribute of a node says, or the default of a function's, as text."""
    value: Any = attribute.SerializeToString().hex()
    if attribute.ref_attr_name or attribute.type in _PLAIN_VALUES:
        value = [attribute.ref_attr_name, attribute.i, attribute.f.hex(), attribute.s.hex(), [*attribute.ints]]
    elif attribute.type == onnx.AttributeProto.TENSOR and not uses_external_data(attribute.t):
        try:
            array = numpy_helper.to_array(attribute.t)  # its numbers may be in one of several fields
            value = [str(array.dtype), list(array.shape), array.tobytes().hex()]
        except (ValueError, TypeError, KeyError):  # a damaged tensor
            pass
    return json.dumps([attribute.name, attribute.type, value])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
