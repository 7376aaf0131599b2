"""strip(): the form ``custom`` of a file in the form ``portable``."""

from __future__ import annotations

from pathlib import Path

from nnorm_export.errors import ModelFileError
from nnorm_export.files.forms import strip_bodies
from nnorm_export.files.machine import OPTIMIZED
from nnorm_export.files.model_file import ModelFile, read
from nnorm_export.files.staging import save, staged
from nnorm_export.files.whole import load_whole
from nnorm_export.names import DOMAIN, METADATA_PREFIX

FORM = "custom"


def strip(path: str | Path, output: str | Path, *, external_data: bool | None = None) -> Path:
    """Writes ``path`` without the bodies of its normalizations: it then runs only where a kernel or plugin is loaded.

    TensorRT up to 10.6 prefers a body to a plugin, so ``trtexec`` needs such a file there;
    :func:`nnorm_export.build_engine` does by itself what is needed. Or prove with it that a kernel runs.

    Args:
        path: a file in the form ``portable``. Keep it: only that one runs everywhere.
        output: the file to write.
        external_data: True puts the weights into ``<output>.data``; None does where they exceed 2 GiB.

    Returns:
        ``output``.

    Raises:
        ModelFileError: ``path`` is not ONNX or has no bodies to strip, or ``output`` is the same file.
        ExportError: ``output`` cannot be written; it is what it was before.
    """
    source, target = read(Path(path).expanduser()), Path(output).expanduser()
    _refuse(source, target)
    model = load_whole(source.path)
    strip_bodies(model)
    model.metadata_props[METADATA_PREFIX + "form"] = FORM
    with staged(target) as staging:
        save(model, staging, external_data)
    return target


def _refuse(source: ModelFile, target: Path) -> None:
    if not source.normalizations:
        inlined = ", where the bodies are inlined" if source.form == "primitives" else ""
        raise ModelFileError(
            f"{source.path}: the file has no nnorm nodes, so there is nothing to strip (its form is {source.form!r}"
            f"{inlined}); export the form 'portable', or the form 'custom' itself"
        )
    if source.form == OPTIMIZED:
        raise ModelFileError(f"{source.path}: the file is optimised; give the portable file that it was made from")
    if not any(function.domain == DOMAIN for function in source.proto.functions):
        raise ModelFileError(f"{source.path}: its nnorm nodes have no bodies, so there is nothing to strip")
    if target.exists() and target.samefile(source.path):
        raise ModelFileError(
            f"{source.path}: the stripped file would take the place of the one that runs everywhere; give it another "
            f"name, {source.path.with_suffix('.custom.onnx')} for example"
        )
