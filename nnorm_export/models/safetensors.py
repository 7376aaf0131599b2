"""Weights in safetensors files: one file, or shards that ``model.safetensors.index.json`` lists."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nnorm_export.errors import CheckpointError
from nnorm_export.reading import JSON_BYTES, damage_of, parse_json, read_bytes, size_of

INDEX = ".safetensors.index.json"


def is_index(path: Path) -> bool:
    return path.name.endswith(INDEX)


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors in ``path``, those too that ``save_model`` left out because they share their memory with others.

    Raises:
        CheckpointError: safetensors is not installed, or ``path`` is not such a file.
    """
    try:
        safetensors = importlib.import_module("safetensors")
        importlib.import_module("safetensors.torch")
    except ImportError:
        raise CheckpointError(f"{path}: reading it needs the safetensors package: pip install safetensors") from None
    size_of(path, CheckpointError)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = file.keys()
            state: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
            metadata: Mapping[str, str] = file.metadata() or {}
    except (safetensors.SafetensorError, OSError, RuntimeError, ValueError) as error:
        reason = damage_of(path) or f"not a safetensors file ({error}); write one with safetensors.torch.save_file"
        raise CheckpointError(f"{path}: {reason}") from error
    # save_model notes the name of a tensor that it left out, and the name under which the same memory was saved.
    shared = {name: state[kept] for name, kept in metadata.items() if kept in state and name not in state}
    return state | shared


def read_shards(index: Path, find: Callable[[str], Path]) -> dict[str, Tensor]:
    """The tensors that ``index`` lists, from the files beside it.

    Args:
        find: returns the path of a shard, given its name.

    Raises:
        CheckpointError: ``index`` is damaged or names files elsewhere; or a shard is missing, damaged, or has other
            tensors than ``index`` says.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for key, shard in _weight_map(index).items():
        names[shard].append(key)
    state: dict[str, Tensor] = {}
    for shard, keys in names.items():
        found = read_file(find(shard))
        if missing := sorted(set(keys) - set(found)):
            raise CheckpointError(
                f"{index}: {shard} lacks {_some(missing)}; the index and the shards are of different models: copy all "
                "of them again"
            )
        state |= {key: found[key] for key in keys}
    return state


def _weight_map(index: Path) -> dict[str, str]:
    """Name of the tensor -> name of its file, which is in the folder of ``index``."""
    try:
        entries: Any = parse_json(read_bytes(index, JSON_BYTES, CheckpointError))["weight_map"]
        names = {key: shard for key, shard in entries.items() if isinstance(shard, str)}
        is_whole = len(names) == len(entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, repr(error)) from error
    if not is_whole or not names:
        raise _damaged(index, "weight_map does not map names of tensors to names of files")
    for shard in names.values():
        if shard in ("", ".", "..") or set(shard) & {"/", "\\", "\0", ":"}:
            raise CheckpointError(
                f"{index}: it names the file {shard!r}, and shards lie beside their index; save it again"
            )
    return names


def _damaged(index: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{index}: not an index of safetensors files ({reason}); copy it again, or save it again")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
