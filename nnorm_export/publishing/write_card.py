"""write_card(): a folder with a model and its card, which huggingface_hub uploads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nnorm_export.errors import ExportError, ModelFileError, NnormExportError
from nnorm_export.files.copies import copy_of
from nnorm_export.files.formats import ONNX
from nnorm_export.files.inspection import describe
from nnorm_export.files.published import local, local_certificate
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.files.staging import staged_folder, writing
from nnorm_export.files.tuned import Tuned
from nnorm_export.parity.certificates.signatures import SIGNATURE
from nnorm_export.parity.certificates.write import PARTS
from nnorm_export.parity.report.plots import import_matplotlib, plot_lambdas
from nnorm_export.publishing.card import PLOT, Contents, card_text
from nnorm_export.publishing.evidence import Certified, certified, measured
from nnorm_export.publishing.metadata import Metadata, lacking_of
from nnorm_export.reading import read_bytes
from nnorm_export.reports import Report

README = "README.md"
_CARD_BYTES = 2**24
_END = re.compile(r"\n<!-- nnorm_export\.card (\{.*\}) -->\n\Z")


@dataclass(frozen=True)
class Card(Report):
    """A folder that :func:`write_card` wrote.

    Attributes:
        folder: for ``hf upload owner/name FOLDER``.
        files: name of each file -> (bytes, SHA-256), README.md excepted.
        text: of README.md.
        notes: what the card does not say, and what the folder makes public.
    """

    folder: Path
    files: dict[str, tuple[int, str]]
    text: str
    notes: list[str] = field(default_factory=list)


def write_card(
    path: str | Path,
    output: str | Path,
    repository: str,
    *,
    certificate: str | Path | None = None,
    tuned: str | Path | None = None,
    introduction: str = "",
    license_id: str = "",
    pipeline_tag: str = "",
    base_model: Sequence[str] = (),
    datasets: Sequence[str] = (),
    evaluated_on: str = "",
    copy_certificate: bool = True,
    plot: bool = True,
) -> Card:
    """Writes a folder for the Hugging Face Hub: the ONNX file ``path`` with a model card, README.md.

    >>> nnorm_export.write_card("model.onnx", "card", "owner/name", certificate="model.parity", license_id="mit")
    >>> huggingface_hub.upload_folder(repo_id="owner/name", folder_path="card")

    The card states the parity that a certificate has and the speed that settings have, and says so if there is none.
    After an error, the folder is as it was. An older folder of a card is replaced if its files are unchanged.

    Args:
        path: an ONNX file; its external data are copied too.
        output: the folder.
        repository: ``owner/name``, for the lines of the card that load the file.
        certificate: of the file, which :func:`nnorm_export.verify` wrote.
        tuned: settings that :func:`nnorm_export.tune` wrote for the file. They and their file are copied.
        introduction: Markdown for the beginning of the card.
        license_id: an identifier of the Hub's list; by default the text ``license`` in the file's metadata.
        pipeline_tag: the task, ``image-classification`` for example.
        base_model: the names on the Hub of the models that this one was made of.
        datasets: the names on the Hub of the data that it was trained on.
        evaluated_on: the name of the data set that the metric in the certificate is of. With it and ``pipeline_tag``,
            the Hub shows the metric.
        copy_certificate: copy the certificate, by which others can check the file. It has the inputs that the file was
            compared on.
        plot: draw λ, by the extra ``plot``.

    Raises:
        ModelFileError: ``path`` is not an ONNX file; ``tuned`` is of another file, or damaged.
        ParityError: ``certificate`` is of another file.
        InputError: the certificate is missing, or it is damaged.
        RuntimeMissingError: matplotlib is not installed.
        ExportError: a name is not one for the Hub; ``output`` holds something else, or cannot be written.
    """
    path, output = Path(local(path)).expanduser(), Path(output).expanduser()
    given = Metadata(
        repository=repository,
        license=license_id,
        pipeline_tag=pipeline_tag,
        base_model=base_model,
        datasets=datasets,
        evaluated_on=evaluated_on,
    )
    given.check()
    check_folder(output)
    description = describe(path)
    if description.format != ONNX:
        raise ModelFileError(f"{path}: a card is of an ONNX file, and this is one of {description.format}")
    if not license_id and _is_license(noted := description.metadata.get("license", "")):
        given = replace(given, license=noted)
    # An absolute path, because "." has no name for the copy.
    found = None if certificate is None else certified(path, Path(os.path.abspath(local_certificate(certificate))))
    settings = None if tuned is None else measured(path, Path(local(tuned)))
    plot = plot and bool(description.layers)
    if plot:
        import_matplotlib()
    folder = _Folder(path, given, introduction, found, settings, copy_certificate, plot)
    with staged_folder(output) as staging, writing(output, shutil.Error):
        contents = folder.fill(staging)
        text = card_text(contents)
        # Bytes, because Windows would write other ends of lines, with another SHA-256 than _end() has.
        (staging / README).write_bytes((text + _end(text, contents.files)).encode())
    return Card(output, dict(contents.files), text, folder.notes(given))


def _is_license(text: str) -> bool:
    try:
        Metadata(repository="owner/name", license=text).check()
    except ExportError:
        return False
    return True


@dataclass(frozen=True)
class _Folder:
    path: Path
    given: Metadata
    introduction: str
    certified: Certified | None
    tuned: Tuned | None
    copy_certificate: bool
    plot: bool

    def fill(self, folder: Path) -> Contents:
        """Copies the files into ``folder``, and returns what the card says of the copies."""
        sha256 = file_sha256(self.path)
        copy = copy_of(self.path, folder)
        if file_sha256(copy) != sha256:
            raise ModelFileError(f"{self.path}: it was replaced while it was copied; try again")
        taken = {file.relative_to(folder).parts[0] for file in folder.rglob("*")}
        if self.tuned is not None and self.tuned.file.name != self.path.name:
            taken |= _copied_beside(self.tuned.file, folder, taken)
        if self.tuned is not None:
            _refuse_taken(self.tuned.path.name, taken)
            shutil.copyfile(self.tuned.path, folder / self.tuned.path.name)
            taken.add(self.tuned.path.name)
        certificate = "" if self.certified is None or not self.copy_certificate else self.certified.folder.name
        if self.certified is not None and certificate:
            _refuse_taken(certificate, taken)
            self._copy_certificate(self.certified.folder, folder / certificate)
            taken.add(certificate)
        description = describe(copy)
        for name in (README, PLOT):
            _refuse_taken(name, taken)
        if self.plot:
            plot_lambdas(description, folder / PLOT)
        return Contents(
            given=self.given,
            description=description,
            model=copy.name,
            files=_listed(folder),
            certified=self.certified,
            certificate=certificate,
            tuned=self.tuned,
            settings="" if self.tuned is None else self.tuned.path.name,
            introduction=self.introduction,
            has_plot=self.plot,
        )

    def _copy_certificate(self, source: Path, target: Path) -> None:
        target.mkdir()
        for name in sorted(PARTS.intersection(os.listdir(source))):
            if name == SIGNATURE and not self.is_beside:
                continue
            copy = shutil.copytree if (source / name).is_dir() else shutil.copyfile
            copy(source / name, target / name)

    @property
    def is_beside(self) -> bool:
        """Whether the certificate lies beside the model, as in the folder: a signature covers where they lie."""
        return self.certified is not None and self.certified.folder.absolute().parent == self.path.absolute().parent

    def notes(self, given: Metadata) -> list[str]:
        found = self.certified
        notes = [] if given.license else ["the card names no license; give one (license_id=, --license)"]
        if found is None:
            return [*notes, "the card has no parity; record a certificate: nnorm-export verify --record"]
        if self.copy_certificate:
            notes.append(
                f"{found.folder.name} in the folder has the inputs that the file was compared on, which become public; "
                "leave them out with copy_certificate=False (--no-certificate-copy)"
            )
            if (found.folder / SIGNATURE).exists() and not self.is_beside:
                notes.append("the signature was left out: it holds for a certificate in another place than the model's")
        if lacking := lacking_of(given, found.metric):
            notes.append(
                f"the Hub shows a metric with its task and data set alone; give {' and '.join(lacking)} "
                "(--pipeline-tag, --evaluated-on)"
            )
        return notes


def _copied_beside(file: Path, folder: Path, taken: set[str]) -> set[str]:
    """Copies ``file`` with its external data into ``folder``, and returns the names in it."""
    with_data = folder / f".{hashlib.sha256(file.name.encode()).hexdigest()[:8]}"
    with_data.mkdir()
    copy_of(file, with_data)
    names = set(os.listdir(with_data))
    for name in names:
        _refuse_taken(name, taken)
        shutil.move(with_data / name, folder / name)
    with_data.rmdir()
    return names


def _refuse_taken(name: str, taken: set[str]) -> None:
    if name in taken:
        raise ExportError(f"two files for the folder are called {name}; rename one of them")


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> (bytes, SHA-256) of all files in ``folder``."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): (file.stat().st_size, _sha256(file)) for file in files}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _end(text: str, files: Mapping[str, tuple[int, str]]) -> str:
    """A comment with the digests of the files, by which :func:`check_folder` finds out whether they are unchanged."""
    entries = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "files": files}
    content = json.dumps(entries).replace("-", "\\u002d").replace(">", "\\u003e").replace("<", "\\u003c")
    return f"\n<!-- nnorm_export.card {content} -->\n"


def check_folder(output: Path) -> None:
    """Raises an ExportError if ``output`` holds anything other than a folder as :func:`write_card` left it."""
    if not os.path.lexists(output) or (output.is_dir() and not os.listdir(output)):
        return
    if not output.is_dir() or not _is_unchanged(output):
        raise ExportError(
            f"{output}: it holds something that nnorm-export card did not write, or that was changed since, and is not "
            "overwritten; name another folder. A text of your own goes into the card by introduction= (--introduction)"
        )


def _is_unchanged(folder: Path) -> bool:
    try:
        card = read_bytes(folder / README, _CARD_BYTES, ExportError).decode()
        found = _END.search(card)
        entries = json.loads(found[1]) if found else {}
        text = card[: found.start()] if found else ""
        names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()}
        if entries.get("sha256") != hashlib.sha256(text.encode()).hexdigest():
            return False
        if names != {README, *entries["files"]} or any(file.is_symlink() for file in folder.rglob("*")):
            return False
        return all(_sha256(folder / name) == digest for name, (_, digest) in entries["files"].items())
    except (NnormExportError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
