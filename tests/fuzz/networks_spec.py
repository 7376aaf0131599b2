"""A random network from one integer: a small tree of steps, which can be printed, stored and shrunk.

A step has a kind and a seed. What it is in detail follows from its seed and from the tensor that reaches it, so that a
network remains a network when any of its steps is taken out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from fuzz.networks_layers import KINDS, NORMS, Random

EXTENTS = (1, 2, 3, 4, 5, 5, 7, 7, 8, 9, 11)
DTYPES = ("float32",) * 16 + ("float64", "float16")
OPSETS = (None,) * 8 + (18, 19, 20, 21, 22, 23)


@dataclass(frozen=True)
class Step:
    """One layer, or a composition of layers.

    Attributes:
        kind: a name in ``KINDS``, or ``residual``, ``concat``, ``branches``, ``shared``, ``split`` or ``input``.
        parts: the steps within a composition.
    """

    kind: str
    seed: int
    parts: tuple[tuple[Step, ...], ...] = ()

    def __str__(self) -> str:
        inside = " | ".join(" ".join(map(str, part)) for part in self.parts)
        return f"{self.kind}:{self.seed}" + (f"({inside})" if self.parts else "")


@dataclass(frozen=True)
class Spec:
    """A network, its inputs and how it is exported.

    Attributes:
        shape: the shape of the first input, with the batch.
        other_batch: a second length of the batch that files with a dynamic batch are run with.
        inner_outputs: indices of the steps whose results are outputs too.
        outputs: the structure of the outputs: ``tensor``, ``tuple``, ``dict`` or ``nested``.
        axes: what is dynamic: ``batch``, ``fixed`` or ``last``, the batch and the last axis.
    """

    seed: int
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    other_batch: int = 3
    inner_outputs: tuple[int, ...] = ()
    outputs: str = "tensor"
    axes: str = "batch"
    dtype: str = "float32"
    opset: int | None = None
    data: str = "normal"

    def __str__(self) -> str:
        steps = " ".join(map(str, self.steps))
        rest = {k: v for k, v in vars(self).items() if k not in ("seed", "shape", "steps") and v != _DEFAULTS[k]}
        return f"seed {self.seed}: {list(self.shape)} {steps} {rest or ''}".strip()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        fields = json.loads(text)
        fields |= {name: tuple(fields[name]) for name in ("shape", "inner_outputs")}
        return cls(**{**fields, "steps": _steps(fields["steps"])})


_DEFAULTS = {name: field.default for name, field in Spec.__dataclass_fields__.items()}


def _steps(entries: list[dict[str, Any]]) -> tuple[Step, ...]:
    return tuple(Step(e["kind"], e["seed"], tuple(_steps(part) for part in e["parts"])) for e in entries)


def random_spec(seed: int) -> Spec:
    """The network of ``seed``."""
    rng = random.Random(seed)
    rank = rng.choice([2, 3, 3, 4, 4, 4, 4, 5])
    batch, axes = rng.choice([1, 2, 3, 5]), rng.choice(["batch"] * 6 + ["fixed", "last"])
    batch = max(batch, 2 if axes == "last" else 1)  # torch.export does not make an axis of extent 1 dynamic on request
    extents = {2: [], 3: [rng.choice(EXTENTS)], 4: rng.choices(EXTENTS, k=2), 5: rng.choices(EXTENTS[:6], k=3)}[rank]
    channels = rng.choice([1, 2, 3, 3, 4, 5, 6, 8, 16])
    if rank == 4 and rng.random() < 0.03:  # rows of a norm with more than 16,000 elements
        batch, channels, extents = 2, rng.choice([1, 2, 4]), rng.choice([[128, 128], [160, 128]])
    steps = _chain(rng, rng.choice([1, 2, 2, 3, 3, 3, 4, 4, 5]), depth=2)
    if not any(step.kind in NORMS for step in _walk(steps)):
        steps = (*steps, _leaf(rng, rng.choice(NORMS)))
    return Spec(
        seed,
        (batch, channels, *extents),
        steps,
        other_batch=rng.choice([b for b in (1, 2, 3, 4) if b != batch]),
        inner_outputs=tuple(sorted(rng.sample(range(len(steps)), k=min(len(steps) - 1, rng.choice([0, 0, 1, 2]))))),
        outputs=rng.choice(["tensor", "tensor", "tuple", "dict", "nested"]),
        axes=axes,
        dtype=rng.choice(DTYPES),
        opset=rng.choice(OPSETS),
        data=rng.choice(["normal", "normal", "normal", "skewed", "zeros", "shifted", "far"]),
    )


def _leaf(rng: Random, kind: str) -> Step:
    return Step(kind, rng.randrange(10**6))


def _chain(rng: Random, length: int, depth: int) -> tuple[Step, ...]:
    kinds, weights = zip(*((kind, weight) for kind, (weight, _) in KINDS.items()), strict=True)
    steps = []
    for _ in range(length):
        if depth and rng.random() < 0.18:
            kind = rng.choice(["residual", "residual", "residual", "concat", "branches", "shared", "split"])
            count = 2 if kind in ("branches", "split") else 1
            parts = tuple(_chain(rng, rng.choice([1, 1, 2, 2, 3]), depth - 1) for _ in range(count))
            steps.append(Step(kind, rng.randrange(10**6), parts))
        elif depth == 2 and rng.random() < 0.2:
            steps.append(_leaf(rng, "input"))
        else:
            steps.append(_leaf(rng, rng.choices(kinds, weights)[0]))
    return tuple(steps)


def _walk(steps: tuple[Step, ...]) -> Iterator[Step]:
    for step in steps:
        yield step
        for part in step.parts:
            yield from _walk(part)


def smaller(spec: Spec) -> Iterator[Spec]:
    """Specs with one thing less than ``spec``, the greatest reductions first."""
    for steps in _smaller_chains(spec.steps):
        yield replace(
            spec, steps=steps, inner_outputs=tuple(index for index in spec.inner_outputs if index < len(steps))
        )
    for name in ("inner_outputs", "outputs", "axes", "dtype", "opset", "data"):
        if getattr(spec, name) != _DEFAULTS[name]:
            yield replace(spec, **{name: _DEFAULTS[name]})
    for axis, extent in enumerate(spec.shape):
        for less in sorted({1, extent // 2, extent - 1}):
            if 0 < less < extent:
                yield replace(spec, shape=(*spec.shape[:axis], less, *spec.shape[axis + 1 :]))


def _smaller_chains(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    for i in range(len(steps)):
        if len(steps) > 1:
            yield steps[:i] + steps[i + 1 :]
    for i, step in enumerate(steps):
        for part in step.parts:
            yield steps[:i] + part + steps[i + 1 :]
        for k, part in enumerate(step.parts):
            for shorter in _smaller_chains(part):
                parts = (*step.parts[:k], shorter, *step.parts[k + 1 :])
                yield (*steps[:i], replace(step, parts=parts), *steps[i + 1 :])
