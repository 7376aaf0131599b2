"""A model whose results depend on chance is refused by its graph, in all formats, whatever one comparison shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from function_module import Function
from torch import Tensor, nn
from torch.nn import functional as F

from nnorm_export import ParityError, export
from nnorm_export.exporting.random_operators import refuse_random
from nnorm_export.exporting.trace import nodes_of, path_of

X = torch.rand(4, 6)


class Network(nn.Module):
    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.head = Function(of)

    def forward(self, x: Tensor) -> Any:
        return self.head(x)


def refuse(of: Callable[[Tensor], Any]) -> None:
    program = torch.export.export(Network(of).eval(), (X,))
    refuse_random(Path("m.onnx"), {node: path_of(node) for node in nodes_of(program)})


def attention(x: Tensor, share: float) -> Tensor:
    heads = x.view(1, 1, 4, 6)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=share)


def with_switch(layer: nn.Module, training: bool) -> Callable[[Tensor], Any]:
    return layer.train(training)


LSTM = nn.LSTM(6, 3, 2, dropout=0.5)

RANDOM: dict[str, Callable[[Tensor], Any]] = {
    "little dropout": lambda x: F.dropout(x, 1e-4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 1e-4, training=True),
    "feature dropout": lambda x: F.dropout1d(x[None], 1e-4),
    "attention": lambda x: attention(x, 1e-4),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rand": lambda x: x + torch.rand(6),
    "randn_like": lambda x: x + 1e-9 * torch.randn_like(x),
    "bernoulli": torch.bernoulli,
    "multinomial": lambda x: x.multinomial(2),
    "poisson": torch.poisson,
    "normal": lambda x: torch.normal(x, 1.0),
    "in place": lambda x: x + torch.zeros(6).uniform_(),
    "view": lambda x: (y := x.clone(), y[0].normal_(), y)[-1],
    "randint": lambda x: x[torch.randint(4, (2,))],
    "gumbel": F.gumbel_softmax,
    "in a branch": lambda x: torch.cond(x.sum() > 0, lambda y: y + torch.rand_like(y), lambda y: y - 1, (x,)),
}
CERTAIN: dict[str, Callable[[Tensor], Any]] = {
    "dropout of 0": lambda x: F.dropout(x, 0.0),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "attention": lambda x: attention(x, 0.0),
    "rrelu": lambda x: F.rrelu(x, training=False),
    "shape": lambda x: x + torch.zeros_like(torch.rand_like(x)),
    "lstm": with_switch(LSTM, False),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_operator_is_refused_with_its_layer(name: str) -> None:
    with pytest.raises(ParityError, match=r"m\.onnx was not written: aten\.\w+\.\w+ in layer (head|\(the m.*) draws"):
        refuse(RANDOM[name])


@pytest.mark.parametrize("name", CERTAIN)
def test_an_operator_that_draws_nothing_is_taken(name: str) -> None:
    refuse(CERTAIN[name])


class Dropping(nn.Module):
    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.dropout, self.is_right = nn.Dropout(0.5), is_right

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(x)
        return F.dropout(y, 1e-4, self.training if self.is_right else True)


@pytest.mark.parametrize(
    ("target", "options"),
    [("onnxruntime", {}), ("pt2", {}), ("torchscript", {}), ("torchscript", {"method": "script"}), ("aoti", {})],
    ids=["onnx", "pt2", "torchscript", "script", "aoti"],
)
def test_every_format_refuses_it(target: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / {"onnxruntime": "m.onnx", "torchscript": "m.pt"}.get(target, "m.pt2")
    with pytest.raises(ParityError, match=r"dropout.*draws random numbers, .*another result each time"):
        export(Dropping(False).eval(), X, path, target=target, **options)
    assert not path.exists()


def test_a_scripted_dropout_in_evaluation_is_taken(tmp_path: Path) -> None:
    assert export(Dropping(True).eval(), X, tmp_path / "m.pt", target="torchscript", method="script").parity
