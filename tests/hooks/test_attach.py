"""What `attach` accepts, what it refuses with which messages, and how a run ends."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import sentinel
from sentinel import wire
from sentinel.errors import AttachError, ConfigError, RollbackError
from sentinel.hooks import accelerate, deepspeed
from sentinel.hooks.session import registry
from sentinel.hooks.transport import daemon_launcher
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, fit, model, sgd
from tests.hooks.sessions import find_session, list_patches
from tests.zygote import TRAINING, run_fork


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def test_hello_lists_nothing_for_each_parameter(daemon: FakeDaemon) -> None:
    """The names of some thousands would make it longer than the daemon takes."""
    net = model()
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=1e-2)
    optimizer.param_groups[0]["schedule"] = [[1.0]] * 3 + list(range(1000))
    with sentinel.attach(net, optimizer):
        daemon.wait(lambda: daemon.of(wire.Hello))
    (group,) = daemon.of(wire.Hello)[0].facts["optimizers"][0]["groups"]
    assert (group["parameters"], group["betas"], group["schedule"]) == (6, [0.9, 0.999], "list")
    assert "param_names" not in group


def test_hello_says_what_the_run_is(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer, run="gpt small", step=500):
        daemon.wait(lambda: daemon.of(wire.LayerTable))
    hello, table = daemon.of(wire.Hello)[0], daemon.of(wire.LayerTable)[0]
    assert (hello.identity.run, hello.step_offset, hello.next_seq) == ("gpt small", 500, 0)
    assert hello.identity.run_id.startswith("gpt-small-")
    assert hello.streams == ("AdamW",)
    assert hello.facts["model"] == "Sequential"
    assert hello.facts["parameters"] == 161
    assert hello.facts["optimizers"][0]["groups"][0]["lr"] == 1e-2
    assert hello.facts["dtypes"] == ["float32"]
    assert hello.rollback is None
    assert [layer.name for layer in table.layers] == [name for name, _ in net.named_parameters()]
    assert [layer.shape for layer in table.layers] == [tuple(p.shape) for p in net.parameters()]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[1].startswith("sentinel: run 'gpt small' ended without a step in ")
    assert "watching run 'gpt small': Sequential, 161 parameters in 6 tensors, AdamW" in said[0]


def test_the_armed_terms_are_in_the_hello(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=50, margin=10)):
        daemon.wait(lambda: daemon.of(wire.Hello))
    assert daemon.of(wire.Hello)[0].rollback == wire.RollbackTerms(every=50, keep=2, margin=10, budget=3)
    assert "rollback is armed" in capsys.readouterr().err


def test_a_parameter_outside_the_model_is_reported(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    net, temperature = model(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*net[0].parameters(), temperature], lr=0.1)
    with sentinel.attach(net, optimizer):
        daemon.wait(lambda: daemon.of(wire.LayerTable))
    said = capsys.readouterr().err
    opening, warning, *_ = said.splitlines()
    assert opening.endswith("does not see the names of 1 optimizer parameter not in the model")
    assert warning.startswith(
        "sentinel: warning: the optimizer holds 1 parameter not in the model (param_groups[0].params[2]). "
        "If a layer was replaced after the optimizer was made, its new parameters do not train: "
    )
    assert "in no optimizer" not in said  # that is an alert
    assert len(daemon.of(wire.Hello)[0].unseen) == 1
    assert daemon.of(wire.LayerTable)[0].layers[-1].name == "param_groups[0].params[2]"


# The arguments.


def frozen() -> nn.Module:
    return model().requires_grad_(False)


def test_the_opening_line_says_that_rules_judge_the_first_of_several_optimizers(
    daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]
) -> None:
    """A NaN that stays in the second one is not found."""
    first, second = model(), model()
    with sentinel.attach([first, second], [adamw(first), adamw(second)]):
        pass
    limit = "faults of the optimizers after the first (rules judge the losses and gradients of the first one)"
    assert limit in capfd.readouterr().err
    daemon.ended()
    assert limit in daemon.of(wire.Hello)[0].unseen


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda net, opt: ("gpt", opt), "the model is of type str, not a torch.nn.Module"),
        (lambda net, opt: ([], opt), "the list of models is empty"),
        (lambda net, opt: (net, net), "the optimizer is of type Sequential, not a torch.optim.Optimizer"),
        (lambda net, opt: (net, torch.optim.SGD), "the optimizer is the class SGD, not a torch.optim.Optimizer"),
        (lambda net, opt: (net, []), "the list of optimizers is empty"),
        (lambda net, opt: (net, [opt, opt]), "the same optimizer is in the list twice"),
        (
            lambda net, opt: (net, opt, StepLR(opt, 9)),
            r"type StepLR, without a name; write scheduler=\.\.\.",
        ),
        (lambda net, opt: (net, opt, "gpt"), r"type str, without a name; write run=\.\.\."),
        (
            lambda net, opt: (net, opt, adamw(net)),
            r"several optimizers as a list: .* \[first, second\]",
        ),
        (
            lambda net, opt: (net, opt, nn.MSELoss()),
            r"write its name \(scaler=, .* or leave it out",
        ),
        (lambda net, opt: (nn.ReLU(), opt), "ReLU has no parameters: attach after its layers are made"),
        (lambda net, opt: (frozen(), opt), "Sequential has no parameter that trains"),
        (
            lambda net, opt: (nn.Linear(2, 2), opt),
            "none of the 6 parameters of AdamW .*is one of Linear's .weight, bias",
        ),
    ],
)
def test_arguments_that_cannot_be_watched(given: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    with pytest.raises(AttachError, match=words):
        sentinel.attach(*given(net, adamw(net)))
    assert list_patches() == ()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run": ""}, "the name of the run must be a text"),
        ({"step": -1}, "a whole number from 0"),
        ({"step": 1.5}, "a whole number from 0"),
        ({"total_steps": 0}, "how many steps the run is to have, from 1"),
        ({"rollback": True}, r"write rollback=sentinel.Rollback\(...\)"),
        ({"overhead": 0}, "over 0 and at most 1"),
        ({"config": "/no/such.toml"}, r"attach\(config='/no/such.toml'\): there is no such file; `sentinel init`"),
        ({"address": "tcp:host:1"}, r"attach\(address='tcp:host:1'\): expected unix:/path"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    net = model()
    with pytest.raises((AttachError, ConfigError), match=words):
        sentinel.attach(net, adamw(net), **options)


def test_attaching_twice(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = adamw(net)
    monitor = sentinel.attach(net, optimizer, run="first")
    with pytest.raises(AttachError, match=r"watched already, as run 'first'.*detach\(\)"):
        sentinel.attach(net, optimizer)
    monitor.detach()
    sentinel.attach(net, optimizer).detach()


def test_snapshots_that_do_not_fit(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise RollbackError("too little memory")

    monkeypatch.setattr("sentinel.hooks.rollback.restorer.Budget.expect", none)
    net = model()
    with pytest.raises(RollbackError, match="too little memory"):
        sentinel.attach(net, adamw(net), rollback=sentinel.Rollback())
    assert list_patches() == ()
    assert not net._forward_hooks


class Wrapper(torch.optim.Optimizer):
    """An Optimizer by class that never called its __init__, as Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()


