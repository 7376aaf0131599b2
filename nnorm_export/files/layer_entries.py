"""The entries about normalizations that export() writes into a file's metadata, and that others may have changed."""

from __future__ import annotations

from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("node", "op_type", "path", "layer", "variant"), (str,)),
    **dict.fromkeys(("epsilon", "lambda_min", "lambda_max"), (int, float)),
    **dict.fromkeys(("channels", "num_groups"), (int,)),
    **dict.fromkeys(("normalized_shape", "lambda_quartiles"), (list,)),
}
_NEEDED = ("node", "op_type", "path")


def check_layers(layers: Any) -> list[dict[str, Any]]:
    """Returns ``layers`` if they are entries as export() writes them; raises ValueError if not."""
    if not isinstance(layers, list) or not all(isinstance(entry, dict) for entry in layers):
        raise ValueError("the layers are not a list of entries")
    for entry in layers:
        for name, kinds in _KINDS.items():
            value = entry.get(name)
            if (name in _NEEDED or value is not None) and not isinstance(value, kinds):
                raise ValueError(f"the {name} of a layer is {value!r}"[:200])
        quartiles = entry.get("lambda_quartiles")
        if len({value is None for value in (entry.get("lambda_min"), entry.get("lambda_max"), quartiles)}) > 1:
            raise ValueError("a layer has some of lambda_min, lambda_max and lambda_quartiles, and not all")
        if quartiles is not None and [isinstance(value, (int, float)) for value in quartiles] != [True] * 3:
            raise ValueError(f"the lambda_quartiles of a layer are {quartiles!r}"[:200])
        if not all(isinstance(length, int) for length in entry.get("normalized_shape") or ()):
            raise ValueError(f"the normalized_shape of a layer is {entry['normalized_shape']!r}"[:200])
    return layers
