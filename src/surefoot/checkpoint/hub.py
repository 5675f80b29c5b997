"""Models of the Hugging Face hub: what is needed of a repository, downloaded into the cache that all its tools share.

    fetch      look up the commit and its files | choose what is needed | download what the cache lacks
    no answer  the same with the copy in the cache, if that is complete

The library reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE itself. Where a connection was lost it goes on; of
a download that was ended it keeps the files that were complete.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_session, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from msgspec import Struct
from rich.console import Console

from surefoot.checkpoint.errors import HubError
from surefoot.checkpoint.hub_failures import NoAnswerError, explained
from surefoot.checkpoint.locate import CheckpointFormat, HubModel, has_pickled_weights
from surefoot.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, indexed_files

CONFIG_FILE = "config.json"
DESCRIPTION_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX_FILE,
)
ANSWER_SECONDS = 10  # for each answer of the hub, and each piece of one
PATIENCE_SECONDS = 3  # before it is said what is waited for
LEFTOVER_SECONDS = 600  # without a write: some file systems of clusters lock in name only
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_NO_REVISION = re.compile(r"\.\.|//|@\{|^[/.-]|/$|[\s\x00-\x1f\x7f~^:?*\[\\]")  # what git allows in no name

log = logging.getLogger(__name__)


def fetch(model: HubModel, revision: str, with_weights: bool, console: Console) -> tuple[Path, CheckpointFormat]:
    """The path of a checkpoint in the cache, after a download of what is not there yet.

    revision: branch, tag or commit; empty is the default branch. Without weights, only what describes the model comes.
    `console` shows what is downloaded or used, the library its progress on standard error; if it is quiet, the log says
    the first and nobody the second. Ctrl-C ends the process, except in an interactive Python. Raises HubError.
    """
    if _NO_REVISION.search(revision):
        raise HubError(f"--revision {revision!r} cannot be a branch, a tag or a commit: give one of {model.repo}")
    with _ended_by_ctrl_c(console):
        return _fetch(model, _look_up(model.repo, revision, console), with_weights)


def _fetch(model: HubModel, repo: _Repo, with_weights: bool) -> tuple[Path, CheckpointFormat]:
    if model.file or model.quant or (repo.ggufs and not repo.has_safetensors):
        file = _choose_gguf(model, repo)
        if not with_weights and not repo.has(file):
            raise HubError(
                f"{file} of {model.repo} is not in the cache, and only its own header describes it: download it "
                f"first, with `hf download {model.repo} {file}`"
            )
        return repo.fetch_weights([file]) / file, "gguf"
    if CONFIG_FILE not in repo.files:
        raise repo.lacks([CONFIG_FILE])
    if not repo.has_safetensors and has_pickled_weights(repo.files):
        raise repo.lacks([SINGLE_FILE])
    folder = repo.fetch([name for name in DESCRIPTION_FILES if name in repo.files])
    if with_weights:
        repo.fetch_weights(_weight_files(folder, repo))
    return folder, "safetensors"


class _Repo(Struct, frozen=True):
    """A repository at one commit."""

    name: str
    revision: str  # as asked for; empty is the default branch
    commit: str
    files: dict[str, int]  # name -> bytes; if the hub gave no answer, those in the cache
    no_answer: str  # why; empty if it answered
    console: Console

    @property
    def has_safetensors(self) -> bool:
        return SINGLE_FILE in self.files or INDEX_FILE in self.files

    @property
    def ggufs(self) -> list[str]:
        """Without image encoders, which are no models of their own."""
        return sorted(name for name in self.files if name.endswith(".gguf") and "mmproj" not in name)

    @property
    def snapshot(self) -> Path:
        return _cache_of(self.name) / "snapshots" / self.commit

    def has(self, file: str) -> bool:
        """Whether the cache has it, whole."""
        cached = try_to_load_from_cache(self.name, file, revision=self.commit)
        return isinstance(cached, str) and os.path.getsize(cached) == (self.files.get(file) or os.path.getsize(cached))

    def fetch_weights(self, files: Sequence[str]) -> Path:
        """`fetch`, which says first what it will do, and whether there is room for it."""
        missing = [file for file in files if not self.has(file)]
        if self.no_answer and missing:
            raise self.lacks(missing)
        if absent := [file for file in missing if file not in self.files]:
            raise self.lacks(absent)
        version, cache = f"revision {self.commit[:7]}", constants.HF_HUB_CACHE
        if not missing:
            _say(self.console, f"Using {self.name} ({version}) from {cache}")
            return self.fetch(files)
        _remove_leftovers(self.name)
        size = sum(self.files[file] for file in missing)
        _check_disk(size)
        count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        _say(self.console, f"Downloading {self.name} ({version}, {count}, {_decimal(size)}) to {cache}")
        return self.fetch(files, show_progress=True)

    def fetch(self, files: Sequence[str], show_progress: bool = False) -> Path:
        """The folder that has these files, after a download of what the cache lacks."""
        patterns = [glob.escape(file) for file in files]
        bars = nullcontext() if show_progress and not self.console.quiet else _no_progress_bars()
        with explained(self.name, self.revision), bars:
            for file in files:
                if not self.has(file) and (self.snapshot / file).is_file():
                    (self.snapshot / file).resolve().unlink()  # of the wrong size: the library would take it as it is
            # By the revision's name, which the cache so learns the commit of.
            revision, offline = self.revision or None, bool(self.no_answer)
            _limit_waits()
            folder = snapshot_download(self.name, revision=revision, allow_patterns=patterns, local_files_only=offline)
        if lacking := [file for file in files if not (Path(folder) / file).is_file()]:
            raise HubError(f"the download of {self.name} ended without {', '.join(lacking)}: start again")
        return Path(folder)

    def lacks(self, files: Sequence[str]) -> HubError:
        names = ", ".join(files)
        if self.no_answer:
            return HubError(
                f"{self.no_answer}, and the copy of {self.name} in the cache, {constants.HF_HUB_CACHE}, lacks {names}: "
                "start again with a connection, and a cache that can be written"
            )
        return HubError(
            f"the repository {self.name} lacks {names}: give one that has config.json and weights in the safetensors "
            "format, or a GGUF file"
        )


def _say(console: Console, text: str) -> None:
    if console.quiet:
        log.info("%s", text)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """The library shows some even if there is nothing to download."""
    if are_progress_bars_disabled():  # by the user
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _ended_by_ctrl_c(console: Console) -> Iterator[None]:
    """The first Ctrl-C ends the process: an exception would wait for the library's threads, and they for the hub.

    An interactive Python lives on, and a program that handles Ctrl-C itself is left alone.
    """

    def end(number: int, _: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        console.show_cursor()  # which a spinner may have hidden
        console.line()  # below the progress
        _say(console, "stopped: whole files are kept, start again to go on")
        os._exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or "ps1" in vars(sys) or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- The hub and the cache -------------------------------------------------------------------------------------------


def _look_up(name: str, revision: str, console: Console) -> _Repo:
    with explained(name, revision):
        folder = _cached_folder(name, revision)
    patience = threading.Timer(PATIENCE_SECONDS, _say, (console, f"waiting for {constants.ENDPOINT} to list {name}"))
    patience.start()
    try:
        with explained(name, revision):
            _limit_waits()
            info = HfApi().model_info(name, revision=revision or None, files_metadata=True)
    except NoAnswerError as error:
        if folder is not None:
            return _cached(name, revision, folder, error.cause, console)
        if cached := _cached_revisions(name):
            way_out = f"{error.way_out}; of {name}, the cache has {', '.join(cached)}"
            raise NoAnswerError(error.cause, way_out) from error
        raise
    finally:
        patience.cancel()
    if folder is not None and folder.name != info.sha and not os.access(folder.parent, os.W_OK):
        cause = f"the hub has a newer commit of {name}, but the cache, {constants.HF_HUB_CACHE}, cannot be written"
        return _cached(name, revision, folder, cause, console)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Repo(name, revision, info.sha or "", sizes, "", console)


def _limit_waits() -> None:
    """The library asks for some answers with no limit. It makes another session after some errors."""
    hooks = get_session().event_hooks["request"]
    if _limit_wait not in hooks:
        hooks.append(_limit_wait)


def _limit_wait(request: Any) -> None:
    waits = request.extensions["timeout"]
    request.extensions["timeout"] = {what: limit or ANSWER_SECONDS for what, limit in waits.items()}


def _cached(name: str, revision: str, folder: Path, cause: str, console: Console) -> _Repo:
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    sizes = {str(file): (folder / file).stat().st_size for file in files}
    _say(console, f"{cause}: using the copy in the cache")
    return _Repo(name, revision, folder.name, sizes, cause, console)


def _cache_of(name: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _cached_revisions(name: str) -> list[str]:
    """Branches and tags."""
    refs = _cache_of(name) / "refs"
    return sorted(str(path.relative_to(refs)) for path in refs.rglob("*") if path.is_file())


def _remove_leftovers(name: str) -> None:
    """Deletes the parts of files that ended downloads left: the library goes on from none of them."""
    cache = _cache_of(name)
    for part in cache.glob("blobs/*.*.incomplete"):
        lock = cache.parent / ".locks" / cache.name / f"{part.name.partition('.')[0]}.lock"
        with suppress(OSError):  # also if a download holds the lock
            if time.time() - part.stat().st_mtime > LEFTOVER_SECONDS:
                with WeakFileLock(lock, timeout=0.1):
                    part.unlink()


def _cached_folder(name: str, revision: str) -> Path | None:
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=[], local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


# ---- Choice of files -------------------------------------------------------------------------------------------------


def _weight_files(folder: Path, repo: _Repo) -> Sequence[str]:
    """The safetensors files that make up the model; a repository may have others, in the author's own format, say."""
    if INDEX_FILE in repo.files and SINGLE_FILE not in repo.files:
        return indexed_files(folder)
    return [SINGLE_FILE]


