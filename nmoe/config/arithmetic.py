"""Computes a run's totals from its batch sizes and step counts, to print before the run starts."""

import math

from nmoe.config.commands import PretrainConfig, RecordsConfig, RLConfig, RunConfig, SupervisedConfig, VerifierConfig


def batch_arithmetic(config: SupervisedConfig | RLConfig) -> list[str]:
    """Returns the lines to print: samples and tokens per step, micro-batches, totals of the run, evaluations, checkpoints."""
    if isinstance(config, PretrainConfig):
        lines = _packed(config, config.data.tokens_per_step)
        evaluated = f"{config.data.held_out_documents:,} documents"
    elif isinstance(config, VerifierConfig):
        lines = _packed(config, config.verifier.tokens_per_step)
        evaluated = f"at most {sum(one.problems for one in config.eval):,} solutions"
    elif isinstance(config, RecordsConfig):
        lines, evaluated = _packed(config, config.records.tokens_per_step), "the records held out"
    else:
        assert isinstance(config, RLConfig), "no other run has steps of this kind"
        lines = _reinforcement_learning(config)
        for probe in config.eval:
            on = "" if len(config.eval) == 1 else f"{(probe.environment or config.environment).env_id}, "
            lines.append(_evaluations(config.run.steps, probe.every_steps, f"{on}{probe.problems:,} problems"))
    if not isinstance(config, RLConfig):
        if config.evaluate_every:
            lines.append(_evaluations(config.run.steps, config.evaluate_every, evaluated))
        for one in config.probes.values():
            assert one.environment is not None, "what makes it a probe"
            asked = f"{one.environment.env_id}, {one.problems:,} problems"
            lines.append(_evaluations(config.run.steps, one.every_steps, asked))
    if not config.eval:
        lines.append("evaluation: none during the run")
    lines.append(
        f"checkpoints: every {config.checkpoint.every_steps:,} steps, the newest {config.checkpoint.keep:,} kept"
    )
    return lines


def _evaluations(steps: int, every: int, evaluated: str) -> str:
    times = 1 + math.ceil(steps / every)
    return f"evaluation: before step 1, every {every:,} steps, at the end = {times:,} times {evaluated}"


def _packed(config: RunConfig, tokens: int) -> list[str]:
    steps = config.run.steps
    return [
        f"step: at most {tokens:,} tokens in micro-batches of at most {config.batch.tokens_per_microbatch:,}",
        f"run: {steps:,} optimizer steps = at most {steps * tokens:,} tokens",
    ]


def _reinforcement_learning(config: RLConfig) -> list[str]:
    """Returns the lines of an RL run. Token counts are upper bounds, since completions may end before the limit; prompts are not
    counted."""
    steps, batch, longest = config.run.steps, config.batch, config.sampling.max_new_tokens
    samples = batch.prompts_per_step * batch.group_size
    tokens = samples * longest
    samples_per_microbatch = max(1, batch.tokens_per_microbatch // longest)
    drawn = math.ceil(batch.prompts_per_step * batch.oversampling) * batch.group_size * (1 + batch.max_refills)
    counted = f"{steps:,} optimizer steps" if batch.updates == 1 else f"{steps:,} steps"
    lines = [
        f"step: {batch.prompts_per_step:,} prompts x {batch.group_size:,} completions = {samples:,} samples "
        f"of at most {longest:,} tokens = at most {tokens:,} sampled tokens",
        f"refills: at most {batch.max_refills:,} a step = at most {drawn:,} samples drawn",
        f"micro-batches: {batch.tokens_per_microbatch:,} tokens each = at most "
        f"{math.ceil(samples / samples_per_microbatch):,} a step, prompts not counted",
        f"run: {counted} = {steps * samples:,} samples = at most {steps * tokens:,} sampled tokens",
    ]
    if batch.updates > 1:
        lines.insert(
            3,
            f"updates: {batch.updates_per_step:,} of a pass x {batch.passes_per_step:,} passes = at most {batch.updates:,} "
            f"optimizer steps a step = {steps * batch.updates:,} in all",
        )
    if (distillation := config.distillation) is not None:
        beside = (
            f", in addition to rewards at {distillation.reward_coef:g}"
            if distillation.reward_coef
            else " in place of rewards"
        )
        lines.append(f"teacher: {distillation.teacher} at {distillation.coef:g}{beside}")
    if config.critic is not None and config.critic.warmup_steps:
        lines.append(f"critic: trained alone for the first {config.critic.warmup_steps:,} steps")
    return lines


def asynchrony_notes(config: RLConfig) -> list[str]:
    """Returns the lines to print of a run that samples beside its training; none for another."""
    section, algorithm = config.asynchrony, config.algorithm
    if not section.max_staleness:
        return []
    groups = (section.max_staleness + 1) * config.batch.prompts_per_step
    lines = [
        f"asynchronous: at most {groups:,} groups under way, of weights at most {section.max_staleness:,} versions older than the "
        f"learner's; in flight at a publication: {section.in_flight}; overdue: {section.overdue}; algorithm.correction = \""
        f'{algorithm.correction}"'
    ]
    if algorithm.correction == "none" and algorithm.loss != "dppo":
        lines.append('nothing corrects for samples of older weights; algorithm.correction = "tis" does')
    if section.overdue == "drop" and config.environment.rewards_efficiency:
        lines.append(
            'biased: async.overdue = "drop" gives up long samples, and the weight of efficiency compares the lengths of the rest; '
            '"wait" keeps all'
        )
    return lines
