"""Dynamic axes whose length is the sum of others: a mask over a cache and new tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import run
from torch import Tensor, nn
from torch.export import Dim

from nnorm_export import ExportReport, InputError, export, load, optimize
from nnorm_export.files.inspection import describe
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.models.dynamic_axes import parse_dynamic
from nnorm_export.names import length_by_names, terms_of
from nnorm_export.runtimes.runner import refuse_disagreement


class Joined(nn.Module):
    """Normalizes what is cached and what is new, and leaves out what is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNormalNorm(4)

    def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> dict[str, Tensor]:
        present = torch.cat([past, self.norm(x)], 1)
        return {"present": present, "y": (present * mask[..., None]).sum(1)}


def inputs_of(batch: int, sequence: int, past: int, total: int | None = None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    total = past + sequence if total is None else total
    shapes = (batch, sequence, 4), (batch, past, 4), (batch, total)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def shapes_with(past: Any, sequence: Any = None, total: str = "past + sequence") -> dict[str, dict[int, Any]]:
    batch, sequence = Dim("batch", min=1), sequence or Dim("sequence", min=1)
    return {"x": {0: batch, 1: sequence}, "past": {0: batch, 1: past}, "mask": {0: batch, 1: total}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    path = tmp_path_factory.mktemp("sums") / "net.onnx"
    return export(Joined().eval(), inputs_of(2, 3, 4), path, dynamic_shapes=shapes_with(Dim("past", min=0, max=64)))


@pytest.mark.parametrize("lengths", [(2, 3, 4), (1, 1, 0), (5, 2, 0), (3, 1, 9), (2, 9, 64)])
def test_the_file_takes_every_length_and_no_cache(lengths: tuple[int, int, int], written: ExportReport) -> None:
    inputs = inputs_of(*lengths)
    results = load(written.path)(*(tensor.numpy() for tensor in inputs))
    for result, expected in zip(results, Joined().eval()(*inputs).values(), strict=True):
        np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_names_and_ranges(written: ExportReport) -> None:
    file = describe(written.path)
    assert [info.shape[1] for info in file.inputs] == ["sequence", "past", "past + sequence"]
    assert file.outputs[0].shape == ("batch", "past + sequence", 4)
    assert file.lengths == {"past": (0, 64)}
    with pytest.raises(
        InputError, match=r"axis 1 of input 'past' \(past\) has the length 65, and the file is right for 0"
    ):
        load(written.path)(*(tensor.numpy() for tensor in inputs_of(1, 1, 65)))


def test_another_length_is_refused(written: ExportReport) -> None:
    said = r"axis 1 of input 'mask' \(past \+ sequence\) has the length 9, and past is 4 and sequence is 3"
    infos, inputs = describe(written.path).inputs, [tensor.numpy() for tensor in inputs_of(2, 3, 4, 9)]
    with pytest.raises(InputError, match=said):
        load(written.path)(*inputs)
    feed = {info.name: array for info, array in zip(infos, inputs, strict=True)}
    with pytest.raises(InputError, match=said):  # of AOTInductor and tract, which read beyond a shorter axis
        refuse_disagreement(infos, feed)


def test_another_programs_names_are_not_held_against_its_users(written: ExportReport, tmp_path: Path) -> None:
    model = onnx.load(written.path)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(InputError, match="onnxruntime fails on these inputs"):  # it is the runtime that refuses them
        load(tmp_path / "other.onnx")(*(tensor.numpy() for tensor in inputs_of(2, 3, 4, 9)))


def test_the_command_line_makes_inputs_of_sums(written: ExportReport, tmp_path: Path) -> None:
    (tmp_path / "joined_nets.py").write_text(
        "from test_sums_of_lengths import Joined\ndef build():\n    return Joined().eval()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.syspath_prepend(str(Path(__file__).parent))
        found = run("verify", written.path, "-m", "joined_nets:build")
    assert "float32[4, 8]" in found.stderr  # the mask over a cache of 4 and 4 new ones


def test_an_empty_cache_is_tried(tmp_path: Path) -> None:
    class NeedsCache(Joined):
        def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return super().forward(x - past.amax(1, keepdim=True), past, mask)

    with pytest.raises(Exception, match="past = 0") as failure:
        export(NeedsCache().eval(), inputs_of(2, 3, 4), tmp_path / "net.onnx", dynamic_shapes=shapes_with(Dim("past")))
    assert "Dim('seq', min=2" in str(failure.value)
    export(
        NeedsCache().eval(), inputs_of(2, 3, 4), tmp_path / "net.onnx", dynamic_shapes=shapes_with(Dim("past", min=1))
    )


def test_strings_name_the_terms_too(tmp_path: Path) -> None:
    report = export(
        Joined().eval(), inputs_of(2, 3, 4), tmp_path / "net.onnx", dynamic_shapes=shapes_with("past", "sequence")
    )
    assert describe(report.path).inputs[2].shape[1] == "past + sequence"


def test_random_inputs_have_sums(written: ExportReport, tmp_path: Path) -> None:
    assert optimize(written.path, tmp_path / "optimized.onnx").parity


@pytest.mark.parametrize(
    ("total", "length", "message"),
    [
        (
            "past + sequence",
            8,
            "axis 1 of mask is past \\+ sequence and has the length 8, and past is 4 and sequence is 3",
        ),
        ("past + tokens", 7, "axis 1 of mask is past \\+ tokens, and no axis is named tokens"),
    ],
)
def test_what_is_no_sum_is_refused(total: str, length: int, message: str, tmp_path: Path) -> None:
    class Sums(Joined):
        def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return {"y": self.norm(x) + past.sum() + mask.sum()}

    inputs = inputs_of(2, 3, 4, length)
    with pytest.raises(InputError, match=f"dynamic_shapes: {message}"):
        export(Sums().eval(), inputs, tmp_path / "net.onnx", dynamic_shapes=shapes_with(Dim("past"), total=total))


def test_the_command_line_takes_sums() -> None:
    arguments = dict(zip(("x", "past", "mask"), inputs_of(2, 3, 4), strict=True))
    specs = ["x:0=n,1=new", "past:0=n,1=past[1..9]", "mask:0=n,1=past+new"]
    shapes = parse_dynamic(specs, arguments)
    assert shapes["mask"][1] == "past + new"
    assert shapes["past"][1].max == 9
    with pytest.raises(InputError, match="past \\+ new is a sum, whose range follows from those of its terms"):
        parse_dynamic([*specs[:2], "mask:1=past+new[1..5]"], arguments)
    with pytest.raises(InputError, match="--dynamic: axis 1 of mask is past \\+ other, and no axis is named other"):
        parse_dynamic([*specs[:2], "mask:1=past + other"], arguments)


def test_terms() -> None:
    assert terms_of("a + b + c") == ["a", "b", "c"]
    for other in ("a", "a + 1", "2*a + b", "a - b", "", 3, None, Dim("a")):
        assert terms_of(other) == []
    names = {"s0": "sequence", "s1": "past", "s2": "past + sequence"}
    assert length_by_names("s0 + s1", names) == "past + sequence"
    assert length_by_names("2*s0", names) == "2*sequence"
