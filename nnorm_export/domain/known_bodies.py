"""The bodies that this package writes, by a digest of what each computes.

A kernel computes what the operator's name says, and a body may say something else: it can be edited, or damaged by a
tool. A file whose bodies have these digests means by its nodes what the kernels compute.

An operator may have several bodies at a time, see :attr:`.Operator.statements`. When a body changes, its digest
changes. The older digest stays, behind the others, as long as released files have that body and the kernels compute it.
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

OLDEST_OPSET = 18  # the bodies are the same from this opset on; torch's exporter writes no older one either

# Name of the operator -> arithmetic -> digests, in the order of Operator.statements.
KNOWN_BODIES: dict[str, dict[str, tuple[str, ...]]] = {
    "BatchNormalNorm": {
        "float": (
            "480fca74b47b7f71a3e2303dcf9b9997007d95d083973020337f95ee55a055a2",
            "645cc5b6479fefabc3130acc7f1c844ac04fdd1b3241d1730b22a5f329b6c474",
            "67fe8d4108123e0dd39799f09fc2c4e2d2d829abf1d6a29c1e629fb693e056b3",
        ),
        "double": (
            "59f9ddaefe3027f6f44067af527a017450d3274aee2b53b0fe840243d755cd87",
            "fb5ba8cf1779b1f0566fd1322252fa629db5683293e9ca64a7cf079ba94285d5",
            "6dac57fa99bd484a66085296176d34fd1560cf258f64f0d8771eef46ca0144b9",
        ),
    },
    "LayerNormalNorm": {
        "float": (
            "996f0033a3b8c9f127042a0792700708cb483b19a251ba55776f3e6abba1a749",
            "f0bb766e53794e4dc6b23351620d4c8eeaed1ce375e9fe0fd72732d0da2cfd56",
            "c1df79d27af4eeb1ee1ae150d7fbcd13cc0b76b18bc31539247b42b1f4d17e18",
            "c73089e4f527723b16354fde0abccfbcd7b99bf794e617764588f9bb116cbfbe",
            "ac1cf0e49173a496212d9ddd3d2b85ecbdf50f65e89cf9cec941934396d0aad5",
            "2ffcc822e7bcb55e26db181774d3192cd462a33e6bbc97011755515db4ffc7b9",
            "b43c279a1838d08a2e2714d54ef7969fb7134a60a292354e694cb68ab53182ec",
            "831513a1c9e5cce3e3d32c9892c7151be02fb47c9dae37d8a67b378e4c8aaf8d",
            "fb087549d1eb44da7d629f44f503a5b58b37aa991f7e67f3232b5e57a50dbf3a",
            "878a9b1f89f0c7df693af2a516ae9f5d03d1a4d802b596c8fb8ef9ce4a091ab8",
            "0401f6922fbdccba5880a40979fdd3bd48946a42d3a9349d632c093ea83b8b8d",
            "26125cb4d3f2721c0821113856657409a2cc79970984358bd9e1a02f5f829221",
            "6209c227237b1aa5683cab4bb466b5d208ddd78478512c4b193d92ea1c132ac7",
            "8928fd8c7ab1019609367cca7a7b6141877861320d437a957adc1a679860bc91",
            "d5b0d6068e6a29f2f30f0c0eb063359e7f25c44f7c9f3b4ae2b5c36b29439091",
            "e9b1809a1b6d2107af6b8c9d06d08e0f8b5711ae764d6939d301cf8388fc6e74",
        ),
        "double": (
            "a59eaa865b80aa36d9d04af45f47147ab789966be629d4f22e17a66560ade5b2",
            "1c0c844cda6b2d12756fd016412e3254e7f3e8a12ccf86f4d6bfdbfe342dc37f",
            "c7ce0500fd989b570ffe2012d231927bd32156a5f252a6368bb7348782821187",
            "cd31a8a509d64553f0e04fac3056b3c0b15933ca99f85008fa86b1c095752e86",
            "c447cfd70ea2d088b4b206a18d2df6dbc66eeb2faaf0e4313b2950f8ec07e685",
            "163e4c6dd7f9bb5d4b9416d3facea040a3f6a4587a56e22627d17ee252da2c8e",
            "9b34d5751fce635901a701f4bed9bf65c7f17f50731ba56ca81ed7048b023e82",
            "0ecdf53455122a78733c952f82c3da81d744eac5b39dcc044c66c7b4ee499f6c",
            "c04c8324759f4a4bed55c6bc2af6b3005327c2e73ba44c705f400bb54e173c4c",
            "5493867f4a4f364e110f8b07f027b244cb781b00e140a33bf1db0ea6ce9fb151",
            "131a18f61d7c0473d63d41696401620a2079231af42dd2232dedc45bfb1d1b1f",
            "61afcb9ae9cccb2ccdd9e69aa732e12cdbc950231589244f610c5744740a3d31",
            "eb0d9fe5f444e3e1fd24f8d9736ca9ed5a1b77019fa544e2b31f412c1c50e286",
            "acea5e7f17ded857f4e4e4e9526646dea9a6fa165388bfcc251afdc1d367ee5a",
            "350743e7e94ae0dadea9b5d4ed7a2ceedf767bc5249fdd51e7afd4eb917dc98a",
            "5ce69e3e8c6002bd848164db147871337070ccc112dbdbc44089454ba5dab87c",
        ),
    },
    "GroupNormalNorm": {
        "float": (
            "f0a4886fef2ce77aa7afd61e26df85003ee15d107e15d5dba771da4bc5dc274d",
            "34d0baeca1dddb3d1269d3ca5c0decc56f4df66c2c509b39022c071826fac70b",
        ),
        "double": (
            "ca63464fb7bf5d6fc2e8c36b62d1937a58c76c48cdcda7547592fc02d94c8690",
            "b5d7535b7d904bf89cb22c184bf82d210c655690d4e16abeac69d43370e83fa9",
        ),
    },
    "BatchNormalNormRelu": {
        "float": (
            "c4006a584c1f36906bc86df0f754e9927c2551f42473b89edb7d234fbb1a3d39",
            "abf929c6b8f24bfe929d0aade4061c987ac86c56c40c36c0ee1bd0a1d7045480",
            "305322dd61ae268225929ce5a1284f0e0b0d2a187075b0141971c23df2756f7e",
        ),
        "double": (
            "c3cbc8803eb601b3e731d6ab1e9dcfa06f8bece59bd8c35e4beabc6995638866",
            "e0bd6bec69ce2556798742ac788a7ce318b207fe0f4e10cce9d2b5e761f37569",
            "a138ef9a5f5ce7df853a4032cc58a63e553182b6ccaf72e6a2f3568fc0a010bb",
        ),
    },
    "BatchNormalNormAddRelu": {
        "float": (
            "eae5d31e7097900ef4183252af1e912f3b4f3d8b49cab4418260ecb0bbd2f371",
            "e8e55ab19ea37fb20d25c388bdda9b99dad2ac4231034bdbf674fb06343c52f7",
            "a10625518f5ce567f5c85d478094de1a301be241d14036e63bb520942a764b54",
        ),
        "double": (
            "cf1648fbabbdf021bf6d3f3361c4f34fa0fbbc973978381abec73f1f66cdf066",
            "63258baf90705935102afb8ebeb51bde155b050da610d4c4601be60c72dba415",
            "0006a0b52b4c6eb1632601ace7b34a1a7a2fb406dd2044669c5be92f2d8c84f5",
        ),
    },
    "QuantizedBatchNormalNorm": {
        "float": (
            "60d6b098759ac36e897c9d56b7d9026590704ed4358b8dc31d91546331cb9b01",
            "653a767cc4e981e54b7c4fd158cf174c4ce64891b572e66fd9c94c2d986f1a2f",
            "9f31d5a45e58f1daf928944371888e33c2a0504b15ce383ac1f5c8c4b796e07c",
            "9f2b5cb0d694975967fc4c8575b9b0c7e5d8bfacfa1ec174e66294eaeeb71542",
            "7a18d35ab23bb29847da4d5bb441add6bbb748c6d0cb46bf8cabca025af224b5",
            "73eeebb91a0db7235eb4e29a6d5cc21ff510b05145f5fb615c6d8e3452fd66e6",
        ),
    },
    "QuantizedBatchNormalNormRelu": {
        "float": (
            "786989fa7fe961c323fb5cb299b2a5dc74dd5e6dcaf40777ab0c4975c012ebd1",
            "f0269c40fcd384a9d3f1f76a54710007dbda0014f1ec0333124888d50f8488f8",
            "bd9c15d09dce9700923ec42a66813e29833cac4bce4aea39a15fd210bba5ce41",
            "4feb8b75b5e07af2b4b7179d2c65fb0f5f491c5d55573f9b71d8a1062245e912",
            "78200aefc56ed77550b8e58c3c13ce7fb894b5759e45b3721a70d0532c79cb93",
            "33a87f6409b8f1715d15b2d40ee0b87e1e07aceb0927e0edafe8e30a93910eb0",
        ),
    },
    "QuantizedBatchNormalNormAddRelu": {
        "float": (
            "95fb6d0a09792494a8084b120901793fe439a594a95ec9cf7c0b22b8c464e91d",
            "65bd3475bca479e4998741111008c24a8a36bc5bcba2ca40e5b28997d4249618",
            "a1c07cb480b7a72fd522c09aa724da1bc91531e18bedb79b35cf0acd08f16b2b",
            "1bf778be2fdd9c633b8eb394f8a62b79a7553ca46b4215d19f7db5f72453a635",
            "114ae8c385a576455a5b7b323fa4784b91e8afe8c2adb8aaadc42d2ef3dc6e9f",
            "6a107589ae7eaf38db751d3d0e6fb139a6fe1b261f1676d6b67f54cf6e7858f0",
        ),
    },
    "QuantizedBatchNormalNormHardSwish": {
        "float": (
            "1f1524af78d2fdb268f390564f59c17dd9007c48c011c1164e0c4bb384b62a01",
            "5fdc7e9058938b948d4c4178e0349b8f2b8f67537ca9d7c73e195643023a6624",
            "b31f9f800a7c257fbf914c069240180ef7d572c51279e6093a0e1e4acb094d24",
            "01bf640d518ab1bde2f5982c940c632e336932688817ebe3356aad01d236bf0b",
            "1b5a7b4623af9c9e2661c767f4e576306a25e6ed4bf7e8c3659358e31a82d9b1",
            "ef155ee34411131c98c656aaf53245f0840bf5e772a3ff0f823fdec2298d1931",
        ),
    },
    "QuantizedBatchNormalNormSwish": {
        "float": (
            "581a473e339a2c877a18bb2f2148535d945d80c17235d1213e8ad088af3180cc",
            "9bcfcdaa1a2ce0f0fef61e7dfbc6065d7ba650b43e22a52b1cd4f63317c6b1f6",
            "f08e75c188ec51e7ec1fd1d6902833cf60a0d434f43baf3a1ca22a3213ef5233",
            "3c2efb624e16010aeebe75143b81dd761937760723877ca8a5111a74020d3065",
            "2de8fa562c314a11995236c6f01fe5b348b1666fe56055115f48cda69f43baf9",
            "de3b5d42b2e28f35ea10d7e83edeb61767a087a6cde25836c0e7681a87c42d60",
        ),
    },
}


def arithmetic_of(function: onnx.FunctionProto) -> str | None:
    """The arithmetic, ``float`` or ``double``, of a body that a release has written; None for any other body."""
    opset = next((entry.version for entry in function.opset_import if entry.domain in _STANDARD), 0)
    if opset < OLDEST_OPSET:
        return None
    found = digests(function)
    bodies = KNOWN_BODIES.get(function.name, {})
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
