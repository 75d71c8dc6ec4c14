"""Extensible tables of named parts: tasks, tools, rewards, pools, advantages, losses, model families.

A configuration names a part in one of four ways:

    sort                      a built-in part
    countdown                 offered by an installed package, as an entry point of the table's group (`nmoe.tasks`, ...)
    countdown                 registered by the running program: `TASKS.register("countdown", Countdown)`
    my_module:Countdown       an object of a module, found as Python finds modules, first in the working directory

Names are unique: registering a second part with a taken name is refused. Parts are imported on first use. The Python API takes the
objects themselves; `hand_over` gives each a name by which the configuration finds it again.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from nmoe.config.elsewhere import closest
from nmoe.errors import MissingInputError, UserError, cut

_IN_MODULE = re.compile(r"[\w.]+:[A-Za-z_]\w*")
_NOTHING: Mapping[str, str] = MappingProxyType({})

# Objects of this process that have no module to be imported from, or are not the module's own: name -> object.
_handed_over: dict[str, Any] = {}
# The objects of the running API call, if there is one: another thread may have passed others under the same names.
_of_this_call: ContextVar[dict[str, Any] | None] = ContextVar("_of_this_call", default=None)


class Registry:
    """The parts of one kind (the tasks, say, or the losses), by name. `get` raises UserError for a name that has no part, or more
    than one."""

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str] = _NOTHING, key: str = "") -> None:
        """Begins with the built-in parts. `kind`, such as "task", names the parts in messages; `group`, such as `nmoe.tasks`, is
        the group of entry points. `builtin` has nmoe's parts: name -> `module:attribute`. `key` is the setting that names one, if
        other frameworks call its values by other names (`nmoe.config.elsewhere`)."""
        self.kind, self.group, self.builtin, self.key = kind, group, builtin, key
        self._registered: dict[str, Any] = {}

    def names(self) -> list[str]:
        """Returns all names that need no module: first the built-in, then registered names, then names from installed packages."""
        return list(dict.fromkeys([*self.builtin, *self._registered, *self._offered]))

    def __contains__(self, name: str) -> bool:
        return (
            name in self.builtin
            or name in self._registered
            or bool(_IN_MODULE.fullmatch(name))
            or name in self._offered
        )

    def refusal(self, name: str, among: Iterable[str] | None = None) -> str:
        """Returns the error message for an unknown name, which lists the known names, or those in `among` if only these are
        allowed."""
        names = list(self.names() if among is None else among)
        alike = closest(name, names, self.key)
        hint = f"; did you mean {alike!r}?" if alike else ""
        known = f"one of {', '.join(names)}, or " if names else ""
        article = "an" if self.kind[0] in "ae" else "a"
        return f"must be {known}{article} {self.kind} of your own as `package.module:Name`{hint}"

    def get(self, name: str) -> Any:
        """Returns the part with this name, importing its module if necessary. Raises UserError if there is none, or if several
        packages offer one."""
        if name in self._registered:
            return self._registered[name]
        if name in self.builtin:
            return load_object(self.kind, self.builtin[name])
        if ":" in name:
            return load_object(self.kind, name)
        offers = self._offered.get(name, [])
        if not offers:
            raise UserError(f"{self.kind} {name!r}: {self.refusal(name)}")
        if len(offers) > 1:
            raise UserError(
                f"{self.kind} {name!r} is offered by several packages: {', '.join(map(_package, offers))}; name one as "
                f"{' or '.join(f'`{offer.value}`' for offer in offers)}"
            )
        return load_object(self.kind, offers[0].value)

    def register(self, name: str, part: Any) -> None:
        """Adds a part under a name. Raises UserError if the name is invalid or belongs to another part."""
        if not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"{self.kind} {name!r}: a name is letters, digits and . _ -")
        taken_by = self._taken_by(name)
        # A notebook defines the same function again.
        again = name in self._registered and _origin(self._registered[name]) == _origin(part)
        if taken_by is not None and not again:
            raise UserError(
                f"{self.kind} {name!r} is registered twice: by {taken_by} and by {_origin(part)}; rename one"
            )
        self._registered[name] = part

    def _taken_by(self, name: str) -> str | None:
        if name in self.builtin:
            return "nmoe"
        if name in self._registered:
            return _origin(self._registered[name])
        return ", ".join(map(_package, self._offered[name])) if name in self._offered else None

    @cached_property
    def _offered(self) -> dict[str, list[EntryPoint]]:
        """The parts that installed packages offer, as entry points. Raises UserError if one has the name of a built-in part."""
        offered: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group):
            if entry.name in self.builtin:
                raise UserError(
                    f"the {self.kind} {entry.name!r} of {_package(entry)} has the name of a built-in one; the package has to "
                    f"rename it in its entry points of the group {self.group!r}"
                )
            offered.setdefault(entry.name, []).append(entry)
        return offered


def load_object(kind: str, name: str) -> Any:
    """Imports and returns the object `package.module:Name`, searching as Python does, first in the working directory.

    Raises MissingInputError, a UserError, if it does not exist or cannot be imported, and UserError for an object that only another
    process has; `kind`, such as "tool", names its purpose in the message.
    """
    for handed_over in (_of_this_call.get() or {}, _handed_over):
        if name in handed_over:
            return handed_over[name]
    module_name, _, attribute = name.partition(":")
    if module_name == "__main__":
        raise UserError(
            f"{kind} {name}: it was passed by a script or notebook, which is the only place that has it; run that again, or put "
            f"{attribute} in its own module and name it as `module:{attribute}`"
        )
    if module_name == "passed":
        raise UserError(
            f"{kind} {name}: a script or notebook passed the records, and is the only place that has them; run that "
            "again, or write them to a .jsonl file and name it as [task_pool] path"
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module may raise anything while it is imported
        raise MissingInputError(
            f"{kind} {name}: importing {module_name} failed: {type(error).__name__}: {error}", name
        ) from error
    finally:
        sys.path.remove(here)
    try:
        return getattr(module, attribute)
    except AttributeError:
        own = sorted(key for key, one in vars(module).items() if getattr(one, "__module__", None) == module_name)
        known = f"; it defines {cut(', '.join(own))}" if own else ""
        raise MissingInputError(
            f"{kind} {name}: {getattr(module, '__file__', None) or module_name} has no {attribute!r}{known}", name
        ) from None


def hand_over(*parts: Any, beside: Collection[str] = ()) -> list[str]:
    """Registers objects passed to the API and returns the names by which a configuration finds them: `["my_module:reward"]`.

    An object is named by its module and qualified name, an instance by its class. A name that occurs twice in `parts`, or is in
    `beside`, gets a number. A later call may reuse a name, as when a notebook defines a function again; within `names_of_one_call`
    a name keeps its object, even if other threads register the same name.
    """
    of_this_call = _of_this_call.get()
    names: list[str] = []
    for part in parts:
        own = part if hasattr(part, "__qualname__") else type(part)
        last = re.sub(r"\W", "", own.__qualname__.rpartition(".")[2]) or "part"
        name, number = f"{own.__module__}:{last}", 2
        while name in names or name in beside:
            name, number = f"{own.__module__}:{last}_{number}", number + 1
        _handed_over[name] = part
        if of_this_call is not None:
            of_this_call[name] = part
        names.append(name)
    return names


@contextmanager
def names_of_one_call() -> Iterator[None]:
    """Keeps the names given by `hand_over` bound to the same objects inside the block: in this thread, and in threads with a
    copy of its context. Thus two runs in two threads can each have another function `reward`."""
    token = _of_this_call.set(dict(_of_this_call.get() or {}))
    try:
        yield
    finally:
        _of_this_call.reset(token)


def _package(entry: EntryPoint) -> str:
    return "an unnamed package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _origin(part: Any) -> str:
    if isinstance(part, ModuleType):
        return part.__name__
    own = part if hasattr(part, "__qualname__") else type(part)
    return f"{own.__module__}:{own.__qualname__}"


_TASKS = "nmoe.envs.tasks"
GENERATED_TASKS: Mapping[str, str] = {
    "sort": f"{_TASKS}.numeric:SortTask",
    "reverse": f"{_TASKS}.numeric:ReverseTask",
    "add": f"{_TASKS}.numeric:AddTask",
    "arithmetic": f"{_TASKS}.numeric:ArithmeticTask",
    "sum": f"{_TASKS}.numeric:SumTask",
    "guess": f"{_TASKS}.numeric:GuessTask",
    "compare": f"{_TASKS}.plain_english:CompareTask",
    "largest": f"{_TASKS}.plain_english:LargestTask",
    "small_sums": f"{_TASKS}.plain_english:SumsTask",
    "differences": f"{_TASKS}.plain_english:DifferencesTask",
    "next_number": f"{_TASKS}.plain_english:NextNumberTask",
    "parity": f"{_TASKS}.plain_english:ParityTask",
    "order_numbers": f"{_TASKS}.plain_english:OrderNumbersTask",
    "word_problems": f"{_TASKS}.plain_english:WordProblemsTask",
    "letters": f"{_TASKS}.plain_english:LettersTask",
    "count_words": f"{_TASKS}.plain_english:CountWordsTask",
    "order_words": f"{_TASKS}.plain_english:OrderWordsTask",
    "longer_word": f"{_TASKS}.plain_english:LongerWordTask",
    "alphabetical": f"{_TASKS}.plain_english:AlphabeticalTask",
    "capitals": f"{_TASKS}.plain_english:CapitalsTask",
    "three_words": f"{_TASKS}.plain_english:ThreeWordsTask",
    "code_fix": f"{_TASKS}.code_fix:CodeFixTask",
}
"""The built-in tasks that generate problems; they can also grade the records of a dataset."""

DATASET_TASKS: Mapping[str, str] = {
    **GENERATED_TASKS,
    "gsm8k": f"{_TASKS}.numeric:Gsm8kTask",
    "math": f"{_TASKS}.math:MathTask",
    "multiple_choice": f"{_TASKS}.choice:MultipleChoiceTask",
    "proof_verification": f"{_TASKS}.proofs:ProofVerificationTask",
    "meta_verification": f"{_TASKS}.proofs:MetaVerificationTask",
    "prm_step": f"{_TASKS}.proofs:PrmStepTask",
    "prm_solution": f"{_TASKS}.proofs:PrmSolutionTask",
    "humaneval": f"{_TASKS}.solution:HumanEvalTask",
    "mbpp": f"{_TASKS}.solution:MbppTask",
    "program": f"{_TASKS}.solution:ProgramTask",
    "code_edit": f"{_TASKS}.code_edit:CodeEditTask",
    "file_search": f"{_TASKS}.text:FileSearchTask",
    "text_match": f"{_TASKS}.text:TextMatchTask",
    "open": f"{_TASKS}.text:OpenTask",
    "skyrl_gym": f"{_TASKS}.skyrl_gym:SkyrlGymEpisode",
    "openenv": f"{_TASKS}.openenv:OpenEnvEpisode",
    "ors": f"{_TASKS}.ors:OrsEpisode",
}
"""The built-in tasks that can grade the records of a dataset."""

TASKS = Registry(
    "task",
    "nmoe.tasks",
    {
        **DATASET_TASKS,
        # Only the pools of these names have their problems.
        "reasoning_gym": f"{_TASKS}.reasoning_gym:ReasoningGymTask",
        "verifiers": f"{_TASKS}.outside:OutsideTask",
        "proof_generation": f"{_TASKS}.proofs:ProofGenerationTask",
    },
)
_BUILTIN = "nmoe.envs.tools.builtin"
TOOLS = Registry(
    "tool", "nmoe.tools", {name: f"{_BUILTIN}:{name}" for name in ("python", "bash", "read", "write", "edit", "search")}
)
REWARDS = Registry("reward", "nmoe.rewards")
POOLS = Registry("pool", "nmoe.pools")
ENGINES = Registry("engine", "nmoe.engines")
ADVANTAGES = Registry(
    "advantage",
    "nmoe.advantages",
    {
        "grpo": "nmoe.rl.advantages:Grpo",
        "dr_grpo": "nmoe.rl.advantages:DrGrpo",
        "rloo": "nmoe.rl.advantages:Rloo",
        "maxrl": "nmoe.rl.advantages:MaxRL",
        "reinforce_pp": "nmoe.rl.advantages:ReinforcePP",
        "gae": "nmoe.rl.advantages:Gae",
    },
    key="algorithm.advantage",
)
LOSSES = Registry(
    "loss",
    "nmoe.losses",
    {
        "clip": "nmoe.learner.objectives:clip",
        "dual_clip": "nmoe.learner.objectives:clip",
        **{name: f"nmoe.learner.objectives:{name}" for name in ("gspo", "cispo", "dppo")},
    },
    key="algorithm.loss",
)
