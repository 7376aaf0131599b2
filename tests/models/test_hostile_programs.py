"""Exported programs from strangers: no pickle and no text in them runs, in any layout that torch.export.load reads."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnorm_export import ModelFileError, export_program, export_torchscript, load, verify
from nnorm_export.models import exported_programs
from nnorm_export.models.exported_programs import load_program
from nnorm_export.runtimes import torchscript
from nnorm_export.runtimes.describe_run import describe_run

Entries = dict[str, bytes]


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "ran")


class Halves(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        return y


@pytest.fixture(scope="module")
def unaltered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_program(Halves(), torch.randn(2, 4), tmp_path_factory.mktemp("unaltered") / "net.pt2").path


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _sample_inputs(entries: Entries, payload: Payload) -> None:
    entries["data/sample_inputs/model.pt"] = _pickled(((torch.ones(2, 4), payload), {}))


def _sample_inputs_in_capitals(entries: Entries, payload: Payload) -> None:
    del entries["data/sample_inputs/model.pt"]
    entries["data/SAMPLE_inputs/Model.PT"] = _pickled(((payload,), {}))


def _old_pickle(entries: Entries, payload: Payload) -> None:
    entries["data/sample_inputs/model.pt"] = pickle.dumps(((payload,), {}))


def _listed(folder: str, use_pickle: object, entry: str, dump: Callable[[Any], bytes]) -> Callable[..., None]:
    def change(entries: Entries, payload: Payload) -> None:
        name = f"data/{folder}/model_{folder}_config.json"
        listed = json.loads(entries[name])
        meta = next(iter(listed["config"].values()))
        meta |= {"use_pickle": use_pickle, "path_name": entry}
        entries[name] = json.dumps(listed).encode()
        entries[f"data/{folder}/{entry}"] = dump(payload)

    return change


def _legacy(folder: str) -> Callable[..., None]:
    def change(entries: Entries, payload: Payload) -> None:
        entries[f"data/{folder}/model.pt"] = _pickled({"linear.weight": payload})

    return change


def _text(path: tuple[Any, ...], value: Callable[[str], Any]) -> Callable[..., None]:
    """Replaces an element of the program's JSON by text that writes the marker if it is evaluated."""

    def change(entries: Entries, payload: Payload) -> None:
        program = json.loads(entries["models/model.json"])
        place = program
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value(f"__import__('pathlib').Path({str(payload.marker)!r}).write_text('ran')")
        entries["models/model.json"] = json.dumps(program).encode()

    return change


def _operator(entries: Entries, payload: Payload) -> None:
    """aten::save writes any value into any file."""
    program = json.loads(entries["models/model.json"])
    node = program["graph_module"]["graph"]["nodes"][0]
    node["target"] = "torch.ops.aten.save.default"
    name = {"name": "filename", "arg": {"as_string": str(payload.marker)}, "kind": 1}
    node["inputs"] = [node["inputs"][0] | {"name": "item"}, name]
    entries["models/model.json"] = json.dumps(program).encode()


def _renamed_input(entries: Entries, payload: Payload) -> None:
    """The name of an input, which torch.fx writes into the code that it generates."""
    name = f"x=open({str(payload.marker)!r},'w')"
    entries["models/model.json"] = (
        entries["models/model.json"].replace(b'"name": "x"', json.dumps({"name": name})[1:-1].encode())
    ).replace(b'"x": {', json.dumps(name).encode() + b": {")


SIZES = ("graph_module", "graph", "tensor_values", "x", "sizes", 0)
TREE = ("graph_module", "module_call_graph", 0, "signature", "in_spec")
ATTACKS: dict[str, Callable[..., None]] = {
    "sample inputs": _sample_inputs,
    "sample inputs under another case": _sample_inputs_in_capitals,
    "sample inputs, not a zip": _old_pickle,
    "a pickled weight": _listed("weights", True, "weight_0", _pickled),
    "a weight pickled by a true text": _listed("weights", "yes", "weight_0", _pickled),
    "a pickled constant": _listed("constants", True, "tensor_0", _pickled),
    "an opaque object": _listed("constants", True, "opaque_obj_0", pickle.dumps),
    "an opaque object that says it is none": _listed("constants", False, "opaque_obj_0", pickle.dumps),
    "a TorchScript object": _listed("constants", True, "custom_obj_0", _pickled),
    "weights in the layout of torch 2.8": _legacy("weights"),
    "constants in the layout of torch 2.8": _legacy("constants"),
    "a symbolic size": _text(SIZES, lambda code: {"as_expr": {"expr_str": code, "hint": {"as_int": 2}}}),
    "a guard": _text(("guards_code",), lambda code: [f"{code} or True"]),
    "a name": _renamed_input,
    "an operator": _operator,
    "a container": _text(
        TREE,
        lambda code: json.dumps(
            [1, {"type": "builtins.dict", "context": '[{"__enum__": 1, "fqn": "os:x"}]', "children_spec": []}]
        ),
    ),
}


