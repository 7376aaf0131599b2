"""Folds what follows a BatchNormalNorm into it: ReLU, or the sum with a residual and ReLU.

    Relu(BatchNormalNorm(X, …))                  ->  BatchNormalNormRelu(X, …)
    Relu(Add(BatchNormalNorm(X, …), residual))   ->  BatchNormalNormAddRelu(X, …, residual),   Add in either order

A kernel then passes over the activations once instead of two or three times. Where only bodies run, nothing is lost:
they end in the same Add and Relu, and inlined in float32 they give the graph that the nodes apart give. In half
precision they are more exact: the sum alone is rounded, where the norm's output was rounded before it.

Nothing is folded that anything else sees: a value between the nodes is used once and is no output of the graph. Where
both operands of the sum are norms, as in a residual block that changes the shape, one is folded and the other is the
residual. The new node stands where the Relu stood, after everything that it reads.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRule, RewriteRuleSet

from nnorm_export.names import DOMAIN


def fuse_epilogues(model: ir.Model) -> None:
    """Replaces, in ``model`` as :func:`translate` makes it, every pattern above; the names of the norms are kept."""
    RewriteRuleSet(
        [RewriteRule(_relu, _fused_relu), RewriteRule(_add_relu, _fused_add_relu, _is_residual)], commute=True
    ).apply_to_model(model)


def _norm(op: Any) -> Any:
    return op.BatchNormalNorm(_domain=DOMAIN, _allow_other_inputs=True, _outputs=["norm"])


def _relu(op: Any) -> Any:
    return op.Relu(_norm(op))


def _fused_relu(op: Any, norm: ir.Value) -> ir.Value:
    return _fused(op.BatchNormalNormRelu, norm)


def _add_relu(op: Any, residual: Any) -> Any:
    return op.Relu(op.Add(_norm(op), residual))


def _is_residual(_: Any, norm: ir.Value, residual: ir.Value) -> MatchResult:
    """``residual`` provably has the shape of the norm's output, so nothing is broadcast; Add gives both one dtype."""
    result = MatchResult()
    if residual is norm:
        return result.fail("the norm is added to itself")
    shape = norm.shape
    if shape is None or shape.has_unknown_dim() or residual.shape != shape:
        return result.fail(f"{residual.name} has the shape {residual.shape}, the norm {shape}")
    return result


def _fused_add_relu(op: Any, norm: ir.Value, residual: ir.Value) -> ir.Value:
    return _fused(op.BatchNormalNormAddRelu, norm, residual)


def _fused(make: Any, norm: ir.Value, *operands: ir.Value) -> ir.Value:
    """The node that takes the place of ``norm``'s: its inputs, then ``operands``; its attributes, name and metadata."""
    old = norm.producer()
    assert old is not None
    output: ir.Value = make(*old.inputs, *operands, _domain=DOMAIN, **old.attributes)
    new = output.producer()
    assert new is not None
    new.name = old.name
    new.metadata_props.update(old.metadata_props)
    return output