def test_wrappers_are_taken_off(daemon: FakeDaemon) -> None:
    net = model()
    wrapped = nn.DataParallel(net)  # on the CPU it calls the module and does nothing else
    optimizer = Wrapper(adamw(wrapped))
    with sentinel.attach(wrapped, optimizer):
        Loop(wrapped, optimizer).run(3)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]
    assert list(daemon.series("forward_seconds")) == [0, 1, 2]
    assert [layer.name for layer in daemon.of(wire.LayerTable)[0].layers] == [n for n, _ in net.named_parameters()]
    assert daemon.of(wire.Hello)[0].facts["wrappers"] == ["DataParallel"]


# Notebooks, and runs that are no longer wanted.


def test_a_cell_that_runs_again_detaches_its_predecessor(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "interactive", lambda: True)
    cell = vars(sys.modules["__main__"])
    kept_by_ipython = []
    for _ in range(2):
        net = model()
        monkeypatch.setitem(cell, "optimizer", adamw(net))
        kept_by_ipython.append((net, cell["optimizer"]))
        last = sentinel.attach(net, cell["optimizer"])
        Loop(net, cell["optimizer"]).run(1)
    assert last.state != "detached"
    assert daemon.ended().reason == "detach"
    daemon.wait(lambda: len({hello.identity.session for hello in daemon.of(wire.Hello)}) == 2)
    # The same optimizer once more, as when only the cell with attach is run.
    sentinel.attach(net, cell["optimizer"])
    assert last.state == "detached"