def _rewritten(unaltered: Path, target: Path, change: Callable[..., None], payload: Payload) -> Path:
    with zipfile.ZipFile(unaltered) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(entries, payload)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(f"net/{name}", content)
    return target


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_a_program_runs(attack: str, unaltered: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = _rewritten(unaltered, tmp_path / "net.pt2", ATTACKS[attack], Payload(marker))
    with pytest.raises(ModelFileError, match=r"would run code from it \(.*trust_pickle=True"):
        load(path)
    with pytest.raises(ModelFileError, match="would run code"):
        load_program(path)
    assert not marker.exists()


@pytest.mark.parametrize("attack", ["sample inputs", "a pickled weight", "an opaque object", "a symbolic size"])
def test_the_attacks_are_real(attack: str, unaltered: Path, tmp_path: Path) -> None:
    path = _rewritten(unaltered, tmp_path / "net.pt2", ATTACKS[attack], Payload(tmp_path / "marker"))
    with pytest.raises(ModelFileError), warnings.catch_warnings():  # it runs, and yields something else than a tensor
        load(path, trust_pickle=True)
    assert (tmp_path / "marker").read_text() == "ran"


@pytest.mark.parametrize("entry", ["example_inputs.pt", "state_dict.pt", "constants.pt", "state_dict.json"])
def test_the_layout_of_torch_2_7(entry: str, unaltered: Path, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "old.pt2"
    with zipfile.ZipFile(unaltered) as archive:
        program = archive.read(next(name for name in archive.namelist() if name.endswith("models/model.json")))
    parts = ("state_dict.pt", "constants.pt", "example_inputs.pt")
    entries = {f"serialized_{part}": _pickled({}) for part in parts}
    entries |= {f"serialized_{entry}": _pickled(Payload(marker))}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"version": b"8.20", "serialized_exported_program.json": program, **entries}.items():
            archive.writestr(name, content)
    with pytest.raises(ModelFileError, match="would run code"):
        load_program(path)
    assert not marker.exists()


@pytest.mark.parametrize("wrong", [3, "x", [], {}, None])
@pytest.mark.parametrize("entry", ["models/model.json", "data/weights/model_weights_config.json"])
def test_json_of_another_structure(entry: str, wrong: object, unaltered: Path, tmp_path: Path) -> None:
    def change(entries: Entries, payload: Payload) -> None:
        found = json.loads(entries[entry])
        found[next(iter(found))] = wrong
        entries[entry] = json.dumps(found).encode()

    path = _rewritten(unaltered, tmp_path / "net.pt2", change, Payload(tmp_path))
    with pytest.raises(ModelFileError, match=r"net\.pt2"):
        load_program(path)
    path = _rewritten(
        unaltered, path, lambda entries, _: entries.update({entry: json.dumps(wrong).encode()}), Payload(tmp_path)
    )
    with pytest.raises(ModelFileError, match=r"net\.pt2"):
        load_program(path)


def test_machine_code_in_a_program(unaltered: Path, tmp_path: Path) -> None:
    def change(entries: Entries, payload: Payload) -> None:
        entries["data/AOTInductor/model/code.so"] = b"\x7fELF"

    path = _rewritten(unaltered, tmp_path / "net.pt2", change, Payload(tmp_path))
    with pytest.raises(ModelFileError, match="machine code of AOTInductor"):
        load_program(path)


def test_machine_code_is_described_and_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/data/aotinductor/model/code.so", b"\x7fELF")
    monkeypatch.setattr("nnorm_export.runtimes.describe_run.load", pytest.fail)
    described = describe_run(path)
    assert (described.format, described.runtime) == ("aoti", "aoti")
    assert "it is machine code" in (described.runtime_problem or "")


def test_trusted_objects_load(unaltered: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An example input that holds an object of any class needs a pickle."""

    def change(entries: Entries, payload: Payload) -> None:
        tensor: Any = torch.ones(2, 4)
        tensor.origin = Path("x")  # saved with the tensor
        entries["data/sample_inputs/model.pt"] = _pickled(((tensor,), {}))

    path = _rewritten(unaltered, tmp_path / "net.pt2", change, Payload(tmp_path))
    with pytest.raises(ModelFileError, match=r"the pickle data/sample_inputs/model\.pt names pathlib"):
        load_program(path)
    caplog.set_level(logging.ERROR, "torch._export.serde.serialize")  # torch 2.13's warning lacks an argument
    assert load_program(path, trust_pickle=True).example_inputs is not None


def test_a_program_replaced_after_it_was_examined(
    unaltered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, path = tmp_path / "marker", tmp_path / "net.pt2"
    hostile = _rewritten(unaltered, tmp_path / "hostile.pt2", _sample_inputs, Payload(marker))
    path.write_bytes(unaltered.read_bytes())
    examine = exported_programs._refuse_code

    def examine_and_replace(*arguments: Any) -> None:
        examine(*arguments)
        os.replace(hostile, path)

    monkeypatch.setattr(exported_programs, "_refuse_code", examine_and_replace)
    assert load_program(path).example_inputs is not None
    assert not hostile.exists()
    assert not marker.exists()


def test_torchscript_replaced_after_it_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export_torchscript(Halves(), torch.randn(2, 4), tmp_path / "net.pt").path
    content = path.read_bytes()

    def replace(*_: Any) -> None:
        path.write_bytes(b"PK" + bytes(100))

    monkeypatch.setattr(torchscript, "check_storages", replace)
    runner = object.__new__(torchscript.FormatRunner)
    runner._path, runner._device = path, torch.device("cpu")
    runner._open()
    assert path.read_bytes() != content
    assert runner._module(torch.ones(1, 4)).shape == (1, 3)


def test_an_honest_program_passes(unaltered: Path) -> None:
    assert load(unaltered).inputs[0].name == "x"


def test_verify_refuses_too(unaltered: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = _rewritten(unaltered, tmp_path / "net.pt2", _sample_inputs, Payload(marker))
    with pytest.raises(ModelFileError, match="would run code"):
        verify(path, Halves(), torch.randn(2, 4))
    assert not marker.exists()
