"""Downloads from a hub that is a server of this test: what is fetched, what is kept, and what is said if it fails.

`fetch` runs in a process of its own, since the library reads its environment when it is imported.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from surefoot.checkpoint import hub as hub_module
from surefoot.checkpoint import hub_failures
from surefoot.checkpoint.errors import HubError
from tests.checkpoint.fake_hub import FakeHub, Repo
from tests.e2e.server import wait_until
from tests.tiny import TinyLlama

FETCH = """
import json, sys
from rich.console import Console
from surefoot.checkpoint.errors import HubError
from surefoot.checkpoint.hub import fetch
from surefoot.checkpoint.locate import HubModel
model, revision, weights = json.loads(sys.argv[1])
try:
    path, format = fetch(HubModel.parse(model), revision, weights, Console(stderr=True))
    print(json.dumps([str(path), format]))
except HubError as error:
    print(json.dumps(str(error)))
"""
IMPATIENT = f"""
from surefoot.checkpoint import hub
hub.ANSWER_SECONDS, hub.PATIENCE_SECONDS = 1, 0.05
{FETCH}
"""
LOGGED = FETCH.replace("Console(stderr=True)", "Console(quiet=True)").replace(
    "model, revision",
    """
from surefoot.evidence import logs
logs.set_up("info", "json", "supervisor")
model, revision""",
    1,
)
PLAN = """
import json, sys
from rich.console import Console
from surefoot.config import settings
from surefoot.config.planning import plan_engine
*wanted, weights = json.loads(sys.argv[1])
plan = plan_engine(settings.load(dict(zip(("model", "revision"), wanted))), Console(stderr=True), weights)
print(json.dumps([plan.checkpoint.path, plan.checkpoint.format, plan.served_model_name]))
"""
WEIGHTS = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
DESCRIPTION = {"config.json": b"{}", "tokenizer.json": b"{ }", "chat_template.jinja": b"t"}
UNNEEDED = {"README.md": b"r", "pytorch_model.bin": b"p", "consolidated.safetensors": b"c", "onnx/model.onnx": b"o"}
SHARDED = {
    **DESCRIPTION,
    **UNNEEDED,
    "model.safetensors.index.json": json.dumps(WEIGHTS).encode(),
    "model-00001-of-00002.safetensors": b"1" * 100_000,
    "model-00002-of-00002.safetensors": b"2" * 200_000,
}
WHOLE = {**DESCRIPTION, "model.safetensors": b"w" * 100_000}
GGUF = {
    "m-Q4_K_M.gguf": b"GGUF4",
    "m-Q8_0.gguf": b"GGUF8",
    "mmproj-m-Q8_0.gguf": b"image",
    "big/m-F32-00001-of-00002.gguf": b"1",
    "big/m-F32-00002-of-00002.gguf": b"2",
}
LIBRARY_CHUNK = 10 * 1024 * 1024  # what it writes at once, and can go on from
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Fetched:
    answer: Any  # [path, format], or the error
    said: str

    @property
    def folder(self) -> Path:
        assert isinstance(self.answer, list), self.answer
        return Path(self.answer[0])

    @property
    def error(self) -> str:
        assert isinstance(self.answer, str), self.answer
        return self.answer

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


class Client:
    def __init__(self, home: Path, hub: FakeHub) -> None:
        self.home = home
        self.hub = hub

    def start(
        self, model: str, revision: str = "", weights: bool = True, script: str = FETCH, **env: str
    ) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        wanted = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), **env}
        return subprocess.Popen(
            [sys.executable, "-c", script, json.dumps([model, revision, weights])],
            env=clean | wanted,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fetch(self, model: str, revision: str = "", weights: bool = True, script: str = FETCH, **env: str) -> Fetched:
        out, said = self.start(model, revision, weights, script, **env).communicate(timeout=60)
        assert "Traceback" not in said, said
        return Fetched(json.loads(out), said)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    repos = {"org/sharded": Repo(dict(SHARDED)), "org/whole": Repo(dict(WHOLE)), "org/gguf": Repo(dict(GGUF))}
    with FakeHub(repos) as hub:
        yield hub


@pytest.fixture
def client(tmp_path: Path, hub: FakeHub) -> Client:
    return Client(tmp_path / "home", hub)


# ---- What is fetched -------------------------------------------------------------------------------------------------


def test_a_model_in_several_files_and_nothing_else(client: Client, hub: FakeHub) -> None:
    fetched = client.fetch("org/sharded")
    assert fetched.answer[1] == "safetensors"
    assert fetched.files() == SHARDED.keys() - UNNEEDED.keys()
    assert fetched.folder.name == hub.repos["org/sharded"].commit
    assert (fetched.folder / "model-00002-of-00002.safetensors").read_bytes() == b"2" * 200_000
    assert f"Downloading org/sharded (revision c0ffee0, 2 files, 0.3 MB) to {client.home / 'hub'}" in fetched.said


def test_what_the_cache_has_is_not_fetched_again(client: Client, hub: FakeHub) -> None:
    first = client.fetch("org/whole")
    assert sorted(hub.transfers()) == sorted(WHOLE)
    hub.requests.clear()
    second = client.fetch("org/whole")
    assert second.answer == first.answer
    assert hub.transfers() == []
    assert "Using org/whole (revision c0ffee0)" in second.said


def test_a_new_commit_of_the_branch_is_fetched(client: Client, hub: FakeHub) -> None:
    client.fetch("org/whole")
    hub.repos["org/whole"] = Repo({**WHOLE, "model.safetensors": b"new"}, commit="f" * 40)
    newer = client.fetch("org/whole")
    assert newer.folder.name == "f" * 40
    assert (newer.folder / "model.safetensors").read_bytes() == b"new"
    assert client.fetch("org/whole", **OFFLINE).answer == newer.answer


@pytest.mark.parametrize("revision", ["v1", "c0ffee" + "0" * 34])
def test_a_revision_that_is_asked_for(client: Client, hub: FakeHub, revision: str) -> None:
    hub.repos["org/whole"].branches = ("v1",)
    assert client.fetch("org/whole", revision).files() == WHOLE.keys()
    assert client.fetch("org/whole", revision, **OFFLINE).files() == WHOLE.keys()


def test_without_weights(client: Client, hub: FakeHub) -> None:
    fetched = client.fetch("org/sharded", weights=False)
    assert fetched.files() == {*DESCRIPTION, "model.safetensors.index.json"}


@pytest.mark.parametrize("name", ["org/gguf:Q4_K_M", "org/gguf:q4_k_m", "org/gguf/m-Q4_K_M.gguf"])
def test_one_gguf_file_of_several(client: Client, hub: FakeHub, name: str) -> None:
    fetched = client.fetch(name)
    assert fetched.answer[1] == "gguf"
    assert fetched.folder.read_bytes() == b"GGUF4"
    assert hub.transfers() == ["m-Q4_K_M.gguf"]
    assert client.fetch(name, **OFFLINE).answer == fetched.answer
    assert client.fetch(name, weights=False).answer == fetched.answer


def test_the_only_gguf_file_needs_no_name(client: Client, hub: FakeHub) -> None:
    hub.repos["org/gguf"].files = {"config.json": b"{}", "m-Q8_0.gguf": b"GGUF8"}
    assert client.fetch("org/gguf").folder.read_bytes() == b"GGUF8"


@pytest.mark.parametrize("weights", [True, False])
def test_a_plan_names_the_model_as_the_hub_does(
    client: Client, hub: FakeHub, tiny_llama: TinyLlama, weights: bool
) -> None:
    hub.repos["org/tiny"] = Repo({path.name: path.read_bytes() for path in tiny_llama.path.iterdir()})
    planned = client.fetch("org/tiny", weights=weights, script=PLAN)
    assert planned.answer[1:] == ["safetensors", "org/tiny"]
    assert ("model.safetensors" in planned.files()) is weights


# ---- Interruptions ---------------------------------------------------------------------------------------------------


def test_a_lost_connection_goes_on_where_it_was(client: Client, hub: FakeHub) -> None:
    weights = os.urandom(3 * LIBRARY_CHUNK)
    hub.repos["org/whole"] = Repo({**WHOLE, "model.safetensors": weights}, breaks={"model.safetensors"})
    fetched = client.fetch("org/whole")
    assert (fetched.folder / "model.safetensors").read_bytes() == weights
    assert [request.range for request in hub.requests if request.range] == [f"bytes={LIBRARY_CHUNK}-"]


def test_a_killed_download_is_completed_by_the_next(client: Client, hub: FakeHub) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    hub.repos["org/sharded"].stalls = {second}
    process = client.start("org/sharded")
    assert hub.stalled.wait(30)
    snapshot = client.home / "hub" / "models--org--sharded" / "snapshots" / hub.repos["org/sharded"].commit
    wait_until(lambda: (snapshot / first).is_file())
    process.kill()
    process.communicate()
    offline = client.fetch("org/sharded", **OFFLINE)
    assert f"lacks {second}: start again with a connection" in offline.error

    hub.repos["org/sharded"].stalls = set()
    hub.requests.clear()
    assert client.fetch("org/sharded").files() == SHARDED.keys() - UNNEEDED.keys()
    assert hub.transfers() == [second]


def test_ctrl_c_ends_a_download(client: Client, hub: FakeHub) -> None:
    hub.repos["org/whole"].stalls = {"model.safetensors"}
    process = client.start("org/whole")
    assert hub.stalled.wait(30)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=8)[1]  # the library's threads would wait for 10 s, several times
    assert process.returncode == 130
    assert said.endswith("stopped: whole files are kept, start again to go on\n")
    assert "Traceback" not in said


@pytest.mark.parametrize("age, kept", [(0, True), (3600, False)])
def test_parts_that_ended_downloads_left_are_deleted(client: Client, hub: FakeHub, age: int, kept: bool) -> None:
    hub.repos["org/whole"].stalls = {"model.safetensors"}
    process = client.start("org/whole")
    assert hub.stalled.wait(30)
    blobs = client.home / "hub" / "models--org--whole" / "blobs"
    wait_until(lambda: any(blobs.glob("*.incomplete")))
    (part,) = blobs.glob("*.incomplete")

    with_another = client.start("org/sharded")  # of another repository: it leaves this one alone
    with_another.communicate(timeout=60)
    assert part.exists()

    process.kill()
    process.communicate()
    os.utime(part, (time.time() - age,) * 2)
    hub.repos["org/whole"].stalls = set()
    client.fetch("org/whole")
    assert part.exists() is kept


def test_the_part_of_a_download_that_runs_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module.constants, "HF_HUB_CACHE", str(tmp_path))
    part = tmp_path / "models--org--whole" / "blobs" / "abc.01234567.incomplete"
    lock = tmp_path / ".locks" / "models--org--whole" / "abc.lock"
    for path in (part, lock):
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(part, (0, 0))
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        hub_module._remove_leftovers("org/whole")
        assert part.exists()
    hub_module._remove_leftovers("org/whole")
    assert not part.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_was_cut_is_fetched_again(client: Client, hub: FakeHub, name: str) -> None:
    file = client.fetch("org/whole").folder / name
    file.resolve().write_bytes(WHOLE[name][:-1])
    hub.requests.clear()
    assert (client.fetch("org/whole").folder / name).read_bytes() == WHOLE[name]
    assert hub.transfers() == [name]


# ---- No network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["offline", "unreachable", "broken"])
def test_without_the_hub_the_cache_serves(client: Client, hub: FakeHub, how: str) -> None:
    online = client.fetch("org/sharded")
    env = {"offline": OFFLINE, "unreachable": {"HF_ENDPOINT": "http://127.0.0.1:9"}, "broken": {}}[how]
    hub.status = 503 if how == "broken" else 0
    again = client.fetch("org/sharded", **env)
    assert again.answer == online.answer
    assert "using the copy in the cache" in again.said
    assert {"offline": "HF_HUB_OFFLINE", "unreachable": "cannot be reached", "broken": "503"}[how] in again.said


def test_a_hub_that_never_answers(client: Client, hub: FakeHub) -> None:
    online = client.fetch("org/whole")
    hub.answers = False
    again = client.fetch("org/whole", script=IMPATIENT)
    assert again.answer == online.answer
    assert f"waiting for {hub.url} to list org/whole" in again.said
    assert "using the copy in the cache" in again.said
    assert "cannot be reached (ReadTimeout" in client.fetch("org/sharded", script=IMPATIENT).error


def test_a_newer_commit_and_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(sha="f" * 40, siblings=[])
    (tmp_path / "model.safetensors").write_bytes(b"old")
    monkeypatch.setattr(hub_module.HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(hub_module, "_cached_folder", lambda *_: tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    repo = hub_module._look_up("org/whole", "", Console(quiet=True))
    assert (repo.commit, repo.files) == (tmp_path.name, {"model.safetensors": 3})
    assert "newer commit of org/whole, but the cache" in repo.no_answer


@pytest.mark.parametrize(
    "lost, names",
    [
        (["model-00001-of-00002.safetensors"], "lacks model-00001-of-00002.safetensors:"),
        (["config.json"], "lacks config.json:"),
        (["model.safetensors.index.json"], "lacks model.safetensors:"),
    ],
)
def test_without_the_hub_an_incomplete_copy_is_named(client: Client, lost: list[str], names: str) -> None:
    fetched = client.fetch("org/sharded")
    for name in lost:
        (fetched.folder / name).unlink()
    assert names in client.fetch("org/sharded", **OFFLINE).error


def test_without_the_hub_and_without_a_copy(client: Client) -> None:
    assert "unset it to download org/whole, which is not in the cache" in client.fetch("org/whole", **OFFLINE).error
    client.fetch("org/whole")
    offline = client.fetch("org/whole", "v1", **OFFLINE).error
    assert "org/whole, revision v1, which is not in the cache; of org/whole, the cache has main" in offline
    client = Client(client.home / "other", client.hub)
    unreachable = client.fetch("org/whole", HF_ENDPOINT="http://127.0.0.1:9").error
    assert "http://127.0.0.1:9) cannot be reached (ConnectError:" in unreachable
    assert "\n" not in unreachable


# ---- Refusals --------------------------------------------------------------------------------------------------------


def test_a_gated_model_needs_a_token(client: Client, hub: FakeHub) -> None:
    hub.repos["org/whole"].token = "hf_mine"
    refused = client.fetch("org/whole").error
    assert f"accept its terms at {hub.url}/org/whole, and set HF_TOKEN" in refused
    assert client.fetch("org/whole", HF_TOKEN="hf_mine").files() == WHOLE.keys()


def test_tokens(client: Client, hub: FakeHub) -> None:
    hub.status = 401
    assert "wants a token" in client.fetch("org/whole").error
    assert "refuses your token" in client.fetch("org/whole", HF_TOKEN="hf_mine").error
    assert "characters that no token has: set HF_TOKEN again" in client.fetch("org/whole", HF_TOKEN="hf_é").error


def test_a_login_page_in_place_of_the_hub(client: Client, hub: FakeHub) -> None:
    hub.body = b"<html>Welcome to our hotel</html>"
    assert f"what answers at {hub.url} is not a Hugging Face hub: look for a login" in client.fetch("org/whole").error


@pytest.mark.parametrize(
    "model, revision, says",
    [
        (
            "org/absent",
            "",
            "there is no file or directory org/absent here, and no model org/absent on the Hugging Face",
        ),
        ("org/whole", "v9", "org/whole has no branch, tag or commit 'v9': give another --revision"),
        ("org/whole", "../../..", "--revision '../../..' cannot be a branch, a tag or a commit: give one of org/whole"),
        ("org/a--b", "", "neither a path here nor a possible name on the Hugging Face hub"),
        ("org/gguf", "", "the name says more than one GGUF file; org/gguf has these: big/m-F32-00001-of-00002.gguf, "),
        ("org/whole:Q9", "", "org/whole lacks a GGUF file for Q9"),
        ("org/gguf:Q9", "", "Q9 says not one GGUF file; org/gguf has these"),
        ("org/gguf/absent.gguf", "", "absent.gguf says not one GGUF file"),
        ("org/gguf:F32", "", "is a part of a split GGUF file, which is not supported"),
    ],
)
def test_refusals_say_the_way_out(client: Client, hub: FakeHub, model: str, revision: str, says: str) -> None:
    assert says in client.fetch(model, revision).error
    assert hub.transfers() == []


@pytest.mark.parametrize(
    "files, says",
    [
        (
            {**DESCRIPTION, "pytorch_model.bin": b"p"},
            "org/other lacks model.safetensors: give one that has config.json and weights",
        ),
        ({"README.md": b"r"}, "org/other lacks config.json: give one"),
        (
            {name: content for name, content in SHARDED.items() if "00002-of" not in name},
            "lacks model-00002-of-00002.safetensors",
        ),
    ],
)
def test_repositories_that_cannot_be_served(client: Client, hub: FakeHub, files: dict[str, bytes], says: str) -> None:
    hub.repos["org/other"] = Repo(files)
    assert says in client.fetch("org/other").error
    assert not any(name.endswith((".bin", ".safetensors")) for name in hub.transfers())


def test_pickled_weights_are_refused_before_weights_are_needed(client: Client, hub: FakeHub) -> None:
    hub.repos["org/other"] = Repo({**DESCRIPTION, "pytorch_model.bin": b"p"})
    assert "org/other lacks model.safetensors" in client.fetch("org/other", weights=False).error
    hub.repos["org/other"] = Repo(dict(DESCRIPTION))  # enough for dummy weights
    assert client.fetch("org/other", weights=False).files() == DESCRIPTION.keys()


def test_a_gguf_header_is_not_read_over_the_network(client: Client, hub: FakeHub) -> None:
    assert "hf download org/gguf m-Q8_0.gguf" in client.fetch("org/gguf:Q8_0", weights=False).error
    assert hub.transfers() == []


def test_a_disk_that_is_too_small_is_seen_before_the_first_byte(client: Client, hub: FakeHub) -> None:
    hub.repos["org/whole"].sizes = {"model.safetensors": 10**16}
    assert "the download needs 10000000.0 GB and the disk of" in client.fetch("org/whole").error
    assert "model.safetensors" not in hub.transfers()


def test_a_cache_that_cannot_be_written(client: Client) -> None:
    client.home.write_text("a file")
    assert "cannot be written" in client.fetch("org/whole").error


def test_a_log_of_json_has_nothing_between_its_lines(client: Client, hub: FakeHub) -> None:
    fetched = client.fetch("org/sharded", script=LOGGED)
    assert fetched.files() == SHARDED.keys() - UNNEEDED.keys()
    (message,) = [json.loads(line)["message"] for line in fetched.said.splitlines()]
    assert message.startswith("Downloading org/sharded (revision c0ffee0, 2 files, 0.3 MB)")


def test_a_disk_that_fills_up() -> None:
    with (
        pytest.raises(HubError, match=r"the disk of .* is full: free some space, or set HF_HOME"),
        hub_failures.explained("org/name", ""),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
