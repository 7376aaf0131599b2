"""``model.tuned.json``: the file that is fastest on a machine, its runtime, and the settings to open it with.

:func:`nnorm_export.tune` writes it beside the file. It names files by their names alone, so that the folder may be
copied as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnorm_export.errors import ModelFileError
from nnorm_export.files.locations import locate
from nnorm_export.files.sha256 import file_sha256
from nnorm_export.names import escaped
from nnorm_export.reading import JSON_BYTES, parse_json, read_bytes

ENDING = ".tuned.json"
FORMAT = 1

Options = dict[str, Any]
# The options of a runtime that the settings may have, which no other program may add to.
_OPTIONS = {"intra_op_num_threads": int, "session_config": dict, "kernels": bool}


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings in ``path``.

    Attributes:
        path: of the settings.
        file: the file to open, beside them.
        sha256: of ``file``.
        runtime, options: the arguments of :func:`nnorm_export.load`.
        batch: the rows of a call, for which it is the fastest.
        objective: what was to be best: ``latency`` or ``throughput``.
        source: the name of the file that ``file`` was made of, which other machines need; empty if it is not a file.
        source_sha256: of that file.
        processor, cores: of the machine that it was measured on.
        service: the configuration that meets a target (``instances``, ``threads``, ``max_batch``, ``max_delay_us``);
            None if none was asked for.
        measured: the report of the measurement, as JSON.
    """

    path: Path
    file: Path
    sha256: str
    runtime: str
    options: Options
    batch: int
    objective: str
    source: str = ""
    source_sha256: str = ""
    processor: str
    cores: int
    service: dict[str, int] | None = None
    measured: Mapping[str, Any]

    def warning(self, processor: str, cores: int) -> str:
        """Says that this machine, with ``cores`` of ``processor``, is another one; empty if it is not."""
        if (processor, cores) == (self.processor, self.cores):
            return ""
        return (
            f"{self.path} was measured on {self.processor}, {self.cores} cores, and this machine has {processor}, "
            f"{cores} cores: another file or other settings may be faster here. Measure again here: {self.command}"
        )

    def explained(self, processor: str, cores: int) -> dict[str, str]:
        """The settings in words, name -> text, on a machine with ``cores`` of ``processor``."""
        winner = self.measured["winner"]
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        time, ratio = winner.get("milliseconds"), winner.get("ratio")
        is_known = isinstance(time, float) and isinstance(ratio, float)
        measured = f"{time:.3g} ms, {ratio:.2f} × the time of {self.source or 'the model'}" if is_known else ""
        service = self.service and ", ".join(f"{name} {value}" for name, value in self.service.items())
        is_here = (processor, cores) == (self.processor, self.cores)
        here = "this kind of machine" if is_here else f"another machine than this, {processor}, {cores} cores"
        return {
            "file": str(self.file),
            "made of": self.source,
            "opened by": f"load({str(self.file)!r}, {self.runtime!r}{f', {options}' if options else ''})",
            "best for": f"{self.objective}, in calls of {self.batch} row{'s' * (self.batch > 1)}",
            "measured": measured,
            "service": service or "",
            "machine": f"{self.processor}, {self.cores} cores: {here}",
        }

    @property
    def command(self) -> str:
        return f"nnorm-export tune {self.source or 'MODEL'} --input DATA"

    @property
    def text(self) -> str:
        """The settings as JSON, for the file ``path``."""
        entries = {
            "format": FORMAT,
            "file": self.file.name,
            "sha256": self.sha256,
            "runtime": self.runtime,
            "options": self.options,
            "batch": self.batch,
            "objective": self.objective,
            "source": self.source,
            "source_sha256": self.source_sha256,
            "processor": self.processor,
            "cores": self.cores,
            "service": self.service,
            "measured": self.measured,
        }
        return json.dumps(entries, indent=2) + "\n"


def is_tuned(path: object) -> bool:
    """Whether ``path`` is called as settings are."""
    return str(path).endswith(ENDING)


def read_tuned(path: str | Path) -> Tuned:
    """Reads settings, and checks that the file beside them is the one that was measured.

    Raises:
        ModelFileError: the settings are missing, damaged or of a newer version, or the file is missing or another.
    """
    tuned = read_settings(path)
    if (found := file_sha256(tuned.file)) != tuned.sha256:
        raise ModelFileError(
            f"{tuned.file} is another file than the one that {tuned.path} was written for (SHA-256 {found[:12]}, there "
            f"{tuned.sha256[:12]}); tune the new model: {tuned.command}"
        )
    return tuned


def read_settings(path: str | Path) -> Tuned:
    """As :func:`read_tuned`, without a look at the file beside the settings."""
    path = Path(path).expanduser()
    text = read_bytes(path, JSON_BYTES, ModelFileError)
    try:
        entries = parse_json(text)
        newer = entries["format"] > FORMAT
        tuned = None if newer else _tuned(path, entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = escaped(str(error))
        raise ModelFileError(f"{path}: not settings that nnorm-export tune wrote ({what}); tune the model again") from (
            error
        )
    if tuned is None:
        raise ModelFileError(f"{path}: a newer version of nnorm_export wrote these settings; install that")
    return tuned


def _tuned(path: Path, entries: Mapping[str, Any]) -> Tuned:
    names = {"sha256": str, "runtime": str, "objective": str, "source": str, "source_sha256": str, "processor": str}
    numbers = {"batch": int, "cores": int}
    plain = {name: _of(entries, name, kind) for name, kind in (names | numbers).items()}
    _of(_of(entries, "measured", dict), "winner", dict)
    service = None if entries["service"] is None else _of(entries, "service", dict)
    return Tuned(
        path=path,
        file=locate(path, _of(entries, "file", str)),
        options={name: _of(entries["options"], name, _OPTIONS[name]) for name in _of(entries, "options", dict)},
        service=None if service is None else {name: _of(service, name, int) for name in service},
        measured=_of(entries, "measured", dict),
        **plain,
    )


def _of(entries: Mapping[str, Any], name: str, kind: type) -> Any:
    """The entry ``name``, which is of the type ``kind``."""
    value = entries[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} is {value!r}")
    return value
