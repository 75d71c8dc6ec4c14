"""Errors that end a command with one clear message: the fault, its place and the remedy."""


def shown(value: object, characters: int = 80) -> str:
    """The repr of a value for a message, in one line of at most so many characters."""
    try:
        text = repr(value)
    except Exception as error:  # the user's object may raise anything
        text = f"what cannot be shown ({type(error).__name__})"
    return cut(" ".join(line.strip() for line in text.splitlines()), characters)


def cut(text: str, characters: int = 80) -> str:
    """A text cut to at most so many characters, with "..." at the end of a longer one."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


class UserError(Exception):
    """Bad input. A command that meets it prints the message without a traceback and exits with code 2."""

    exit_code = 2


class MissingInputError(UserError):
    """An input file or name does not exist. `named` is that path or name as it was written, by which a command finds the line of
    its configuration that names it."""

    def __init__(self, message: str, named: str = "") -> None:
        super().__init__(message)
        self.named = named


class StorageError(UserError):
    """The disk is full or cannot be written: nothing is wrong with the input, so the exit code is 1."""

    exit_code = 1


class DivergenceError(UserError):
    """A gradient, a logit or a log-probability is not finite: nothing is wrong with the input's form, so the exit code is 1."""

    exit_code = 1


class InfrastructureError(UserError):
    """Tools or verifiers failed for a reason outside the samples, so that nothing could be judged: the exit code is 1."""

    exit_code = 1


class RunStoppedError(UserError):
    """A rule of [monitor] with the level "stop" ended the run: nothing is wrong with the input's form, so the exit code is 1."""

    exit_code = 1


class ShortfallError(UserError):
    """Everything ran, and a figure misses its promise: the exit code is 1."""

    exit_code = 1
