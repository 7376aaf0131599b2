"""Names that writers and readers of a file share. This module imports only the errors of the package."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from nnorm_export.errors import NnormExportError

DOMAIN = "nnorm"
DOMAIN_VERSION = 1
PRODUCER = "nnorm_export"

# Choices of export() and of the command line.
FORMS = ("portable", "primitives", "custom")
GENAI = ("bodies", "kernels")  # what onnxruntime-genai runs
TORCHSCRIPT_METHODS = ("trace", "script")
PT2_OPERATORS = ("decomposed", "kept")
DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
# Spellings of others -> ours. ``float`` is none of them: it is float32 in PyTorch and float64 in NumPy.
_SPELLINGS = {long: short for short, long in DTYPE_NAMES.items()} | {"half": "fp16", "single": "fp32", "double": "fp64"}

# Backends of Triton that serve-repo does not write for -> what to do.
OTHER_BACKENDS = dict.fromkeys(
    ("pytorch", "libtorch", "torch"), "Triton's PyTorch backend is not written for; serve the ONNX file of the model"
)

# Runtimes that users ask for and no test has tried -> what to do.
OTHER_TARGETS = {
    "winml": "no file has been tried in Windows ML. Its newest version contains ONNX Runtime, which reads the default "
    "target. That of Windows 11 reads opset 12: leave out the target, and write opset_version=12 (--opset 12)"
}

# Model metadata that export() writes: nnorm_export.version, .form, .layers, …
METADATA_PREFIX = "nnorm_export."
# Metadata of a node: the path of the layer that it came from.
LAYER_PATH = METADATA_PREFIX + "layer"

# Metadata of a node that torch writes: the modules, outermost first, whose forward made the node.
NAME_SCOPES = "pkg.torch.onnx.name_scopes"

# The entry of a layer in the metadata that torch keeps beside a state dict: the class of a normality norm.
NORMALITY = METADATA_PREFIX + "normality"

# The entry of a PyTorch file (TorchScript, exported program, AOTInductor package) that describes it.
NOTE_FILE = METADATA_PREFIX.rstrip(".") + ".json"


def listed(names: Any, option: str, error: type[NnormExportError] = NnormExportError) -> list[Any]:
    """``names`` as a list. Raises ``error`` for a single string, which would be a list of its letters."""
    if isinstance(names, (str, type)):
        what = "one string" if isinstance(names, str) else "one class"
        name = names if isinstance(names, str) else names.__name__
        raise error(f"{option} is {what}; give a list of names: {[name]}")
    return list(names)


def dtype_spelled(text: str) -> str:
    """The key of DTYPE_NAMES for another spelling: ``float16``, ``torch.float16``, ``half`` or ``FP16`` -> ``fp16``.

    Text that is not a spelling of a floating-point dtype is returned unchanged.
    """
    name = text.lower().removeprefix("torch.")
    found = _SPELLINGS.get(name, name)
    return found if found in DTYPE_NAMES else text


def layer_name(path: str) -> str:
    """The path of a layer in the model, as messages show it."""
    return path or "(the model itself)"


def without_user(text: str) -> str:
    """``text`` with the user and password of a URL replaced: https://…@host, for text that others may read."""
    return re.sub(r"://[^/?#\s]*@", "://…@", text)


def node_names(calls: Iterable[tuple[str, str]]) -> list[str]:
    """The name of each (path of a layer, operator): ``layer1.norm/BatchNormalNorm``, ``…_2`` for its second call."""
    counts: Counter[str] = Counter()
    names = []
    for path, op_type in calls:
        name = f"{path or 'model'}/{op_type}"
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return names


def length_by_names(length: str, names: Mapping[str, str]) -> str | None:
    """A length with the names of axes in place of torch's symbols: ``4*s77`` -> ``4*batch``.

    None if a symbol has no name, because a reader would not know the axis of the symbol.
    """
    symbols = r"[A-Za-z_]\w*"
    if any(symbol not in names for symbol in re.findall(symbols, length)):
        return None
    found = re.sub(symbols, lambda match: names[match[0]], length)
    terms = sorted(terms_of(found))
    return next((name for name in names.values() if terms and sorted(terms_of(name)) == terms), found)


def terms_of(length: Any) -> list[str]:
    """The names in a length that is a sum of other lengths, ``past + sequence``; none for other lengths."""
    is_sum = isinstance(length, str) and re.fullmatch(r"[A-Za-z_]\w*( \+ [A-Za-z_]\w*)+", length)
    return length.split(" + ") if is_sum else []


def escaped(text: str, *, kept: str = "") -> str:
    """``text`` with escapes for characters that change how a terminal or page shows others, but those in ``kept``.

    They are control characters, line ends, bidi marks and unpaired surrogates.
    """
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in kept and unicodedata.category(character) in _ESCAPED
        else character
        for character in text
    )


# Unicode categories: control characters, bidi marks, unpaired surrogates (of names that are not UTF-8), line ends.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
