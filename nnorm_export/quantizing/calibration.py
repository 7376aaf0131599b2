"""The range of every tensor that is to be quantized, by the calibrators of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from nnorm_export.errors import InputError, ModelFileError, first_line
from nnorm_export.process import redirected
from nnorm_export.quantizing.calibration_data import Feed

DYNAMIC = "dynamic"  # the method without calibration
METHODS = ("minmax", "entropy", "percentile", DYNAMIC)
_CALIBRATION_METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
Progress = Callable[[str, float], None]


def no_progress(phase: str, done: float) -> None:
    """A ``Progress`` that reports nothing."""


def ranges_of(
    path: Path,
    op_types: Collection[str],
    feeds: Sequence[Feed],
    method: str,
    percentile: float,
    progress: Progress,
) -> Any:
    """Runs ``path`` on ``feeds`` and returns the ranges of what nodes of ``op_types`` read and compute.

    Args:
        path: a file that ONNX Runtime runs without kernels; files are written beside it.
        method: one of ``METHODS``; ``percentile`` is that of the method of this name.

    Raises:
        ModelFileError: ONNX Runtime does not open the file.
        InputError: ONNX Runtime does not run the file on ``feeds``, or ``method`` finds no range of a tensor there.
    """
    from onnxruntime.quantization import CalibrationMethod, create_calibrator  # noqa: PLC0415 - an extra, slow

    # The calibrators print what they do.
    with redirected(lambda *_: None, "stdout"):
        try:
            calibrator = create_calibrator(
                path,
                list(op_types),
                augmented_model_path=str(path.with_name("augmented.onnx")),
                calibrate_method=getattr(CalibrationMethod, _CALIBRATION_METHODS[method]),
                use_external_data_format=True,
                extra_options={"percentile": percentile} if method == "percentile" else {},
            )
        except Exception as error:  # the classes of ONNX Runtime's exceptions are not public
            raise ModelFileError(f"ONNX Runtime cannot calibrate the file: {first_line(error)}") from error
        for done, feed in enumerate(feeds):
            progress("calibrating", done / len(feeds))
            # One batch at a time: a calibrator keeps every tensor of the batches that it is given together.
            try:
                calibrator.collect_data(_Reader(feed))
            except ValueError as error:  # a histogram has no infinite numbers, of a mask for example
                raise InputError(
                    f"the method {method} finds no range on the calibration data ({first_line(error)}); the method "
                    "minmax leaves the layers with infinite numbers in float"
                ) from error
            except Exception as error:  # the classes of ONNX Runtime's exceptions are not public
                raise InputError(f"the file does not run on the calibration data: {first_line(error)}") from error
        progress("calibrating", 1.0)
        found = calibrator.compute_data()
    return found


class _Reader:
    """One batch, as calibrators take it."""

    def __init__(self, feed: Feed) -> None:
        self._left = [feed]

    def get_next(self) -> Feed | None:
        return self._left.pop() if self._left else None
