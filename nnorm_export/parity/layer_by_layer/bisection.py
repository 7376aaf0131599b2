"""The outcome of bisect(): each compared layer, and the first that is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from nnorm_export.float16_range import about_float16
from nnorm_export.names import layer_name
from nnorm_export.parity.verdict.outcome import OutputParity
from nnorm_export.reports import ComparisonReport

_SHOWN = 6  # constants in a verdict: those of a normalization


@dataclass(frozen=True)
class LayerParity:
    """A layer in the runtime compared with PyTorch.

    Attributes:
        path: the layer's path in the model.
        call: the number of this call of the layer, from 1.
        op_type: the operator of its node; ``(module)`` for a layer that is not a normalization.
        implementation: ``kernel``, ``body`` or ``plugin``; empty for a layer that is not a normalization.
        inherited: the layer's input in the whole file.
        own: the layer's output, alone, on PyTorch's input; None if it cannot be cut out of the file.
    """

    path: str
    call: int
    op_type: str
    implementation: str
    inherited: OutputParity
    own: OutputParity | None

    @property
    def name(self) -> str:
        return f"{layer_name(self.path)}{f', call {self.call}' if self.call > 1 else ''}"


@dataclass(frozen=True)
class Bisection(ComparisonReport):
    """The outcome; true if nothing differs.

    Attributes:
        runtime: the runtime that ran the file.
        layers: the compared layers in the order in which they run.
        outputs: the outputs of the whole file.
        notes: the layers that were not compared, and why.
        other_weights: says that the file was made from other weights, if that is why something differs; else empty.
        beyond_float16: if something differs in a float16 file, the inputs, the weights and the numbers in forward that
            float16 does not have.
        constants: the constants of the file that differ from the model's, of the first layer that is wrong by itself,
            or, if there is none, of the nodes between the last right value and the first wrong one.
    """

    runtime: str
    layers: list[LayerParity]
    outputs: list[OutputParity]
    notes: list[str]
    other_weights: str = ""
    beyond_float16: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        inherited = [layer.inherited for layer in self.layers]
        is_sound = self.culprit is None and self.not_compared is None
        return is_sound and all(parity.passed for parity in (*inherited, *self.outputs))

    @property
    def culprit(self) -> LayerParity | None:
        """The first layer whose own error is too great."""
        owns = ((layer, layer.own) for layer in self.layers if layer.own is not None)
        return next((layer for layer, own in owns if own.compared and not own.passed), None)

    @property
    def not_compared(self) -> OutputParity | None:
        """The first comparison that shows nothing, because of NaN in PyTorch's result for example."""
        parities = [parity for layer in self.layers for parity in (layer.inherited, layer.own) if parity is not None]
        return next((parity for parity in (*parities, *self.outputs) if not parity.compared), None)

    @property
    def verdict(self) -> str:
        """Says where the runtime first differs from PyTorch, and that the weights are others, if they are."""
        shown, more = self.constants[:_SHOWN], len(self.constants) - _SHOWN
        listed = "; ".join([*shown, *([f"and {more} others"] if more > 0 else [])])
        constants = f"Constants that differ from the model's: {listed}" if listed else ""
        if self.other_weights:
            finding = f"{self.other_weights}. That shows first here: {self._finding}"
            return ". ".join(filter(None, (finding, constants)))
        return ". ".join(filter(None, (self._finding, constants, about_float16(self.beyond_float16))))

    @property
    def _finding(self) -> str:
        if (culprit := self.culprit) is not None:
            what = f"layer {culprit.name} ({culprit.op_type.strip('()')})"
            return f"{what} computes something else, on PyTorch's own input: {culprit.own}"
        if (nothing := self.not_compared) is not None:
            return f"nothing was compared: {nothing.name}: {nothing.note}"
        before = "the input of the model"
        every = "every layer" if all(layer.own for layer in self.layers) else "every layer that can be run alone"
        for layer in self.layers:
            if not layer.inherited.passed:
                where = f"between {before} and layer {layer.name}"
                return f"{every} is sound alone; {self.runtime} leaves PyTorch {where}: {layer.inherited}"
            before = f"layer {layer.name}"
        wrong = ", ".join(str(output) for output in self.outputs if not output.passed)
        return f"{every} is sound; the fault lies after {before}: {wrong}" if wrong else "nothing differs"
