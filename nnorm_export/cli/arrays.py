"""The arrays of ``--input``, random (seeded) of a given shape or from a NumPy file, without PyTorch.

:mod:`nnorm_export.cli.inputs` converts the arrays to tensors. If ``forward`` takes a dict, paths name its entries:
``batch.ids`` is ``batch["ids"]``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nnorm_export.dtypes import DTYPES, FLOATS, Array
from nnorm_export.errors import NnormExportError
from nnorm_export.names import DTYPE_NAMES, dtype_spelled
from nnorm_export.reading import CutOffError, check_arrays, damage_of, is_regular

OPTION = "--input"
EXAMPLES = "--input 8,3,32,32 or --input 'x:float32[8,3,32,32]' (random), --input data.npz or --input x:data.npy"
SEED = 0

FLOAT32 = DTYPES["float32"].numpy

_DTYPES = {
    **{short: DTYPES[long].numpy for short, long in DTYPE_NAMES.items()},
    **{name: dtype.numpy for name, dtype in DTYPES.items()},
}
FLOATING = {dtype.name: dtype.numpy for dtype in FLOATS}
_READABLE = {*_DTYPES.values(), np.dtype(np.complex64), np.dtype(np.complex128)}  # the dtypes of NumPy that PyTorch has
_ENDINGS = (".npy", ".npz")
# The name is a path of keys. `data.npz:key` has no name.
_NAMED = re.compile(r"(?:(?P<name>(?![^:]*\.np[yz]:)[A-Za-z_]\w*(?:\.\w+)*):)?(?P<rest>.+)", re.DOTALL | re.IGNORECASE)
_ALL_ARRAYS = "*"  # data.npz:* is a dict of all arrays
_SHAPE = re.compile(r"(?P<dtype>[A-Za-z]\w*)?(?:\[(?P<bracketed>[\d,\sx]*)\]|(?P<bare>\d+(?:\s*[,x]\s*\d+)*))")


@dataclass
class Inputs:
    """A call of the model: positional and named values, and notices on how the values were read.

    ``option`` is the option that they were given with, for messages.
    """

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    option: str = OPTION

    def add(self, name: str | None, value: Array | dict[str, Array]) -> None:
        if name is None:
            self.args.append(value)
        elif name in self.kwargs:
            raise NnormExportError(f"input {name} is given twice; leave out one {self.option}")
        else:
            self.kwargs[name] = value

    def nest(self) -> None:
        """Makes ``{"batch": {"ids": value}}`` of ``{"batch.ids": value}``.

        The keys of a dict are sorted. Their order is the order of the file's inputs, which must not depend on the order
        of the options.
        """
        nested: dict[str, Any] = {}
        for path in sorted(self.kwargs, key=lambda path: (path.count("."), path)):
            *parents, last = path.split(".")
            place = nested
            for depth, part in enumerate(parents):
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    whole = ".".join(parents[: depth + 1])
                    raise NnormExportError(f"input {path} lies within {whole}, which is given as a tensor; give one")
            if last in place:
                raise NnormExportError(f"input {path} is given twice; leave out one {self.option}")
            place[last] = self.kwargs[path]
        order = dict.fromkeys(path.partition(".")[0] for path in self.kwargs)
        self.kwargs = {name: _sorted(nested[name]) for name in order}


def _sorted(value: Any) -> Any:
    return {key: _sorted(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


def paths_of(names: Sequence[str], parameters: Sequence[str]) -> dict[str, str]:
    """Name of an input in a file -> its path: an entry of a parameter that is a dict, or the parameter in its position.

    A parameter is a dict if several names begin with the parameter's name, as
    :func:`nnorm_export.models.arguments.leaf_names` writes names, and no name is the parameter's name itself.
    """
    owners: dict[str, list[str]] = {}
    for name in names:
        dicts = (p for p in parameters if p not in names and name.startswith(f"{p}_"))
        owner = name if name in parameters else max(dicts, key=len, default=None)
        if owner is not None:
            owners.setdefault(owner, []).append(name)
    if sum(map(len, owners.values())) < len(names) or not any(len(owned) > 1 for owned in owners.values()):
        return dict(zip(names, parameters, strict=False))
    return {
        name: owner if name == owner else f"{owner}.{name.removeprefix(f'{owner}_')}"
        for owner, owned in owners.items()
        for name in owned
    }


def read_inputs_of_file(
    specs: Sequence[str], dtypes_by_name: Mapping[str, np.dtype[Any]], option: str = OPTION
) -> tuple[dict[str, Array], list[str]]:
    """Returns the arrays that ``specs`` of ``option`` describe, by the names of a file's inputs, and notices."""
    floating = next((dtype for dtype in dtypes_by_name.values() if dtype in FLOATING.values()), FLOAT32)
    inputs = read_all(specs, list(dtypes_by_name), floating, option=option)  # names in a file may have dots
    by_position = dict(zip(dtypes_by_name, inputs.args, strict=False))
    values = by_position | inputs.kwargs
    if nested := [name for name, value in values.items() if isinstance(value, dict)]:
        raise NnormExportError(f"input {nested[0]}: a file takes tensors, and :* is a dict of them; name one array")
    return values, inputs.notices


