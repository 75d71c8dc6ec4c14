"""What older versions called keys and modules, so that files written for one are told today's name.

Add a line whenever a key or a module that users name gets another name.
"""

KEYS = {
    "algorithm.dual_clip": "algorithm.dual_clip_bound",
    "model.shape.router_aux_loss_coef": "model.router_aux_loss_coef",
    "model.shape.router_bias_rate": "model.router_bias_rate",
}
"""Dotted, as in a run's file; the keys of an environment as in its own file."""

PROBE_OUTSIDE = '[eval.ood] is an [[eval]] of its own now, with role = "out_of_distribution"'

MODULES = {
    "nmoe.config.dataset": "nmoe.config.tables.records",
    "nmoe.config.rewards": "nmoe.config.tables.rewards",
    "nmoe.config.run": "nmoe.config.commands",
    "nmoe.config.sandbox": "nmoe.config.tables.rollout",
    "nmoe.config.selfplay": "nmoe.config.commands.selfplay",
    "nmoe.config.verifier": "nmoe.config.tables.recipes",
    "nmoe.eval.replay": "nmoe.rl.replay",
    "nmoe.eval.scorers": "nmoe.verifier.scorers",
    "nmoe.eval.verifier": "nmoe.verifier",
    "nmoe.recipes.distillation": "nmoe.rl.teacher",
    "nmoe.recipes.grpo": "nmoe.rl.train",
    "nmoe.recipes.ppo": "nmoe.rl.critic",
    "nmoe.recipes.selfplay": "nmoe.selfplay.loop",
    "nmoe.recipes.speedrun": "nmoe.speedrun",
    "nmoe.recipes.verifier": "nmoe.verifier.train",
    "nmoe.rl.adapters": "nmoe.grading.adapters",
    "nmoe.rl.check": "nmoe.envs.check",
    "nmoe.rl.curriculum": "nmoe.envs.curriculum",
    "nmoe.rl.failures": "nmoe.types",
    "nmoe.rl.formats": "nmoe.text.renderers",
    "nmoe.rl.golds": "nmoe.envs.golds",
    "nmoe.rl.grading": "nmoe.grading",
    "nmoe.rl.grading.grade": "nmoe.envs.grade",
    "nmoe.rl.grading.verdict": "nmoe.types",
    "nmoe.rl.pools": "nmoe.envs.pools",
    "nmoe.rl.problem": "nmoe.types",
    "nmoe.rl.rewards": "nmoe.envs.rewards",
    "nmoe.rl.rollout": "nmoe.rollout",
    "nmoe.rl.rollout.trajectory": "nmoe.trajectory",
    "nmoe.rl.sandbox": "nmoe.sandbox",
    "nmoe.rl.scorer": "nmoe.envs.scorer",
    "nmoe.rl.selfplay": "nmoe.selfplay",
    "nmoe.rl.tasks": "nmoe.envs.tasks",
    "nmoe.rl.tools": "nmoe.envs.tools",
    "nmoe.rl.tools.event": "nmoe.types",
    "nmoe.rl.trainer_state": "nmoe.types",
    "nmoe.rl.turn": "nmoe.types",
    "nmoe.rl.user_code": "nmoe.envs.user_code",
    "nmoe.rl.workspace": "nmoe.sandbox.workspaces",
    **{
        f"nmoe.rl.grading.{name}": f"nmoe.grading.math.{name}"
        for name in (
            *("answers", "equivalence", "expressions", "forms", "intervals", "names", "normalization", "numbers"),
            *("policy", "question", "screen", "shape", "symbolic", "units"),
        )
    },
}
"""A package stands for the modules in it that have no line of their own."""


def key_today(path: tuple[str, ...]) -> str | None:
    """Today's name of a key, `("model", "shape", "router_bias_rate")` or the same below `environment`; None if it has not moved."""
    below = path[path.index("environment") + 1 :] if "environment" in path else path
    return KEYS.get(".".join(below))


def module_today(module: str) -> str | None:
    """Today's name of a module, `nmoe.rl.tools.tool` or `nmoe.recipes.grpo`; None if it has not moved."""
    package, below = module, ""
    while package:
        if package in MODULES:
            return MODULES[package] + ("" if MODULES[package] == "nmoe.types" else below)
        package, dot, name = package.rpartition(".")
        below = f"{dot}{name}{below}"
    return None
