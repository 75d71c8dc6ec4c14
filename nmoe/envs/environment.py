"""An environment: problems, their prompts, and the grades of completions.

It binds a task pool, an output format, a rubric and a curriculum under one name; a trainer needs nothing else about a domain.
The packaged ones are in `nmoe/packaged/environments`. `Environment.from_toml` reads and checks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nmoe.config.environment import EnvironmentSettings, SystemByFormat, held_out
from nmoe.config.loader import load_environment
from nmoe.config.tables.pools import ProgramPool, task_types
from nmoe.envs.curriculum import Curriculum
from nmoe.envs.grade import Grader
from nmoe.envs.pools import build_pool
from nmoe.envs.pools.outside import OutsideOrder
from nmoe.envs.pools.pool import fingerprint_of, stable_hash
from nmoe.envs.prompts import PromptBuilder
from nmoe.envs.rewards.reward import Reward
from nmoe.envs.rewards.rewards import load_rewards
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.conversation import AnsweringTask, AssistantTurn, ConversationTask
from nmoe.envs.tasks.live import LiveTask
from nmoe.envs.tasks.task import SandboxTask
from nmoe.envs.tools.builtin import load_tools
from nmoe.envs.tools.servers import pinned, refuse_unshown
from nmoe.errors import UserError
from nmoe.sandbox.api import Access
from nmoe.text.conversation import ToolDefinition
from nmoe.text.harmony import HarmonyTokenizer
from nmoe.text.renderers import RENDERERS, ChatRenderer, Renderer, natural_format
from nmoe.types import Exchange, Problem, Turn


class Environment:
    """Problems, prompts, grader, rewards and tools under one name.

        >>> import nmoe
        >>> from pathlib import Path
        >>> sort = nmoe.Environment.from_toml(Path("sort"), nmoe.Tokenizer.load(checkpoint))
        >>> [problem] = sort.pool.take(1)
        >>> sorted(problem.question.removeprefix("Sort: ")) == list(problem.gold)
        True

    `pool` gives the problems, `prompts` builds their prompts, and `grader` grades what the policy answers. `rewards` are added to
    the grade. `tools` are the tools that the policy may call, by name; `access` lists the parts of the workspace that they may
    touch. `renderer` writes and reads the format. `settings` hold the resolved format and its system message, even if the file
    leaves both to the tokenizer. `identity` is recorded with every trajectory (`identity_of`).
    """

    def __init__(self, settings: EnvironmentSettings, tokenizer: HarmonyTokenizer, *, user_code: bool = True) -> None:
        """Loads pool, tools and rewards. Without `user_code`, the user's own tools and all `[[rewards]]`, also those by services
        and models, are left out, and none of their functions is imported.

        Raises UserError if data, tools, rewards or tokenizer do not fit the settings.
        """
        settings = in_format(settings, tokenizer)
        self.settings = settings = settings.model_copy(update={"tools": pinned(settings.tools)})
        self.pool = build_pool(settings.env_id, settings.task_pool, columns=bool(settings.rewards))
        self.rewards: list[Reward] = load_rewards(settings.rewards) if user_code else []
        self.curriculum = None if settings.curriculum is None else Curriculum(settings.curriculum)
        self.tokenizer = tokenizer
        self.identity = identity_of(settings)
        self.overlong = 0
        self.budget = settings.budget
        self._tasks = [TASKS[name] for name in task_types(settings.task_pool)]
        self.converses = any(isinstance(task, AnsweringTask) for task in self._tasks)
        pool = settings.task_pool
        self.command = pool.command if isinstance(pool, ProgramPool) else None
        """The program that asks the policy, if one does."""
        self.host = self.pool.order.host if isinstance(self.pool.order, OutsideOrder) else None
        """The process whose environment asks the policy, if one does."""
        self.asks = self.command is not None or self.host is not None
        if self.asks and (self.converses or settings.tools is not None):
            raise UserError(
                f"environment {settings.env_id!r}: a program asks the policy and has its tools, so leave out [tools] "
                "and tasks that converse"
            )
        if self.host is not None and settings.system:
            raise UserError(
                f"environment {settings.env_id!r}: its own messages are all that the policy is asked; leave out `system`"
            )
        self.lives = any(isinstance(task, LiveTask) for task in self._tasks)
        self.tools = {} if settings.tools is None else load_tools(settings.tools, settings.budget, user_code=user_code)
        definitions = [tool.definition for tool in self.tools.values()]
        # By the settings: without user code its tools are not loaded, and the environment is refused all the same.
        if settings.tools is not None and settings.format == "chat" and self.converses:
            raise UserError(
                f"environment {settings.env_id!r}: a task that converses has no [tools] under a chat template; use harmony"
            )
        if settings.format == "harmony":
            refuse_unshown(self.tools.values())
        self.renderer = renderer_of(settings, tokenizer, definitions)
        one_turn = not self.tools and not self.converses
        self.prompts = PromptBuilder(settings, self.renderer, self.curriculum, one_turn=one_turn)
        self.grader = Grader(settings, self.renderer, self.curriculum)
        self.access = None
        if settings.tools is not None and (settings.tools.read, settings.tools.write) != (None, None):
            self.access = Access(settings.tools.read, settings.tools.write)

    @classmethod
    def from_settings(cls, settings: EnvironmentSettings, tokenizer: HarmonyTokenizer) -> Environment:
        """Builds an environment from checked settings."""
        return cls(settings, tokenizer)

    @classmethod
    def from_toml(cls, path: Path, tokenizer: HarmonyTokenizer) -> Environment:
        """Builds an environment from a TOML file, a directory with environment.toml, or a packaged name.

        Raises ConfigError with every mistake in the file and its line.
        """
        return cls.from_settings(load_environment(path), tokenizer)

    def held_out(self, split: Literal["validation", "eval"] = "eval") -> Environment:
        """Returns this environment at the start of a split whose problems never occur in training.

        Raises UserError for a pool that cannot guarantee this: a dataset, or a generated pool that trains on another split than
        "train".
        """
        settings = held_out(self.settings, split)
        if settings is None:
            raise UserError(
                f"environment {self.settings.env_id!r} has no held-out problems: only generated pools with "
                'split = "train" do; name another environment in [[eval]]'
            )
        return Environment(settings, self.tokenizer)

    @property
    def wants_sandbox(self) -> bool:
        """Whether a trajectory may need a sandbox: to run a tool, to hold files, or to verify its answer."""
        return (
            self.settings.workspace is not None
            or any(tool.sandbox_parameter for tool in self.tools.values())
            or any(isinstance(task, SandboxTask) for task in self._tasks)
        )

    def leave_out_overlong(self, context_tokens: int, max_new_tokens: int) -> None:
        """Makes the pool skip problems whose prompt is longer than the budget, or does not fit the model's context together with
        the longest completion.

        Call it before a run starts. `overlong` then counts the skipped problems of a finite pool; an endless pool counts them as
        they come (`pool.passed_over`). Raises the UserError of `PromptBuilder.check` if no problem of a finite pool fits, or if the
        first problem of an endless one does not.
        """
        fits = partial(self.prompts.fits, context_tokens=context_tokens, max_new_tokens=max_new_tokens)
        self.pool.keep(fits)
        size = self.pool.size or 1
        overlong = [position for position in range(size) if not fits(self.pool.order.at(position))]
        if len(overlong) == size:
            self.prompts.check(self.pool.order.at(0), context_tokens, max_new_tokens)
        self.overlong = len(overlong)

    def respond(
        self, problem: Problem, seed: int, index: int, turns: Sequence[Turn], exchanges: Sequence[Exchange]
    ) -> Exchange | None:
        """Returns the simulated user's response to the last turn in a conversation task; `exchanges` are the earlier responses.

        None, which ends the trajectory, if the task does not converse, or if it is not to answer the turn (`to_answer`). `seed`
        belongs to the group and `index` to the sample. Exceptions of the task propagate.
        """
        task, turn = TASKS[problem.task_type], len(turns) - 1
        said = self.to_answer(problem, turns, exchanges)
        if said is None or not isinstance(task, ConversationTask):
            return None
        before = exchanges[-1] if exchanges else None
        return task.exchange(problem, before, said, turn=turn, seed=stable_hash("user", seed, index, turn))

    def to_answer(self, problem: Problem, turns: Sequence[Turn], exchanges: Sequence[Exchange]) -> AssistantTurn | None:
        """Returns the last turn as its task answers it. None if the task answers no turns, if this one did not end by itself, or if
        the turns since the last exchange have no valid form or no answer."""
        last = turns[-1].sample
        if not isinstance(TASKS[problem.task_type], AnsweringTask) or last.finish_reason != "stop":
            return None
        reading = self.grader.read(problem, turns[exchanges[-1].turn + 1 :] if exchanges else turns)
        answer = reading.extraction.answer
        if reading.parse_error or not reading.answer_counts or answer is None:
            return None
        return AssistantTurn(answer, self.renderer.said(last.token_ids)[1])

    def state(self) -> dict[str, Any]:
        """Returns the position in the pool and in the curriculum, as JSON values for a checkpoint."""
        curriculum = None if self.curriculum is None else self.curriculum.state()
        return {"env_id": self.settings.env_id, "pool": self.pool.state(), "curriculum": curriculum}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from the position that `state` saved. Raises UserError for the state of another environment."""
        if state.get("env_id") != self.settings.env_id or (state.get("curriculum") is None) != (
            self.curriculum is None
        ):
            raise UserError(
                f"the saved state belongs to the environment {state.get('env_id')!r} or to other settings of it, not to "
                f"{self.settings.env_id!r} as it is now; restore the settings, or start a new run"
            )
        self.pool.load_state(state["pool"])
        if self.curriculum is not None:
            self.curriculum.load_state(state["curriculum"])


