"""Runs the command of an image as a cluster would, and asks the server. scripts/try_image.py calls it.

python scripts/serve_in_image.py FOLDER_OF_IMAGE MODEL.onnx CONFIGURATION

It needs new namespaces of mounts and of the network, so that only this program reaches the server. The file system of
the server is read-only, except /tmp. The server runs as the user of the image and does not have capabilities.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import nnorm_export

ADDRESS = "http://127.0.0.1:8000"
SECONDS_TO_START, SECONDS_TO_STOP = 60, 15
DEVICES = ("null", "zero", "random", "urandom")


def main(image: Path, model: Path, config: dict[str, Any]) -> None:
    mount(image, model)
    run("ip", "link", "set", "lo", "up")
    start = time.monotonic()
    server = subprocess.Popen(in_image(image, config, [*config["Entrypoint"], *config["Cmd"]]))
    try:
        wait_until_healthy(image, config, server)
        print(f"healthy after {time.monotonic() - start:.1f} s")
        compare(model)
        refuses_writes(image, config)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(SECONDS_TO_STOP)
    if code != 0:
        raise SystemExit(f"the server ended with {code} on SIGTERM")
    print("it ends on SIGTERM")


def mount(image: Path, model: Path) -> None:
    """The file system of the server: the image, read-only, /tmp, the model, and devices."""
    run("mount", "--make-rprivate", "/")
    run("mount", "--bind", str(image), str(image))
    for name in ("tmp", "models", "dev"):
        run("mount", "-t", "tmpfs", "tmpfs", str(image / name))
    run("mount", "-t", "proc", "proc", str(image / "proc"))
    (image / "models" / "model.onnx").write_bytes(model.read_bytes())
    run("mount", "-o", "remount,ro", str(image / "models"))
    for name in DEVICES:
        (image / "dev" / name).touch()
        run("mount", "--bind", f"/dev/{name}", str(image / "dev" / name))
    (image / "dev" / "shm").mkdir(mode=0o1777)
    run("mount", "-t", "tmpfs", "tmpfs", str(image / "dev" / "shm"))
    run("mount", "-o", "remount,ro,bind", str(image))


def in_image(image: Path, config: dict[str, Any], command: list[str]) -> list[str]:
    """The command that runs ``command`` with the user, the folder and the variables of the image."""
    user, _, group = config["User"].partition(":")
    rights = [f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    enter = ["chroot", str(image), "setpriv", *rights, "--inh-caps=-all"]
    return [*enter, "env", "-i", f"--chdir={config['WorkingDir']}", *config["Env"], *command]


def wait_until_healthy(image: Path, config: dict[str, Any], server: subprocess.Popen[bytes]) -> None:
    """By the health check of the image."""
    kind, *check = config["Healthcheck"]["Test"]
    assert kind == "CMD"
    until = time.monotonic() + SECONDS_TO_START
    while subprocess.run(in_image(image, config, check), check=False, capture_output=True).returncode:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        if time.monotonic() > until:
            raise SystemExit(f"the server is not healthy after {SECONDS_TO_START} s")
        time.sleep(0.2)


def compare(model: Path) -> None:
    """The answers of the server beside those of the file in this process."""
    runner = nnorm_export.load(model, intra_op_num_threads=1)
    rows = np.random.default_rng(0).standard_normal((5, *runner.inputs[0].shape[1:])).astype(np.float32)
    buffer = io.BytesIO()
    np.save(buffer, rows)
    answer = np.load(io.BytesIO(urllib.request.urlopen(f"{ADDRESS}/predict", data=buffer.getvalue()).read()))
    np.testing.assert_allclose(answer, runner(rows)[0], rtol=1e-5, atol=1e-5)
    print(f"its answers are those of the file here, to {np.abs(answer - runner(rows)[0]).max():.1e}")
    try:
        urllib.request.urlopen(f"{ADDRESS}/predict", data=b"other")
        code = 200
    except urllib.error.HTTPError as error:
        code = error.code
    assert code == 400, f"a request that is not an array was answered with {code}"


def refuses_writes(image: Path, config: dict[str, Any]) -> None:
    for place in ("/", "/models", "/app", "/opt/venv", "/etc"):
        done = subprocess.run(in_image(image, config, ["touch", f"{place}/x"]), check=False, capture_output=True)
        assert done.returncode, f"{place} can be written"
    run(*in_image(image, config, ["touch", "/tmp/x"]))
    print("it may write to /tmp alone")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
