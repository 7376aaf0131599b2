"""Builds samples/container/Dockerfile without a daemon, and serves a file in the image. `make test-container` runs it.

python scripts/try_image.py

It needs Linux, root, buildah and debootstrap (apt install buildah debootstrap). Debian's Python, by debootstrap,
stands in for the base image of the Dockerfile, so that no registry of images is asked; packages come from where apt and
pip find them. The server runs as in a cluster: as a user without rights, on a read-only file system.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import nnorm_export

ROOT = Path(__file__).parents[1]
CONTAINER = ROOT / "samples" / "container"
NEEDED = ("buildah", "debootstrap", "unshare", "setpriv", "ip")
PACKAGES = "python3-venv,python-is-python3,ca-certificates"
# What the machine needs to reach its packages: certificates and the settings of pip.
OF_MACHINE = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")


def main() -> None:
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        raise SystemExit(f"{', '.join(missing)}: not installed; on Debian: apt install buildah debootstrap")
    if os.geteuid() != 0:
        raise SystemExit("this builds an image without a daemon, which takes root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        folder = Path(temporary)
        build(folder)
        export_model(folder)
        name = buildah(folder, "from", "nnorm-serve")
        image = buildah(folder, "mount", name)
        (Path(image) / "models").mkdir(exist_ok=True)  # where a container mounts its volume
        config = json.loads(buildah(folder, "inspect", "--type", "image", "nnorm-serve"))["Docker"]["config"]
        try:
            program = Path(__file__).with_name("serve_in_image.py")
            serve = [sys.executable, str(program), image, str(folder / "model.onnx"), json.dumps(config)]
            subprocess.run(["unshare", "--mount", "--net", *serve], check=True)
        finally:
            buildah(folder, "umount", name)
            buildah(folder, "rm", name)


def build(folder: Path) -> None:
    """The image nnorm-serve, of a Debian in ``folder``."""
    start = time.monotonic()
    base = folder / "base"
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(base))
    for file in filter(os.path.exists, OF_MACHINE):
        shutil.copyfile(file, base / file[1:])
    name = buildah(folder, "from", "scratch")
    buildah(folder, "copy", name, str(base), "/")
    buildah(folder, "commit", "--rm", name, "base")
    options = ["--format=docker", f"--ignorefile={CONTAINER}/Dockerfile.dockerignore", "--build-arg=PYTHON_IMAGE=base"]
    buildah(folder, "build", *options, f"--file={CONTAINER}/Dockerfile", "--tag=nnorm-serve", str(ROOT))
    print(f"built in {time.monotonic() - start:.0f} s")


def export_model(folder: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 8), nnorm_export.layers.LayerNormalNorm(8)).eval()
    nnorm_export.export(network, (torch.randn(2, 6),), folder / "model.onnx", verify=False)


def buildah(folder: Path, *arguments: str) -> str:
    """What a command prints at the end. Images lie in ``folder``; the commands of a build run in a chroot."""
    places = [f"--root={folder}/images", f"--runroot={folder}/run", "--storage-driver=vfs"]
    command = ["buildah", *places, *arguments]
    if arguments[0] == "build":
        subprocess.run([*command[:4], "build", "--isolation=chroot", *arguments[1:]], check=True)
        return ""
    return run(*command)


def run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
