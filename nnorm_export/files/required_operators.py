"""The operators that a build of ONNX Runtime needs for some files, and the configuration that lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from nnorm_export._version import __version__
from nnorm_export.errors import InputError
from nnorm_export.files.onnx_file import with_nested
from nnorm_export.files.staging import staged, writing
from nnorm_export.names import DOMAIN, escaped
from nnorm_export.reports import Report

Operator = tuple[str, int, str]  # domain, the opset since which it is as it is, name
_STANDARD = "ai.onnx"  # ONNX Runtime's name for the domain "" of ONNX


@dataclass(frozen=True)
class RequiredOperators(Report):
    """The operators of ONNX Runtime that files need.

    Attributes:
        files: the files.
        operators: domain -> opset -> names. The opset is the one since which the operator is as it is.
        onnxruntime: the version of ONNX Runtime whose optimized graphs were read too; None if none was.
        kernels: whether they were also read with the library of kernels.
    """

    files: list[Path]
    operators: dict[str, dict[int, list[str]]]
    onnxruntime: str | None
    kernels: bool

    @property
    def config(self) -> str:
        """The text of the configuration, for ``--include_ops_by_config`` of ONNX Runtime's ``build.sh``."""
        lines = [
            f"# Operators for {len(self.files)} files; a build of ONNX Runtime takes this as --include_ops_by_config.",
            *(f"#     {escaped(str(path))}" for path in self.files),
            f"# nnorm_export {__version__} listed the operators of the graphs, their subgraphs and functions.",
            *(f"# {line}" for line in self._about_optimizing()),
            f"# Operators of the domain {DOMAIN} are not ONNX Runtime's and not here. Without the library of kernels,",
            "# ONNX Runtime runs their bodies, whose operators are here. No types are listed: all types are built.",
        ]
        for domain, opsets in self.operators.items():
            lines += [f"{domain};{opset};{','.join(names)}" for opset, names in opsets.items()]
        return "\n".join(lines) + "\n"

    def write(self, path: str | Path) -> Path:
        """Write :attr:`config` into the file ``path``, and return its path.

        Raises:
            ExportError: the file cannot be written.
        """
        path = Path(path)
        with staged(path) as new, writing(path):
            new.write_text(self.config, encoding="utf-8")
        return path

    def _about_optimizing(self) -> list[str]:
        if self.onnxruntime is None:
            return [
                "What ONNX Runtime makes of them (FusedConv, ...) is not here: switch graph optimization off in the",
                "sessions of this build, or write this file again where ONNX Runtime is installed.",
            ]
        kernels = "with the kernels of nnorm_export and without" if self.kernels else "without kernels of nnorm_export"
        return [
            f"Those that ONNX Runtime {self.onnxruntime} makes of them are here too: on the CPU of the machine that",
            f"wrote this file, at each level of graph optimization, {kernels}.",
            "Another version or processor may make others.",
        ]


def onnx_files(paths: Iterable[str | Path]) -> list[Path]:
    """Returns ``paths`` with each folder replaced by the files ``*.onnx`` in it and in its folders.

    Raises:
        InputError: there are no paths, or a folder has no such file.
    """
    files = []
    for path in map(Path, paths):
        found = sorted(each for each in path.rglob("*.onnx") if each.is_file()) if path.is_dir() else [path]
        if not found:
            raise InputError(f"{path}: the folder has no file *.onnx; give one that has, or a file")
        files += found
    if not files:
        raise InputError("no file is given, and this lists the operators of ONNX files")
    return files


def operators_of(proto: onnx.ModelProto) -> Iterator[Operator]:
    """The operators of ONNX Runtime in the graph, the subgraphs and the functions of ``proto``."""
    functions = {(function.domain, function.name) for function in proto.functions}
    for owner, imports in ((proto.graph, proto.opset_import), *((each, each.opset_import) for each in proto.functions)):
        opsets = {entry.domain: entry.version for entry in imports}
        for node in with_nested(owner.node):
            if node.domain != DOMAIN and (node.domain, node.op_type) not in functions:
                domain = "" if node.domain == _STANDARD else node.domain
                opset = opsets.get(domain) or opsets.get(_STANDARD if domain == "" else domain, 1)
                yield domain or _STANDARD, _since(node.op_type, opset, domain), node.op_type


def sorted_operators(operators: Iterable[Operator]) -> dict[str, dict[int, list[str]]]:
    """Domain -> opset -> names, each once and sorted."""
    found: dict[str, dict[int, list[str]]] = {}
    for domain, opset, name in sorted(set(operators)):
        found.setdefault(domain, {}).setdefault(opset, []).append(name)
    return found


def _since(name: str, opset: int, domain: str) -> int:
    """The opset since which an operator is as in ``opset``, by which ONNX Runtime's own tool lists it."""
    try:
        return int(onnx.defs.get_schema(name, opset, domain).since_version)
    except onnx.defs.SchemaError:  # an operator of ONNX Runtime's own
        return opset
