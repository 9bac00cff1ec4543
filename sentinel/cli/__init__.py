"""The command line: one file per command, each imported when it is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import NoReturn

import click

from sentinel.cli.plain import echo, plain
from sentinel.errors import SentinelError

_COMMANDS = {
    "alerts": ("sentinel.cli.alerts", "Send a test alert to the receivers."),
    "daemon": ("sentinel.cli.daemon", "Run a daemon in the foreground; attach starts one by itself."),
    "demo": ("sentinel.cli.demo", "Watch Sentinel save a run: a small GPT, a real fault, an alert, a rollback."),
    "doctor": ("sentinel.cli.doctor", "Check the environment, and a script's first steps, for known mistakes."),
    "explain": ("sentinel.cli.explain", "Print an alert's runbook section."),
    "grafana": ("sentinel.cli.grafana", "Write dashboards to a Grafana server, or into files."),
    "history": ("sentinel.cli.history", "List the runs whose history is kept, export their numbers, delete old ones."),
    "hang": ("sentinel.cli.hang", "Say which rank is missing in which collective, live or after the fact."),
    "incidents": ("sentinel.cli.incidents", "List the incidents of live and ended runs."),
    "init": ("sentinel.cli.init", "Write settings and a rule to begin with."),
    "last": ("sentinel.cli.last", "Summarise the last runs, the worst first."),
    "mcp": ("sentinel.cli.mcp", "Serve runs and incidents to an assistant, over MCP."),
    "memory": ("sentinel.cli.memory", "Analyse snapshots of the CUDA caching allocator."),
    "page": ("sentinel.cli.page", "Print the address of the live page, or show an ended run."),
    "plan": ("sentinel.cli.plan", "Estimate memory per GPU and list the strategies that fit."),
    "precision": ("sentinel.cli.precision", "Check a checkpoint or a run for fp16 and bf16 problems."),
    "reload": ("sentinel.cli.reload", "Make the daemons read rule files and settings again."),
    "replay": ("sentinel.cli.replay", "Judge runs that were recorded without a daemon."),
    "report": ("sentinel.cli.report", "Write one offline HTML file about a run, or two side by side."),
    "rules": ("sentinel.cli.rules", "Check, test and backtest rule files; show the state of each rule."),
    "run": ("sentinel.cli.run", "Run a training command under watch, without code changes; restart it when it breaks."),
    "silence": ("sentinel.cli.silence", "Mute an alert for a while."),
    "status": ("sentinel.cli.status", "Show the runs that are watched now."),
    "top": ("sentinel.cli.top", "Show the runs of this node, live, in a terminal."),
}
"""Name -> module that holds a click command of that name, and the line that --help shows. Importing all of them for
every --help would cost five times the time."""

_INTERRUPTED = 130
"""Exit code after an interrupt, as in shells: 128 + SIGINT."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(_COMMANDS[name][0]), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(_COMMANDS.items())])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            from sentinel.text import did_you_mean

            raise click.UsageError(f"no such command: {args[0]}{did_you_mean(args[0], sorted(_COMMANDS))}", ctx)
        return super().resolve_command(ctx, args)


def _print_versions(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from sentinel.cli.version import describe_versions

        echo(describe_versions())
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_versions,
              help="Show the versions of Sentinel, torch and Python, and exit.")  # fmt: skip
def cli() -> None:
    """Training health daemon and diagnostics toolkit for PyTorch.

    \b
    In the training script:   monitor = sentinel.attach(model, optimizer)
    See it at work:           sentinel demo

    Exit codes: 0 fine, 1 found something, 2 wrong use.
    """


def main() -> None:
    """Run the command line. A user's mistake is a sentence on stderr and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files and runs may hold any bytes
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:  # `sentinel rules`: its message is the help
        echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        if (context := getattr(error, "ctx", None)) is not None:
            echo(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", err=True)
        echo(f"Error: {plain(error.format_message())}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        _fail("interrupted", _INTERRUPTED)
    except SentinelError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None:  # of stdout; the interpreter would flush, and fail, once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # the reader, as in `| head`, has closed the pipe
            sys.exit(1)
        _fail(f"{error.filename or 'what it prints'}: {error.strerror or error}")


def _fail(text: str, code: int = 2) -> NoReturn:
    echo(f"sentinel: {plain(text)}", err=True)
    sys.exit(code)
