"""Settings: where they are found, what they may be, and the messages for what they may not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sentinel.config import settings as config
from sentinel.config.links import fill_link
from sentinel.errors import ConfigError
from sentinel.node import paths
from tests.second_user import NOBODY, as_user

FILE = Path("/etc/sentinel/sentinel.toml")
HOOK = "[[receivers]]\nname = 'ops'\ntype = 'webhook'\n"
TOKEN = "a1b2c3d4e5f6a7b8c9d0e1f2"


def receiver(rest: str) -> config.ReceiverSettings:
    return config.parse_settings(HOOK + rest, FILE).receivers[0]


def test_an_empty_file_is_the_defaults() -> None:
    assert config.parse_settings("", FILE) == config.Settings()


def test_the_settings_are_those_of_the_file() -> None:
    settings = config.parse_settings(
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
        ("\n[deamon]\n", 2, "unknown key 'deamon'; there are: daemon, links, grouping, cluster, history, trackers"),
        ("[daemon]\n\nhtpp = 1\n", 3, "unknown key 'htpp'; there are: http,"),
        ("[daemon]\nhttp = 70000\n", 2, "70000 is no port"),
        ("[daemon]\nhttp = true\n", 2, "http: expected"),
        ("[daemon]\nlisten = 'localhost'\n", 2, "'localhost' is no IPv4 address"),
        ("[grouping]\nwait = 5\n", 2, "wait: expected text in quotes, got 5"),
        ("[grouping]\nwait = '5 minutes'\n", 2, "no duration; write 90s, 5m"),
        ("receivers = 3\n", 1, "receivers: expected a list in [ ], got a whole number"),
        (HOOK, 3, "webhook needs one of url, url_env and url_file, and has none"),
        (HOOK + "url_env = 'A'\nurl_file = 'b'\n", 5, "url_env and url_file: name one of them"),
        (HOOK + "url = 'ftp://host'\n", 4, "no http:// or https:// URL"),
        (HOOK + "url = 'http://[::1/hook'\n", 4, "no http:// or https:// URL"),
        (HOOK + "url_env = 'A'\nseverities = ['bad']\n", 5, "'bad' is not one of info, warning, critical"),
        (HOOK + "url_env = 'A'\n" + HOOK + "url_env = 'B'\n", 6, "a second receiver 'ops'"),
        ("[[receivers]]\nname = 'a b'\ntype = 'webhook'\n", 2, "'a b' is not 1 to 40 letters"),
        ("[[receivers]]\nname = 'a'\n", 1, "type is missing"),
        (
            "[[receivers]]\nname = 'a'\ntype = 'carrier-pigeon'\n",
            3,
            "there are: alertmanager, apprise, ",
        ),
        ("[[receivers]]\nname = 'a'\ntype = 'pagerduty'\n", 3, "needs the routing key"),
        ("[[receivers]]\nname = 'a'\ntype = 'slack'\n", 3, "or token_env or token_file (a bot) and channel"),
        ("[[receivers]]\nname = 'a'\ntype = 'slack'\ntoken_env = 'T'\n", 3, "needs a channel"),
        ("[[receivers]]\nname = 'a'\ntype = 'slack'\nurl_env = 'T'\nchannel = '#a'\n", 3, "the webhook's channel"),
        (HOOK + "url_env = 'A'\nrate_limit = 'few'\n", 5, "'few' is no rate; write 20 per 1h"),
        (HOOK + "url_env = 'A'\nrate_limit = '0 per 1h'\n", 5, "lets nothing through"),
        (HOOK + "url_env = 'A'\n[[routes]]\nreceivers = ['op']\n", 6, "no receiver is called 'op'; there are: ops"),
        ("[[routes]]\nreceivers = ['op']\n", 2, "there is none; add one under [[receivers]]"),
        (HOOK + "url_env = 'A'\n[[routes]]\nreceivers = []\n", 2, "no route leads to 'ops'"),
        (
            HOOK + "url_env = 'A'\n[[routes]]\nreceivers = ['ops']\ngo_on = true\n",
            7,
            "severities, rules, runs, continue",
        ),
        ("[[receivers]]\nname = 'a'\ntype = 'apprise'\n", 3, "needs one of url, url_env"),
        ("[[receivers]]\nname = 'a'\ntype = 'apprise'\nurl = 'ntfy://x'\n", 4, "apprise's URLs hold secrets"),
        ("[heartbeat]\ninterval = '1m'\n", 2, "a heartbeat needs one of url, url_env and url_file"),
        ("[heartbeat]\nurl = 'https://hc.example/0f8fad5b-d9cb-469f-a165-70867728950e'\n", 2, "seems to hold a secret"),
        ("[daemon]\nexternal_url = 'grafana'\n", 2, "no http:// or https:// URL"),
        ("[links]\npage = 'https://h/'\nrunbook = 'wiki'\n", 3, 'write runbook = "https://host/path"'),
        ("[links]\nreport = 'https://me:pw@h/r'\n", 2, "report: no http:// or https:// URL, or one with a user in it"),
        (HOOK + "url_env = 'A'\ntimeout = '0s'\n", 5, "timeout: 0 s leaves no time; write one such as 10s"),
        ("[heartbeat]\nurl_env = 'A'\ninterval = '0s'\n", 3, "interval: 0 s leaves no time"),
        ("[otlp]\ninterval = '1m'\ntimeout = '0ms'\n", 3, "timeout: 0 s leaves no time"),
        ("[grouping]\nwait = '0s'\nrepeat = '0s'\n", 3, "repeat: 0 s sends alerts again and again; write"),
        (HOOK + "url_file = '~no-such-user/hook'\n", 4, "'~no-such-user/hook': there is no such home directory"),
        ("[daemon]\nrules = ['~no-such-user/rules']\n", 2, "there is no such home directory; write the path"),
        ("[links]\nrunbok = 'https://h/'\n", 2, "unknown key 'runbok'; there are: runbook, page, report"),
    ],
)
def test_a_mistake_is_a_sentence_with_its_line(text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_settings(text, FILE)
    assert str(caught.value).startswith(f"{FILE}:{line}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "secret",
    [
        f"url = 'https://user:{TOKEN}@host/'",
        f"url = 'https://host/hook?key={TOKEN}'",
        f"url = 'https://host/services/{TOKEN}'",
        f"token = '{TOKEN}'",
        f"routing_key = '{TOKEN}'",
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


def test_a_token_is_read_when_it_is_used_and_is_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = receiver("url_env = 'U'\ntoken_env = 'OPS_TOKEN'\n")
    with pytest.raises(ConfigError, match="OPS_TOKEN is empty or not set"):
        named.token()
    monkeypatch.setenv("OPS_TOKEN", TOKEN)
    assert named.authorization() == {"Authorization": f"Bearer {TOKEN}"}
    monkeypatch.setenv("OPS_TOKEN", f"Basic {TOKEN}")
    assert named.authorization() == {"Authorization": f"Basic {TOKEN}"}
    monkeypatch.setenv("OPS_TOKEN", f"{TOKEN}\r\nX-Header: y")
    with pytest.raises(ConfigError, match="a character that no token has") as caught:
        named.token()
    assert TOKEN not in str(caught.value)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert receiver(f"url_env = 'U'\ntoken_file = '{tmp_path / 'token'}'\n").token() == TOKEN
    assert receiver("url_env = 'U'\n").authorization() == {}


def test_links_are_filled_in() -> None:
    names = {"run": "a b&{run_id}/", "run_id": "r1"}
    filled = "https://g/d?r=a%20b%26%7Brun_id%7D%2F&i=r1&x={a}"
    assert fill_link("https://g/d?r={run}&i={run_id}&x={a}", names) == filled
    assert fill_link("", names) == ""


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


@pytest.mark.root
def test_a_named_file_that_another_user_keeps_is_a_mistake_in_the_settings() -> None:
    """As any other: a run that starts its daemon is then watched with the defaults."""

    def say() -> str:
        try:
            return str(config.load(file))
        except ConfigError as error:
            return str(error)

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        file = Path(folder, "sentinel.toml")
        file.write_text("")
        os.chmod(folder, 0o700)
        assert as_user(NOBODY, say) == f"{file}: no such settings file; `sentinel init` writes one"


@pytest.mark.parametrize("variable", ["HOME", "XDG_CONFIG_HOME"])
def test_without_a_home_the_working_directory_is_not_one(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user may have no home: `~` stays `~`, and a repository could bring a folder of that name."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "SENTINEL_STATE"):
        monkeypatch.delenv(name, raising=False)
    if variable == "HOME":
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    else:
        monkeypatch.setenv(variable, "~/.config")
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "~" / ".config" / "sentinel" / config.FILE
    theirs.parent.mkdir(parents=True)
    theirs.write_text("[[receivers]]\nname = 'theirs'\ntype = 'webhook'\nurl = 'http://elsewhere/'\n")
    assert config.load().receivers == ()
    with pytest.raises(ConfigError, match="set HOME or XDG_CONFIG_HOME"):
        config.home()
    assert all(place.is_absolute() for place in paths.state_places())
