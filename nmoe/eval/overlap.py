"""Whether a benchmark asks what the model was trained on."""

from __future__ import annotations

from nmoe.config.environment import EnvironmentSettings
from nmoe.envs.environment import Environment
from nmoe.errors import UserError
from nmoe.eval.evaluate import distinct_problems
from nmoe.text.tokenizer import Tokenizer


def refuse_overlap(
    benchmark: Environment, trained: EnvironmentSettings | None, problems: int, who: str, tokenizer: Tokenizer
) -> None:
    """Raises UserError where one of the benchmark's next problems is among those of the environment that `who` was `trained` on.

    Only a training pool with an end is known whole: problems generated without end are told apart by their splits.
    """
    if trained is None:
        return
    training = Environment.from_settings(trained, tokenizer)
    if (size := training.pool.size) is None:
        return
    known = {asked(training.pool.order.at(position).question) for position in range(size)}
    start = benchmark.state()
    questions = [asked(problem.question) for problem in distinct_problems(benchmark, problems)]
    benchmark.load_state(start)
    common = sum(question in known for question in questions)
    if common:
        raise UserError(
            f"{benchmark.settings.env_id}: {common:,} of {len(questions):,} problems are among those that {who} was trained on, so "
            "that the result would say nothing about others; evaluate on problems that are held out"
        )


def asked(question: str) -> str:
    """The question as it is compared with others: without regard to case and white space."""
    return " ".join(question.split()).casefold()
