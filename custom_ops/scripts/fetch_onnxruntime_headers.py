#!/usr/bin/env python3
"""Fetches the C header of ONNX Runtime into a folder; needs no root, installs nothing, uses the standard library only.

Looks in two places, in this order:

1. Debian's package libonnxruntime-dev. apt-get takes it from the mirror that this machine is configured with, but
   from Debian 13 or newer, as older ones have no such package; dpkg unpacks it into a temporary folder. The lists of
   that release live in the temporary folder too, so the machine's own are left as they are.
   Verified by apt: the signature of the release file with Debian's own keyring, then the SHA-256 of the package
   list and of the package. Without that keyring nothing is fetched from there.
2. ONNX Runtime's release archive on GitHub.
   Verified: the server's certificate, and the SHA-256 if one is given.

ONNXRUNTIME_INCLUDE_DIR tells the build to use headers that are there already; then this script is not run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

HEADER = "onnxruntime_c_api.h"

PACKAGE = "libonnxruntime-dev"
SUITES = ("trixie", "stable")  # trixie has 1.21; "stable" is for mirrors that no longer carry trixie
KEYRINGS = ("debian-archive-keyring.gpg", "debian-archive-keyring.pgp")

# Headers are the same for every platform, so the one archive serves all.
ARCHIVE = "https://github.com/microsoft/onnxruntime/releases/download/v1.21.0/onnxruntime-linux-x64-1.21.0.tgz"

SECONDS = 300  # for each command or download; a build must not hang on a network that drops packets


class FetchError(Exception):
    """A source that does not have the headers, and why."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Fetch the C header of ONNX Runtime into OUTPUT_DIR, from Debian's package libonnxruntime-dev or, "
        "where that cannot be had, from the release archive on GitHub.",
        epilog="Then build with it: ONNXRUNTIME_INCLUDE_DIR=OUTPUT_DIR pip install nnorm_export",
    )
    parser.add_argument(
        "output", metavar="OUTPUT_DIR", type=Path, help="made by this script; kept if it has the header"
    )
    parser.add_argument(
        "--archive",
        metavar="URL",
        default=os.environ.get("NNORM_ONNXRUNTIME_ARCHIVE"),
        help="take the headers from this copy of a release archive (.tgz) and nowhere else; file:// will do. "
        "Default: the environment variable NNORM_ONNXRUNTIME_ARCHIVE",
    )
    parser.add_argument(
        "--sha256",
        metavar="HEX",
        default=os.environ.get("NNORM_ONNXRUNTIME_ARCHIVE_SHA256"),
        help="refuse an archive with another SHA-256. Default: NNORM_ONNXRUNTIME_ARCHIVE_SHA256",
    )
    arguments = parser.parse_args()
    output: Path = arguments.output.absolute()

    if (output / HEADER).exists():
        print(f"{output} has {HEADER} already")
        return 0
    failures = []
    sources = ["archive"] if arguments.archive else ["Debian", "archive"]
    for source in sources:
        try:
            with tempfile.TemporaryDirectory(prefix="onnxruntime-headers-") as temporary:
                if source == "Debian":
                    origin, headers = from_debian(Path(temporary))
                else:
                    origin, headers = from_archive(Path(temporary), arguments.archive or ARCHIVE, arguments.sha256)
                put_in_place(headers, output)
        except FetchError as error:
            failures.append(str(error))
        except OSError as error:
            failures.append(f"{output}: cannot be written: {error}")
            break
        else:
            print(f"{output}: headers from {origin}")
            return 0
    print("\n".join(failures), file=sys.stderr)
    return 1


