"""What an export or a comparison changes in the process is what it was afterwards, also where several overlap."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxscript.rewriter import _pattern_ir
from torch import Tensor, nn

from nnorm_export import export, export_program, layers, load, verify
from nnorm_export.errors import ExportError
from nnorm_export.exporting.trace import exporting_state
from nnorm_export.graphs.exact_constants import exact_constants
from nnorm_export.models.modules import without_fused_attention

CALLS: dict[str, Callable[[], object]] = {}  # what the forward of a model does: a deep copy must not copy it


class Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.norm = layers.LayerNormalNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        CALLS[self.name]()
        return self.norm(x)


def state() -> list[object]:
    loggers = [logging.getLogger(name).level for name in ("torch.onnx", "torch.export", "onnxscript")]
    return [sys.stdout, sys.stderr, loggers, list(warnings.filters), torch.backends.mha.get_fastpath_enabled()]


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = state()
    yield
    found = state()
    sys.stdout, sys.stderr = before[0], before[1]
    torch.backends.mha.set_fastpath_enabled(True)
    assert found == before


def together(*works: Callable[[], object]) -> None:
    """Runs ``works`` in threads at once, and raises what one of them raises."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]


def overlap(block: Callable[[], Any]) -> None:
    """Enters ``block`` in one thread, then in another, and leaves it in this order, if ``block`` allows that."""
    entered, left = threading.Event(), threading.Event()
    second_entered = threading.Event()

    def first() -> None:
        with block():
            entered.set()
            second_entered.wait(0.5)  # it never comes where one waits for the other
        left.set()

    def second() -> None:
        entered.wait()
        with block():
            second_entered.set()
            left.wait()

    together(first, second)


@pytest.mark.parametrize("block", [without_fused_attention, exporting_state, exact_constants])
def test_blocks_that_overlap(block: Callable[[], Any]) -> None:
    for _ in range(2):
        overlap(block)


def test_onnxscripts_constants_keep_their_tolerances() -> None:
    with exact_constants():
        with exact_constants():
            pass
        within = _pattern_ir.Constant(1.0)
        assert within._rel_tol == 0
    assert within._rel_tol == _pattern_ir.Constant(1.0)._rel_tol > 0


def test_a_block_that_fails() -> None:
    with pytest.raises(KeyError), exporting_state():
        raise KeyError


@pytest.mark.slow
def test_comparisons_that_overlap(tmp_path: Path) -> None:
    """Both run PyTorch at once, step by step."""
    CALLS["a"] = CALLS["b"] = lambda: None
    nets = [Net(name).eval() for name in "ab"]
    x = torch.randn(3, 4)
    path = export(nets[0], (x,), tmp_path / "m.onnx").path
    barrier = threading.Barrier(2)

    def meet() -> None:
        if barrier.n_waiting or not barrier.broken:
            barrier.wait(30)
        assert not torch.backends.mha.get_fastpath_enabled()

    CALLS["a"] = CALLS["b"] = meet
    together(*[lambda net=net: verify(path, net, (x,)) for net in nets])


@pytest.mark.slow
def test_exports_that_overlap(tmp_path: Path) -> None:
    """The first waits in forward for the second, which another export must not end before."""
    entered, met = threading.Event(), threading.Event()

    def first() -> None:
        entered.set()
        met.wait(0.5)

    CALLS.update(a=first, b=met.set)
    x = torch.randn(3, 4)

    def second() -> None:
        entered.wait(60)
        export_program(Net("b").eval(), (x,), tmp_path / "b.pt2", verify=False)

    together(lambda: export(Net("a").eval(), (x,), tmp_path / "a.onnx", verify=False), second)
    loads = [lambda: load(tmp_path / "b.pt2")] * 3
    together(*loads)


def test_other_threads_print_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def from_a_thread() -> None:
        together(lambda: print("from a thread"))
        print("from forward")

    CALLS["a"] = from_a_thread
    export(Net("a").eval(), (torch.randn(3, 4),), tmp_path / "a.onnx", verify=False)
    printed = capsys.readouterr()
    assert set(printed.out.split("\n")) == {"from a thread", ""}
    assert "from forward" in printed.err


def test_what_the_model_prints_before_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        if not torch.compiler.is_compiling():  # it runs before it is traced
            return
        print("the reason")
        logging.getLogger("user").warning("and more")
        raise RuntimeError("forward failed")

    CALLS["a"] = fail
    with pytest.raises(ExportError, match="forward failed"):
        export(Net("a").eval(), (torch.randn(3, 4),), tmp_path / "a.onnx")
    assert "the reason" in capsys.readouterr().err
