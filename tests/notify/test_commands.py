"""`sentinel init` and `sentinel alerts test`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sentinel.cli import cli
from sentinel.config import settings as config
from sentinel.config.settings import Grouping
from sentinel.errors import ConfigError
from sentinel.notify import Delivery, Message, Route
from sentinel.notify.limiter import Limiter
from sentinel.rulebook import loader
from tests.notify.consumer import check, consumer
from tests.notify.test_pipeline import Fake


def sentinel(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_what_init_writes_is_right_and_is_in_force() -> None:
    done = sentinel("init")
    folder = config.home()
    assert done.exit_code == 0
    assert done.output.count("written") == 3
    assert len(done.output.partition("Next:\n")[2].splitlines()) == 5
    settings = config.load()
    assert settings == config.Settings(daemon=config.DaemonSettings(rules=(folder / "rules",)))
    book = loader.load(settings.daemon.rules)
    assert "GradientsFade" in {rule.name for rule in book.rules}
    assert book.notes == ()
    assert sentinel("rules", "check", str(folder / "rules")).exit_code == 0
    assert "2 passed, 0 failed" in sentinel("rules", "test", str(folder / "rules")).output


def test_init_writes_the_file_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "team" / "mine.toml"
    monkeypatch.setenv("SENTINEL_CONFIG", str(named))
    with pytest.raises(ConfigError, match="no such settings file; `sentinel init` writes one"):
        config.load()
    done = sentinel("init")
    assert done.exit_code == 0
    assert f"name a receiver in {named}\n" in done.output
    assert config.load() == config.Settings(daemon=config.DaemonSettings(rules=(tmp_path / "team" / "rules",)))
    assert (tmp_path / "team" / "rules" / "example.yaml").is_file()
    assert not config.home().exists()
    monkeypatch.setenv("SENTINEL_CONFIG", str(tmp_path))
    with pytest.raises(ConfigError, match="is there, but no file"):
        CliRunner().invoke(cli, ["init"], catch_exceptions=False)


def test_every_setting_is_in_what_init_writes_with_its_default(tmp_path: Path) -> None:
    """Uncommented, the file states the defaults. It shows both ways for nodes to meet, and uses one of them."""
    sentinel("init", str(tmp_path))
    text = (tmp_path / "sentinel.toml").read_text()
    lines = [line.removeprefix("# ") if " = " in line or "# [" in line else line for line in text.splitlines()]
    lines = [line for line in lines if not line.startswith("routers")]
    said = config.parse_settings("\n".join(lines), tmp_path / "sentinel.toml")
    default = config.Settings()
    assert said.grouping == default.grouping
    assert said.daemon.http == default.daemon.http
    assert {receiver.type for receiver in said.receivers} == set(config.list_own_types()), (
        "an example of each in init.py"
    )
    for struct in (config.DaemonSettings, config.Grouping, config.ReceiverSettings, config.RouteSettings):
        assert all(f"{name} = " in text for name in struct.__struct_encode_fields__ if name != "options")


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "sentinel.toml").write_text("# mine\n")
    done = sentinel("init", str(tmp_path))
    assert done.exit_code == 0
    assert done.output.count("is there already, and stays as it is") == 1
    assert (tmp_path / "sentinel.toml").read_text() == "# mine\n"
    (tmp_path / "file").write_text("")
    assert isinstance(sentinel("init", str(tmp_path / "file" / "x")).exception, ConfigError)


def test_a_receiver_can_be_tried(tmp_path: Path) -> None:
    settings = tmp_path / "s.toml"
    with consumer(200, 200, 404) as ops:
        settings.write_text(f"[[receivers]]\nname = 'ops'\ntype = 'webhook'\nurl = '{ops.url}'\n")
        good = sentinel("alerts", "test", "ops", "--config", str(settings))
        assert (good.exit_code, good.output) == (0, "ops: delivered\n")
        firing, resolved = ops.next(), ops.next()
        check(firing)
        check(resolved)
        assert (firing["status"], resolved["status"]) == ("firing", "resolved")
        assert firing["alerts"][0]["labels"]["alertname"] == "SentinelTest"
        bad = sentinel("alerts", "test", "--json", "--config", str(settings))
        assert bad.exit_code == 1
        assert json.loads(bad.output)[0]["detail"] == "it answers 404"
    unknown = sentinel("alerts", "test", "pager", "--config", str(settings))
    assert "no receiver pager in" in str(unknown.exception)
    assert "there are: ops" in str(unknown.exception)
    assert "sentinel init" in str(sentinel("alerts", "test").exception)


@pytest.mark.parametrize("fault", [RuntimeError, SystemExit, asyncio.CancelledError])
def test_a_receiver_that_raises_is_reported_without_its_words_and_others_are_tried(
    fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Fake):
        async def deliver(self, message: Message) -> Delivery:
            raise fault("https://s3cr3t")

        async def close(self) -> None:
            raise fault("https://s3cr3t")

    # As in a container whose user has no name.
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    made = [("bad", Broken()), ("good", Fake())]
    routes = [Route(name, one, lambda _: True, 5.0, Grouping(), Limiter()) for name, one in made]
    monkeypatch.setattr("sentinel.cli.alerts.make_routes", lambda _: (routes, []))
    done = sentinel("alerts", "test")
    assert done.output == f"bad: not delivered: {fault.__name__} in its code\ngood: delivered\n"
    assert done.exit_code == 1
