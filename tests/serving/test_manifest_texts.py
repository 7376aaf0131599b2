"""Names, claims and YAML of manifests."""

from __future__ import annotations

import pytest
import yaml

from nnorm_export import ExportError
from nnorm_export.serving.manifests.request import claim_of, object_name
from nnorm_export.serving.manifests.text import yaml_of


@pytest.mark.parametrize(
    ("model", "name"),
    [("resnet18", "resnet18"), ("ResNet_18.v2", "resnet-18-v2"), ("8bit", "model-8bit"), ("a--b_", "a-b"), ("y", "y")],
)
def test_names_of_objects(model: str, name: str) -> None:
    found, note = object_name(model)
    assert found == name
    assert bool(note) == (found != model)


@pytest.mark.parametrize("model", ["___", "é", "n" * 54, "1" * 50])
def test_no_name_can_be_made(model: str) -> None:
    with pytest.raises(ExportError, match=r"no name for objects of Kubernetes can be made of"):
        object_name(model)


@pytest.mark.parametrize(
    "text", ["y", "n", "on", "No", "null", "~", "1e3", "0o7", "1_0", "12:30:00", "", " x", "a: b", "#"]
)
def test_text_stays_text_for_every_reader(text: str) -> None:
    line = yaml_of([{"key": text}]).splitlines()[1]
    assert yaml.safe_load(line) == {"key": text}
    assert line[len("key: ")] in "\"'"


def test_a_folder_of_a_claim() -> None:
    assert claim_of("pvc://models") == ("models", "")
    assert claim_of("pvc://my.models/a/b/") == ("my.models", "a/b")
