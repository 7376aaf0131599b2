"""The models of the matrix: the authors' networks and layers, exponents at and near their edges, the related layers.

Files of older opsets are written of twelve networks of timm, torchvision and transformers too (.venv-zoo).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fake_layers
import family
import networks
import numpy as np
import torch
from golden_data import GOLDEN, layer_case, layer_case_names
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.zoo.catalog import TWELVE, catalog, without_operators_of_torchvision
from everywhere.runtimes import OLDER_OPSETS
from nnorm_export import layers
from nnorm_export.domain import OPERATORS
from nnorm_export.parity.layer_by_layer.probe_inputs import Norm, probes_of

GROUPS = ("golden", "lambda", "family", "zoo")
NETWORKS = ("fc", "vit", "wideresnet")
# λ of all channels of a BatchNormalNorm2d: where an exponent vanishes, nearly vanishes, and where ψ is the identity.
LAMBDAS = {"0": [0.0], "1": [1.0], "2": [2.0]}
LAMBDAS["near_0"] = [0.0, 1e-7, -1e-6, 1e-5, -1e-4, 1e-3, 1e-2, 0.05]
LAMBDAS["near_2"] = [2.0 - value for value in LAMBDAS["near_0"]]
# What `make test-all` runs: all networks, and the layers in which runtimes differed.
QUICK = (
    *NETWORKS,
    *("bnn1d_trained", "bnn2d_lambda_edges", "bnn2d_trained", "gnn_g4", "inn2d", "lnn_768", "lnn_hard_rows"),
    *("lambda_0", "lambda_near_2", "lambda_rows"),
    *("BMLV", "EvoNormS0"),
)


@dataclass(frozen=True)
class Case:
    """A model to be exported.

    Attributes:
        group: which column of the table counts it.
        build: makes the model and an example input, whose first axis is the batch.
        recorded: what the authors' code computed for the example, if it is known.
    """

    name: str
    group: str
    build: Callable[[], tuple[nn.Module, Tensor]]
    recorded: Tensor | None = None

    @property
    def is_quick(self) -> bool:
        return self.name in QUICK


def belongs(group: str, form: str) -> bool:
    """Whether files of ``form`` are written of the cases of ``group``."""
    return group != "zoo" or form in OLDER_OPSETS


def cases() -> Iterator[Case]:
    """All cases, in the order of the table's columns."""
    for name in NETWORKS:
        recorded = np.load(GOLDEN / "checkpoints" / f"{name}.npz")
        yield Case(name, "golden", lambda name=name: _network(name), torch.from_numpy(recorded["logits"][:4]))
    for name in layer_case_names():
        yield Case(name, "golden", lambda name=name: _golden_layer(name), layer_case(name).outputs[0])
    for name, lmbdas in LAMBDAS.items():
        yield Case(f"lambda_{name}", "lambda", lambda lmbdas=lmbdas: _with_lambdas(lmbdas))
    yield Case("lambda_rows", "lambda", lambda: _rows("LayerNormalNorm"))
    yield Case("lambda_groups", "lambda", lambda: _rows("GroupNormalNorm"))
    for name in TWELVE:
        yield Case(name.replace("/", "_"), "zoo", lambda name=name: _of_the_zoo(name))
    for name in family.CASES:
        yield Case(name.replace(", ", "_"), "family", lambda name=name: _related(name))


def case_named(name: str) -> Case:
    return next(case for case in cases() if case.name == name)


def _network(name: str) -> tuple[nn.Module, Tensor]:
    card = json.loads((GOLDEN / "checkpoints" / f"{name}.json").read_text())
    checkpoint = torch.load(GOLDEN / "checkpoints" / f"{name}.pth", weights_only=True)
    network = networks.build(card, fake_layers)
    network.load_state_dict(checkpoint["model_state_dict"], strict=True)
    return network, torch.from_numpy(np.load(GOLDEN / "checkpoints" / f"{name}.npz")["input"][:4])


def _golden_layer(name: str) -> tuple[nn.Module, Tensor]:
    case = layer_case(name)
    layer = getattr(fake_layers, case.layer)(**case.kwargs)
    layer.load_state_dict(case.state, strict=True)
    return layer, case.inputs[0]


def _with_lambdas(lmbdas: list[float]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = layers.BatchNormalNorm2d(8)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
        layer.running_lmbda.copy_(torch.tensor((lmbdas * 8)[:8]))
    return layer.eval(), 2 * torch.randn(3, 8, 5, 6)


def _rows(operator: str) -> tuple[nn.Module, Tensor]:
    """Rows of one value, normal, skewed, with an outlier, and those whose λ̂ is 0 or 2."""
    torch.manual_seed(0)
    channels = 12
    layer: Any = (
        layers.LayerNormalNorm(channels) if operator == "LayerNormalNorm" else layers.GroupNormalNorm(channels, 2)
    )
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    parameters = {"weight": layer.weight.detach().numpy(), "bias": layer.bias.detach().numpy()}
    attributes = {name: default for name, (_, default) in OPERATORS[operator].attributes.items()}
    if operator == "GroupNormalNorm":
        attributes["num_groups"] = 2
    (probe,) = probes_of(Norm(OPERATORS[operator], parameters, attributes), np.dtype(np.float32))
    return layer.eval(), torch.from_numpy(probe.feed[0])


class _FirstOutput(nn.Module):
    """A network of the zoo with one input and one output."""

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network, self.name = network, name

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.network(**{self.name: x})
        return next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))


def _of_the_zoo(name: str) -> tuple[nn.Module, Tensor]:
    without_operators_of_torchvision()
    architecture = catalog()[name]
    torch.manual_seed(0)
    twin = architecture.build()
    ((argument, x),) = architecture.inputs(twin).items()
    return _FirstOutput(layers.convert_normal_norm(twin), argument).eval(), x


def _related(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer, x = family.make(name)
    return layer.eval(), x
