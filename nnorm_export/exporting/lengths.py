"""The lengths of its dynamic axes at which a file is right, for what the file says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from nnorm_export.models.program_axes import range_of, shapes_of
from nnorm_export.names import terms_of

Place = tuple[int, int]  # (input, axis)
_OF_TORCH = 2  # the least length of an axis of which torch.export knows nothing: it takes 1 for an axis of its own kind
_NO_LIMIT = 2**62


def lengths_of(
    program: torch.export.ExportedProgram, dims: Mapping[Place, Any] | None, names: Mapping[Place, str]
) -> dict[str, tuple[int, int | None]]:
    """Name of an axis -> its range, for axes that have one, or that the trace made equal to others.

    Args:
        dims: what the user declared; None for a program that the user made, which says it all.
        names: of the axes. Others have the names of their symbols.
    """
    places = {
        (number, axis): length
        for number, shape in enumerate(shapes_of(program))
        for axis, length in enumerate(shape)
        if getattr(length, "free_symbols", None)
    }
    named = {symbol: str(symbol) for symbol in places.values() if isinstance(symbol, sympy.Symbol)}
    named |= {places[place]: name for place, name in names.items() if places.get(place) in named}
    # A length that is the sum of others has no range of its own, and theirs may begin at 0.
    terms = {term for name in names.values() for term in terms_of(name)}
    lengths = {}
    for symbol, name in named.items():
        if terms_of(name):
            continue
        axes = [place for place, length in places.items() if symbol in length.free_symbols]
        declared = [dim for dim in ((dims or {}).get(place) for place in axes) if not terms_of(dim)]
        low, high = range_of(program, symbol)
        if low == _OF_TORCH and all(getattr(dim, "min", 1) < low for dim in declared):
            low = 1
        if name in terms and all(int(getattr(dim, "min", 1)) == 0 for dim in declared):
            low = 0
        is_one = len(axes) > 1 and (dims is None or None in declared or len(set(map(str, declared))) > 1)
        most = int(high) if high < _NO_LIMIT else None
        if low > 1 or most is not None or is_one:
            lengths[name] = low, most
    return lengths
