"""Errors a user can act on, each with the exit code the command line returns for it.

Anything that is not a :class:`TelamonError` is a bug and exits with 1 and a traceback.
"""


class TelamonError(Exception):
    """An error with a message for the user: it names the field or file, the value, and the way out."""

    exit_code = 1


class ConfigError(TelamonError):
    """A config or a command line that cannot be run as written."""

    exit_code = 2


class MissingCompiler(ConfigError):
    """A plan is asked for devices whose compiler is not installed."""


class DataError(TelamonError):
    """Data that is missing, unreadable, empty or exhausted."""

    exit_code = 3


class OutOfDataError(DataError):
    """All data were used as often as the config allows; every process of a run finds so at the same step."""


class NumericsError(TelamonError):
    """A loss or gradient that is not finite."""

    exit_code = 4


class CheckpointError(TelamonError):
    """A checkpoint that cannot be written or read."""

    exit_code = 5


class PeerError(TelamonError):
    """A process of the run that hangs or is lost."""

    exit_code = 6


class CompileError(TelamonError):
    """A compilation ahead of time that failed, or took too long or too much of the host's memory."""

    exit_code = 7


class Stopped(TelamonError):
    """The run was asked to stop (SIGTERM, preemption), saved, and can be resumed."""

    exit_code = 75
