"""Example inputs of a model, from a shape (random, seeded) or from a NumPy file: what ``--input`` takes."""

from __future__ import annotations

import inspect
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nnorm_export.dtypes import DTYPES
from nnorm_export.errors import NnormExportError
from nnorm_export.models import arguments
from nnorm_export.models.arguments import to_numpy

EXAMPLES = "--input 8,3,32,32 or --input 'x:float32[8,3,32,32]' (random), --input data.npz or --input x:data.npy"
SEED = 0

_DTYPES = {**arguments.DTYPES, **{name: getattr(torch, name) for name in DTYPES}}
_FILES = (".npy", ".npz")
_NAMED = re.compile(r"(?:(?P<name>[A-Za-z_]\w*):)?(?P<rest>.+)", re.DOTALL)
_SHAPE = re.compile(r"(?P<dtype>[A-Za-z]\w*)?(?:\[(?P<bracketed>[\d,\sx]*)\]|(?P<bare>\d+(?:\s*[,x]\s*\d+)*))")


@dataclass
class Inputs:
    """A call of the model: positional and named values, and notices on how they came about."""

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def add(self, name: str | None, value: Tensor) -> None:
        if name is None:
            self.args.append(value)
        elif name in self.kwargs:
            raise NnormExportError(f"input {name} is given twice; leave out one --input")
        else:
            self.kwargs[name] = value


def read_inputs(specs: Sequence[str], model: nn.Module, *, aliases: Sequence[str] = ()) -> Inputs:
    """Returns the inputs that ``specs`` describe; those without a name are in the order of ``forward``.

    ``aliases`` are the names of the model's inputs in a file, in the order of ``forward``.

    Raises:
        NnormExportError: a spec that cannot be parsed, a file that cannot be read, or a name given twice.
    """
    parameters = forward_parameters(model)
    tensors = (*model.parameters(), *model.buffers())
    floating = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    return _read_all(specs, parameters, floating, dict(zip(aliases, parameters or (), strict=False)))


def read_inputs_of_file(
    specs: Sequence[str], dtypes_by_name: Mapping[str, np.dtype[Any]]
) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
    """Returns the arrays that ``specs`` describe, by the names of a file's inputs, and notices."""
    dtypes = (_DTYPES.get(dtype.name) for dtype in dtypes_by_name.values())
    floating = next((dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point), torch.float32)
    inputs = _read_all(specs, list(dtypes_by_name), floating, {})
    by_position = dict(zip(dtypes_by_name, inputs.args, strict=False))
    return {name: to_numpy(value) for name, value in (by_position | inputs.kwargs).items()}, inputs.notices


def _read_all(
    specs: Sequence[str], parameters: list[str] | None, floating: torch.dtype, own_names: dict[str, str]
) -> Inputs:
    """``own_names`` maps a file's names for the inputs to those of ``parameters``, which is None if any name goes."""
    inputs = Inputs()
    generator = torch.Generator().manual_seed(SEED)
    for spec in specs:
        name, file, rest = _split(spec)
        if file is None:
            inputs.add(name, _random(spec, rest, floating, generator))
        else:
            accepted = None if parameters is None else [*parameters, *own_names]
            _add_file(inputs, name, file, accepted, floating)
    for name in inputs.kwargs.keys() - set(parameters or inputs.kwargs):
        if name not in own_names:
            raise NnormExportError(f"the model has no input {name}; it takes {', '.join(parameters or ())}")
        inputs.add(own_names[name], inputs.kwargs.pop(name))
    return inputs


