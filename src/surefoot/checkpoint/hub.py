"""Models of the Hugging Face hub: what is needed of a repository, downloaded into the cache that all its tools share.

    fetch      look up the commit and its files | choose what is needed | download what the cache lacks
    no answer  the same with the copy in the cache, if that is complete

The library reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE itself. Where a connection was lost it goes on; of
a download that was ended it keeps the files that were complete.
"""

from __future__ import annotations

import errno
import glob
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from msgspec import Struct
from rich.console import Console

from surefoot.checkpoint.errors import HubError
from surefoot.checkpoint.locate import CheckpointFormat, HubModel
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
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class NoAnswerError(HubError):
    """The hub gave nothing."""

    def __init__(self, cause: str, way_out: str) -> None:
        super().__init__(f"{cause}: {way_out}")
        self.cause = cause


def fetch(model: HubModel, revision: str, with_weights: bool, console: Console) -> tuple[Path, CheckpointFormat]:
    """The path of a checkpoint in the cache, after a download of what is not there yet.

    revision: branch, tag or commit; empty is the default branch. Without weights, only what describes the model comes.
    `console` shows what is downloaded or used, the library its progress on standard error. Raises HubError.
    """
    repo = _look_up(model.repo, revision, console)
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

    def has(self, file: str) -> bool:
        """Whether the cache has it, whole."""
        return isinstance(try_to_load_from_cache(self.name, file, revision=self.commit), str)

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
        size = sum(self.files[file] for file in missing)
        _check_disk(size)
        count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        _say(self.console, f"Downloading {self.name} ({version}, {count}, {_decimal(size)}) to {cache}")
        return self.fetch(files, show_progress=True)

    def fetch(self, files: Sequence[str], show_progress: bool = False) -> Path:
        """The folder that has these files, after a download of what the cache lacks."""
        patterns = [glob.escape(file) for file in files]
        with _explained(self.name, self.revision), nullcontext() if show_progress else _no_progress_bars():
            # By the revision's name, which the cache so learns the commit of.
            revision, offline = self.revision or None, bool(self.no_answer)
            folder = snapshot_download(self.name, revision=revision, allow_patterns=patterns, local_files_only=offline)
        if lacking := [file for file in files if not (Path(folder) / file).is_file()]:
            raise HubError(f"the download of {self.name} ended without {', '.join(lacking)}: start again")
        return Path(folder)

    def lacks(self, files: Sequence[str]) -> HubError:
        names = ", ".join(files)
        if self.no_answer:
            return HubError(
                f"{self.no_answer}, and the copy of {self.name} in the cache, {constants.HF_HUB_CACHE}, lacks {names}: "
                "start again with a connection"
            )
        return HubError(
            f"the repository {self.name} lacks {names}: give one that has config.json and weights in the safetensors "
            "format, or a GGUF file"
        )


def _say(console: Console, text: str) -> None:
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


def _look_up(name: str, revision: str, console: Console) -> _Repo:
    try:
        with _explained(name, revision):
            info = HfApi().model_info(name, revision=revision or None, files_metadata=True)
    except NoAnswerError as error:
        folder = _cached_folder(name, revision)
        if folder is None:
            raise
        files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        sizes = {str(file): (folder / file).stat().st_size for file in files}
        _say(console, f"{error.cause}: using the copy in the cache")
        return _Repo(name, revision, folder.name, sizes, error.cause, console)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Repo(name, revision, info.sha or "", sizes, "", console)


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


# ---- Failures --------------------------------------------------------------------------------------------------------


@contextmanager
def _explained(name: str, revision: str) -> Iterator[None]:
    """Makes a NoAnswerError of whatever the library raises.

    It lets the exceptions of its HTTP client (not the same in all versions) and of its storage client through, so that
    there is no type that would cover them.
    """
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise NoAnswerError(*_explain(error.__cause__ or error, name, revision)) from error
    except Exception as error:
        raise NoAnswerError(*_explain(error, name, revision)) from error


def _explain(error: BaseException, name: str, revision: str) -> tuple[str, str]:
    """The cause and the way out."""
    cache, hub = constants.HF_HUB_CACHE, constants.ENDPOINT
    said = " ".join(str(error).split())
    match error:
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set", f"unset it to download {name}, which is not in the cache"
        case HFValidationError():
            return f"{name!r} is neither a path here nor a possible name on the Hugging Face hub", said
        case GatedRepoError():
            return (
                f"{name} is gated, and the hub does not know you as one who may read it",
                f"accept its terms at {hub}/{name}, and set HF_TOKEN to a token of yours ({hub}/settings/tokens)",
            )
        case RepositoryNotFoundError():
            return (
                f"there is no file or directory {Path(name)} here, and no model {name} on the Hugging Face hub that "
                "you may see",
                "check the name; if the model is private, set HF_TOKEN to a token that may read it",
            )
        case RevisionNotFoundError():
            return f"{name} has no branch, tag or commit {revision!r}", "give another --revision, or none"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"the Hugging Face hub refuses your token ({said})", "set HF_TOKEN to one that may read the model"
        case HfHubHTTPError():
            return f"the Hugging Face hub failed ({said})", "try again later; files that were complete are kept"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return f"the disk of {cache} is full", "free some space, or set HF_HOME to a directory elsewhere"
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR):
            return f"the cache {cache} cannot be written ({said})", "set HF_HOME to a directory of yours"
    return (
        f"the Hugging Face hub ({hub}) cannot be reached ({type(error).__name__}: {said})",
        f"check the network, or give the path of a model that is here; {name} is not complete in the cache",
    )


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
