"""Writing what won: the file and, beside it, ``model.tuned.json``."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir as ir

from nnorm_export.errors import ExportError
from nnorm_export.files.onnx_file import companions, read_with_weights
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.staging import check_output, save, staged, writing
from nnorm_export.files.tuned import ENDING, Tuned, is_tuned

_ENDINGS = (".onnx", ".aoti.pt2", ".rtx.plan", ".plan", ".pt")


def settings_path(source: Path | None, output: str | Path | None) -> Path:
    """Where the settings are written: ``output``, or beside the given file.

    Raises:
        ExportError: the place is not known, or its name does not end as settings do.
    """
    if output is None:
        if source is None:
            raise ExportError(f"a model in memory has no folder; name the settings to write: output='model{ENDING}'")
        return source.with_name(f"{source.name.removesuffix('.onnx')}{ENDING}")
    path = Path(output).expanduser()
    if not is_tuned(path):
        raise ExportError(f"{path}: settings are called NAME{ENDING}, by which load and serve-repo know them")
    check_output(path)
    return path


def file_beside(settings: Path, made: Path) -> Path:
    """The name of the winner's file: ``model.tuned.onnx`` beside ``model.tuned.json``."""
    ending = next((ending for ending in _ENDINGS if made.name.endswith(ending)), _ENDINGS[0])
    return settings.with_name(f"{settings.name.removesuffix('.json')}{ending}")


def refuse_source(settings: Path, source: Path) -> None:
    """Raises ExportError if the winner's file may be ``source``, or hold the data of its weights."""
    needed = {each.resolve() for each in (source, *companions(source))}
    stem = settings.name.removesuffix(".json")
    for ending in _ENDINGS:
        if (file := settings.with_name(f"{stem}{ending}")).resolve() in needed:
            raise ExportError(
                f"the winner may become {file}, which is the file to tune; name other settings (output=, -o)"
            )


def write_settings(tuned: Tuned, made: Path) -> Tuned:
    """Copies ``made`` to ``tuned.file``, writes the settings, and returns them with the digest of the copy.

    Raises:
        ExportError: one of the files cannot be written; an older file that does not fit older settings is refused by
            ``load``.
    """
    with staged(tuned.file) as staging, writing(tuned.file):
        if companions(made):
            save(ir.from_proto(read_with_weights(made)), staging, external_data=True)
        else:
            shutil.copyfile(made, staging)
    from_copy = Tuned(**{**vars(tuned), "sha256": file_sha256(tuned.file)})
    with staged(tuned.path) as staging, writing(tuned.path):
        staging.write_text(from_copy.text, encoding="utf-8")
    return from_copy
