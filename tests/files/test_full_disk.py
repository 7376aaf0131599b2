"""A disk that is full, in every format: an error that says so, and the older file as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITERS = {
    "onnx": "export(model, (x,), path)",
    "data": "export(model, (x,), path, external_data=True)",
    "pt2": "export_program(model, (x,), path)",
    "pt": "export_torchscript(model, (x,), path)",
    "html": "write_report(path, *compared)",
    "folder": "verify(*compared[:3], certificate=path)",
    "repository": "write_repository(compared[0], path)",
}

PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from torch import nn
from nnorm_export import export, export_program, export_torchscript, verify
from nnorm_export.errors import NnormExportError
from nnorm_export.parity.report.write_report import write_report
from nnorm_export.serving.repository import write_repository

x = torch.randn(4, 512)
model = nn.Linear(512, 512).eval()
source = export(model, (x,), "source.onnx").path
compared = (source, model, (x,), verify(source, model, (x,)))
for line in sys.stdin:
    suffix, _, write = line.strip().partition(" ")
    path = Path("m." + suffix)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, resource.RLIM_INFINITY))
    try:
        eval(write)
        print(suffix, "written")
    except NnormExportError as error:
        print(suffix, error.exit_code, "large" in str(error), path.is_file() or any(path.glob("*")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """Files may not exceed 1 kB, as if the disk were full; one process writes all formats, and must not end."""
    lines = "".join(f"{suffix} {call}\n" for suffix, call in WRITERS.items())
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=lines,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == [f"{suffix} 2 True False" for suffix in WRITERS]
    assert not [file for file in tmp_path.rglob("*") if ".nnorm-" in file.name]