def from_debian(work: Path) -> tuple[str, Path]:
    """Download and unpack Debian's package below ``work``; returns its origin and the folder of the headers."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise FetchError(f"Debian's {PACKAGE}: not on this system, it has no {tool}")
    keyring = next((path for name in KEYRINGS if (path := Path("/usr/share/keyrings", name)).exists()), None)
    if keyring is None:
        raise FetchError(f"Debian's {PACKAGE}: cannot be verified; install the package debian-archive-keyring")
    work.chmod(0o755)  # as root, apt downloads as its own user, which needs access
    failures = []
    for mirror in debian_mirrors():
        for suite in SUITES:
            try:
                package = download_package(work / suite, mirror, suite, keyring)
            except FetchError as error:
                failures.append(str(error))
                continue
            run(["dpkg", "-x", str(package), str(work / "unpacked")])
            header = next((work / "unpacked").rglob(HEADER), None)
            if header is None:
                raise FetchError(f"Debian's {PACKAGE}: {package.name} does not contain {HEADER}")
            return f"{package.name}, {mirror} {suite}", header.parent
    raise FetchError("\n".join(failures) or f"Debian's {PACKAGE}: apt-get has no mirror of Debian in its configuration")


def debian_mirrors() -> list[str]:
    """The addresses in this machine's configuration of apt, in any of its files and formats."""
    mirrors = []
    # Lines like 'http://mirror/debian/dists/bookworm/InRelease' name 0; apt-get prints them without fetching anything.
    for line in run(["apt-get", "update", "--print-uris"]).splitlines():
        address, _, release = line.split("' ")[0].lstrip("'").partition("/dists/")
        # Security updates and the like are separate repositories without whole releases. Repositories of
        # other projects may pass here; they do not have Debian's signature.
        if release.count("/") == 1 and "-" not in release and address not in mirrors:
            mirrors.append(address)
    return mirrors


def download_package(work: Path, mirror: str, suite: str, keyring: Path) -> Path:
    """Let apt-get download and verify the package, with its own lists and cache below ``work``."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "sources.list").write_text(f"deb [target=Packages signed-by={keyring}] {mirror} {suite} main\n")
    configuration = work / "apt.conf"  # read after the machine's own, whose proxies and the like apply too
    configuration.write_text(
        # The machine's own hooks into "update" are for its own lists.
        "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
        f'Dir::Etc::SourceList "{work}/sources.list";\nDir::Etc::SourceParts "/dev/null";\n'
        'Dir::Etc::Preferences "/dev/null";\nDir::Etc::PreferencesParts "/dev/null";\n'
        f'Dir::State::Lists "{work}/lists";\nDir::Cache "{work}/cache";\nAcquire::Languages "none";\n'
    )
    apt = ["apt-get", "--quiet", "--config-file", str(configuration)]
    run([*apt, "--error-on=any", "update"])
    run([*apt, "download", PACKAGE], directory=work)
    return next(work.glob("*.deb"))


def from_archive(work: Path, url: str, sha256: str | None) -> tuple[str, Path]:
    """Download a release archive and take its headers; returns their origin and their folder."""
    archive = work / "archive.tgz"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer, archive.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except (OSError, ValueError) as error:  # URLError is an OSError; a malformed address is a ValueError
        raise FetchError(f"{url}: cannot be downloaded: {error}") from error
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if sha256 and found != sha256.lower():
        raise FetchError(f"{url}: its SHA-256 is {found}, not {sha256}; the archive was replaced or damaged")
    headers = work / "include"
    headers.mkdir()
    try:
        with tarfile.open(archive) as members:
            for member in members:
                # Only files of its include folder, under their base names, so that nothing is written elsewhere.
                if Path(member.name).parent.name == "include" and member.isfile() and member.name.endswith(".h"):
                    content = members.extractfile(member)
                    assert content is not None
                    (headers / Path(member.name).name).write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FetchError(f"{url}: not a complete .tgz: {error}") from error
    if not (headers / HEADER).exists():
        raise FetchError(f"{url}: does not contain include/{HEADER}")
    return f"{url} (SHA-256 {found})", headers


def put_in_place(headers: Path, output: Path) -> None:
    """Copy the headers beside ``output`` and rename the copy, so that the folder is complete as soon as it exists."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as temporary:
        whole = Path(temporary, output.name)
        whole.mkdir()
        for header in headers.glob("*.h"):
            shutil.copyfile(header, whole / header.name)
        try:
            whole.rename(output)
        except OSError:
            if not (output / HEADER).exists():  # otherwise another build was faster
                raise


def run(command: list[str], directory: Path | None = None) -> str:
    """Run a command and return what it prints; FetchError with its error messages if it fails."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"Debian's {PACKAGE}: {error}") from error
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.startswith("E:")] or done.stderr.splitlines()
        raise FetchError(f"Debian's {PACKAGE}: {' '.join(words) or f'{command[0]} failed'}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
