"""The text of config.pbtxt, which describes a model to Triton: https://github.com/triton-inference-server/common."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import text_encoding

from nnorm_export.dtypes import DTYPES
from nnorm_export.errors import ExportError
from nnorm_export.files.kept_io_types import KEY, KeptTypes, to_json
from nnorm_export.files.lengths import Lengths, described
from nnorm_export.files.tensors import TensorInfo
from nnorm_export.names import METADATA_PREFIX

FILE = "config.pbtxt"
_HEADER = "# nnorm-export serve-repo wrote this file, and keeps your changes: "
# The digests of the text and of the tensors, whose lines a user may write otherwise.
_SIGNATURE = re.compile(rf"^{_HEADER}(?P<text>[0-9a-f]{{64}}), (?P<tensors>[0-9a-f]{{64}})\n", re.MULTILINE)
_BACKEND = re.compile(r'^\s*(?:backend|platform)\s*:\s*"(\w+)"', re.MULTILINE)
_BACKENDS_OF_PLATFORMS = {"tensorrt_plan": "tensorrt", "onnxruntime_onnx": "onnxruntime"}
_MAX_BATCH_SIZE = re.compile(r"^\s*max_batch_size\s*:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What config.pbtxt says of a model.

    Attributes:
        strings: the names of the tensors of text, whose dtype in NumPy is ``object``.
        max_batch_size: 0 without batching.
        threads: of an ONNX Runtime session; 0 leaves them to ONNX Runtime.
        kernels: the path of the library on the server.
        lengths: those of the dynamic axes at which the model is right, which Triton does not check.
        kept_io_types: see :mod:`.files.kept_io_types`; a comparison with the server reads it.
    """

    name: str
    backend: str
    inputs: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]
    strings: frozenset[str]
    max_batch_size: int
    max_queue_delay_microseconds: int
    instances: int
    device: str
    threads: int
    kernels: str | None
    lengths: Lengths = field(default_factory=dict)
    kept_io_types: KeptTypes = field(default_factory=dict)

    def __str__(self) -> str:
        is_engine = self.backend == "tensorrt"
        lines = [
            f"name: {_quoted(self.name)}",
            'platform: "tensorrt_plan"' if is_engine else f"backend: {_quoted(self.backend)}",
            f"max_batch_size: {self.max_batch_size}",
        ]
        for kind, infos in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"{kind} [", ",\n".join(self._tensor(info, self.max_batch_size > 0) for info in infos), "]"]
        lines += [f"instance_group [ {{ kind: KIND_{self.device.upper()} count: {self.instances} }} ]"]
        lines += [f"# right for the lengths {_quoted(axis)}" for axis in described(self.lengths)]
        if self.max_batch_size:
            lines += [f"dynamic_batching {{ max_queue_delay_microseconds: {self.max_queue_delay_microseconds} }}"]
        if self.kernels:
            lines += [f"model_operations {{ op_library_filename: {_quoted(self.kernels)} }}"]
        parameters = {
            "intra_op_thread_count": str(self.threads) if self.threads else "",
            METADATA_PREFIX + KEY: to_json(self.kept_io_types) if self.kept_io_types else "",
        }
        lines += [
            f"parameters [ {{ key: {_quoted(key)} value: {{ string_value: {_quoted(value)} }} }} ]"
            for key, value in parameters.items()
            if value
        ]
        return "\n".join(lines) + "\n"

    def merged(self, folder: Path, old: str | None, *, overwrite: bool) -> str:
        """The text for the model in ``folder``, all of whose versions share it.

        It is ``old``, with the changes of its user, if that was written for the same options.

        Raises:
            ExportError: ``old`` is for another backend, for other tensors, or has changes that would be lost.
        """
        text = str(self)
        new = f"{_HEADER}{_digest(text)}, {self._tensors}\n{text}"
        if old is None:
            return new
        signature = _SIGNATURE.search(old)
        if signature and signature["text"] == _digest(text) and not overwrite:
            return old
        self._refuse_another_model(folder, old, overwrite=overwrite)
        if not overwrite:
            self._refuse_other_batching(folder, old)
        if overwrite or not is_changed(old):
            return new
        if signature is None:
            raise ExportError(
                f"{folder / FILE}: this version of serve-repo did not write it, and would replace it; give "
                "overwrite_config=True (--overwrite-config) to do so"
            )
        raise ExportError(
            f"{folder / FILE}: it has changes that serve-repo did not write, and these options would replace it. Give "
            "the options that it was written with, which keeps the changes, or overwrite_config=True "
            "(--overwrite-config)"
        )

    def _refuse_another_model(self, folder: Path, old: str, *, overwrite: bool) -> None:
        found = _BACKEND.search(old)
        backend = _BACKENDS_OF_PLATFORMS.get(found[1], found[1]) if found else self.backend
        if backend != self.backend:
            raise ExportError(
                f"{folder}: its other versions are for the backend {backend}; a model has one, so choose that, or give "
                "the model another name"
            )
        if signature := _SIGNATURE.search(old):
            is_another = signature["tensors"] != self._tensors
        else:  # another program wrote it
            listed = [line.rstrip(",") for line in old.splitlines() if line.startswith("  {")]
            is_another = bool(listed) and not overwrite and listed != self._lines(_is_batched(old))
        if is_another:
            raise ExportError(f"{folder}: its other versions have other inputs or outputs; give the model another name")

    def _refuse_other_batching(self, folder: Path, old: str) -> None:
        if (batched := _is_batched(old)) != (self.max_batch_size > 0):
            states = ("with batching (max_batch_size > 0)", "without batching (max_batch_size 0)")
            old_state, new_state = states if batched else reversed(states)
            raise ExportError(
                f"{folder}: its other versions are served {old_state}, and this one would be {new_state}, which is one "
                "setting for all versions; serve it as the others, give the model another name, or change all with "
                "overwrite_config=True (--overwrite-config)"
            )

    @property
    def _tensors(self) -> str:
        """A digest of the tensors, with the axis that a batch has or would have."""
        return _digest("\n".join(self._lines(batched=False)))

    def _lines(self, batched: bool) -> list[str]:
        return [self._tensor(info, batched) for info in (*self.inputs, *self.outputs)]

    def _tensor(self, info: TensorInfo, batched: bool) -> str:
        dims = [dim if isinstance(dim, int) else -1 for dim in (info.shape[1:] if batched else info.shape)]
        if not info.has_rank:
            raise ExportError(
                f"{info.name}: the model does not say how many axes it has, which Triton needs; onnx.shape_inference "
                "may find it, or export the model again"
            )
        if not dims and not batched:
            raise ExportError(
                f"{info.name} is a scalar, which Triton serves only as one number for each row of a batch; export the "
                "model with an axis of length 1 in its place"
            )
        if 0 in dims:
            raise ExportError(f"{info.name} has an axis of length 0, which Triton cannot serve; export it without")
        shape = f"dims: [ {', '.join(map(str, dims))} ]" if dims else "dims: [ 1 ] reshape { shape: [ ] }"
        return f"  {{ name: {_quoted(info.name)} data_type: {self._data_type(info)} {shape} }}"

    def _data_type(self, info: TensorInfo) -> str:
        of_python = self.backend == "python"
        if info.name in self.strings:
            if of_python:
                raise ExportError(f"{info.name} is text, which the backend python cannot serve; choose onnxruntime")
            return "TYPE_STRING"
        if info.dtype.name not in DTYPES:
            raise ExportError(
                f"{info.name} is {info.dtype.name}, which Triton cannot serve; export the model without it"
            )
        if of_python and info.dtype.name == "bfloat16":
            raise ExportError(
                f"{info.name} is bfloat16, which NumPy and so the backend python do not have; choose the backend "
                "onnxruntime, or export the model with keep_io_types=True (--keep-io-types)"
            )
        return DTYPES[info.dtype.name].triton


def _is_batched(text: str) -> bool:
    size = _MAX_BATCH_SIZE.search(text)
    return size is not None and int(size[1]) > 0


def is_changed(text: str) -> bool:
    """Whether ``text`` is not as serve-repo wrote it."""
    signature = _SIGNATURE.search(text)
    return signature is None or signature["text"] != _digest(_SIGNATURE.sub("", text, count=1))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _quoted(text: str) -> str:
    """``text`` in protobuf's text format: bytes of UTF-8 that are not printable ASCII are octal escapes."""
    escaped: str = text_encoding.CEscape(text.encode("utf-8", "surrogateescape"), as_utf8=False)
    return f'"{escaped}"'
