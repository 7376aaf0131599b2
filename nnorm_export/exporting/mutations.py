"""What a call of forward leaves behind besides its result: changed tensors of the model, and changed inputs.

The comparison of a file with PyTorch looks at each call alone, and most runtimes keep nothing from call to call. A
model that reads what an earlier call has left, such as the keys and values of a cache in a buffer, would pass it and
be wrong. A buffer that no result depends on, such as a count of calls, does no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from nnorm_export.errors import ExportError


@dataclass(frozen=True)
class Changes:
    """What one call may have changed.

    Attributes:
        assigned: paths of parameters, buffers and other attributes of the model that are other tensors now.
        written: paths of those that were written to.
        appeared: paths of tensors that were not there before, or are others now in a list, a tuple or a dict: tables
            that are made when they are needed, or state. Later calls show which.
        inputs: whether an input was written to.
        forgotten: those of ``appeared`` that are state, which a trace does not keep.
    """

    assigned: frozenset[str]
    written: frozenset[str]
    appeared: frozenset[str]
    inputs: bool
    forgotten: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.assigned or self.written or self.forgotten) or self.inputs


@dataclass(frozen=True)
class Snapshot:
    """The tensors of a model and of its inputs before a call."""

    module: nn.Module
    inputs: object
    versions: Mapping[str, tuple[Tensor, int]]
    contained: Mapping[str, tuple[Tensor, int]]
    input_versions: list[int]

    @classmethod
    def of(cls, module: nn.Module, inputs: object) -> Snapshot:
        versions = {path: (tensor, _version(tensor)) for path, tensor in _tensors(module)}
        contained = {path: (tensor, _version(tensor)) for path, tensor in _contained(module)}
        return cls(module, inputs, versions, contained, _versions(inputs))

    def changes(self) -> Changes:
        """What has changed since."""
        now = dict(_tensors(self.module))
        assigned = frozenset(path for path, (tensor, _) in self.versions.items() if now.get(path) is not tensor)
        written = frozenset(path for path, (tensor, version) in self.versions.items() if _version(tensor) != version)
        contained = {path: (tensor, _version(tensor)) for path, tensor in _contained(self.module)}
        others = {path for path, found in contained.items() if not _is_same(found, self.contained.get(path))}
        appeared = frozenset((now.keys() - self.versions.keys()) | others)
        return Changes(assigned, written, appeared, _versions(self.inputs) != self.input_versions)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, layer in module.named_modules(remove_duplicate=False):
        for name, value in (*layer._parameters.items(), *layer._buffers.items(), *vars(layer).items()):
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module()))  # _parameters, _buffers, _modules, hooks


def _contained(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in lists, tuples and dicts that are attributes of a module."""
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            if name in _ATTRIBUTES_OF_MODULES or not isinstance(value, (list, tuple, dict)):
                continue
            for index, leaf in enumerate(pytree.tree_leaves(value)):
                if isinstance(leaf, Tensor):
                    yield f"{path}.{name}[{index}]".lstrip("."), leaf


def _is_same(found: tuple[Tensor, int], before: tuple[Tensor, int] | None) -> bool:
    return before is not None and found[0] is before[0] and found[1] == before[1]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _versions(values: object) -> list[int]:
    return [_version(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def refuse_state(program: torch.export.ExportedProgram, changes: Changes | None, *, keeps_state: bool) -> None:
    """Raises an ExportError if a result depends on a tensor of the model that forward changes.

    Args:
        program: as :func:`.functional` returns it, which does not list tensors that forward assigns and that are not
            buffers.
        changes: what a call changes; None if that is not known.
        keeps_state: whether a file of the format keeps them, so that the comparison alone is in the way.
    """
    assigned = frozenset() if changes is None else changes.assigned
    signature = program.graph_signature
    held = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    constants = {name: path for name, path in signature.inputs_to_lifted_tensor_constants.items() if path in assigned}
    mutated = {*mutated_in(program), *constants.values()}
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    results = {str(name) for name in signature.user_outputs}
    read = [
        path
        for name, path in {**held, **constants}.items()
        if path in mutated and results & reached_from(placeholders[name])
    ]
    if read:
        raise refusal(read, keeps_state=keeps_state)


def refuse_written_constants(program: torch.export.ExportedProgram, changes: Changes | None) -> None:
    """Raises an ExportError if forward writes to an attribute that is neither a parameter nor a buffer.

    torch cannot write such a program in operators that change no tensor, so that what depends on it is not known.
    """
    constants = program.graph_signature.inputs_to_lifted_tensor_constants.values()
    if changes is not None and (written := [path for path in constants if path in changes.written]):
        raise ExportError(
            f"forward writes to {', '.join(written)}, which is neither a parameter nor a buffer, and torch.export "
            "cannot express that: make it a buffer (self.register_buffer), or do not write to it in eval mode"
        )


def mutated_in(program: torch.export.ExportedProgram) -> set[str]:
    """The paths of buffers and parameters that ``program``, in operators that change no tensor, gives new values."""
    return {*program.graph_signature.buffers_to_mutate.values(), *_mutated_parameters(program)}


def refusal(paths: Collection[str], *, keeps_state: bool) -> ExportError:
    why, otherwise = "a file keeps no state from call to call", ""
    if keeps_state:
        why = "the comparison, which looks at each call alone, does not show whether the file keeps it"
        otherwise = "; verify=False (--no-verify) writes a file that keeps it and is not compared"
    return ExportError(
        f"forward changes {', '.join(sorted(paths))}, and its result depends on what an earlier call left there: "
        f"{why}. Take these tensors as inputs and return their new values, or do not change them in eval mode"
        f"{otherwise}"
    )


def _mutated_parameters(program: torch.export.ExportedProgram) -> set[str]:
    # Older versions of torch lack this kind.
    kind = getattr(torch.export.graph_signature.OutputKind, "PARAMETER_MUTATION", None)
    specs = program.graph_signature.output_specs
    return {str(spec.target) for spec in specs if kind is not None and spec.kind == kind}


_ATEN = torch.ops.aten
# Of their first argument they take the shape and the dtype, and not the numbers.
_OVERWRITING = (
    _ATEN.copy, _ATEN.fill, _ATEN.zero, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.empty_like,
    _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full, _ATEN.new_empty,
)  # fmt: skip


def reached_from(node: fx.Node) -> set[str]:
    """The names of ``node`` and of the nodes that depend on its numbers."""
    reached, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user not in reached and not _overwrites(user, node):
                reached.add(user)
                waiting.append(user)
    return {each.name for each in reached}


def _overwrites(user: fx.Node, node: fx.Node) -> bool:
    others = pytree.tree_leaves((user.args[1:], user.kwargs))
    return getattr(user.target, "overloadpacket", None) in _OVERWRITING and node not in others