def _choose_gguf(model: HubModel, repo: _Repo) -> str:
    """The one GGUF file that is meant."""
    if model.quant:
        ending = re.compile(rf"(^|[-._/]){re.escape(model.quant)}(-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE)
        found = [name for name in repo.ggufs if ending.search(name)]
    else:
        found = [name for name in repo.ggufs if model.file in ("", name)]
    if found and all(map(_SPLIT_GGUF.search, found)):
        raise HubError(f"{found[0]} of {repo.name} is a part of a split GGUF file, which is not supported: merge them")
    if not found and not repo.ggufs:
        raise repo.lacks([model.file or f"a GGUF file for {model.quant}"])
    if len(found) != 1:
        which = f"the cache has these of {repo.name}" if repo.no_answer else f"{repo.name} has these"
        raise HubError(
            f"{model.file or model.quant or 'the name'} says {'more than' if found else 'not'} one GGUF file; {which}: "
            f"{', '.join(repo.ggufs)}. Give one as {repo.name}/FILE, or by its ending as {repo.name}:Q4_K_M"
        )
    return found[0]


def _check_disk(size: int) -> None:
    cache = Path(constants.HF_HUB_CACHE).absolute()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise HubError(
            f"the download needs {_decimal(size)} and the disk of {cache} has {_decimal(free)} left: free some space, "
            "or set HF_HOME to a directory elsewhere"
        )


def _decimal(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
