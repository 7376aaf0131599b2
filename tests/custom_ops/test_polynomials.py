"""The constants in Python are those of the kernels; fit_polynomials.py fits the polynomials."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nnorm_export import polynomials

SCRIPT = Path(__file__).parents[2] / "custom_ops" / "scripts" / "fit_polynomials.py"
COEFFICIENTS = {"log2_1p_of_mantissa": polynomials.LOG2_1P, "exp2_m1_of_fraction": polynomials.EXP2_M1}


@pytest.fixture(scope="module")
def fit_polynomials() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_polynomials", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("function", COEFFICIENTS)
def test_python_has_the_coefficients_of_the_kernels(function: str, fit_polynomials: ModuleType) -> None:
    np.testing.assert_array_equal(sorted(np.float32(COEFFICIENTS[function])), fit_polynomials.in_header(function))


def test_python_has_the_least_exponents_of_the_kernels(fit_polynomials: ModuleType) -> None:
    found = re.findall(r" least_exponent = (0x1p-\d+)", fit_polynomials.HEADER.read_text())
    assert [float.fromhex(each) for each in found] == list(polynomials.LEAST_EXPONENT.values())


def test_the_script_fits_every_polynomial(fit_polynomials: ModuleType) -> None:
    degrees = {name: degree for name, _, _, _, degree in fit_polynomials.POLYNOMIALS}
    assert degrees == {name: len(coefficients) - 1 for name, coefficients in COEFFICIENTS.items()}
