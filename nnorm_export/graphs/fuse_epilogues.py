"""Folds the operators that follow a norm into its node: one rule for each operator that declares an epilogue.

    Relu(BatchNormalNorm(X, …))                  ->  BatchNormalNormRelu(X, …)
    Relu(Add(BatchNormalNorm(X, …), residual))   ->  BatchNormalNormAddRelu(X, …, residual),   Add in either order

A kernel then passes over the activations once instead of two or three times. The body of a fused operator ends in the
same operators, and inlined in float32 it gives the same graph as the separate nodes. In half precision the body is more
exact, because only the last result is rounded: separate nodes round the norm's output too.

The nodes are folded only if each value between them has one reader and is not an output of the graph. If both operands
of a sum are norms, as in a residual block that changes the shape, one norm is folded and the other is the residual. The
new node replaces the last node, so that all its inputs come before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRule, RewriteRuleSet, Var

from nnorm_export.domain import OPERATORS, Operator
from nnorm_export.names import DOMAIN


def fuse_epilogues(model: ir.Model) -> None:
    """Replaces every pattern above in ``model``, whose norms are nodes. The norms keep their names."""
    # Longer patterns first, because a shorter pattern may be the beginning of a longer one.
    for operator in sorted(OPERATORS.values(), key=lambda operator: -len(operator.epilogue)):
        if operator.epilogue:
            fusion = _Fusion(operator)
            rule = RewriteRule(fusion.pattern, fusion.rewrite, fusion.check)
            RewriteRuleSet([rule], commute=True).apply_to_model(model)


@dataclass(frozen=True)
class _Fusion:
    """The rule that replaces a norm and the separate nodes of an epilogue by ``operator``."""

    operator: Operator

    def pattern(self, op: Any) -> Any:
        y = getattr(op, self.operator.norm)(_domain=DOMAIN, _allow_other_inputs=True, _outputs=["norm"])
        for step in self.operator.epilogue:
            operands = [] if step.operand is None else [Var(step.operand)]
            y = getattr(op, step.op_type)(y, *operands, _allow_other_attributes=False)
        return y

    def check(self, _: Any, norm: ir.Value, **operands: ir.Value) -> MatchResult:
        """Require the shape of the norm's output for each operand, so that nothing is broadcast."""
        result = MatchResult()
        for operand in operands.values():
            if operand is norm:
                return result.fail("the norm is an operand of its own epilogue")
            if norm.shape is None or norm.shape.has_unknown_dim() or operand.shape != norm.shape:
                return result.fail(f"{operand.name} has the shape {operand.shape}, the norm {norm.shape}")
        return result

    def rewrite(self, op: Any, norm: ir.Value, **operands: ir.Value) -> ir.Value:
        """The norm with the operands as further inputs; its attributes, name and metadata are kept."""
        old = norm.producer()
        assert old is not None
        make = getattr(op, self.operator.op_type)
        ordered = [operands[name] for name in self.operator.operands]
        output: ir.Value = make(*old.inputs, *ordered, _domain=DOMAIN, **old.attributes)
        new = output.producer()
        assert new is not None
        new.name = old.name
        new.metadata_props.update(old.metadata_props)
        return output
