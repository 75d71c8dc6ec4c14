"""Reads a launch of another trainer into its keys: a command, a shell script with one, or a YAML file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nmoe.config.launches.shell import Statement, Word, statements
from nmoe.config.locate import KeyPath, locate
from nmoe.errors import UserError
from nmoe.parsing import toml_of

_HYDRA = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_YAML = (".yaml", ".yml")
_TOML = ".toml"
_SHELL = (".sh", ".bash")


@dataclass(frozen=True)
class Given:
    """One key of a launch: as it was written, its value, and where, such as `train.sh:12`."""

    key: str
    value: Any
    where: str


@dataclass
class Launch:
    """What a launch says: the program that it starts, its keys, and the options of what starts it (`accelerate launch`, `ray job
    submit`, variables set in front), which have the starter's name in front of them."""

    program: str = ""
    where: str = ""
    given: dict[str, Given] = field(default_factory=dict)
    starter: dict[str, Given] = field(default_factory=dict)


def read_launch(text: str) -> Launch:
    """Reads a launch from the command `text`, or from the script or YAML file that it names. Raises UserError."""
    named = text.strip()
    path = Path(named).expanduser()
    if named and not re.search(r"\s", named) and (path.suffix in (*_YAML, *_SHELL, _TOML) or _is_file(path)):
        if path.suffix in _YAML:
            return Launch(where=named, given=read_yaml(path))
        if path.suffix == _TOML:
            return Launch(where=named, given=read_toml(path))
        return _of_statements(statements(_text(path), named), named, path.parent)
    if not named:
        raise UserError("an empty command; give a launch of another trainer, or the file that has it")
    return _of_statements(statements(text, "command"), "command", Path())


def read_yaml(path: Path, named_at: str = "") -> dict[str, Given]:
    """Returns the keys of a YAML file, nested ones with dots. Raises UserError if it is no mapping, or has a key twice."""
    text = _text(path, named_at)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: no mapping of keys to values, as a trainer's configuration is")
    found: dict[str, Given] = {}
    for key, value, line in _leaves((), node, str(path)):
        found[key] = Given(key, value, f"{path}:{line}")
    return {key: _resolved(one, found) for key, one in found.items()}


