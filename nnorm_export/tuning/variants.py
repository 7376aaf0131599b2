"""The files that tune() tries: the given one, and those that this package makes of it or of its PyTorch model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnorm_export.converting.change_form import change_form
from nnorm_export.errors import NnormExportError, RuntimeMissingError
from nnorm_export.files.formats import FORMATS
from nnorm_export.files.onnx_file import read
from nnorm_export.optimizing.optimize import optimize
from nnorm_export.quantizing.quantize import quantize
from nnorm_export.runtimes import DEFAULT_RUNTIME, RUNTIMES
from nnorm_export.tensorrt.engine import build_engine
from nnorm_export.tuning.candidates import Way
from nnorm_export.tuning.rows import Feed

if TYPE_CHECKING:
    from nnorm_export.tuning.pytorch import Original

# Runtimes that read ONNX files without functions alone, and those that read all.
_WITHOUT_FUNCTIONS = ("openvino", "opencv", "tract")
_FOR_ALL = (DEFAULT_RUNTIME, "onnxruntime-cuda")


@dataclass(frozen=True)
class Work:
    """What files are made of.

    Attributes:
        source: the given ONNX file.
        folder: where new files are written.
        rows: a few rows of the inputs, by the names of the file's inputs.
        data: all rows.
        batched: the inputs whose first axis is the batch; empty if the file has a fixed one.
        original: the PyTorch model, if it was given.
    """

    source: Path
    folder: Path
    rows: Feed
    data: Feed
    batched: Sequence[str]
    original: Original | None = None

    def without_folder(self, text: str) -> str:
        """``text`` without the name of the temporary folder, which says nothing to a reader."""
        return text.replace(f"{self.folder}/", "")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A file to try.

    Attributes:
        name: what reports call it.
        make: writes it, and returns its path.
        runtimes: those that are to run it; empty for all that read it (:func:`ways_of`).
        changes_results: whether its results are others than those of the given file, so that only a metric can accept
            it.
        bodies_too: whether it is tried without the kernels too.
        in_half: whether it computes in float16 or bfloat16, whose roundings only PyTorch's budget knows.
        of_model: whether it is made of the PyTorch model.
        needs: the runtime without which it is not made.
        seconds: about how long making and comparing it takes with two cores, for a ResNet18.
    """

    name: str
    make: Callable[[Work], Path]
    runtimes: tuple[str, ...] = ()
    changes_results: bool = False
    bodies_too: bool = False
    in_half: bool = False
    of_model: bool = False
    needs: str = ""
    seconds: float = 5.0

    def is_for(self, runtime: str) -> bool:
        """Whether the file may run in ``runtime``, which reads ONNX."""
        return runtime in (self.runtimes or _FOR_ALL) and not self.needs and self.name not in FORMATS


def _given(work: Work) -> Path:
    return work.source


def _primitives(work: Work) -> Path:
    return change_form(work.source, work.folder / "primitives.onnx", "primitives", inputs=work.rows).path


def _optimized(work: Work) -> Path:
    report = optimize(work.source, work.folder / "optimized.onnx", inputs=work.rows)
    if not report.in_blocks:
        raise NnormExportError(report.notices[0])
    return report.path


def _int8(target: str, method: str) -> Callable[[Work], Path]:
    def make(work: Work) -> Path:
        path = work.folder / f"int8-{target}-{method}.onnx"
        # The metric decides, and not the signal-to-noise ratio.
        return quantize(work.source, work.data, path, target=target, method=method, min_sqnr=None).path

    return make


def _of_model(file_name: str, **options: Any) -> Callable[[Work], Path]:
    def make(work: Work) -> Path:
        if work.original is None:
            raise NnormExportError("it is made of the PyTorch model, which was not given (model=, --model)")
        return work.original.export(work.folder / file_name, **options)

    return make


def _in_half(dtype: str) -> Callable[[Work], Path]:
    return _of_model(f"{dtype}.onnx", dtype=dtype, keep_io_types=True)


def _engine(file_name: str, *, rtx: bool) -> Callable[[Work], Path]:
    def make(work: Work) -> Path:
        return build_engine(work.source, work.folder / file_name, rtx=rtx).path

    return make


# In the order in which they are made: what takes longest, and what is rarely faster on processors, comes last.
VARIANTS = (
    Variant(name="given", make=_given, bodies_too=True),
    Variant(name="optimized", make=_optimized, runtimes=("onnxruntime",)),
    Variant(name="primitives", make=_primitives),
    Variant(name="int8", make=_int8("onnxruntime", "minmax"), runtimes=("onnxruntime",), changes_results=True),
    Variant(name="int8-entropy", make=_int8("onnxruntime", "entropy"), runtimes=("onnxruntime",), changes_results=True),
    Variant(name="int8-dynamic", make=_int8("onnxruntime", "dynamic"), runtimes=("onnxruntime",), changes_results=True),
    Variant(
        name="int8-openvino",
        make=_int8("openvino", "minmax"),
        runtimes=("openvino",),
        changes_results=True,
        needs="openvino",
    ),
    Variant(name="tensorrt", make=_engine("model.plan", rtx=False), needs="tensorrt", seconds=60),
    Variant(name="tensorrt-rtx", make=_engine("model.rtx.plan", rtx=True), needs="tensorrt-rtx", seconds=60),
    Variant(name="torchscript", make=_of_model("model.pt", target="torchscript"), of_model=True),
    Variant(name="aoti", make=_of_model("model.aoti.pt2", target="aoti"), of_model=True, seconds=40),
    Variant(name="float16", make=_in_half("fp16"), in_half=True, of_model=True, seconds=20),
    Variant(name="bfloat16", make=_in_half("bf16"), in_half=True, of_model=True, seconds=20),
)
NAMES = tuple(variant.name for variant in VARIANTS)


def ways_of(path: Path, variant: Variant, installed: Collection[str], *, kernels: bool) -> Iterator[Way]:
    """The runtimes that are to run the file of ``variant`` at ``path``.

    Args:
        installed: the runtimes that are installed.
        kernels: whether the kernels for processors are.
    """
    if (variant.needs and not variant.runtimes) or (variant.of_model and path.suffix != ".onnx"):
        yield Way(variant.needs or variant.name)
        return
    file = read(path, large_weights=False)
    has_functions = bool(file.proto.functions) or bool(file.normalizations)
    wanted = variant.runtimes or (_FOR_ALL if has_functions else (*_FOR_ALL, *_WITHOUT_FUNCTIONS))
    for runtime in wanted:
        if runtime in installed:
            yield Way(runtime)
            has_both = kernels and file.has_bodies and bool(file.normalizations)
            if runtime == DEFAULT_RUNTIME and has_both and variant.bodies_too:
                yield Way(runtime, {"kernels": False})


def installed_runtimes() -> tuple[list[str], list[str]]:
    """The runtimes that may run a candidate here, and those that are not installed."""
    present, missing = [], []
    for name in (*_FOR_ALL, *_WITHOUT_FUNCTIONS, "tensorrt", "tensorrt-rtx"):
        try:
            RUNTIMES[name].require()
            present.append(name)
        except RuntimeMissingError:
            missing.append(name)
    return present, missing
