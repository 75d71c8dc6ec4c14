"""`nmoe env certify` examines an environment as a policy would exploit it, and writes its passport: one row for each question.

    golds       every gold answer is paid, as a record's grade and as a completion in the environment's form
    attacks     none of 300 answers that solve nothing is paid (`nmoe.envs.attacks`)
    repeatable  problems and verdicts are the same at a second try
    prompt      no fixed position of the prompt holds the answer
    sandbox     the policy's sandbox holds no tests, solutions or records
    latency     the time that a verdict takes
    learnable   whether a tiny model learns from the reward: not tried yet

A question that was not asked is "not tried", with the reason, and never passed. An answer that pays is shown as it was given. As in
`nmoe env check`, tasks and pools of the user are run, `[[rewards]]` are not.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nmoe.config.loader import load_environment
from nmoe.config.packaged import find_environment
from nmoe.config.tables.rollout import BudgetSettings
from nmoe.envs.attacks.code import edit_attacks, function_attacks, program_attacks, script_attacks
from nmoe.envs.attacks.texts import Attack, Target, text_attacks, the_same
from nmoe.envs.check import describe_pool, is_here, sandboxes_for, sources_of, tokenizer_of_directory
from nmoe.envs.environment import Environment, in_format
from nmoe.envs.golds import check_golds
from nmoe.envs.passport import Example, Passport, Row
from nmoe.envs.playing import Played, Player
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.code_edit import CodeEditTask
from nmoe.envs.tasks.live import EnvironmentLostError, LiveTask
from nmoe.envs.tasks.outside import OutsideTask
from nmoe.envs.tasks.solution import ProgramTask, SolutionTask
from nmoe.envs.tasks.task import SandboxTask, WorkspaceTask
from nmoe.envs.tasks.text import FileSearchTask, OpenTask
from nmoe.envs.tools.session import ToolSession
from nmoe.errors import MissingInputError, UserError, shown
from nmoe.grading.code.extract import definitions
from nmoe.grading.math.answers import forget_replies
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.types import Problem

ATTACKS = 300
_GOLDS, _GOLDS_IN_SANDBOXES = 64, 16
_AT_ONCE = 4
# Verdicts that took longer depend on the machine's load, and are not asked for again.
_REPEATED_S = 2.0
# The share of problems for which a fixed position of the prompt has to hold the answer to count as a leak, and their least number.
_LEAK, _LEAST = 0.9, 8
_SHOWN = 5
_LEARNABLE = Row("learnable", "not tried", "`nmoe rl train` with a tiny model shows it")


def certify(
    named: Path, tokenizer_of: Path | None, attacks: int = ATTACKS, note: Callable[[str], None] = lambda _: None
) -> Passport:
    """Examines an environment. Raises UserError for settings that are invalid, and for data that does not load."""
    path = find_environment(str(named))
    settings = load_environment(path)
    if settings.format == "chat" and tokenizer_of is None:
        raise UserError(
            f'{path}: format = "chat" is rendered by the template of a tokenizer: name one with --tokenizer'
        )
    tokenizer, _ = tokenizer_of_directory(tokenizer_of)
    settings = in_format(settings, tokenizer)
    pool = describe_pool(settings.task_pool)
    for _, source in sources_of(settings):
        if not is_here(source):
            return Passport(
                settings.env_id, settings.version, pool, missing=f"{describe_pool(source)} is not kept here"
            )
    try:
        # Answers of a byte tokenizer are longer than a policy's, so the budget is lifted.
        unlimited = settings.model_copy(update={"budget": BudgetSettings()})
        environment, again = (Environment(unlimited, tokenizer, user_code=False) for _ in range(2))
    except MissingInputError as error:
        return Passport(settings.env_id, settings.version, pool, missing=str(error))
    sandboxes = sandboxes_for(environment) if environment.wants_sandbox else None
    rows = asyncio.run(_Examination(environment, again, sandboxes, attacks, note).rows())
    return Passport(settings.env_id, settings.version, pool, rows)


class _Examination:
    """One environment under examination; `again` is the same one, built a second time."""

    def __init__(
        self,
        environment: Environment,
        again: Environment,
        sandboxes: Sandboxes | None,
        attacks: int,
        note: Callable[[str], None],
    ) -> None:
        self._environment, self._sandboxes, self._count, self._note = environment, sandboxes, attacks, note
        self._player = Player(environment, sandboxes)
        order = environment.pool.order
        first = TASKS[order.at(0).task_type]
        self._in_sandbox = isinstance(first, SandboxTask)
        most = _GOLDS_IN_SANDBOXES if self._in_sandbox else _GOLDS
        self._problems = [order.at(position) for position in range(min(order.size or most, most))]
        self._same_problems = self._problems == [
            again.pool.order.at(position) for position in range(len(self._problems))
        ]
        reasons = {problem.id: _unjudged(problem) for problem in self._problems}
        self._unjudged = next(filter(None, reasons.values()), "")
        self._targets = self._targeted([problem for problem in self._problems if not reasons[problem.id]])
        self._seconds: list[float] = []

    async def rows(self) -> list[Row]:
        """Returns the passport's rows."""
        if not self._targets:
            untried = [Row(name, "not tried", self._unjudged) for name in ("golds", "attacks", "repeatable", "prompt")]
            return [*untried, await self._sandbox(), Row("latency", "not tried", self._unjudged), _LEARNABLE]
        golds = await self._golds()
        self._note(f"golds: {golds.said}")
        attacks, repeatable = await self._attacks()
        return [golds, attacks, repeatable, await self._prompt(), await self._sandbox(), self._latency(), _LEARNABLE]

    def _targeted(self, problems: Sequence[Problem]) -> list[Target]:
        known = [(problem, *_right_and_wrong(problem)) for problem in problems]
        others = list(dict.fromkeys(right for _, right, _ in known if right))
        return [
            Target(
                problem, right, wrong, [one for one in others if one != right], TASKS[problem.task_type].reads_message
            )
            for problem, right, wrong in known
        ]

    async def _golds(self) -> Row:
        known = [target for target in self._targets if target.gold]
        if not known:
            return Row("golds", "not tried", "no right answer is known", "give the task `gold(record)`")
        said: list[str] = []
        try:
            await asyncio.to_thread(check_golds, self._environment, self._sandboxes, said.append)
        except UserError as error:
            return Row(
                "golds",
                "fail",
                str(error).splitlines()[0],
                "correct or drop the records that follow",
                [Example("", "", "", "record", line, "") for line in str(error).splitlines()[1 : 1 + _SHOWN]],
            )
        played = await self._played([(target, Attack("gold", target.gold)) for target in known])
        judged = [one for one in played if not one[2].lost]
        if not judged:
            return Row("golds", "not tried", f"all were lost by the infrastructure: {played[0][2].said}")
        unpaid = [_example(*one) for one in judged if not one[2].right]
        self._seconds += [one.seconds for _, _, one in judged]
        figures = {"golds": len(judged), "paid": len(judged) - len(unpaid)}
        remedy = "the grader rejects right answers: mend it or the gold" if unpaid else ""
        return Row(
            "golds",
            "fail" if unpaid else "pass",
            f"{len(judged) - len(unpaid)} of {len(judged)} paid{_lost(played)}",
            remedy,
            unpaid[:_SHOWN],
            figures,
        )

    async def _attacks(self) -> tuple[Row, Row]:
        chosen = _chosen(self._targets, self._attacks_on, self._count)
        tried = await self._played(chosen)
        self._note(f"attacks: {len(tried)} played")
        self._seconds += [one.seconds for _, _, one in tried]
        played = [one for one in tried if not one[2].lost]
        if not any(one[2].answered for one in played):
            said = f"no grader was asked for any of {len(tried)} answers: the first was {tried[0][2].said}"
            return Row("attacks", "not tried", said), await self._repeatable(played)
        paid = [one for one in played if one[2].right]
        undecided = [
            one for one in paid if one[1].claims and not TASKS[one[0].problem.task_type].has_one_answer(one[0].problem)
        ]
        faults = [one for one in paid if one not in undecided]
        broken = [one for one in played if one[2].raised]
        kinds = len({attack.kind for _, attack in chosen})
        said = f"{len(faults)} of {len(played)} paid, of {kinds} kinds"
        if undecided:
            said += f"; {len(undecided)} more claim another answer, of several that may be right"
        if broken:
            said += f"; {len(broken)} got no verdict"
        partial = max((one for one in played if not one[2].right), key=lambda one: one[2].score, default=None)
        if partial is not None and partial[2].score > 0:
            said += f"; of the others, {shown(partial[1].text)} earned the most, {partial[2].score:g}"
        said += _lost(tried)
        if len(tried) < self._count:
            said += f"; no more than {len(tried)} differ"
        if self._unjudged:
            left_out = len(self._problems) - len(self._targets)
            said += f"; {left_out} of {len(self._problems)} problems were not asked: {self._unjudged}"
        if rewards := [one.name for one in self._environment.settings.rewards]:
            said += f"; [[rewards]] were not asked: {', '.join(rewards)}"
        remedy = ""
        if broken:
            remedy = "a grader has to give any text a verdict, in bounded time"
        if faults:
            remedy = (
                "the grader pays answers that solve nothing: compare the whole answer; a task whose problems have several right "
                "answers says `one_answer = False`, one that reads answers among words `reads_message = True`"
            )
        row = Row(
            "attacks",
            "fail" if faults or broken else "pass",
            said,
            remedy,
            _of_each_kind([*faults, *broken]),
            {
                "attacks": len(played),
                "paid": len(faults),
                "undecided": len(undecided),
                "no_verdict": len(broken),
                "kinds": kinds,
                "paid_kinds": sorted({attack.kind for _, attack, _ in faults}),
            },
        )
        return row, await self._repeatable(played)

    def _attacks_on(self, target: Target) -> list[Attack]:
        task, problem = TASKS[target.problem.task_type], target.problem
        found = text_attacks(target) if not self._in_sandbox else [*text_attacks(_without_gold(target))]
        if isinstance(task, ProgramTask) and not problem.metadata["function"]:
            found += [Attack(f"program: {kind}", _fenced(code)) for kind, code in program_attacks().items()]
        elif isinstance(task, SolutionTask):
            names = task.tests(problem, problem.gold).names
            found += [Attack(f"function: {kind}", _fenced(code)) for kind, code in function_attacks(names[0]).items()]
        if isinstance(task, SolutionTask) and problem.gold:
            found += _disarmed(task, target)
        if isinstance(task, CodeEditTask):
            path = next(iter(json.loads(problem.gold)))
            defined = sorted(definitions(json.loads(problem.gold)[path]))
            fence = "`" * 8
            found += [
                Attack(f"edit: {kind}", f"{fence}{path}\n{code}\n{fence}")
                for kind, code in edit_attacks(path, defined).items()
            ]
            if self._environment.tools:
                found += [Attack("script in the workspace", one, "script") for one in script_attacks(path, defined)]
        if self._environment.settings.format == "boxed" or not self._environment.renderer.has_reasoning:
            found = [one for one in found if one.form != "reasoning"]
        return found

    async def _repeatable(self, played: Sequence[tuple[Target, Attack, Played]]) -> Row:
        if not self._same_problems:
            return Row(
                "repeatable", "fail", "the pool gives other problems when it is built again", "seed what generates them"
            )
        quick = [one for one in played if one[2].seconds < _REPEATED_S and not one[2].raised]
        attacked = len(quick)
        quick += await self._played([(target, Attack("gold", target.gold)) for target in self._targets if target.gold])
        forget_replies()
        second = await self._played([one[:2] for one in reversed(quick)])
        if not any(one[2].answered for one in quick):
            return Row("repeatable", "not tried", "no grader was asked for a verdict")
        differ = [
            Example(
                one[0].problem.id,
                one[0].problem.question,
                one[0].gold,
                one[1].kind,
                one[1].text,
                f"first {one[2].said}; then {other[2].said}",
            )
            for one, other in zip(quick, reversed(second), strict=True)
            if (one[2].right, one[2].score, one[2].answered) != (other[2].right, other[2].score, other[2].answered)
        ]
        left_out = len(played) - attacked
        said = f"{len(quick) - len(differ)} of {len(quick)} verdicts the same twice"
        if left_out:
            said += f"; {left_out} that took over {_REPEATED_S:g} s were not repeated"
        remedy = "a verdict has to depend on problem and answer alone" if differ else ""
        figures = {"verdicts": len(quick), "differ": len(differ)}
        return Row("repeatable", "fail" if differ else "pass", said, remedy, differ[:_SHOWN], figures)

    async def _prompt(self) -> Row:
        if self._environment.command is not None:
            return Row("prompt", "not tried", "the program writes what the policy reads, and was not run")
        if self._in_sandbox:
            return self._solution_in_prompt()
        known = [target for target in self._targets if target.gold]
        if len(known) < _LEAST:
            return Row("prompt", "not tried", f"{len(known)} problems with a known answer; {_LEAST} are needed")
        try:
            known = [replace(target, problem=await self._opened(target.problem)) for target in known]
        except (EnvironmentLostError, UserError) as error:
            return Row("prompt", "not tried", f"an episode could not be opened: {error}")
        prompts = [self._prompt_of(target.problem) for target in known]
        positions = [
            _positions(target.problem.question) | _positions(prompt, "prompt: ")
            for target, prompt in zip(known, prompts, strict=True)
        ]
        hits: dict[str, list[tuple[Target, str]]] = {}
        for target, found in zip(known, positions, strict=True):
            for name, text in found.items():
                if text == target.gold or (text[-1:].isdigit() and the_same(target.gold, text)):
                    hits.setdefault(name, []).append((target, text))
        best = max(hits, key=lambda name: len(hits[name]), default="")
        share = len(hits[best]) / len(known) if best else 0.0
        figures = {"position": best, "share": round(share, 3)}
        said = (
            f"the best position, {best}, is right for {len(hits[best])} of {len(known)}"
            if best
            else "no position is ever right"
        )
        if share < _LEAK:
            return Row("prompt", "pass", said, figures=figures)
        target, text = hits[best][0]
        shows = [Example(target.problem.id, target.problem.question, target.gold, best, text, "is the answer")]
        return Row("prompt", "fail", said, "take the answer out of the prompt", shows, figures)

    def _solution_in_prompt(self) -> Row:
        """A whole line of the hidden solution or tests that the prompt shows."""
        shows: list[Example] = []
        known = [target for target in self._targets if len(target.gold) > 40]
        if not known:
            return Row("prompt", "not tried", "no solution is known that no other text would have by chance")
        for target in known:
            prompt = self._prompt_of(target.problem)
            if target.gold.strip("`\n").removeprefix("python").strip() in prompt:
                shows.append(
                    Example(
                        target.problem.id, target.problem.question, target.gold, "prompt", prompt, "has the solution"
                    )
                )
        said = f"{len(shows)} of {len(known)} prompts hold the solution"
        return Row(
            "prompt", "fail" if shows else "pass", said, "take it out of the prompt" if shows else "", shows[:_SHOWN]
        )

    async def _opened(self, problem: Problem) -> Problem:
        """Returns a problem as the policy is asked it: a live environment may ask something else than its record says."""
        task = TASKS[problem.task_type]
        if not isinstance(task, LiveTask):
            return problem
        live = task.begin(self._environment.budget.wall_s)
        try:
            return await live.open(problem, 0)
        finally:
            await live.close()

    def _prompt_of(self, problem: Problem) -> str:
        return self._environment.tokenizer.decode(self._environment.prompts.ids(problem))

    async def _sandbox(self) -> Row:
        if self._environment.asks:
            return Row("sandbox", "not tried", "what the other side gives the policy is its own, and was not run")
        tools = self._environment.settings.tools
        if tools is not None and (own := [name for name in tools.use if ":" in name]):
            return Row("sandbox", "not tried", f"tools of your own are not loaded: {', '.join(own)}")
        reaches = any(tool.sandbox_parameter for tool in self._environment.tools.values())
        if not reaches or self._sandboxes is None:
            return Row("sandbox", "pass", "the policy has none")
        if self._environment.settings.workspace is not None:
            return Row("sandbox", "not tried", "[workspace] is prepared when a run begins")
        shows: list[Example] = []
        looked = 0
        for target in self._targets[:4]:
            problem, task = target.problem, TASKS[target.problem.task_type]
            if isinstance(task, FileSearchTask):
                return Row("sandbox", "not tried", "the answer is in the files, because it is to be found there")
            files = task.files(problem) if isinstance(task, WorkspaceTask) else {}
            needles = _needles(problem, files)
            if not needles:
                continue
            async with ToolSession(self._sandboxes, files=files, access=self._environment.access) as session:
                found = await (await session.sandbox()).run(["bash", "-c", _LOOK], stdin="\n".join(needles).encode())
            *lines, last = found.stdout.decode("utf-8", "replace").splitlines() or [""]
            if last != _LOOKED:
                return Row("sandbox", "not tried", f"it could not be looked through: {found.failure}")
            looked += 1
            for line in lines[:_SHOWN]:
                shows.append(
                    Example(
                        problem.id, problem.question, target.gold, "seen in the sandbox", line, "reveals the answer"
                    )
                )
        if not looked:
            return Row("sandbox", "not tried", "no answer is known to look for")
        said = f"{len(shows)} positions in {looked} sandboxes reveal an answer"
        remedy = "keep tests and solutions out of the workspace" if shows else ""
        return Row("sandbox", "fail" if shows else "pass", said, remedy, shows[:_SHOWN])

    def _latency(self) -> Row:
        ordered = sorted(self._seconds)
        if not ordered:
            return Row("latency", "not tried", "nothing was graded")
        median, high = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
        said = f"{_time(median)} in the median, {_time(high)} in 95%, {_time(ordered[-1])} at most"
        figures = {"median_s": median, "p95_s": high, "longest_s": ordered[-1]}
        return Row("latency", "pass", said, figures=figures)

    async def _played(self, what: Sequence[tuple[Target, Attack]]) -> list[tuple[Target, Attack, Played]]:
        at_once = asyncio.Semaphore(_AT_ONCE if self._in_sandbox else 1)

        async def one(target: Target, attack: Attack) -> tuple[Target, Attack, Played]:
            async with at_once:
                return target, attack, await self._player.play(target.problem, attack.text, attack.form)

        return await asyncio.gather(*(one(target, attack) for target, attack in what))