def test_two_runs_in_one_script_go_side_by_side(daemon: FakeDaemon) -> None:
    one, other = model(), model()
    optimizers = adamw(one), adamw(other)
    first, second = sentinel.attach(one, optimizers[0]), sentinel.attach(other, optimizers[1])
    assert "detached" not in (first.state, second.state)
    daemon.wait(lambda: len({hello.identity.run_id for hello in daemon.of(wire.Hello)}) == 2)


@pytest.mark.parametrize("step", [0, 3000])
def test_a_run_that_goes_on_from_an_earlier_one_says_so_once(step: int, daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer, step=step):
        fit(net, optimizer)
    daemon.ended()
    assert daemon.series("resumed") == ({0: 1.0} if step else {})


def test_a_run_whose_optimizer_is_gone_makes_room(daemon: FakeDaemon) -> None:
    net = model()
    optimizer: Any = adamw(net)
    optimizer.cycle = optimizer  # only the collector finds it
    first = sentinel.attach(net, optimizer)
    gone = find_session(first)
    optimizer = adamw(net)
    second = sentinel.attach(net, optimizer)
    assert gone is not None
    assert gone.ended, "at once, and not when the collector comes by"
    gone.sender.join(20)
    assert first.state == "detached"
    assert gone.make_farewell() is None, "one goodbye is enough"
    assert second.state != "detached"
    assert len(list_patches()) == len(set(list_patches())), "once, and not once a run"


# A fault of the machine is reported once, and training goes on.


def unmonitored(capsys: pytest.CaptureFixture[str], net: nn.Module, **options: Any) -> str:
    optimizer = adamw(net)
    monitor = sentinel.attach(net, optimizer, **options)
    find_session(monitor).sender.join(20)
    optimizer.step()
    assert monitor.state.startswith("unmonitored")
    said = [line for line in capsys.readouterr().err.splitlines() if "watching run" not in line]
    assert len(said) == 1
    assert said[0].endswith("training goes on unmonitored")
    return said[0]


