"""download(): a model file from the Hugging Face Hub, with the files that belong to it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from nnorm_export.errors import InputError
from nnorm_export.files.onnx_file import companions
from nnorm_export.files.tuned import is_tuned, read_settings
from nnorm_export.hub import Address, fetch, fetch_folder, is_hub

_T = TypeVar("_T")


def download(address: str) -> Path:
    """Downloads a file of the Hugging Face Hub into its cache, and returns its path there.

    >>> path = nnorm_export.download("hf://owner/name@v1/model.onnx")
    >>> nnorm_export.optimize(path, "model.cpu.onnx")

    The external data of an ONNX file, and the file that ``model.tuned.json`` names, are downloaded from the same
    commit. Nothing is downloaded that the cache has. huggingface_hub reads HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.

    Args:
        address: ``hf://owner/name/path``, or with a branch, a tag or a commit ``hf://owner/name@revision/path``. A
            slash in a revision is written ``%2F``.

    Raises:
        ModelFileError: the address, the repository, the revision or the file does not exist; you may not read it; the
            network cannot be reached; or the file names others outside of its folder.
        RuntimeMissingError: huggingface_hub is not installed.
    """
    found = fetch(Address.of(str(address)))
    model = found.fetch(read_settings(found.path).file) if is_tuned(found.path) else found
    for data in companions(model.path):
        model.fetch(data)
    return found.path


def local(path: _T) -> _T | Path:
    """``path``, or where :func:`download` puts it if it is an address on the Hub."""
    return download(path) if isinstance(path, str) and is_hub(path) else path


def local_certificate(folder: _T) -> _T | Path:
    """As :func:`local`, for the folder of a certificate.

    Raises:
        InputError: as ModelFileError of :func:`download`.
    """
    if not (isinstance(folder, str) and is_hub(folder)):
        return folder
    return fetch_folder(Address.of(folder, InputError), InputError)