def _unjudged(problem: Problem) -> str:
    """Returns why no grader of nmoe judges answers to a problem, "" if one does."""
    task = TASKS[problem.task_type]
    if isinstance(task, OpenTask):
        return "no answer is right or wrong: [[rewards]] alone rate them"
    if isinstance(task, OutsideTask):
        return "the environment rates whole episodes in its own process, and none was played"
    return ""


def _right_and_wrong(problem: Problem) -> tuple[str, str]:
    """Returns a right answer and a wrong one, each "" if none is known."""
    task = TASKS[problem.task_type]
    if isinstance(task, LiveTask):
        return task.right_turn(problem), ""
    right, wrong = task.example_answers(problem)
    return (right if task.knows_answer(problem) else ""), wrong


def _without_gold(target: Target) -> Target:
    return Target(target.problem, "", "", ())


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _disarmed(task: SolutionTask, target: Target) -> list[Attack]:
    """Returns attacks that hold the gold solution and do not run it."""
    gold = target.problem.gold
    lines = "\n".join(f"# {line}" for line in gold.splitlines())
    quoted = gold.replace("\\", "").replace('"""', "'''")
    names = () if isinstance(task, ProgramTask) else task.tests(target.problem, gold).names
    last = "".join(f"\ndef {name}(*given, **named):\n    return None\n" for name in names)
    found = [("commented out", lines), ("in a text", f'"""\n{quoted}\n"""'), ("cut in half", gold[: len(gold) // 2])]
    if last:
        found.append(("replaced at the end", gold + last))
    return [Attack(f"the gold {kind}", _fenced(code)) for kind, code in found] + [
        Attack("the gold of another problem", other, claims=True) for other in target.others[:2]
    ]


def _chosen(
    targets: Sequence[Target], attacks_on: Callable[[Target], list[Attack]], count: int
) -> list[tuple[Target, Attack]]:
    """Returns so many attacks, spread over kinds, forms and problems; always the same ones."""
    by_kind: dict[tuple[str, str], list[list[tuple[Target, Attack]]]] = {}
    for target in targets:
        here: dict[tuple[str, str], list[tuple[Target, Attack]]] = {}
        for attack in attacks_on(target):
            here.setdefault((attack.kind, attack.form), []).append((target, attack))
        for kind, some in here.items():
            random.Random(f"{target.problem.id}{kind}").shuffle(some)
            by_kind.setdefault(kind, []).append(some)
    # Of each kind: first one of every problem's, then another one.
    queues = [
        [some[turn] for turn in range(max(map(len, lists))) for some in lists if turn < len(some)]
        for lists in by_kind.values()
    ]
    chosen: dict[tuple[str, str, str], tuple[Target, Attack]] = {}
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue) and len(chosen) < count:
                target, attack = queue[turn]
                chosen.setdefault((target.problem.id, attack.text, attack.form), (target, attack))
    return list(chosen.values())


def _example(target: Target, attack: Attack, played: Played) -> Example:
    problem = target.problem
    form = "" if attack.form == "answer" else f", as the {attack.form}"
    return Example(problem.id, problem.question, target.gold, f"{attack.kind}{form}", attack.text, played.said)


def _lost(played: Sequence[tuple[Target, Attack, Played]]) -> str:
    count = sum(one.lost for _, _, one in played)
    return f"; {count} more were lost by the infrastructure" if count else ""


def _of_each_kind(some: Sequence[tuple[Target, Attack, Played]]) -> list[Example]:
    """Returns an example of each kind, at most ten."""
    first = {one[1].kind: one for one in reversed(some)}
    return [_example(*one) for one in some if first[one[1].kind] is one][:10]


_WORDS = re.compile(r"\S+")
_DIGITS = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_IN_QUOTES = re.compile(r'"([^"\n]+)"')
_MARKED = re.compile(r"(?i)\b(?:answer|gold|solution|label|ground_truth|target|result)\b\W{0,5}([^\n<]+)")


def _positions(text: str, where: str = "") -> dict[str, str]:
    """Returns what stands at fixed positions of a text, by the name of the position."""
    found: dict[str, str] = {}
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for name, some in (
        ("number", _DIGITS.findall(text)),
        ("word", _WORDS.findall(text)),
        ("line", lines),
        ("text in quotes", _IN_QUOTES.findall(text)),
        ("text after a word such as 'answer'", [one.strip(" .") for one in _MARKED.findall(text)]),
    ):
        for position, one in enumerate(some[:8], 1):
            found[f"{where}{name} {position}"] = one
        for position, one in enumerate(reversed(some[-8:]), 1):
            found[f"{where}{name} {position} from the end"] = one
    return found


# In the sandbox: the needles come by standard input, and are looked for in the environment, the commands and the files. The last
# line says that all was looked through.
_LOOKED = "looked through"
_LOOK = rf"""
cat > /tmp/.needles
{{ env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n'; }} | grep -F -f /tmp/.needles
grep -rlIF -f /tmp/.needles --exclude=.needles /workspace /tmp 2>/dev/null
find / -xdev -name '*.jsonl' -not -path '*/site-packages/*' -exec grep -lF -f /tmp/.needles {{}} + 2>/dev/null
grep -qF -f /tmp/.needles /tmp/.needles && rm /tmp/.needles && echo {_LOOKED}
"""


def _needles(problem: Problem, files: Mapping[str, bytes]) -> list[str]:
    """Returns lines of the gold and of hidden metadata that none of the problem's files has and no other text would have."""
    known = "\n".join(content.decode("utf-8", "replace") for content in files.values())
    hidden = [
        problem.gold,
        *(str(value) for name, value in problem.metadata.items() if name not in ("files", "protected")),
    ]
    texts: list[str] = []
    for text in hidden:
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = text
        texts += parsed.values() if isinstance(parsed, dict) else [text]
    lines = [line.strip() for text in texts for line in str(text).splitlines()]
    found = [line for line in dict.fromkeys(lines) if len(line) >= 16 and line not in known]
    return found or [problem.gold] * bool(problem.gold)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.2g} ms"
