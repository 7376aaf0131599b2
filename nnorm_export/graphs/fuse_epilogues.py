"""Folds the operators that follow a norm into its node: one rule for each operator that declares an epilogue.

    Relu(BatchNormalNorm(X, …))                  ->  BatchNormalNormRelu(X, …)
    Relu(Add(BatchNormalNorm(X, …), residual))   ->  BatchNormalNormAddRelu(X, …, residual),   Add in either order

A kernel then passes over the activations once instead of two or three times. Bodies lose nothing: they end in the same
operators, and inlined in float32 they give the same graph as the separate nodes. In half precision they are more exact:
only the last result is rounded, where separate nodes round the norm's output too.

A value between the nodes must have one reader and not be an output of the graph, otherwise nothing is folded. Where
both operands of a sum are norms, as in a residual block that changes the shape, one is folded and the other is the
residual. The new node stands in the place of the last one, after everything that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRule, RewriteRuleSet, Var

from nnorm_export.domain import OPERATORS, Operator
from nnorm_export.names import DOMAIN


def fuse_epilogues(model: ir.Model) -> None:
    """Replaces every pattern above in ``model``, whose norms are nodes; they keep their names."""
    # The longest first: a shorter one may be its beginning.
    for operator in sorted(OPERATORS.values(), key=lambda operator: -len(operator.epilogue)):
        if operator.epilogue:
            fusion = _Fusion(operator)
            rule = RewriteRule(fusion.pattern, fusion.rewrite, fusion.check)
            RewriteRuleSet([rule], commute=True).apply_to_model(model)


@dataclass(frozen=True)
class _Fusion:
    """From the norm and the steps of an epilogue, apart, to ``operator``."""

    operator: Operator

    def pattern(self, op: Any) -> Any:
        y = getattr(op, self.operator.norm)(_domain=DOMAIN, _allow_other_inputs=True, _outputs=["norm"])
        for step in self.operator.epilogue:
            operands = [] if step.operand is None else [Var(step.operand)]
            y = getattr(op, step.op_type)(y, *operands, _allow_other_attributes=False)
        return y

    def check(self, _: Any, norm: ir.Value, **operands: ir.Value) -> MatchResult:
        """Each operand must have the shape of the norm's output, so that nothing is broadcast."""
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
