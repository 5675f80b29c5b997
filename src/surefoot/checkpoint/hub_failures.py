"""What can go wrong between here and the Hugging Face hub, in words, each with a way out."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from surefoot.checkpoint.errors import HubError


class NoAnswerError(HubError):
    """The hub gave nothing."""

    def __init__(self, cause: str, way_out: str) -> None:
        super().__init__(f"{cause}: {way_out}")
        self.cause = cause
        self.way_out = way_out


@contextmanager
def explained(name: str, revision: str) -> Iterator[None]:
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
            wanted = f"{name}, revision {revision}," if revision else f"{name},"
            return "HF_HUB_OFFLINE is set", f"unset it to download {wanted} which is not in the cache"
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
        case HfHubHTTPError() if error.response.status_code in (401, 403) and get_token() is None:
            return f"the Hugging Face hub wants a token ({said})", "set HF_TOKEN to one that may read the model"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"the Hugging Face hub refuses your token ({said})", "set HF_TOKEN to one that may read the model"
        case HfHubHTTPError():
            return f"the Hugging Face hub failed ({said})", "try again later; files that were complete are kept"
        case UnicodeEncodeError():
            return "the token for the hub has characters that no token has", "set HF_TOKEN again, or unset it"
        case json.JSONDecodeError():
            return (
                f"what answers at {hub} is not a Hugging Face hub",
                "look for a login page of your network, and check HF_ENDPOINT and the proxy",
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return f"the disk of {cache} is full", "free some space, or set HF_HOME to a directory elsewhere"
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR):
            return f"the cache {cache} cannot be written ({said})", "set HF_HOME to a directory of yours"
    return (
        f"the Hugging Face hub ({hub}) cannot be reached ({type(error).__name__}: {said})",
        f"check the network, or give the path of a model that is here; {name} is not complete in the cache",
    )
