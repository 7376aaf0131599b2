"""Runs the notebooks in docs/notebooks and writes their outputs into them: ``make notebooks``.

Only outputs are kept, without times and facts about this machine.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def executed(path: Path) -> NotebookNode:
    """The notebook ``path`` with the outputs of its cells, in a temporary folder, on one thread.

    Raises:
        CellExecutionError: a cell has failed.
    """
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in the folder, because another kernel may take a free TCP port first.
        sockets = {"transport": "ipc", "ip": f"{folder}/s", "connection_file": f"{folder}/kernel.json"}
        kernel = AsyncKernelManager(kernel_name="python3", **sockets)
        environment = {**os.environ, "TMPDIR": folder, "IPYTHONDIR": folder, "OMP_NUM_THREADS": "1"}
        NotebookClient(notebook, km=kernel, timeout=300, record_timing=False).execute(env=environment, cwd=folder)
    notebook.metadata = NotebookNode(metadata)  # the kernel has written its version of Python there
    return notebook


if __name__ == "__main__":
    for each in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(each), each)
        print(f"wrote {each.name}")
