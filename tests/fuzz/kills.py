"""Kills writers at random moments and after each of their steps, while a reader looks.

    python tests/fuzz/kills.py 500

Every command that writes runs in a forked process, with everything imported and its model translated. It writes a
model whose weights are all the same number, in the place of one with another number. Half of the writers end
themselves after a random number of calls that change the file system, the other half are killed at a random moment of
their writing. The reader and the look afterwards accept the older file or the new one, whole, and no folder where one
is replaced, which takes two renames. Another writer then finishes, and nothing may be left beside its file.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import random
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from nnorm_export import export, export_program, export_torchscript, load
from nnorm_export.exporting.formats import onnx as onnx_exporter, pt2, torchscript
from nnorm_export.exporting.request import freeze_source
from nnorm_export.files.archive import read_archive
from nnorm_export.files.durable import read_whole
from nnorm_export.files.sha256 import file_digests
from nnorm_export.layers import LayerNormalNorm
from nnorm_export.optimizing import optimize as optimizing
from nnorm_export.parity.certificates.files import CERTIFICATE
from nnorm_export.parity.certificates.write import NewCertificate
from nnorm_export.parity.report import write_report
from nnorm_export.parity.verdict.case import Case as ParityCase
from nnorm_export.parity.verdict.compare_outputs import Comparison
from nnorm_export.parity.verdict.criteria import Criterion
from nnorm_export.parity.verdict.outcome import ParityReport
from nnorm_export.serving.repository import write_repository

VALUES = (1.0, 2.0)
SIZE = 64
LONGEST = 120  # seconds that one writer may take


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), LayerNormalNorm(SIZE)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def weights_of(path: Path) -> float:
    """The number that all weights of an ONNX file are, with those in external data."""
    found = {
        float(number)
        for tensor in onnx.load(path).graph.initializer
        for number in np.unique(onnx.numpy_helper.to_array(tensor))
    }
    (value,) = found & set(VALUES)
    return value


@dataclass
class Case:
    """A command that writes ``path``: ``write(value)``, and ``read()``, which returns the value of a whole file.

    A folder may be missing for a moment, and after a kill until the next writer: ``look()`` returns None then.
    """

    name: str
    path: Path
    write: Callable[[float], object]
    read: Callable[[], object]
    kills: int = 0
    steps: int = 0
    seconds: float = 0.1
    is_folder: bool = False

    def look(self) -> object:
        return read_whole(self.path, lambda: None if self.is_folder and not self.path.exists() else self.read())


def cases(folder: Path) -> list[Case]:
    """The commands, each with a folder of its own; what they do before they write is done here, once."""
    x = (torch.ones(2, SIZE),)
    source = {value: export(model_of(value), x, folder / f"source{value}.onnx", verify=False).path for value in VALUES}
    found: list[Case] = []

    def add(
        name: str, write: Callable[[Path, float], object], read: Callable[[Path], object], *, is_folder: bool = False
    ) -> None:
        path = folder / name / "m.onnx" if "." not in name else folder / name.replace(".", "-") / f"m.{name[1:]}"
        path.parent.mkdir()
        found.append(Case(name, path, lambda value: write(path, value), lambda: read(path), is_folder=is_folder))

    translated = onnx_exporter._translated
    known: dict[float, bytes] = {}
    for value in VALUES:
        request = onnx_exporter.Request(model=model_of(value), args=x, path=source[value], verify=False)
        frozen = freeze_source(request)
        model, *about = translated(frozen, None)
        known[value] = ir.serde.serialize_model(model).SerializeToString()

    def export_onnx(path: Path, value: float, external_data: bool) -> None:
        model = ir.serde.deserialize_model(onnx.ModelProto.FromString(known[value]))
        with mock.patch.object(onnx_exporter, "_translated", return_value=(model, *about)):
            export(model_of(value), x, path, verify=False, external_data=external_data)

    add("export", lambda path, value: export_onnx(path, value, False), weights_of)
    add("export-external-data", lambda path, value: export_onnx(path, value, True), weights_of)

    graphs = {value: onnx.load(source[value]) for value in VALUES}

    def optimize(path: Path, value: float) -> None:
        graph = ir.serde.deserialize_model(graphs[value])
        with mock.patch.object(optimizing, "optimized_graph", return_value=graph):
            optimizing.optimize(source[value], path, verify=False, external_data=True)

    add("optimize", optimize, weights_of)

    digests: dict[str, float] = {}

    def whole_archive(path: Path) -> float:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        note = read_archive(path).note
        assert note is not None
        return digests[note.weights_sha256]

    archives = (
        (".pt", export_torchscript, torchscript, "_traced"),
        (".pt2", export_program, pt2, "trace"),
    )
    for suffix, function, module, step in archives:
        prepared: dict[float, Any] = {}
        original = getattr(module, step)
        for value in VALUES:

            def keep(
                frozen: Any, value: float = value, original: Any = original, prepared: Any = prepared, **options: bool
            ) -> Any:
                prepared[value] = original(frozen, **options)
                return prepared[value]

            with mock.patch.object(module, step, keep):
                target = folder / f"prepared{value}{suffix}"
                report = function(model_of(value), x, target, verify=False)
            digests[report.weights_sha256] = value

        def write(
            path: Path,
            value: float,
            function: Any = function,
            module: Any = module,
            step: str = step,
            prepared: Any = prepared,
        ) -> None:
            with mock.patch.object(module, step, return_value=prepared[value]):
                function(model_of(value), x, path, verify=False)

        add(suffix, write, whole_archive)

    runner = load(source[1.0])

    def certify(path: Path, value: float) -> None:
        array = np.full((2, SIZE), value, np.float32)
        report = ParityReport("test", str(value), [], {})
        names = [info.name for info in runner.outputs]
        comparison = Comparison("file", "reference", names, [Criterion()], "float32")
        new = NewCertificate(source[value], path, None, file_digests(source[value]))
        new.write(runner, comparison, [ParityCase([array], [array], [array], float64=[array])], report)

    def certified(path: Path) -> float:
        told = json.loads((path / CERTIFICATE).read_text())["predicate"]
        value = float(told["decided_by"])
        arrays = [onnx.numpy_helper.to_array(onnx.load_tensor(file)) for file in sorted(path.rglob("*.pb"))]
        assert len(arrays) == 3
        assert all((array == value).all() for array in arrays)
        return value

    add("verify-record", certify, certified, is_folder=True)

    def write_page(path: Path, value: float) -> None:
        report = mock.MagicMock(runtime=str(value), criterion="c", outputs=[], metric=None)
        with (
            mock.patch.object(write_report, "_or_reason", return_value=(None, "left out")),
            mock.patch.object(write_report, "check_page"),
        ):
            write_report.write_report(path, source[value], model_of(value), x, report)

    def whole_page(path: Path) -> float:
        text = path.read_text()
        assert text.rstrip().endswith("</html>")
        (value,) = (value for value in VALUES if f"run by {value}" in text)
        return value

    add("verify-report", write_page, whole_page)

    def serve(path: Path, value: float) -> None:
        """A version more, and another config.pbtxt if ``value`` is another than that of the newest."""
        write_repository(source[value], path.parent, name=path.name, instances=int(value))

    def served(path: Path) -> float:
        config = (path / "config.pbtxt").read_text()
        versions = sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdigit())
        values = [weights_of(path / str(version) / "model.onnx") for version in versions]
        assert f"count: {int(values[-1])} " in config
        return values[-1]

    add("serve-repo", serve, served, is_folder=True)
    return found


def hooks(fail_at: int | None, count: list[int]) -> Iterator[Any]:
    """Patches of the calls that change the file system; the process is killed after the ``fail_at``-th."""

    def wrap(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            count[0] += 1
            if count[0] == fail_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in ("replace", "rename", "fsync", "unlink", "mkdir", "rmdir", "open", "link"):
        yield mock.patch.object(os, name, wrap(getattr(os, name)))
    yield mock.patch.object(builtins, "open", wrap(builtins.open))


def run(case: Case, value: float, *, step: int | None = None, after: float | None = None) -> bool:
    """Runs the writer in a process of its own, to its end or until it is killed; returns whether it was killed."""
    begun, begin = os.pipe()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.dup2(os.open(case.path.parent.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            count = [0]
            for patch in hooks(step, count):
                patch.start()
            count[0] = 0
            os.write(begin, b"1")
            start = time.monotonic()
            case.write(value)
            os.write(begin, json.dumps([count[0], time.monotonic() - start]).encode())
            code = 0
        finally:
            if code:
                import traceback  # noqa: PLC0415

                traceback.print_exc()
            os._exit(code)
    os.close(begin)
    os.read(begun, 1)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    told = os.read(begun, 1000)
    os.close(begun)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"{case.name}: signal {os.WTERMSIG(status)}"
        return True
    log = case.path.parent.parent / "log"
    assert os.WEXITSTATUS(status) == 0, f"{case.name}: {log.read_text()[-2000:]}"
    if told:
        case.steps, case.seconds = json.loads(told)
    return False


def read_all_the_time(watched: list[Case], stop: int) -> None:
    """The reader: looks at every file in turn, until ``stop`` is closed; says how often it looked, and what it saw."""
    looks = 0
    os.set_blocking(stop, False)
    while True:
        for case in watched:
            try:
                assert case.look() in (*VALUES, *[None] * case.is_folder)
            except Exception as error:  # whatever reading raises over a file that is not whole
                print(f"MIXED {case.name}: {type(error).__name__}: {error}", flush=True)
            looks += 1
        try:
            if os.read(stop, 1) == b"":
                break
        except BlockingIOError:
            pass
    print(looks, flush=True)


@dataclass
class Found:
    """What the kills left: how often the older file or no folder, files beside it, and what the reader saw."""

    kills: int = 0
    old: int = 0
    missing: int = 0
    leftovers: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    looks: int = 0


def kill(watched: list[Case], kills: int, chance: random.Random, found: Found) -> None:
    """Kills the writers in turn; after each kill the file is read, another writer finishes, the folder is listed."""
    columns = (TextColumn("kills"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=kills)
        while found.kills < kills:
            case = watched[found.kills % len(watched)]
            before = case.look()
            assert before in VALUES
            value = VALUES[before == VALUES[0]]
            by_step = chance.random() < 0.5
            step = chance.randint(1, case.steps) if by_step else None
            after = None if by_step else chance.uniform(0, case.seconds)
            if run(case, value, step=step, after=after):
                case.kills += 1
                found.kills += 1
                progress.advance(task)
            now = case.look()
            if now is None and case.is_folder:
                found.missing += 1
            elif now not in (before, value):
                found.mixed.append(f"{case.name}: {now} after a kill in writing {value} over {before}")
            found.old += now == before
            run(case, before if now == value else value)
            found.leftovers += [f"{case.name}: {name}" for name in strange(case)]


def strange(case: Case) -> list[str]:
    """What lies beside a file and does not belong to it."""
    beside = {entry.name for entry in case.path.parent.iterdir()} - {case.path.name}
    weights = sorted(name for name in beside if name.endswith(".data"))
    beside -= set(weights[: case.name in ("export-external-data", "optimize")])
    return [*sorted(beside), *(entry.name for entry in case.path.glob(".*") if case.path.is_dir())]


def main(kills: int, seed: int, folder: Path) -> int:
    torch.set_num_threads(1)
    watched, found = cases(folder), Found()
    for case in watched:
        run(case, VALUES[0])
    stop, stopped = os.pipe()
    reader = os.fork()
    if reader == 0:
        os.close(stopped)
        output = os.open(folder / "reader", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        try:
            read_all_the_time(watched, stop)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.set_inheritable(stopped, False)
    try:
        kill(watched, kills, random.Random(seed), found)
    finally:
        os.close(stopped)
        os.waitpid(reader, 0)
    *mixed, looks = (folder / "reader").read_text().splitlines()
    found.mixed += mixed
    found.looks = int(looks)
    print("| command | kills | steps of one run |\n| --- | --- | --- |")
    for case in watched:
        print(f"| {case.name} | {case.kills} | {case.steps} |")
    print(
        f"\n{found.kills} kills, seed {seed}: the older file was in place {found.old} times, no folder {found.missing} "
        f"times and the new one {found.kills - found.old - found.missing} times; mixed files {len(found.mixed)}, "
        f"leftovers {len(found.leftovers)}; the reader looked {found.looks:,} times"
    )
    print(*found.mixed[:20], *found.leftovers[:20], sep="\n")
    return int(bool(found.mixed or found.leftovers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(options.kills, options.seed, Path(temporary)))