def forward_parameters(model: nn.Module) -> list[str] | None:
    """Returns the names of what ``forward`` takes; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _split(spec: str) -> tuple[str | None, Path | None, str]:
    """Returns the name, the file, and the text after the name."""
    if Path(spec).is_file():  # a path may have colons
        if Path(spec).suffix.lower() not in _FILES:
            raise _unparsable(spec, ", which is not a .npy or .npz file")
        return None, Path(spec), spec
    match = _NAMED.fullmatch(spec)
    if match is None:
        raise _unparsable(spec)
    name, rest = match["name"], match["rest"]
    is_file = Path(rest).suffix.lower() in _FILES or ".npz:" in rest.lower()
    return name, Path(rest) if is_file else None, rest


def _unparsable(spec: str, why: str = "") -> NnormExportError:
    return NnormExportError(f"cannot make an input of {spec!r}{why}; write {EXAMPLES}")


def _random(spec: str, text: str, floating: torch.dtype, generator: torch.Generator) -> Tensor:
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise _unparsable(spec)
    if match["dtype"] is not None and match["dtype"] not in _DTYPES:
        raise _unparsable(spec, f": unknown dtype {match['dtype']!r} (choose one of {', '.join(_DTYPES)})")
    dtype = _DTYPES[match["dtype"]] if match["dtype"] else floating
    sizes = match["bare"] if match["bracketed"] is None else match["bracketed"]
    try:
        shape = [int(size) for size in re.split("[,x]", sizes)] if sizes.strip() else []
    except ValueError:
        raise _unparsable(spec) from None
    if math.prod(shape) > 2**33:  # 32 GiB in float32
        raise _unparsable(spec, f": {math.prod(shape):,} elements are too many")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    # Integers are mostly indices, and 0 and 1 are valid indices nearly everywhere.
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _add_file(
    inputs: Inputs, name: str | None, path: Path, parameters: list[str] | None, floating: torch.dtype
) -> None:
    head, colon, key = str(path).rpartition(":")
    if colon and head.lower().endswith(".npz"):  # data.npz:key
        path = Path(head)
    else:
        key = name or ""  # by default the input's own name
    arrays = _read(path)
    if isinstance(arrays, dict) and key:
        if key not in arrays:
            raise NnormExportError(
                f"{path} has no array {key}; it has {', '.join(arrays)}. "
                f"Name one of them: --input {f'{name}:' if name else ''}{path}:{next(iter(arrays), 'array')}"
            )
        arrays = arrays[key]
    if not isinstance(arrays, dict):
        inputs.add(name, _tensor(arrays, path, name, floating, inputs.notices))
        return
    unnamed = all(re.fullmatch(r"arr_\d+", key) for key in arrays)  # np.savez without keywords
    wanted = [key for key in arrays if unnamed or parameters is None or key in parameters]
    if not wanted:
        raise NnormExportError(
            f"{path}: its arrays ({', '.join(arrays) or 'none'}) are none of the model's inputs "
            f"({', '.join(parameters or [])}); save them by these names: np.savez('data.npz', "
            f"{(parameters or ['x'])[0]}=array)"
        )
    if unused := [key for key in arrays if key not in wanted]:
        inputs.notices.append(f"{path.name}: not used, as the model has no such input: {', '.join(unused)}")
    for key in wanted:
        inputs.add(None if unnamed else key, _tensor(arrays[key], path, key, floating, inputs.notices))


def _read(path: Path) -> Any:
    """Returns an array, or arrays by name."""
    try:
        contents = np.load(path, allow_pickle=False)
        if isinstance(contents, np.ndarray):
            return contents
        with contents:
            return {key: contents[key] for key in contents.files}
    except FileNotFoundError:
        raise NnormExportError(f"{path}: no such file") from None
    except OSError as error:
        raise NnormExportError(
            f"{path}: cannot be read ({error.strerror or error}); check its permissions, or copy it again"
        ) from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise NnormExportError(
            f"{path}: not a NumPy file of plain arrays; write one with np.save or np.savez"
        ) from error


def _tensor(array: Any, path: Path, name: str | None, floating: torch.dtype, notices: list[str]) -> Tensor:
    try:
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError:
        raise NnormExportError(
            f"{path}: {name or 'its array'} is {array.dtype}, which PyTorch does not have; convert it with .astype"
        ) from None
    if tensor.is_floating_point() and tensor.dtype != floating:  # NumPy's default is float64, a model's rarely
        wanted = str(floating).removeprefix("torch.")
        notices.append(f"{path.name}: {name or 'its array'} converted from {array.dtype} to the model's {wanted}")
        tensor = tensor.to(floating)
    return tensor
