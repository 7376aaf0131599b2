"""The examples in docstrings print what they show."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnorm_export
from nnorm_export.layers import convert_normal_norm


@pytest.mark.parametrize("function", [nnorm_export.freeze, convert_normal_norm], ids=["freeze", "convert_normal_norm"])
def test_an_example_in_a_docstring_prints_what_it_shows(function: Callable[..., Any]) -> None:
    names = {"torch": torch, "nnorm_export": nnorm_export, function.__name__: function}
    (example,) = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs=names)
    assert doctest.DocTestRunner().run(example) == (0, 2)
