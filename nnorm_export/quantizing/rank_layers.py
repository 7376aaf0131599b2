"""rank_layers(): how much accuracy each layer costs."""

from __future__ import annotations

from nnorm_export.quantizing.accuracy import sqnr_of
from nnorm_export.quantizing.layers import layers_of, with_norms
from nnorm_export.quantizing.measure import Calibrated
from nnorm_export.quantizing.qdq import PRODUCTS
from nnorm_export.quantizing.reference import Reference
from nnorm_export.runtimes import Runner

_BATCHES = 4


def rank_layers(calibrated: Calibrated, reference: Reference, runner: Runner) -> dict[str, float]:
    """Path of a layer with a product -> the decibels by which the least SQNR rises if it alone stays float.

    Args:
        runner: runs the file in which all of ``calibrated.names`` are in int8.
    """
    proto, names, reference = calibrated.graph.proto, calibrated.names, reference.first(_BATCHES)
    products = {node.name for node in proto.graph.node if node.op_type in PRODUCTS}
    layers = {path: nodes for path, nodes in layers_of(proto, names).items() if not products.isdisjoint(nodes)}
    basis = sqnr_of(reference.compare(runner))
    gains = {}
    for done, (path, nodes) in enumerate(layers.items()):
        calibrated.request.progress("ranking", done / len(layers))
        alone = with_norms(proto, nodes)
        other = calibrated.runner([name for name in names if name not in alone])
        gains[path] = sqnr_of(reference.compare(other)) - basis
    return gains