def read_all(
    specs: Sequence[str],
    parameters: list[str] | None,
    floating: np.dtype[Any],
    own_names: dict[str, str] | None = None,
    *,
    option: str = OPTION,
) -> Inputs:
    """The inputs, before dicts are nested.

    Args:
        specs: the values of ``option``.
        parameters: the names of the parameters; None allows any name.
        floating: the dtype of floating-point inputs whose spec names no dtype.
        own_names: name of an input in a file -> path of a parameter; None if the inputs are not dicts.
    """
    inputs = Inputs(option=option)
    generator = np.random.default_rng(SEED)
    for spec in specs:
        name, file, rest = _split(spec, option)
        if file is None:
            inputs.add(name, _random(spec, rest, floating, generator, option))
        else:
            accepted = None if parameters is None else list(dict.fromkeys((*parameters, *(own_names or ()))))
            _add_file(inputs, name, file, accepted, floating, takes_dicts=own_names is not None)
    for name in inputs.kwargs.keys() - set(parameters or inputs.kwargs):
        if own_names is not None and name in own_names:
            inputs.add(own_names[name], inputs.kwargs.pop(name))
        elif own_names is None or name.partition(".")[0] not in (parameters or ()):
            raise NnormExportError(f"the model has no input {name}; it takes {', '.join(parameters or ())}")
    return inputs


def _split(spec: str, option: str) -> tuple[str | None, Path | None, str]:
    """Returns the name, the file, and the text after the name."""
    if is_regular(spec):  # the path of a file may have colons
        if Path(spec).suffix.lower() not in _ENDINGS:
            raise _unparsable(spec, option, ", which is not a .npy or .npz file")
        return None, Path(spec), spec
    match = _NAMED.fullmatch(spec)
    if match is None:
        raise _unparsable(spec, option)
    name, rest = match["name"], match["rest"]
    is_file = Path(rest).suffix.lower() in _ENDINGS or ".npz:" in rest.lower()
    return name, Path(rest) if is_file else None, rest


def file_of(spec: str, option: str = OPTION) -> Path | None:
    """The file that ``spec`` names, without a key; None for random values."""
    file = _split(spec, option)[1]
    return None if file is None else without_key(file)[0]


def without_key(path: Path) -> tuple[Path, str]:
    """``data.npz:key`` -> ``data.npz`` and ``key``; the key is empty if there is none."""
    head, colon, key = str(path).rpartition(":")
    return (Path(head), key) if colon and head.lower().endswith(".npz") and not is_regular(path) else (path, "")


def _unparsable(spec: str, option: str, why: str = "") -> NnormExportError:
    return NnormExportError(f"cannot make an input of {spec!r}{why}; write {EXAMPLES.replace(OPTION, option)}")


def _random(spec: str, text: str, floating: np.dtype[Any], generator: np.random.Generator, option: str) -> Array:
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise _unparsable(spec, option)
    name = match["dtype"] and dtype_spelled(match["dtype"])
    if name and name not in _DTYPES:
        raise _unparsable(spec, option, f": unknown dtype {name!r} (choose one of {', '.join(_DTYPES)})")
    dtype = _DTYPES[name] if name else floating
    sizes = match["bare"] if match["bracketed"] is None else match["bracketed"]
    try:
        shape = [int(size) for size in re.split("[,x]", sizes)] if sizes.strip() else []
    except ValueError:
        raise _unparsable(spec, option) from None
    if math.prod(shape) > 2**33:  # 32 GiB in float32
        raise _unparsable(spec, option, f": {math.prod(shape):,} elements are too many")
    if dtype in FLOATING.values():
        return generator.standard_normal(shape, np.float32).astype(dtype)
    # Integers are mostly indices, and 0 and 1 are valid indices nearly everywhere.
    return generator.integers(0, 2, shape).astype(dtype)


