"""Splits a file into parts below a size, and puts them together again.

    python scripts/split_wheel.py split FILE --size 20M -o DIR
    python scripts/split_wheel.py join DIR -o FILE

For a wheel of hundreds of megabytes, like that of onnxruntime-gpu, and a machine that limits the size of uploads. The
folder of the parts also has manifest.json: name, size and SHA-256 of the file and of each part. Files are read and
written in small pieces, and get their names when they are complete and verified. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "manifest.json"
FORMAT = "split_wheel 1"
PIECE = 1 << 20  # bytes in memory at once
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class SplitError(Exception):
    """An error that the user can correct. Only its message is printed."""


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give a whole number above 0, then K, M, G or nothing"
        )
    return int(match[1]) * UNITS[match[2]]


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that gets its name if the block ends without an exception, and is removed otherwise."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        Path(name).chmod(0o644)  # mkstemp makes the file readable by its owner only
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def copy(source: BinaryIO, destination: BinaryIO, limit: int | None, *digests: Any) -> int:
    """Copies at most `limit` bytes, or all, and updates the digests with them. Returns the number of bytes."""
    copied = 0
    while limit is None or copied < limit:
        piece = source.read(PIECE if limit is None else min(PIECE, limit - copied))
        if not piece:
            break
        destination.write(piece)
        for digest in digests:
            digest.update(piece)
        copied += len(piece)
    return copied


def split(file: Path, size: int, folder: Path) -> Path:
    """Writes the parts of `file`, of `size` bytes each except the last, and the manifest; returns the manifest."""
    if not file.is_file():
        raise SplitError(f"{file} is not a file")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SplitError(f"{folder} is not empty; parts of two files would mix. Name a new folder")
    whole, parts = hashlib.sha256(), []
    total = 0
    with file.open("rb") as source:
        while True:
            name, digest = f"part-{len(parts):04d}", hashlib.sha256()
            with written_atomically(folder / name) as part:
                copied = copy(source, part, size, whole, digest)
            if copied == 0:
                (folder / name).unlink()
                break
            total += copied
            parts.append({"name": name, "size": copied, "sha256": digest.hexdigest()})
    manifest = {"format": FORMAT, "name": file.name, "size": total, "sha256": whole.hexdigest(), "parts": parts}
    with written_atomically(folder / MANIFEST) as manifest_file:  # last, so that a folder with a manifest is complete
        manifest_file.write(json.dumps(manifest, indent=1).encode())
    return folder / MANIFEST


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SplitError(
            f"{folder} has no {MANIFEST}: it is not a folder that `split` wrote, or not all of it"
        ) from None
    except ValueError as error:
        raise SplitError(f"{path} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise SplitError(f"{path} is not of the format {FORMAT!r}")
    return manifest


def join(folder: Path, file: Path) -> Path:
    """Writes the file that was split; `file` may be a folder, in which it gets its original name."""
    manifest = read_manifest(folder)
    if file.is_dir():
        file /= Path(manifest["name"]).name
    whole = hashlib.sha256()
    with written_atomically(file) as joined:
        for part in manifest["parts"]:
            path, digest = folder / Path(part["name"]).name, hashlib.sha256()
            if not path.is_file():
                raise SplitError(f"{path} is missing; the manifest lists {len(manifest['parts'])} parts")
            with path.open("rb") as source:
                copied = copy(source, joined, None, whole, digest)
            if copied != part["size"] or digest.hexdigest() != part["sha256"]:
                raise SplitError(
                    f"{path} is damaged: {copied} bytes where {part['size']} were written, or others; bring it again"
                )
        if whole.hexdigest() != manifest["sha256"]:
            raise SplitError(f"the parts in {folder} are whole, but not those of {manifest['name']}: mixed manifests?")
    return file


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="split_wheel.py", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split", help="a file into parts")
    splitting.add_argument("file", type=Path)
    splitting.add_argument("--size", type=parse_size, default="20M", help="bytes of a part (default %(default)s)")
    splitting.add_argument("-o", "--output", type=Path, required=True, help="a new or empty folder")
    joining = commands.add_parser("join", help="parts into the file")
    joining.add_argument("folder", type=Path)
    joining.add_argument("-o", "--output", type=Path, required=True, help="the file, or a folder for it")
    options = parser.parse_args(argv)
    try:
        if options.command == "split":
            print(split(options.file, options.size, options.output))
        else:
            print(join(options.folder, options.output))
    except (SplitError, OSError) as error:
        print(f"split_wheel.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
