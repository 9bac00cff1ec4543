"""The exceptions of Sentinel, as a tree.

    SentinelError                 anything that a person can fix; the command line prints it and exits with 2
      AttachError                 `attach` was given something that it cannot watch
      ConfigError                 a setting, a place on the disk, a permission
        DamageError               a history whose content is not what was written
      RuleError                   a rule file; carries file, line and column
      ProtocolError               a peer that speaks another version, or sends no messages of Sentinel
      RollbackError               a snapshot or a rollback that is not possible
        StateError                state of the run that cannot be captured whole
      LogError                    a recorded run that cannot be read
    RunStopped(SystemExit)        the run is ended on purpose: the budget of rollbacks is spent, or a rule says `stop`

Their texts name what is wrong, where, and the fix. Sentinel's own bugs are assertions, not these.
"""

from __future__ import annotations

EXIT_STOPPED = 86
"""Exit status of a run that Sentinel stopped: starting it again unchanged would meet the same fault."""
EXIT_BY_RULE = 87
"""Exit status of a run that an alert with the action `stop` ended, on all ranks."""
EXIT_LEFT_OUT = 88
"""Exit status of `sentinel run` on a node that the job goes on without (`--allow-shrink`)."""
EXIT_UNFINISHED = 85
"""Exit status of `sentinel run` where it ended the job or has no restart left: the job may go on elsewhere or later."""


class SentinelError(Exception):
    """Base of all errors that a person can fix."""


class AttachError(SentinelError):
    """Raised where `sentinel.attach` was given something that it cannot watch."""


class UnknownArgumentError(AttachError, TypeError):
    """Raised for an argument that `sentinel.attach` does not have."""


class ConfigError(SentinelError):
    """A setting, a path or a permission is wrong."""


class DamageError(ConfigError):
    """A history does not hold what was written: unlike a locked history, it can never be read."""


class ProtocolError(SentinelError):
    """The peer speaks another protocol version, or what arrived is no message."""


class RollbackError(SentinelError):
    """A snapshot cannot be taken or a rollback cannot be applied."""


class StateError(RollbackError):
    """A part of the run's state cannot be captured whole: rollback is not armed."""


class LogError(SentinelError):
    """A recorded run cannot be read, or the file is not a recorded run."""


class RuleError(SentinelError):
    """A rule file is wrong. Prints as `file:line:column: what is wrong; the fix`. With `line` 0 the error is about the
    file as a whole, and the line and column are left out."""

    def __init__(self, message: str, *, file: str = "<rules>", line: int = 1, column: int = 1) -> None:
        self.message, self.file, self.line, self.column = message, file, line, column
        self.others: tuple[RuleError, ...] = ()
        """Further mistakes in the same file, in the order of its text."""
        super().__init__(f"{file}:{line}:{column}: {message}" if line else f"{file}: {message}")


class RunStopped(SystemExit):
    """Raised at the exit of an optimizer step to end the run: the rollback budget is spent (`EXIT_STOPPED`), or a rule
    has the action `stop` (`EXIT_BY_RULE`)."""

    def __init__(self, reason: str, status: int = EXIT_STOPPED) -> None:
        self.reason, self.status = reason, status
        super().__init__(status)
