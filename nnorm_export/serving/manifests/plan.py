"""The manifests for a model, made before anything is written, so that what cannot be written changes nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nnorm_export import library
from nnorm_export.errors import ExportError
from nnorm_export.files.onnx_file import companions
from nnorm_export.files.sha256 import file_sha256, plain_sha256
from nnorm_export.files.staging import check_output, parents_made, staged, writing
from nnorm_export.serving.arguments import as_path
from nnorm_export.serving.config import FILE, Config
from nnorm_export.serving.manifests.kserve import inference_service_of
from nnorm_export.serving.manifests.kubernetes import objects_of
from nnorm_export.serving.manifests.pod import Fields, Pod, memory_of
from nnorm_export.serving.manifests.request import MOUNT, THREADS, Manifests, object_name
from nnorm_export.serving.manifests.text import merged, yaml_of


@dataclass(frozen=True)
class Plan:
    """What will be written beside the repository, and into it.

    Attributes:
        texts: the manifests, path -> text.
        libraries: the files of kernels that pods need, to be copied beside config.pbtxt.
        config: names the library where the pods have it.
        notes: what the caller must do, and what was chosen.
    """

    texts: Mapping[Path, str]
    libraries: tuple[Path, ...]
    config: Config
    notes: list[str]

    def write(self) -> list[Path]:
        """Writes the manifests; returns their paths.

        Raises:
            ExportError: the folder cannot be written.
        """
        for path, text in self.texts.items():
            with writing(path), parents_made(path), staged(path) as new:
                new.write_bytes(text.encode())  # not write_text, which ends lines as this machine does
        return list(self.texts)


def planned(
    request: Manifests,
    path: Path,
    config: Config,
    repository: Path,
    *,
    max_batch_size: int | None,
    given: bool,
    measured: bool,
    overwrite: bool,
) -> Plan:
    """The manifests of pods that serve ``path``, with ``config``.

    Args:
        config: without batching, which a run decides.
        max_batch_size: what the caller says of it.
        given: whether the caller has named the library of kernels; otherwise it is shipped with the repository.
        measured: whether tune has measured the instances and the threads.

    Raises:
        ExportError: no name can be made of the model's, the library is not for Linux, or a file has changes that would
            be lost.
        RuntimeMissingError: PyYAML is not installed.
    """
    name, note = object_name(config.name)
    libraries, kernels = _shipped(config, given=given)
    config = replace(config, kernels=kernels)
    memory = request.memory or memory_of(_bytes_of(path), config.instances, config.backend)
    pod = Pod(
        name=name,
        model=config.name,
        backend=config.backend,
        device=config.device,
        cpus=config.instances * max(config.threads, 1),
        memory=memory,
        digest=_digest(
            file_sha256(path),
            config,
            config.max_queue_delay_microseconds,
            max_batch_size,
            *map(plain_sha256, libraries),
        ),
        request=request,
    )
    folder = _beside(repository) if request.folder is None else as_path(request.folder, "the manifests")
    _check_folder(folder)
    texts = {
        file: merged(file, yaml_of(objects), overwrite=overwrite)
        for file, objects in _files(request, pod, folder).items()
    }
    notes = [note, *_notes(pod, config, repository, measured=measured, shipped=bool(libraries))]
    return Plan(texts, libraries, config, list(filter(None, notes)))


def _beside(repository: Path) -> Path:
    has_name = repository.name not in ("", "..")  # "." has none
    return (repository if has_name else repository.resolve()).parent / "manifests"


def _check_folder(folder: Path) -> None:
    """Raises the ExportError of a folder that cannot be made or written, before the repository is."""
    nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    check_output(nearest / "manifest.yaml")


def _files(request: Manifests, pod: Pod, folder: Path) -> dict[Path, list[Fields]]:
    found: dict[Path, list[Fields]] = {}
    if request.kserve:
        found[folder / f"{pod.name}.kserve.yaml"] = [inference_service_of(pod)]
    if request.kubernetes:
        found[folder / f"{pod.name}.kubernetes.yaml"] = objects_of(pod)
    return found


def _shipped(config: Config, *, given: bool) -> tuple[tuple[Path, ...], str | None]:
    """The libraries to copy into the model's folder, and the path of the first in the pods."""
    if config.kernels is None or given:
        return (), config.kernels
    first = Path(config.kernels)
    if first.suffix != ".so":
        raise ExportError(
            f"{first}: pods run Linux, and these kernels are for this machine; name the path that the library for "
            "Linux has in the image (library_path=, --library), or none to serve the bodies"
        )
    beside = library.find_cuda_library() if config.device == "gpu" else None
    return (first, *([Path(beside)] if beside else [])), f"{MOUNT}/{config.name}/{first.name}"


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()


def _bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *companions(path)))


def _others(repository: Path, model: str) -> list[str]:
    """The other models in the repository."""
    return sorted(file.parent.name for file in repository.glob(f"*/{FILE}") if file.parent.name != model)


def _notes(pod: Pod, config: Config, repository: Path, *, measured: bool, shipped: bool) -> list[str]:
    memory = pod.memory if isinstance(pod.memory, str) else f"{pod.memory // 2**20} MiB"
    source = "which tune measured" if measured else f"by --instances and --threads ({THREADS} by default)"
    notes = [
        f"a pod asks for {pod.cpus} CPU{'s' * (pod.cpus > 1)}, {config.instances} × {max(config.threads, 1)} "
        f"(instances × threads), {source}, and {memory}",
        f"copy the content of {repository} to {pod.storage_uri}, from which the pods read it",
    ]
    if others := _others(repository, pod.model):
        notes.append(
            f"the pods load all models of the repository, {', '.join(others)} too, whose memory and CPUs are not in "
            "these numbers: give each model a repository of its own, or the pods more (--memory)"
        )
    if shipped:
        notes.append(f"the kernels are a part of the repository; the pods load {config.kernels}")
    elif config.kernels:
        notes.append(f"the image {pod.image} must have the kernels at {config.kernels}")
    if pod.device == "gpu":
        notes.append(
            "the autoscaler looks at the CPUs, whose load says little of a GPU: change it to a metric of yours"
        )
    return notes
