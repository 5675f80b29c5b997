"""Settings: where a value comes from, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.config import settings
from surefoot.config.settings import SettingsError


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text("port = 1\nseed = 1\nmax_model_len = 64\ndisable_prefix_cache = true\n")
    monkeypatch.setenv("SUREFOOT_PORT", "2")
    monkeypatch.setenv("SUREFOOT_SEED", "2")
    loaded = settings.load({"port": "3"}, str(tmp_path / "a.toml"))
    assert (loaded.port, loaded.seed, loaded.max_model_len, loaded.disable_prefix_cache) == (3, 2, 64, True)
    assert loaded.page_size == "auto"


def test_all_that_is_wrong_is_said_at_once_as_the_user_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text("max_modle_len = 64\nmem_fraction = 2.0\n")
    monkeypatch.setenv("SUREFOOT_LOOKAHEAD", "7")
    with pytest.raises(SettingsError) as caught:
        settings.load({"page_size": "big", "port": "70000", "weight_dtype": "int3"}, str(tmp_path / "a.toml"))
    assert str(caught.value).splitlines() == [
        "--page-size: 'big' is not valid, expected a whole number >= 1 or 'auto'",
        "--port: '70000' is not valid, expected a whole number >= 0 and <= 65535",
        "--weight-dtype: 'int3' is not valid, expected 'auto', 'float32', 'float16', 'stored'",
        "SUREFOOT_LOOKAHEAD: '7' is not valid, expected 'auto', 0, 1",
        f"max_modle_len in {tmp_path}/a.toml: there is no such setting, did you mean max_model_len?",
        f"mem_fraction in {tmp_path}/a.toml: 2.0 is not valid, expected a number > 0 and < 1 or 'auto'",
    ]


@pytest.mark.parametrize(
    "given, toml, environment, said",
    [
        ({"max_model_ln": 3}, None, {}, "max_model_ln: there is no such setting, did you mean max_model_len?"),
        ({"threads": "few"}, None, {}, "threads: 'few' is not valid, expected a whole number >= 1 or 'auto'"),
        (
            {},
            None,
            {"SUREFOOT_MAX_MODEL_LN": "3"},
            "SUREFOOT_MAX_MODEL_LN: there is no such setting, did you mean SUREFOOT_MAX_MODEL_LEN?",
        ),
        (
            {},
            "[server]\nport = 1\n",
            {},
            "[server] in {file}: tables are not taken, write the settings in it without its heading",
        ),
        (
            {"api_key": "a b"},
            "",
            {},
            "--api-key: what is given is not valid, expected text of ASCII characters without spaces",
        ),
    ],
    ids=["keyword", "keyword-value", "variable", "table", "pattern"],
)
def test_a_hint_is_spelled_as_the_user_would(
    given: dict[str, Any],
    toml: str | None,
    environment: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(toml or "")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        settings.load(given, toml and str(file))
    assert str(caught.value) == said.format(file=file)


def test_the_file_may_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text("seed = 1\n")
    (tmp_path / "b.toml").write_text("seed = 2\n")
    monkeypatch.setenv("SUREFOOT_CONFIG", str(tmp_path / "a.toml"))
    assert settings.load({}).seed == 1
    assert settings.load({}, str(tmp_path / "b.toml")).seed == 2
    monkeypatch.setenv("SUREFOOT_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(SettingsError, match=r"SUREFOOT_CONFIG .*none\.toml: No such file"):
        settings.load({}, "")


def test_what_kubernetes_says_of_a_service_named_surefoot_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "://10.0.0.1:8000"
    for name, value in {
        "SUREFOOT_SERVICE_HOST": "10.0.0.1",
        "SUREFOOT_SERVICE_PORT": "8000",
        "SUREFOOT_SERVICE_PORT_HTTP": "8000",
        "SUREFOOT_PORT": f"tcp{address}",
        "SUREFOOT_PORT_8000_TCP": f"tcp{address}",
        "SUREFOOT_PORT_8000_TCP_PROTO": "tcp",
        "SUREFOOT_PORT_8000_TCP_PORT": "8000",
        "SUREFOOT_PORT_8000_TCP_ADDR": "10.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    assert settings.load({}).port == 8000
    monkeypatch.setenv("SUREFOOT_PORT", f"udp{address}")
    assert settings.load({"port": "3"}).port == 3
    for name, value in {"SUREFOOT_PORT": "http://x", "SUREFOOT_PORT_X_TCP": "1", "SUREFOOT_SERVICES": "1"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(SettingsError, match=f"{name}: "):
                settings.load({})


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--config .*none\.toml: No such file"):
        settings.load({}, str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("port 8000")
    with pytest.raises(SettingsError, match=r"bad\.toml is not TOML"):
        settings.load({}, str(tmp_path / "bad.toml"))


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    infos = settings.infos()
    assert len(infos) <= 40
    assert all(info.help and info.flag.startswith("--") for info in infos)
    assert {info.name for info in infos if info.is_switch} == {"disable_prefix_cache"}
