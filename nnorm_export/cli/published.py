"""Addresses on the Hugging Face Hub in the place of files, for all commands."""

from __future__ import annotations

from typing import Any

from nnorm_export.errors import NnormExportError
from nnorm_export.hub import is_hub

FILES = ("path", "file")  # the parameters of commands that name a model file


def download_files(params: dict[str, Any]) -> None:
    """Replaces the addresses among the parameters of a command by the paths of the files in the cache.

    Raises:
        NnormExportError: as :func:`nnorm_export.download`; or the command would write beside the file, into the cache.
    """
    if not any(is_hub(params.get(name)) for name in (*FILES, "replay")):
        return
    from nnorm_export.files.published import download, local_certificate
    from nnorm_export.files.tuned import is_tuned

    for name in FILES:
        if is_hub(params.get(name)):
            _refuse_output_beside(params[name], params)
            params[name] = str(download(params[name]))
    replay: Any = params.get("replay")
    if is_hub(replay):
        # verify replays the folder of a certificate, and tune replays settings.
        params["replay"] = str(download(replay) if is_tuned(replay) else local_certificate(replay))


def _refuse_output_beside(address: str, params: dict[str, Any]) -> None:
    writes = params.get("replay") is None  # tune --replay measures alone
    if writes and "output" in params and params["output"] is None:
        raise NnormExportError(f"{address}: the new file would lie in the cache; name it with --output")
