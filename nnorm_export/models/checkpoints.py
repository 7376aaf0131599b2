"""Weights from a checkpoint. Code in the checkpoint does not run unless the user allows it."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nnorm_export.errors import CheckpointError
from nnorm_export.hub import Address, Fetched, fetch, is_hub
from nnorm_export.models.ambient import without_exit
from nnorm_export.models.safetensors import is_index, read_file, read_shards
from nnorm_export.models.state_dicts import find_state_dict, fit
from nnorm_export.process import without_warnings
from nnorm_export.reading import check_entries, damage_of, size_of
from nnorm_export.user_code import add_current_directory


@without_exit()
def load_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    key: str | None = None,
    prefix: str | None = None,
    trust_pickle: bool = False,
    factory: str = "",
) -> list[str]:
    """Loads the weights in ``path`` into ``model`` and returns notices on how they were made to fit.

    >>> nnorm_export.load_checkpoint(model, "model.safetensors")
    >>> frozen = nnorm_export.freeze(model)

    Args:
        model: the module to load into. An exception leaves it as it was.
        path: a file from ``torch.save``: a state dict, plain or under one of the usual keys, or (with
            ``trust_pickle``) a whole module; a ``.safetensors`` file; or the index of several,
            ``model.safetensors.index.json``. Or one of these on the Hugging Face Hub,
            ``hf://owner/name/model.safetensors``.
        key: the entry that holds the weights (``ema``, ``swa.model``), if not the usual one.
        prefix: the prefix of the model's keys in that entry (``ema_model``), "" for none; other keys are ignored. None
            finds the prefix under which all of the model's weights lie.
        trust_pickle: allow a pickle that runs code while it loads.
        factory: what has built the model, ``package.module:factory``, for messages; empty if it is not known.

    Raises:
        CheckpointError: the file cannot be read or holds no weights; the weights do not fit (the message lists the
            missing and unexpected keys and the shapes that differ); or several sets of weights fit, and they differ.
        RuntimeMissingError: ``path`` is on the Hub, and huggingface_hub is not installed.
    """
    fetched = fetch(Address.of(str(path), CheckpointError), CheckpointError) if is_hub(path) else None
    path = Path(path) if fetched is None else fetched.path
    add_current_directory()  # a trusted pickle may name the user's own classes
    contents = _read(path, fetched, trust_pickle=trust_pickle)
    state, found_at, others = find_state_dict(contents, path, key)
    notices = []
    if others:
        notices.append(
            f"{path.name}: weights taken from {found_at!r}; it also holds {', '.join(map(repr, others))} "
            "(choose with --checkpoint-key)"
        )
    return notices + fit(model, state, path, prefix, factory)


def _read(path: Path, fetched: Fetched | None, *, trust_pickle: bool) -> Any:
    """Returns the contents of a file from ``torch.save``, or the tensors of ``.safetensors`` files.

    Args:
        fetched: ``path``, if it is in the cache of the Hub.
    """
    if path.is_dir():
        raise CheckpointError(f"{path}: a folder; give a file in it")
    size_of(path, CheckpointError)
    _refuse_bomb(path)
    if path.suffix == ".safetensors":
        return read_file(path)
    if is_index(path):

        def find(shard: str) -> Path:
            file = path.with_name(shard)
            return file if fetched is None else fetched.fetch(file, CheckpointError).path

        return read_shards(path, find)
    try:
        with without_warnings(message=".*TorchScript archive"):  # _reason reports TorchScript archives
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:  # torch.load raises the errors of the pickle and of the archive unchanged
        raise CheckpointError(f"{path}: {damage_of(path) or _reason(error, trust_pickle)}") from error


def _refuse_bomb(path: Path) -> None:
    """Raises CheckpointError for an archive that would unpack to far more than its size."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                check_entries(path, archive.infolist(), CheckpointError)
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        # zipfile cannot read this archive (NotImplementedError: its version is unknown). torch.load reads the file
        # next, and its error says what is wrong.
        return


def _reason(error: Exception, trust_pickle: bool) -> str:
    text = str(error)
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error}); check its permissions"
    if "TorchScript" in text:
        return "a TorchScript archive, not a checkpoint; save the model's state_dict() with torch.save"
    # Bytes that are not a pickle raise this error too, with an unknown operand.
    if "WeightsUnpickler error" in text and "Unsupported operand" not in text:
        needed = re.search(r"GLOBAL ([\w.]+)", text)
        return (
            f"loading it would run code{f' ({needed.group(1)})' if needed else ''}, which weights alone do not need; "
            "save model.state_dict() without anything else, or, if you trust the file's author, give --trust-pickle"
        )
    if trust_pickle and isinstance(error, (ImportError, AttributeError)):
        return f"it holds an object whose class cannot be imported ({error}); run this where its module lies"
    if isinstance(error, RuntimeError) and "PytorchStreamReader" in text:
        return "the file is damaged or cut short; copy it again, or load an earlier checkpoint"
    return "not a checkpoint; give a file that torch.save wrote, or a .safetensors file"
