"""What git says of the code that runs: commit, changes that no commit holds, and files that it does not know."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import nmoe
from nmoe.errors import UserError

# A diff that is longer, of a notebook with pictures say, is cut: a run's directory is no place for it.
MAX_DIFF_BYTES = 256 * 1024
MAX_FILES = 100
_NAMED_FILES = 5


@dataclass(frozen=True)
class Checkout:
    """A git repository as it is now.

    diff: the changes of tracked files against the commit, at most `MAX_DIFF_BYTES`. untracked: the files that git neither
    knows nor ignores, at most `MAX_FILES`.
    """

    top: Path
    commit: str | None
    diff: str
    untracked: tuple[str, ...]

    @property
    def dirty(self) -> bool:
        return bool(self.diff or self.untracked)


def run_git(directory: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "--literal-pathspecs", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def git(directory: Path, *arguments: str) -> str:
    """What git prints. Raises UserError with what it says where it fails."""
    command = ["git", "--literal-pathspecs", "-C", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise UserError(f"git {arguments[0]}: {done.stderr.strip() or done.stdout.strip() or 'failed'}")
    return done.stdout.strip()


def package_checkout() -> Checkout | None:
    """The checkout that holds this package, which has to be tracked there: it is not if it is installed in an environment inside
    another repository."""
    package = Path(nmoe.__file__).parent
    return None if run_git(package, "ls-files", "--error-unmatch", "__init__.py") is None else checkout_at(package)


def checkout_at(directory: Path) -> Checkout | None:
    """The repository around a directory; None where there is none."""
    if (top := run_git(directory, "rev-parse", "--show-toplevel")) is None:
        return None
    root = Path(top)
    diff = run_git(root, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    others = (run_git(root, "ls-files", "--others", "--exclude-standard", "--directory") or "").splitlines()
    return Checkout(root, run_git(root, "rev-parse", "HEAD"), _cut(diff), tuple(others[:MAX_FILES]))


def refuse_dirty(outputs: Path) -> None:
    """Raises UserError unless commits hold all code: nmoe's own, where it runs from a checkout, and that of the repository that the
    command runs in. Files below `outputs`, where runs are written, do not count."""
    found = {one.top: one for one in (package_checkout(), checkout_at(Path.cwd())) if one is not None}
    if not found:
        raise UserError(f"run.require_clean: no commit says what runs here: {Path.cwd()} is in no git repository")
    for top, checkout in found.items():
        if checkout.commit is None:
            raise UserError(f"run.require_clean: {top} has no commit yet; commit what is to run")
        if files := changed_files(top, outputs):
            named = ", ".join(files[:_NAMED_FILES]) + (
                f" and {len(files) - _NAMED_FILES} more" * (len(files) > _NAMED_FILES)
            )
            raise UserError(
                f"run.require_clean: {top} has changes that no commit holds: {named}; commit or stash them, or leave "
                "out --require-clean (run.require_clean)"
            )


def changed_files(top: Path, outputs: Path | None = None) -> list[str]:
    """The changed and the untracked files of a repository, but for those below `outputs`. Where that is the repository itself, or
    holds it, only what lies in the directory of a run is left out."""
    listed = (
        run_git(top, "diff", "HEAD", "--name-only", "-z"),
        run_git(top, "ls-files", "--others", "--exclude-standard", "-z"),
    )
    files = [file for of_kind in listed for file in (of_kind or "").split("\0") if file]
    if outputs is None:
        return files
    below = outputs.resolve()
    apart = not top.resolve().is_relative_to(below)

    def is_output(file: Path) -> bool:
        return file.is_relative_to(below) and (apart or any(_is_run(parent, top) for parent in file.parents))

    return [file for file in files if not is_output((top / file).resolve())]


def _is_run(directory: Path, top: Path) -> bool:
    return directory != top.resolve() and (directory / "provenance.json").is_file()


def _cut(diff: str) -> str:
    content = diff.encode(errors="replace")
    if len(content) <= MAX_DIFF_BYTES:
        return diff
    kept = content[:MAX_DIFF_BYTES].decode(errors="ignore")
    return f"{kept}\n... cut here: the whole diff has {len(content):,} bytes\n"
