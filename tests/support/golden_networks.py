"""The recorded layers and the trained networks of tests/golden, built of fakes that cannot run or of our own layers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import fake_layers
import networks
import torch
from golden_data import GOLDEN, layer_cases
from torch import Tensor, nn

from nnorm_export import layers

CASES = layer_cases()
EVALUATIONS = [(case, index) for case in CASES for index in range(len(case.inputs))]

# Two recorded layers need more than 2e-6 + 2e-5·|y|. Near small exponents the authors' float32 formula, pow(1 + |h|, η)
# − 1, is itself off float64: by 1.2e-5 in lnn_768 and by 4e-6 in inn2d, where ours is within 2e-6.
EXTRA_ABSOLUTE = {"lnn_768": 1.2e-5, "inn2d": 1e-6}

CHECKPOINTS = ("fc", "vit", "wideresnet")
FAKES = SimpleNamespace(**vars(fake_layers))
OURS = SimpleNamespace(**{**vars(layers), "Standardize": fake_layers.Standardize})


class AllLayers(nn.Module):
    """Every recorded evaluation side by side, one input and one output each, so that one export covers them all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for case in CASES:
            layer = getattr(fake_layers, case.layer)(**case.kwargs)
            layer.load_state_dict(case.state, strict=True)
            self.layers[case.name] = layer

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [self.layers[case.name](x) for (case, _), x in zip(EVALUATIONS, inputs, strict=True)]


def trained_network(name: str, kinds: Any) -> nn.Module:
    card = json.loads((GOLDEN / "checkpoints" / f"{name}.json").read_text())
    checkpoint = torch.load(GOLDEN / "checkpoints" / f"{name}.pth", weights_only=True)
    network = networks.build(card, kinds)
    network.load_state_dict(checkpoint["model_state_dict"], strict=True)
    return network