def read_toml(path: Path, named_at: str = "") -> dict[str, Given]:
    """Returns the keys of a TOML file, nested ones with dots, and the index of a table in an array as a part of its key. Raises
    UserError if it is none."""
    text = _text(path, named_at)
    try:
        tables = toml_of(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    lines = locate(text, path)
    return {
        ".".join(map(str, keys)): Given(".".join(map(str, keys)), value, str(lines.place_of_key(keys)))
        for keys, value in _of_tables((), tables)
    }


def _of_tables(above: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    is_array = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    if (not isinstance(value, dict) or not value) and not is_array:
        yield above, value
        return
    for key, below in enumerate(value) if is_array else value.items():
        yield from _of_tables((*above, key), below)


def _leaves(above: tuple[str, ...], node: yaml.MappingNode, source: str) -> Iterator[tuple[str, Any, int]]:
    seen: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        name = str(key_node.value)
        if name in seen:
            raise UserError(f"{source}:{line}: {'.'.join((*above, name))} is given twice, first in line {seen[name]}")
        seen[name] = line
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _leaves((*above, name), value, source)
        else:
            yield ".".join((*above, name)), _plain(value, is_file=True), line


def _plain(node: yaml.Node, is_file: bool = False) -> Any:
    """Returns the value of a YAML node, numbers such as 1e-6 among them, which YAML reads as text. In a file, on, off, yes and no
    are switches, as trainers read them; in a command's list they are words."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one, is_file) for one in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value, is_file) for key, value in node.value}
    if is_file and node.tag == "tag:yaml.org,2002:bool":
        return str(node.value).lower() in ("true", "yes", "on")
    if node.tag == "tag:yaml.org,2002:str" and node.style in ("'", '"', "|", ">"):
        return node.value
    return scalar(str(node.value))


def scalar(text: str) -> Any:
    """Returns the value that a word of a command stands for: a number, true or false, None, a list, or the text itself."""
    plain = text.strip()
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if plain.lower() in ("none", "null", "~"):
        return None
    if _NUMBER.fullmatch(plain):
        return int(plain) if plain.lstrip("+-").replace("_", "").isdigit() else float(plain)
    if plain[:1] in ("[", "{") and "$" not in plain:
        try:
            node = yaml.compose(plain, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            return text
        return text if node is None else _plain(node)
    if len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
        return plain[1:-1]
    return text


def _resolved(one: Given, found: Mapping[str, Given]) -> Given:
    """Puts the values of other keys in for OmegaConf's references, `${trainer.seed}`, and $HOME for `${oc.env:HOME}`."""

    def value(match: re.Match[str]) -> str:
        name, _, default = match[1].partition(",")
        if name.startswith("oc.env:"):
            named = name.removeprefix("oc.env:")
            return os.environ["HOME"] if named == "HOME" and "HOME" in os.environ else default.strip() or match[0]
        other = found.get(name.removeprefix("oc.select:"))
        return match[0] if other is None else "null" if other.value is None else str(other.value)

    if isinstance(one.value, list) and any(isinstance(item, str) and "${" in item for item in one.value):
        items = [_REFERENCE.sub(value, item) if isinstance(item, str) else item for item in one.value]
        return Given(one.key, items, one.where)
    if not isinstance(one.value, str) or "${" not in one.value:
        return one
    text = one.value
    for _ in range(8):  # references to references
        text = _REFERENCE.sub(value, text)
    return Given(one.key, scalar(text) if text != one.value else text, one.where)


def _text(path: Path, named_at: str = "") -> str:
    by = f" (named at {named_at})" if named_at else ""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file{by}; name a launch script or YAML that is there, or give the command in quotes"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read{by}: {error}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long for one
        return False


def _of_statements(found: list[Statement], source: str, directory: Path) -> Launch:
    launches = [launch for one in found if (launch := _of_words(one, source, directory)) is not None]
    if not launches:
        raise UserError(
            f"{source}: starts no trainer: expected `python`, `torchrun`, `accelerate launch`, `deepspeed`, `trl`, or keys "
            f"such as "
            "--learning_rate 1e-6 or trainer.epochs=1"
        )
    named = [one for one in launches if one.program]
    if len(named) > 1:
        found_at = ", ".join(f"{one.where} {one.program}" for one in named)
        raise UserError(f"{source}: has {len(named)} launches ({found_at}); give one of them")
    return (named or launches)[0]


_STARTERS = ("accelerate", "torchrun", "deepspeed", "uv", "poetry", "ray", "srun", "mpirun")
_PYTHON = re.compile(
    r"python(\d(\.\d+)?)?|uv|torchrun|deepspeed|accelerate|srun|mpirun|poetry|ray|trl|sudo|nohup|env|time|exec|bash|sh"
)
# Options of starters that take no value.
_FLAGS_OF_STARTERS = frozenset({
    "--isolated", "--active", "--no-sync", "--frozen", "--multi_gpu", "--use_deepspeed", "--use_fsdp", "--standalone",
    "--no_local_rank",
    "--no-wait", "--verbose", "--debug", "-u", "-O", "-B", "--module", "-m", "--cpu",
})  # fmt: skip


def _of_words(statement: Statement, source: str, directory: Path) -> Launch | None:
    """Reads one command; None if it starts no trainer and has no keys."""
    words = [one for one in statement.words if one.text not in ("then", "do", "else", "{", "}")]
    if not words:
        return None
    launch = Launch(where=f"{source}:{words[0].line}")
    for name, value, line in statement.environment:
        launch.starter[name] = Given(name, value, f"{source}:{line}")
    if words[0].text.startswith(("-", "+")) or _HYDRA.fullmatch(words[0].text):
        _keys(words, launch, source)
        return launch
    at = _program(words, launch, source)
    if at is None:
        return None
    if launch.program.endswith(_SHELL):
        return _of_script(launch, words[at:], source, directory)
    if not _is_training(launch.program):
        return None
    _keys(words[at:], launch, source)
    _files(launch, directory)
    return launch


# Programs beside a trainer that its scripts start.
_OTHERS = re.compile(
    r"(^|[./])(vllm[-_]serve|data_preprocess|preprocess\w*|prepare\w*|serve_rm|pip|json\.tool|http\.server|lora_combiner)"
    r"($|[./])"
)


def _is_training(program: str) -> bool:
    return bool(program) and not _OTHERS.search(program.removesuffix(".py"))


def _program(words: Sequence[Word], launch: Launch, source: str) -> int | None:
    """Finds the program among the words of a command, sets it in `launch` with the options of its starters, and returns where its
    own arguments begin; None if the command is no Python program."""
    if not _PYTHON.fullmatch(Path(words[0].text).name):
        return None
    at, starter = 0, ""
    while at < len(words):
        text = words[at].text
        name = Path(text).name
        following = words[at + 1].text if at + 1 < len(words) else ""
        if text in ("-m", "--module") and following and not following.startswith("-"):
            launch.program = following
            return at + 2
        if name == "trl" and following and not following.startswith("-"):
            launch.program = f"trl {following}"
            return at + 2
        if text.endswith((".py", *_SHELL)) and not text.startswith("-"):
            launch.program = text
            return at + 1
        if text == "rl" and at > 0 and words[at - 1].text == "run":  # uv run rl @ rl.toml
            launch.program = "prime-rl rl"
            return at + 1
        if name in _STARTERS:
            starter = name
        elif text.startswith("-") and text != "--":
            option, has_value, value = text.partition("=")
            is_program = following.endswith((".py", *_SHELL)) or _PYTHON.fullmatch(following)
            takes_value = following and not following.startswith("-") and not is_program
            if not has_value and option not in _FLAGS_OF_STARTERS and takes_value:
                value, at = following, at + 1
            key = f"{starter or 'python'} {option}"
            launch.starter[key] = Given(key, scalar(value) if value else True, f"{source}:{words[at].line}")
        at += 1
    return None


def _of_script(launch: Launch, arguments: Sequence[Word], source: str, directory: Path) -> Launch:
    """Reads the script that a command starts; arguments behind it replace the script's own keys, as the last one counts."""
    path = Path(launch.program).expanduser()
    path = path if path.is_absolute() else directory / path
    at = next((at for at, one in enumerate(arguments) if _begins_key(one.text)), len(arguments))
    found = statements(_text(path, launch.where), str(path), [one.text for one in arguments[:at]])
    inner = _of_statements(found, str(path), path.parent)
    over = Launch(where=launch.where)
    _keys(arguments[at:], over, source)
    return Launch(inner.program, inner.where, {**inner.given, **over.given}, {**inner.starter, **launch.starter})


def _keys(words: Sequence[Word], launch: Launch, source: str) -> None:
    """Reads `--key value`, `--key=value`, `--flag` and Hydra's `key=value`. Raises UserError for a key that comes twice."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        where = f"{source}:{word.line}"
        if (match := _HYDRA.fullmatch(word.text)) and not word.text.startswith("-"):
            key, value = match[2], None if match[1] == "~" else scalar(match[3])
        elif re.fullmatch(r"--.+|-[a-z]+", word.text, re.DOTALL):
            name, has_value, value = word.text.lstrip("-").partition("=")
            key, values = name, [scalar(value)] if has_value else []
            while not has_value and at < len(words) and not _begins_key(words[at].text):
                values.append(scalar(words[at].text))
                at += 1
            value = True if not values else values[0] if len(values) == 1 else values
        elif word.text == "@" and at < len(words):
            key, value = "@", words[at].text
            at += 1
        elif word.text in ("$@", "$*", "--") or word.text.isdigit():
            continue
        else:
            key, value = word.text, True
        if key in launch.given:
            raise UserError(f"{where}: {key} is given twice, first at {launch.given[key].where}; leave one out")
        launch.given[key] = Given(key, value, where)


# `"${ARGS[@]}"`, which has no words in a shell where nothing sets it.
_UNSET_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")


def _begins_key(text: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", text) or _UNSET_ARRAY.fullmatch(text)) or (
        _HYDRA.fullmatch(text) is not None and "." in text.partition("=")[0]
    )


# Configurations inside the trainers' packages, whose values are the defaults in the tables.
_SHIPPED = ("ppo_trainer", "ppo_megatron_trainer", "ppo_base_config", "sft_trainer", "sft_trainer_engine")


def _files(launch: Launch, directory: Path) -> None:
    """Reads the configuration that a command names (`--config`, `--config-path` and `--config-name`, `@`); the command's keys count
    over the file's. Raises UserError if it is not there."""
    named = {
        name: launch.given.get(name)
        for name in ("config", "config-path", "config_path", "config-name", "config_name", "cn", "cp")
    }
    folder = next((named[name] for name in ("config-path", "config_path", "cp") if named[name]), None)
    name = next((named[name] for name in ("config-name", "config_name", "cn") if named[name]), None)
    file: Path | None = None
    if (one := launch.given.get("@")) is not None:
        toml = Path(str(one.value))
        found = next((path for path in (toml, directory / toml) if _is_file(path)), toml)
        launch.given = _over(read_toml(found, one.where), launch.given)
        return
    if (one := named["config"]) is not None and str(one.value).endswith(_YAML):
        file = Path(str(one.value))
    elif folder is not None and name is not None:
        stem = str(name.value)
        file = Path(str(folder.value)) / (stem if stem.endswith(_YAML) else f"{stem}.yaml")
        one = name
    if file is None or one is None or (file.stem in _SHIPPED and not _is_file(file)):
        return
    where = next((path for path in (file, directory / file) if _is_file(path)), file)
    launch.given = _over(read_yaml(where, one.where), launch.given)


def _over(file: Mapping[str, Given], command: Mapping[str, Given]) -> dict[str, Given]:
    """Lays a command's keys over a file's, `--max-steps` over `max_steps`."""
    spelled = {key.replace("-", "_") for key in command}
    return {key: one for key, one in file.items() if key.replace("-", "_") not in spelled} | dict(command)