def test_no_directory_for_the_socket(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_RUNTIME", "/dev/null/sentinel")
    assert "set SENTINEL_RUNTIME" in unmonitored(capsys, model())


def test_a_path_that_is_too_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SENTINEL_RUNTIME", str(tmp_path / ("x" * 100)))
    assert "SENTINEL_RUNTIME to a shorter one" in unmonitored(capsys, model())


def test_an_address_that_is_not_valid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_ADDRESS", "http://localhost")
    assert "expected unix:/path" in unmonitored(capsys, model())


def test_a_daemon_that_cannot_be_started(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_launcher.sys, "executable", "/no/such/python")
    assert "the daemon cannot be started" in unmonitored(capsys, model())


def test_settings_are_for_a_daemon_that_is_started(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "sentinel.toml"
    settings.write_text("")
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer, config=settings):
        daemon.wait(lambda: daemon.of(wire.Hello))
    said = f"config={settings} is not used: the daemon at {daemon.path} has settings of its own"
    assert capsys.readouterr().err.count(said) == 1
    monkeypatch.delenv("SENTINEL_ADDRESS")
    echo = tmp_path / "python"
    echo.write_text('#!/bin/sh\necho "$@" >&2\nexit 3\n')
    echo.chmod(0o700)
    monkeypatch.setattr(daemon_launcher.sys, "executable", str(echo))
    assert f"--config {settings}" in unmonitored(capsys, net, config=settings)


def test_a_daemon_that_ends_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(daemon_launcher.sys, "executable", str(broken))
    said = unmonitored(capsys, model())
    assert "the daemon ended 3 times (status 3): no such library; its log is " in said


# The end of the process.

SCRIPT = """
import sentinel
from tests.hooks.loops import Loop, model
import torch
net = model()
loop = Loop(net, torch.optim.AdamW(net.parameters()))
sentinel.attach(net, loop.optimizer)
loop.run(30)
{end}
"""


@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "status", "goodbye"),
    [
        ("", 0, {"reason": "exit"}),
        ("raise ValueError('bad data')", 1, {"reason": "exception", "detail": "ValueError: bad data"}),
        ("import os; os._exit(0)", 0, None),
    ],
)
def test_goodbye(end: str, status: int, goodbye: dict[str, str] | None, daemon: FakeDaemon) -> None:
    """All that was queued arrives, and how the process ended; a process that is cut off sends no goodbye."""
    done = run_fork([sys.executable, "-c", SCRIPT.format(end=end)], TRAINING)
    assert done.returncode == status, done.stderr
    daemon.wait(lambda: daemon.hung_up)
    assert len(daemon.of(wire.Goodbye)) == (goodbye is not None)
    if goodbye is not None:
        assert daemon.ended_as(next_seq=30, **goodbye)
        assert daemon.seqs() == list(range(30))


def test_leaving_the_block_by_an_exception(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = adamw(net)

    def train() -> None:
        with sentinel.attach(net, optimizer):
            raise KeyError("x")

    with pytest.raises(KeyError):
        train()
    assert daemon.ended_as(reason="exception", next_seq=0, detail="KeyError")


@pytest.mark.parametrize("scaled", [False, True])
def test_the_loss_scale_is_named_where_there_is_a_scaler(
    scaled: bool, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with sentinel.attach(net, adamw(net)):
        daemon.wait(lambda: daemon.of(wire.Hello))
    assert ("loss scale" in capsys.readouterr().err) is scaled
    assert scaler.is_enabled() is scaled


def test_an_unnamed_argument_after_an_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class DeepSpeedEngine:
        """Taken by `attach` for DeepSpeed's, which it recognises by the class in the loaded module."""

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine))
    with pytest.raises(AttachError, match="the third argument is of type str, without a name; write run="):
        sentinel.attach(DeepSpeedEngine(), None, "my-run")


@pytest.mark.parametrize("way", ["sentinel", "deepspeed", "accelerate"])
def test_an_argument_that_attach_does_not_have_is_refused_by_the_integrations_too(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The integrations used to raise a TypeError about an inner function instead."""
    net = model()

    class DeepSpeedEngine:
        module, optimizer, training_dataloader, global_steps = net, adamw(net), None, 0

        def zero_optimization(self) -> bool:
            return False

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine))
    engine, accelerator = DeepSpeedEngine(), SimpleNamespace(_schedulers=[], scaler=None)
    attach: Callable[..., Any] = {
        "sentinel": functools.partial(sentinel.attach, engine, None),
        "deepspeed": functools.partial(deepspeed.attach, engine),
        "accelerate": functools.partial(accelerate.attach, accelerator, net, adamw(net)),
    }[way]
    with pytest.raises(AttachError, match="attach has no argument 'schedular'; did you mean 'scheduler'"):
        attach(schedular=None)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("schedular", "; did you mean 'scheduler'?"), ("optimiser", "; did you mean 'optimizer'?"), ("unnamed", "")],
)
def test_an_argument_that_attach_does_not_have_is_a_type_error_that_says_what_was_meant(name: str, hint: str) -> None:
    net = model()
    with pytest.raises(TypeError) as raised:
        sentinel.attach(net, adamw(net), **{name: None})
    assert isinstance(raised.value, AttachError)
    assert str(raised.value) == f"attach has no argument {name!r}{hint}"
    assert "scheduler" in inspect.signature(sentinel.attach).parameters
