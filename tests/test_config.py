"""Settings: where they are found, what they may say, and sentences for what they may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel import config
from sentinel.errors import ConfigError

FILE = Path("/etc/sentinel/sentinel.toml")
HOOK = "[[receivers]]\nname = 'ops'\ntype = 'webhook'\n"
TOKEN = "a1b2c3d4e5f6a7b8c9d0e1f2"


def receiver(rest: str) -> config.Receiver:
    return config.parsed(HOOK + rest, FILE).receivers[0]


def test_an_empty_file_is_the_defaults() -> None:
    assert config.parsed("", FILE) == config.Settings()


def test_what_a_file_says_is_what_is_set() -> None:
    settings = config.parsed(
        "[daemon]\nhttp = 'off'\nfile_sd = 'targets'\nrules = ['rules', '/abs.yaml']\n"
        "[grouping]\nwait = '500ms'\nrepeat = '1d'\n" + HOOK + "url = 'http://127.0.0.1:9000/hook'\n"
        "severities = ['critical']\ntimeout = '2.5s'\n",
        FILE,
    )
    assert settings.daemon.http == "off"
    assert settings.daemon.file_sd == FILE.parent / "targets"
    assert settings.daemon.rules == (FILE.parent / "rules", Path("/abs.yaml"))
    assert (settings.grouping.wait, settings.grouping.interval, settings.grouping.repeat) == (0.5, 60, 86400)
    (hook,) = settings.receivers
    assert (hook.address(), hook.severities, hook.timeout) == ("http://127.0.0.1:9000/hook", ("critical",), 2.5)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("[daemon\n", 1, "not TOML"),
        ("[daemon]\nhttp = \n", 2, "not TOML"),
        ("\n[deamon]\n", 2, "unknown key 'deamon'; there are: daemon, grouping, history, receivers"),
        ("[daemon]\n\nhtpp = 1\n", 3, "unknown key 'htpp'; there are: http,"),
        ("[daemon]\nhttp = 70000\n", 2, "70000 is no port"),
        ("[daemon]\nhttp = true\n", 2, "http: expected"),
        ("[grouping]\nwait = 5\n", 2, "wait: expected text in quotes, got 5"),
        ("[grouping]\nwait = '5 minutes'\n", 2, "no duration; write 90s, 5m"),
        ("receivers = 3\n", 1, "receivers: expected `array`"),
        (HOOK, 3, "one of url, url_env and url_file, and has none"),
        (HOOK + "url_env = 'A'\nurl_file = 'b'\n", 3, "and has 2"),
        (HOOK + "url = 'ftp://host'\n", 4, "no http:// or https:// URL"),
        (HOOK + "url = 'http://[::1/hook'\n", 4, "no http:// or https:// URL"),
        (HOOK + "url_env = 'A'\nseverities = ['bad']\n", 5, "there are: info, warning, critical"),
        (HOOK + "url_env = 'A'\n" + HOOK + "url_env = 'B'\n", 6, "a second receiver 'ops'"),
        ("[[receivers]]\nname = 'a b'\ntype = 'webhook'\n", 2, "'a b' is not 1 to 40 letters"),
        ("[[receivers]]\nname = 'a'\n", 1, "type is missing"),
        ("[[receivers]]\nname = 'a'\ntype = 'carrier-pigeon'\n", 3, "there are: terminal, webhook"),
    ],
)
def test_a_mistake_is_a_sentence_with_its_line(text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parsed(text, FILE)
    assert str(caught.value).startswith(f"{FILE}:{line}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "secret",
    [
        f"url = 'https://user:{TOKEN}@host/'",
        f"url = 'https://host/hook?key={TOKEN}'",
        f"url = 'https://host/services/{TOKEN}'",
        f"token = '{TOKEN}'",
        f"url = 'host {TOKEN}'",
    ],
)
def test_a_secret_in_the_file_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ConfigError) as caught:
        receiver(secret + "\n")
    assert TOKEN not in str(caught.value)
    assert "url" in str(caught.value)


def test_a_secret_is_read_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = receiver("url_env = 'OPS_URL'\n")
    with pytest.raises(ConfigError, match="OPS_URL is empty or not set"):
        named.address()
    monkeypatch.setenv("OPS_URL", f"https://host/{TOKEN}")
    assert named.address() == f"https://host/{TOKEN}"
    monkeypatch.setenv("OPS_URL", TOKEN)
    with pytest.raises(ConfigError) as caught:
        named.address()
    assert TOKEN not in str(caught.value)
    kept = receiver(f"url_file = '{tmp_path / 'url'}'\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        kept.address()
    (tmp_path / "url").write_text("https://host/x\n")
    assert kept.address() == "https://host/x"
    assert TOKEN not in repr(named)


def test_the_file_is_the_named_one_or_the_users_and_never_the_working_directorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("sentinel.toml").write_text("[grouping]\nwait = '1s'\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert config.path() in (None, FILE)
    config.home().mkdir(parents=True)
    (config.home() / "sentinel.toml").write_text("[grouping]\nwait = '2s'\n")
    assert config.load().grouping.wait == 2
    (tmp_path / "named.toml").write_text("[grouping]\nwait = '3s'\n")
    monkeypatch.setenv("SENTINEL_CONFIG", str(tmp_path / "named.toml"))
    assert config.load().grouping.wait == 3
    assert config.load(Path("sentinel.toml")).grouping.wait == 1
    with pytest.raises(ConfigError, match=r"/no/such\.toml: no such settings file; `sentinel init` writes one"):
        config.load(Path("/no/such.toml"))