def identity_of(settings: EnvironmentSettings) -> dict[str, str]:
    """Returns an environment's name, version and a fingerprint of all its settings, as recorded with every trajectory."""
    fingerprint = fingerprint_of(settings.model_dump_json())
    return {"env_id": settings.env_id, "version": settings.version, "fingerprint": fingerprint}


def in_format(settings: EnvironmentSettings, tokenizer: HarmonyTokenizer) -> EnvironmentSettings:
    """Returns the settings in one format: the tokenizer's if they leave it open. A system message for this format replaces
    `system`.

    Raises UserError for a tokenizer that supports no format.
    """
    form = natural_format(tokenizer) if settings.format == "auto" else settings.format
    if form is None:
        raise UserError(
            f"environment {settings.env_id!r}: the tokenizer has neither Harmony's control tokens nor a chat template; use another "
            'one, or write format = "boxed" for plain text'
        )
    system = getattr(settings.system_by_format, form)
    return settings.model_copy(
        update={
            "format": form,
            "system": settings.system if system is None else system,
            "system_by_format": SystemByFormat(),
        }
    )


def renderer_of(
    settings: EnvironmentSettings, tokenizer: HarmonyTokenizer, tools: Sequence[ToolDefinition] = ()
) -> Renderer:
    """Returns the renderer of an environment's prompts, which declares these tools. `settings.format` must not be "auto":
    `in_format` replaces that.

    Raises UserError for `chat_template_kwargs` in another format than the chat template's, and as `ChatTemplate` does.
    """
    arguments = settings.chat_template_kwargs
    if not arguments:
        return RENDERERS[settings.format](tokenizer, tools, settings.reasoning_effort)
    if settings.format != "chat":
        raise UserError(
            f"environment {settings.env_id!r}: chat_template_kwargs are for a chat template, and its format is "
            f"{settings.format}; leave them out"
        )
    return ChatRenderer(tokenizer, tools, settings.reasoning_effort, arguments)


def renderer_as_trained(trained_on: EnvironmentSettings | None, tokenizer: HarmonyTokenizer) -> Renderer:
    """Returns a renderer for questions to a model, as the environment that it was trained on renders them, but without tools. A
    model that no environment trained is asked in its tokenizer's own format, or in plain text. Raises UserError as `renderer_of`
    does."""
    if trained_on is None:
        return RENDERERS[natural_format(tokenizer) or "text"](tokenizer)
    return renderer_of(in_format(trained_on, tokenizer), tokenizer)
