"""Errors that end a command with one clear message, which states the fault, its location and the remedy."""


def shown(value: object, characters: int = 80) -> str:
    """Returns the repr of a value for an error message, on one line and cut to `characters` characters."""
    try:
        text = repr(value)
    except Exception as error:  # the user's object may raise anything
        text = f"what cannot be shown ({type(error).__name__})"
    return cut(" ".join(line.strip() for line in text.splitlines()), characters)


def cut(text: str, characters: int = 80) -> str:
    """Cuts a text to at most `characters` characters; a text that was cut ends in "..."."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


class UserError(Exception):
    """Bad input. A command that meets it prints the message without a traceback and exits with code 2."""

    exit_code = 2


class MissingInputError(UserError):
    """Raised if an input file or name does not exist.

    `named` is this path or name as the user wrote it, with which a command finds the line of the configuration that
    contains it.
    """

    def __init__(self, message: str, named: str = "") -> None:
        super().__init__(message)
        self.named = named


class StorageError(UserError):
    """Raised if the disk is full or cannot be written. The exit code is 2, because the same command fails again until somebody
    makes room."""


class DivergenceError(UserError):
    """Raised if a gradient, a logit or a log-probability is not finite. The exit code is 1, because the input is well-formed."""

    exit_code = 1


class InfrastructureError(UserError):
    """Raised if tools or verifiers failed for a reason other than the samples, so that nothing could be graded. The
    exit code is 1."""

    exit_code = 1


class RunStoppedError(UserError):
    """Raised if a rule in [monitor] with the level "stop" ended the run. The exit code is 1, because the input is well-formed."""

    exit_code = 1


class ShortfallError(UserError):
    """Raised if a command succeeded but a figure misses its promised bounds. The exit code is 1."""

    exit_code = 1