def _add_file(
    inputs: Inputs,
    name: str | None,
    path: Path,
    parameters: list[str] | None,
    floating: np.dtype[Any],
    *,
    takes_dicts: bool,
) -> None:
    path, key = without_key(path)
    key = key or name or ""  # by default the name of the input
    arrays = _read(path)
    if key == _ALL_ARRAYS:
        if not isinstance(arrays, dict):
            raise NnormExportError(
                f"{path}: one array, and {path}:* is a dict of the arrays of a .npz file; leave out :*"
            )
        values = {key: _array(arrays[key], path, key, floating, inputs.notices) for key in sorted(arrays)}
        inputs.add(name, values)
        return
    if isinstance(arrays, dict) and key:
        if key not in arrays:
            raise NnormExportError(
                f"{path} has no array {key}; it has {', '.join(arrays)}. "
                f"Name one of them: {inputs.option} {f'{name}:' if name else ''}{path}:{next(iter(arrays), 'array')}"
            )
        arrays = arrays[key]
    if not isinstance(arrays, dict):
        inputs.add(name, _array(arrays, path, name, floating, inputs.notices))
        return
    unnamed = all(re.fullmatch(r"arr_\d+", key) for key in arrays)  # names of np.savez without keywords
    accepted = None if unnamed or parameters is None else {*parameters}
    wanted = [key for key in arrays if accepted is None or {key, key.partition(".")[0]} & accepted]
    if not wanted:
        first = (parameters or ["x"])[0]
        of_dict = f", or, if {first} is a dict of them, give {inputs.option} {first}:{path}:*" if takes_dicts else ""
        raise NnormExportError(
            f"{path}: its arrays ({', '.join(arrays) or 'none'}) are none of the model's inputs "
            f"({', '.join(parameters or [])}); save them by these names: np.savez('data.npz', {first}=array){of_dict}"
        )
    if unused := [key for key in arrays if key not in wanted]:
        inputs.notices.append(f"{path.name}: not used, as the model has no such input: {', '.join(unused)}")
    for key in wanted:
        inputs.add(None if unnamed else key, _array(arrays[key], path, key, floating, inputs.notices))


def _read(path: Path) -> Any:
    """Returns an array, or arrays by name."""
    try:
        check_arrays(path, NnormExportError)
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
    except NnormExportError:
        raise
    except Exception as error:  # NumPy reads a header as Python text: a damaged one raises exceptions of many classes
        reason = damage_of(path) or "not a NumPy file of plain arrays; write one with np.save or np.savez"
        if isinstance(error, CutOffError):
            reason = f"damaged or cut off: {error}; copy it again, or write it again"
        raise NnormExportError(f"{path}: {reason}") from error


def read_arrays(spec: str) -> Array | dict[str, Array]:
    """The array of data.npy or data.npz:key, or those of data.npz by name; one array alone needs no name.

    Raises:
        NnormExportError: the file cannot be read, or does not have the array.
    """
    path, key = without_key(Path(spec))
    arrays = _read(path)
    if not isinstance(arrays, dict):
        array: Array = arrays
        return array
    if not key:
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays
    if key not in arrays:
        raise NnormExportError(f"{path} has no array {key}; it has {', '.join(arrays)}. Name one of them")
    found: Array = arrays[key]
    return found


def _array(given: Any, path: Path, name: str | None, floating: np.dtype[Any], notices: list[str]) -> Array:
    dtype = given.dtype.newbyteorder("=")
    if dtype not in _READABLE:
        raise NnormExportError(
            f"{path}: {name or 'its array'} is {given.dtype}, which PyTorch does not have; convert it with .astype"
        )
    array: Array = np.ascontiguousarray(given, dtype).reshape(given.shape)  # it adds an axis to a scalar
    if dtype in FLOATING.values() and dtype != floating:  # NumPy's default is float64, which few models take
        notices.append(f"{path.name}: {name or 'its array'} converted from {dtype} to the model's {floating}")
        array = array.astype(floating)
    return array
