"""An environment: problems, the prompt for each, and the grade of each completion.

It binds a task pool, an output format, a rubric and a curriculum under one name; a trainer needs nothing else about a domain.
The packaged ones are in `nmoe/packaged/environments`. `Environment.from_toml` reads and checks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nmoe.config.environment import EnvironmentSettings, SystemByFormat, held_out
from nmoe.config.loader import load_environment
from nmoe.config.tables.curriculum import Rubric
from nmoe.config.tables.pools import task_types
from nmoe.envs.curriculum import Curriculum
from nmoe.envs.grade import Reading, grade_reading, joined_readings, read_answer
from nmoe.envs.pools import Shard, build_pool
from nmoe.envs.pools.order import fingerprint_of, stable_hash
from nmoe.envs.rewards.reward import Reward
from nmoe.envs.rewards.rewards import load_rewards
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.conversation import AssistantTurn, ConversationTask
from nmoe.envs.tools.registry import load_tools
from nmoe.errors import UserError
from nmoe.grading.extraction import from_final
from nmoe.sandbox.api import Access
from nmoe.text.harmony import HarmonyTokenizer
from nmoe.text.renderers import RENDERERS, ChatRenderer, HarmonyRenderer, Renderer, Round, natural_format
from nmoe.types import Exchange, Failure, Given, Grade, Message, Problem, ToolEvent, Turn

if TYPE_CHECKING:
    from nmoe.envs.tools.session import ToolSession

_REASONING = "The answer follows."


class Environment:
    """One environment, as one rank sees it.

        >>> import nmoe
        >>> from pathlib import Path
        >>> sort = nmoe.Environment.from_toml(Path("sort"), nmoe.Tokenizer.load(checkpoint))
        >>> [problem] = sort.pool.take(1)
        >>> sorted(problem.question.removeprefix("Sort: ")) == list(problem.gold)
        True

    `stop_ids` are the tokens that end a turn: <|return|> and <|call|> in Harmony, <|endoftext|> in plain text. `tools` are the
    tools that the policy may call, by name; `access` lists the parts of the workspace that they may touch. `format` parses
    calls and renders their answers. `settings` name the resolved format and its system message, even if the file leaves them
    to the tokenizer.
    """

    def __init__(
        self, settings: EnvironmentSettings, tokenizer: HarmonyTokenizer, shard: Shard, *, user_code: bool = True
    ) -> None:
        """Loads pool, tools and rewards. Without `user_code`, the user's own tools and rewards are left out and not imported.

        Raises UserError if data, tools, rewards or tokenizer do not fit the settings.
        """
        self.settings = settings = in_format(settings, tokenizer)
        self.pool = build_pool(settings.env_id, settings.task_pool, shard, columns=bool(settings.rewards))
        self.rewards: list[Reward] = load_rewards(settings.rewards) if user_code else []
        self.curriculum = None if settings.curriculum is None else Curriculum(settings.curriculum)
        self._tokenizer = tokenizer
        self.overlong = 0
        self.budget = settings.budget
        self.tools = (
            {} if settings.tools is None else load_tools(settings.tools.use, settings.budget, user_code=user_code)
        )
        definitions = [tool.definition for tool in self.tools.values()]
        # By the settings: without user code its tools are not loaded, and the environment is refused all the same.
        if settings.tools is not None and settings.tools.use and settings.format == "chat" and self.converses:
            raise UserError(
                f"environment {settings.env_id!r}: a task that converses has no [tools] under a chat template; use harmony"
            )
        arguments = settings.chat_template_kwargs
        if arguments and settings.format != "chat":
            raise UserError(
                f"environment {settings.env_id!r}: chat_template_kwargs are for a chat template, and its format is "
                f"{settings.format}; leave them out"
            )
        self.renderer: Renderer = (
            ChatRenderer(tokenizer, definitions, settings.reasoning_effort, arguments)
            if arguments
            else RENDERERS[settings.format](tokenizer, definitions, settings.reasoning_effort)
        )
        self._given = self._starts_given()
        self.stop_ids = self.renderer.stop_ids
        limited = settings.tools is not None and (settings.tools.read, settings.tools.write) != (None, None)
        self.access = (
            Access(settings.tools.read, settings.tools.write) if settings.tools is not None and limited else None
        )
        self._rubric = (settings.rubric or Rubric()).model_dump()

    @classmethod
    def from_settings(
        cls, settings: EnvironmentSettings, tokenizer: HarmonyTokenizer, *, rank: int = 0, world_size: int = 1
    ) -> Environment:
        """Builds an environment from checked settings."""
        return cls(settings, tokenizer, Shard(rank, world_size))

    @classmethod
    def from_toml(cls, path: Path, tokenizer: HarmonyTokenizer, *, rank: int = 0, world_size: int = 1) -> Environment:
        """Builds an environment from a TOML file, a directory with environment.toml, or a packaged name.

        Raises ConfigError with every mistake in the file and its line.
        """
        return cls.from_settings(load_environment(path), tokenizer, rank=rank, world_size=world_size)

    def held_out(self, split: Literal["validation", "eval"] = "eval") -> Environment:
        """Returns this environment at the start of a split whose problems never occur in training.

        Raises UserError for a pool that cannot guarantee that: a dataset, or one that does not train on "train".
        """
        settings = held_out(self.settings, split)
        if settings is None:
            raise UserError(
                f"environment {self.settings.env_id!r} has no held-out problems: only generated pools with "
                'split = "train" do; name another environment in [[eval]]'
            )
        return Environment(settings, self._tokenizer, self.pool.shard)

    @property
    def weights(self) -> dict[str, float]:
        """The current weights of the score: those of the curriculum's stage or, without a curriculum, those of the rubric."""
        return self._rubric if self.curriculum is None else self.curriculum.weights

    @property
    def given_ids(self) -> tuple[int, ...]:
        """The start of the answer that the curriculum's stage gives the policy in training; () where it gives none."""
        return () if self.curriculum is None else self._given[self.curriculum.index]

    def _starts_given(self) -> list[tuple[int, ...]]:
        """The start of the answer that each stage gives. Raises UserError where a form of another kind takes none."""
        stages = () if self.settings.curriculum is None else self.settings.curriculum.stages
        if not any(stage.given for stage in stages):
            return [()] * len(stages)
        if not isinstance(self.renderer, HarmonyRenderer) or self.tools or self.converses:
            raise UserError(
                f"environment {self.settings.env_id!r}: a stage of [curriculum] has `given`, the start of Harmony's answer in one "
                "turn; leave it out in other formats, with [tools] and in conversations"
            )
        return [tuple(self.renderer.spelled(stage.given)) for stage in stages]

    @cached_property
    def converses(self) -> bool:
        """Whether one of its tasks answers the policy with turns of the user."""
        return any(isinstance(TASKS[name], ConversationTask) for name in task_types(self.settings.task_pool))

    @property
    def wants_sandbox(self) -> bool:
        """Whether a trajectory may need a sandbox: for a tool, for files, or to verify its answer."""
        return (
            self.settings.workspace is not None
            or any(tool.sandbox_parameter for tool in self.tools.values())
            or any(TASKS[name].needs_sandbox for name in task_types(self.settings.task_pool))
        )

    def files(self, problem: Problem) -> Mapping[str, bytes]:
        """Returns the files that the problem adds to the workspace of a trajectory: path -> content."""
        return TASKS[problem.task_type].files(problem)

    def token_limit(self, max_new_tokens: int) -> int:
        """Returns the most tokens that a trajectory may sample: the run's limit, capped by the environment's budget."""
        budget = self.settings.budget.completion_tokens
        return max_new_tokens if budget is None else min(max_new_tokens, budget)

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Renders the prompt. A pure function of the problem."""
        return self.renderer.prompt_ids(self.messages(problem))

    def messages(self, problem: Problem) -> list[Message]:
        """Returns the conversation that the prompt shows, starting with the environment's system message.

        Raises UserError if the problem has a system message as well.
        """
        system = [Message("system", self.settings.system)] if self.settings.system else []
        if system and any(message.role == "system" for message in problem.history):
            raise UserError(
                f"problem {problem.id}: its prompt has a system message of its own beside the environment's `system`; drop either"
            )
        return [*system, *problem.history, *TASKS[problem.task_type].messages(problem)]

    def fits(self, problem: Problem, context_tokens: int, max_new_tokens: int) -> bool:
        """Whether the problem's prompt is within the budget, and fits the model's context with the longest completion."""
        return len(self.prompt_ids(problem)) <= self.prompt_limit(context_tokens, max_new_tokens)

    def prompt_limit(self, context_tokens: int, max_new_tokens: int) -> int:
        """Returns the most tokens that a prompt may have: what the longest completion leaves of the model's context, capped by
        the environment's budget."""
        room = context_tokens - self.token_limit(max_new_tokens) - self._most_given
        budget = self.settings.budget.prompt_tokens
        return room if budget is None else min(room, budget)

    @property
    def _most_given(self) -> int:
        return max(map(len, self._given), default=0)

    def check_prompt(self, problem: Problem, context_tokens: int, max_new_tokens: int) -> tuple[int, ...]:
        """Renders the prompt of a problem. Raises UserError if it is longer than the budget, or does not fit the model's context
        together with the longest completion."""
        prompt_ids = tuple(self.prompt_ids(problem))
        limit = self.token_limit(max_new_tokens) + self._most_given
        longest = self.settings.budget.prompt_tokens
        if longest is not None and len(prompt_ids) > longest:
            raise UserError(
                f"problem {problem.id}: its prompt has {len(prompt_ids)} tokens, more than budget.prompt_tokens = {longest}; raise "
                "it, or drop the problem"
            )
        if len(prompt_ids) + limit > context_tokens:
            raise UserError(
                f"problem {problem.id}: its prompt of {len(prompt_ids)} tokens and completions of up to {limit} do not fit the "
                f"model's context of {context_tokens}; lower sampling.max_new_tokens or drop the problem"
            )
        return prompt_ids

    def leave_out_overlong(self, context_tokens: int, max_new_tokens: int) -> None:
        """Makes the pool skip problems whose prompt is longer than the budget, or does not fit the model's context together with
        the longest completion.

        Called before a run starts. `overlong` is their number in a finite pool; an endless pool counts them as they come
        (`pool.passed_over`). Raises the UserError of `check_prompt` if no problem of a finite pool fits, or if the first
        problem of an endless one does not.
        """

        def fits(problem: Problem) -> bool:
            return self.fits(problem, context_tokens, max_new_tokens)

        self.pool.keep(fits)
        size = self.pool.size or 1
        overlong = [position for position in range(size) if not fits(self.pool.order.at(position))]
        if len(overlong) == size:
            self.check_prompt(self.pool.order.at(0), context_tokens, max_new_tokens)
        self.overlong = len(overlong)

    def respond(
        self, problem: Problem, seed: int, index: int, turns: Sequence[Turn], exchanges: Sequence[Exchange]
    ) -> Exchange | None:
        """Has the problem's task respond to the last turn, after `exchanges`. Exceptions of the task propagate.

        Returns None if the task does not converse, or if the turns since the last exchange have no valid form; both end the
        trajectory. `seed` belongs to the group and `index` to the sample.
        """
        task, turn = TASKS[problem.task_type], len(turns) - 1
        if not isinstance(task, ConversationTask) or turns[turn].sample.finish_reason != "stop":
            return None
        reading = self._reading(problem, turns[exchanges[-1].turn + 1 :] if exchanges else turns, ())
        answer = reading.extraction.answer
        if reading.parse_error or not reading.answer_counts or answer is None:
            return None
        said = AssistantTurn(answer, self.renderer.said(turns[turn].sample.token_ids)[1])
        before = exchanges[-1] if exchanges else None
        return task.exchange(problem, before, said, turn=turn, seed=stable_hash("user", seed, index, turn))

    def follow_up(
        self,
        problem: Problem,
        turns: Sequence[Turn],
        tool_events: Sequence[ToolEvent],
        exchanges: Sequence[Exchange],
    ) -> tuple[Given, list[int]]:
        """Returns the tokens between the last exchange, in which the user spoke, and the next turn."""
        rounds, start = [], 0
        for exchange in exchanges:
            assert exchange.user is not None, "a conversation that goes on was not over before"
            places = range(start, exchange.turn + 1)
            answers = [[one for one in tool_events if one.call.call_id.startswith(f"{place}/")] for place in places]
            rounds.append(Round([turns[place].sample.token_ids for place in places], answers, exchange.user))
            start = exchange.turn + 1
        return self.renderer.follow_up(self.messages(problem), rounds)

    def _reading(self, problem: Problem, turns: Sequence[Turn], exchanges: Sequence[Exchange]) -> Reading:
        """Reads the turns with the format's parser, each answer by itself."""
        task, ids = TASKS[problem.task_type], [turn.said_ids for turn in turns]
        starts = [0, *(one.turn + 1 for one in exchanges if one.turn + 1 < len(ids)), len(ids)]
        return joined_readings(
            [
                read_answer(self.renderer.parse(ids[start:end]), task, prose=self.settings.extraction == "prose")
                for start, end in pairwise(starts)
            ]
        )

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        """Parses one sampled turn into messages."""
        return self.renderer.transcript(token_ids)

    def answer_text(self, token_ids: Sequence[int]) -> str | None:
        """Returns the last turn's answer without reasoning; None if it has no answer."""
        _, text = self.renderer.said(token_ids)
        return text if text.strip() else None

    def text(self, token_ids: Sequence[int]) -> str:
        """Decodes the tokens into text, for people and for extractors that work on text."""
        return self._tokenizer.decode(token_ids)

    def answer_ids(self, problem: Problem, answer: str) -> list[int]:
        """Renders a well-formed completion with this answer, including the stop token. It reasons first where the format has a
        place for that, or the reward asks for it."""
        # Only answers that cannot be told from the prose around them need a box; otherwise the whole message is the answer.
        bare = from_final(answer, bare_final=TASKS[problem.task_type].bare_final).answer == answer
        in_box = self.settings.format == "boxed" or not bare
        reasons = self.renderer.has_reasoning or self.weights["reasoning"] > 0
        return self.renderer.completion_ids(_REASONING if reasons else "", rf"\boxed{{{answer}}}" if in_box else answer)

    async def grade(
        self,
        problem: Problem,
        turns: Sequence[Turn],
        max_new_tokens: int,
        *,
        ended: Failure | None = None,
        tool_events: Sequence[ToolEvent] = (),
        session: ToolSession | None = None,
        exchanges: Sequence[Exchange] = (),
    ) -> Grade:
        """Grades a trajectory of one or more turns under the current weights.

        `ended` says what ended the trajectory before the policy did, if anything did. `exchanges` are a conversation task's
        responses. Any tokens are graded; an exception means a bug in the grader, not in the tokens.
        """
        task = TASKS[problem.task_type]
        if session is not None:
            await session.lift()
        return await grade_reading(
            self._reading(problem, turns, exchanges),
            task,
            problem,
            turns=turns,
            ended=ended,
            tool_events=tool_events,
            session=session,
            exchanges=exchanges,
            token_limit=self.token_limit(max_new_tokens),
            call_limit=self.budget.tool_calls,
            weights=self.weights,
        )

    @cached_property
    def identity(self) -> dict[str, str]:
        """Returns the identity of this environment (`identity_of`)."""
        return identity_of(self.settings)

    def state(self) -> dict[str, Any]:
        """Returns the position in the pool and in the curriculum, JSON-able, for a checkpoint."""
        curriculum = None if self.curriculum is None else self.curriculum.state()
        return {"env_id": self.settings.env_id, "pool": self.pool.state(), "curriculum": curriculum}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes exactly where `state` was saved. Raises UserError for the state of another environment."""
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
    """Identifies an environment by name, version and a fingerprint of all its settings."""
    fingerprint = fingerprint_of(settings.model_dump_json())
    return {"env_id": settings.env_id, "version": settings.version, "fingerprint": fingerprint}


def in_format(settings: EnvironmentSettings, tokenizer: HarmonyTokenizer) -> EnvironmentSettings:
    """Returns the settings with the tokenizer's format and that format's system message filled in where they are left open.

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
