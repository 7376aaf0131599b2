"""Files of model repositories on the Hugging Face Hub, named ``hf://owner/name[@revision]/path``.

huggingface_hub, the extra ``hub``, downloads them into its own cache. It reads the environment itself: HF_TOKEN,
HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and the others.
"""

from __future__ import annotations

import glob
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from nnorm_export.errors import ModelFileError, NnormExportError, RuntimeMissingError, first_line, reported_as

SCHEME = "hf://"
EXAMPLE = "hf://owner/name/model.onnx"
# Revisions with a slash that huggingface_hub's own addresses know; a slash in another one is written %2F.
_REVISION = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)|[^/]+")
_OTHER_KINDS = ("datasets", "spaces", "buckets", "kernels")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def is_hub(path: object) -> bool:
    """Whether ``path`` is an address on the Hub."""
    return isinstance(path, str) and path.lower().startswith(SCHEME)


@dataclass(frozen=True)
class Address:
    """A file or folder on the Hub.

    Attributes:
        repository: ``owner/name``.
        path: of the file in the repository.
        revision: a branch, a tag or a commit; None for the branch ``main``.
    """

    repository: str
    path: str
    revision: str | None = None

    @classmethod
    def of(cls, text: str, error: type[NnormExportError] = ModelFileError) -> Address:
        """Reads ``hf://owner/name[@revision]/path``. Raises ``error`` if ``text`` is not such an address."""
        rest = text[len(SCHEME) :].removeprefix("models/")
        if rest.partition("/")[0] in _OTHER_KINDS:
            raise error(f"{text}: models are read from repositories of models, as in {EXAMPLE}")
        owner, _, rest = rest.partition("/")
        end = re.search("[@/]", rest)
        name, rest = (rest, "") if end is None else (rest[: end.start()], rest[end.start() :])
        revision = None
        if rest.startswith("@"):
            found = _REVISION.match(rest, 1)
            revision, rest = (unquote(found[0]), rest[found.end() :]) if found else ("", rest)
        path = rest.removeprefix("/").rstrip("/")
        parts = path.split("/")
        wrong = {"", ".", ".."}.intersection([*parts, *(revision or "main").split("/")])
        wrong |= {"\\", "\0"}.intersection(path + (revision or ""))
        if revision == "" or wrong or not (_NAME.fullmatch(owner) and _NAME.fullmatch(name)):
            raise error(f"{text}: not an address on the Hub; give {EXAMPLE}, or with a revision, hf://owner/name@v1/…")
        return cls(f"{owner}/{name}", path, revision)

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{quote(self.revision, safe='')}"
        return f"{SCHEME}{self.repository}{revision}/{self.path}"


@dataclass(frozen=True)
class Fetched:
    """A file in the cache.

    Attributes:
        path: a link in the folder of one commit.
        address: of this commit, so that other files can be fetched that belong to it.
    """

    path: Path
    address: Address

    def fetch(self, file: Path, error: type[NnormExportError] = ModelFileError) -> Fetched:
        """Downloads ``file``, a path below the folder of :attr:`path`, from the same commit."""
        name = file.relative_to(_root(self.path, self.address)).as_posix()
        return fetch(replace(self.address, path=name), error)


def fetch(address: Address, error: type[NnormExportError] = ModelFileError) -> Fetched:
    """Downloads a file into the cache of huggingface_hub, unless it is there.

    Raises:
        RuntimeMissingError: huggingface_hub is not installed.
        NnormExportError: ``error``, which says what is wrong: the repository, the revision, the file, the access, or
            the network.
    """
    path = _asked(
        address,
        error,
        lambda library: library.hf_hub_download(address.repository, address.path, revision=address.revision),
    )
    return Fetched(path, replace(address, revision=_root(path, address).name))


def fetch_folder(address: Address, error: type[NnormExportError] = ModelFileError) -> Path:
    """As :func:`fetch`, for a folder and everything in it.

    Raises:
        RuntimeMissingError, NnormExportError: as :func:`fetch`; or the repository has no such folder.
    """
    pattern = f"{glob.escape(address.path)}/*"  # fnmatch, by which the library selects files, reads / as any letter
    root = _asked(
        address,
        error,
        lambda library: library.snapshot_download(
            address.repository, revision=address.revision, allow_patterns=[pattern]
        ),
    )
    if not (root / address.path).is_dir():
        raise error(f"{address}: {_offline() or 'the repository has no such folder'}; {_LOOK.format(address)}")
    return root / address.path


def _root(path: Path, address: Address) -> Path:
    """The folder of the commit, in which ``path`` is the file of ``address``."""
    return path.parents[len(address.path.split("/")) - 1]


def _asked(address: Address, error: type[NnormExportError], call: Callable[[Any], str]) -> Path:
    library, errors = (_library(address, name) for name in ("huggingface_hub", "huggingface_hub.errors"))
    page = f"https://huggingface.co/{address.repository}"
    with reported_as(error, str(address), "Check the network, HF_ENDPOINT and the space on the disk; then try again"):
        try:
            return Path(call(library))
        except errors.GatedRepoError as reason:
            why = f"access to it is granted to users who ask; ask at {page}, then log in (hf auth login, or HF_TOKEN)"
            raise error(f"{address}: {why}") from reason
        except errors.RepositoryNotFoundError as reason:
            why = (
                f"no repository {address.repository} that you may read; check the name, and log in if it is private "
                "(hf auth login, or HF_TOKEN)"
            )
            raise error(f"{address}: {why}") from reason
        except errors.RevisionNotFoundError as reason:
            why = f"the repository has no revision {address.revision}; {_LOOK.format(page)}"
            raise error(f"{address}: {why}") from reason
        except errors.LocalEntryNotFoundError as reason:
            raise error(f"{address}: {_offline() or _unreachable(reason)}") from reason
        except errors.EntryNotFoundError as reason:
            raise error(f"{address}: the repository has no such file; {_LOOK.format(page)}") from reason


_LOOK = "see what it has at {}"


def _offline() -> str:
    """Says that the Hub is not asked, if the user wants it so."""
    if not importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
        return ""
    return (
        "it is not in the cache, and HF_HUB_OFFLINE forbids to download it; unset that, or fill the cache where there "
        "is a network (hf download) and copy it (HF_HOME)"
    )


def _unreachable(error: BaseException) -> str:
    reason = first_line(error.__cause__ or error)
    return (
        f"it is not in the cache, and the Hub cannot be reached ({reason}); check the network, the proxy and "
        "HF_ENDPOINT"
    )


def _library(address: Address, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeMissingError(
            f"{address}: the Hub needs huggingface_hub ({first_line(error)}): pip install 'nnorm_export[hub]'"
        ) from error
