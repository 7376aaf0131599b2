"""``--input`` and ``--dynamic`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from command_line import fails, run
from sampled import every_second, long

import nnorm_export
from nnorm_export.cli.arrays import read_inputs_of_file
from nnorm_export.exporting.targets import TARGETS

pytestmark = pytest.mark.usefixtures("working_directory")


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs",
    every_second(
        [
            ("x:float32[3]", "ids:int64[3]"),
            ("ids:int64[3]", "x:3"),
            ("3", "int64[3]"),
            ("pair.npz",),
            ("3", "ids:pair.npz"),
        ]
    ),
)
def test_several_inputs_by_order_and_by_name(specs: tuple[str, ...], tmp_path: Path) -> None:
    np.savez("pair.npz", x=np.ones(3, np.float32), ids=np.arange(3))
    inputs = [part for spec in specs for part in ("-i", spec)]
    target = tmp_path / "two.onnx"
    options = ("-m", "cli_nets:Two", *inputs)
    report = json.loads(run("export", *options, "-o", target, "--input-names", "a,b", "--json").stdout)
    assert report["inputs"] == ["a: float32[batch]", "b: int64[batch]"]
    assert report["outputs"] == ["sum: float32[batch]", "ids_out: int64[batch]"]
    run("verify", target, *options)
    run("verify", target, "-m", "cli_nets:Two", "-i", "b:int64[5]", "-i", "a:5")  # by the file's own names


BOTH = ("--dynamic", "x:0=batch,1=seq", "--dynamic", "mask:0=batch,1=seq")
MASKED = ("-m", "cli_nets:Masked", "-i", "x:2,5,3", "-i", "mask:2,5")


def dims_of(path: Path) -> dict[str, list[str | int]]:
    graph = onnx.load(path).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


@pytest.mark.slow
def test_dynamic_axes_are_named_in_the_file_and_compared_at_other_lengths(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    report = json.loads(run("export", *MASKED, *BOTH, "-o", target, "--json").stdout)
    assert report["parity"]["outputs"][0]["rows"] == 2 + 1 + 3  # the example, the least lengths, and others
    assert dims_of(target) == {
        "x": ["batch", "seq", 3],
        "mask": ["batch", "seq"],
        "output": ["batch", "seq", 3],
    }
    for batch, length in ((1, 1), (3, 40)):
        run("verify", target, "-m", "cli_nets:Masked", "-i", f"x:{batch},{length},3", "-i", f"mask:{batch},{length}")
    fails("verify", target, "-m", "cli_nets:Masked", "-i", "x:2,5,4", "-i", "mask:2,5")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "pt2", "torchscript"])
def test_dynamic_axes_have_ranges_and_may_be_one_long_in_the_example(target: str, tmp_path: Path) -> None:
    path = tmp_path / f"net{TARGETS[target].format.ending}"
    example = ("-i", "x:1,1,3", "-i", "mask:1,1")
    dynamic = ("--dynamic", "x:0=batch[..4],1=seq[1..9]", "--dynamic", "mask:0=batch,-1=seq")
    run("export", "-m", "cli_nets:Masked", *example, *dynamic, "-o", path, "--target", target)
    run("verify", path, "-m", "cli_nets:Masked", "-i", "x:4,9,3", "-i", "mask:4,9")
    one_input = ("-m", "cli_nets:Windowed", "-i", "2,3,8", "-o", path, "--target", target)
    run("export", *one_input, "--dynamic", "2=seq[7..]")
    run("verify", path, "-m", "cli_nets:Windowed", "-i", "2,3,7")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*MASKED, "--dynamic", "x:0"), "--dynamic 'x:0' does not name axes; write --dynamic x:0=batch,1=seq"),
        ((*MASKED, "--dynamic", "x:0=batch,one=seq"), "does not name axes"),
        ((*MASKED, "--dynamic", "0=batch"), "the model takes x, mask; name the input"),
        ((*MASKED, "--dynamic", "y:0=batch"), "the model has no input y; it takes x, mask"),
        ((*MASKED, "--dynamic", "mask:2=seq"), "mask has no axis 2; the example has the shape [2, 5]"),
        ((*MASKED, "--dynamic", "x:0=a", "--dynamic", "x:0=b"), "axis 0 of x is given twice"),
        ((*MASKED, "--dynamic", "x:0=n,1=n"), "n is 2 in axis 0 of x and 5 in axis 1 of x"),
        ((*MASKED, "--dynamic", "x:1=seq[6..9]"), "the example's seq is 5, outside 6..9"),
        ((*MASKED, "--dynamic", "x:1=seq[9..6]"), "seq has no length from 9 to 6"),
        ((*MASKED, "--dynamic", "x:1=seq[2..]", "--dynamic", "mask:1=seq[3..]"), "seq is given two ranges"),
        ((*MASKED, *BOTH, "--fixed-shape"), "leave out one of them"),
        ((*MASKED, "--dynamic", "x:1=seq"), "give axes that must be equal one name"),
        ((*MASKED, "--dynamic", "x:1=seq", "--dynamic", "mask:1=time"), "must always be equal"),
        (("-m", "cli_nets:Windowed", "-i", "2,3,8", "--dynamic", "2=seq"), "(--dynamic 'x:1=seq[6..]')"),
        (("-m", "net.pt2", "--dynamic", "images:0=batch"), "--dynamic does not go with a .pt2 file"),
    ],
)
def test_dynamic_axes_that_are_refused(arguments: tuple[str, ...], message: str) -> None:
    shown = run("export", *arguments, "-o", "unwritten.onnx", code=None).stderr
    assert message in shown
    assert "Traceback" not in shown
    assert not Path("unwritten.onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs",
    [
        ("batch.x:2,5,3", "batch.mask:float32[2,5]"),
        long(("batch.mask:2,5", "batch.x:2,5,3")),
        ("batch:dict.npz:*",),
        long(("dict.npz:*",)),
        ("batch.x:dict.npz:x", "batch.mask:dict.npz:mask"),
        ("dotted.npz",),
    ],
)
def test_entries_of_a_dict(specs: tuple[str, ...], tmp_path: Path) -> None:
    values = {"x": np.ones((2, 5, 3), np.float32), "mask": np.ones((2, 5), np.float32)}
    np.savez("dict.npz", **values)
    np.savez("dotted.npz", **{f"batch.{name}": value for name, value in values.items()})
    target = tmp_path / "net.onnx"
    inputs = [part for spec in specs for part in ("-i", spec)]
    dynamic = ("--dynamic", "batch.x:0=batch,1=seq", "--dynamic", "batch_mask:0=batch,1=seq")
    run("export", "-m", "cli_nets:FromDict", *inputs, *dynamic, "-o", target)
    assert dims_of(target)["batch_mask"] == ["batch", "seq"]
    assert "equal" in run("verify", target, "-m", "cli_nets:FromDict").stdout
    run("verify", target, "-m", "cli_nets:FromDict", "-i", "batch.x:3,4,3", "-i", "batch_mask:3,4")


def test_a_dict_in_another_order_is_the_same(tmp_path: Path) -> None:
    import cli_nets  # noqa: PLC0415 - in the user's folder

    x, other = torch.randn(2, 5), torch.randn(2, 5)
    model = cli_nets.Difference()
    nnorm_export.export(model, ({"b": other, "a": x},), tmp_path / "net.onnx")
    assert nnorm_export.verify(tmp_path / "net.onnx", model, ({"a": x, "b": other},))
    run("verify", tmp_path / "net.onnx", "-m", "cli_nets:Difference", "-i", "batch.a:2,5", "-i", "batch.b:2,5")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (("batch:2,5", "batch.x:2,5"), "input batch.x lies within batch, which is given as a tensor"),
        (("other.x:2,5",), "the model has no input other.x; it takes batch, scale"),
        (("batch.x:2,5", "batch.x:2,5"), "input batch.x is given twice"),
        (("batch:data.npz:*", "batch.images:2,5"), "input batch.images is given twice"),
        (("data.npz",), "if batch is a dict of them, give --input batch:data.npz:*"),
        (("batch.x:2,5",), "KeyError"),
    ],
)
def test_entries_that_are_refused(specs: tuple[str, ...], message: str) -> None:
    inputs = [part for spec in specs for part in ("-i", spec)]
    assert message in fails("export", "-m", "cli_nets:FromDict", *inputs, "-o", "unwritten.onnx")


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i8"])
def test_an_array_of_another_byte_order(dtype: str, tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3)
    np.save(tmp_path / "x.npy", values.astype(dtype))
    floating = np.dtype(np.float32)
    inputs, _ = read_inputs_of_file([str(tmp_path / "x.npy")], {"x": floating})
    read = inputs["x"]
    assert read.dtype == (floating if "f" in dtype else np.int64)
    np.testing.assert_array_equal(read, values)


def test_arrays_that_a_file_does_not_take(tmp_path: Path) -> None:
    """A file takes no dicts, as a model may."""
    np.savez(tmp_path / "other.npz", pixels=np.ones(3))
    with pytest.raises(nnorm_export.NnormExportError, match=r"none of the model's inputs \(x\); .*x=array\)$"):
        read_inputs_of_file([str(tmp_path / "other.npz")], {"x": np.dtype(np.float32)})
