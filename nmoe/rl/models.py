"""The models of a policy-gradient run, and the learner of the policy among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nmoe.config.commands.rl import RLConfig
from nmoe.learner.learner import Learner
from nmoe.model.head import Head
from nmoe.model.lora import Lora
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import add_adapter, build_model, optimizer_settings
from nmoe.rl.critic import build_critic, value_head
from nmoe.rl.teacher import Teacher, build_teacher
from nmoe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Models:
    """The policy, with the adapter where that alone is trained; the policy before training, where a divergence is measured from it;
    the critic's own; and the teacher."""

    policy: Transformer
    lora: Lora | None
    before: Transformer | None
    critic: tuple[Transformer, Head] | None
    teacher: Teacher | None

    @classmethod
    def build(cls, config: RLConfig, tokenizer: Tokenizer) -> Models:
        """Loads or makes them. Raises UserError for a checkpoint that is not there, or does not fit the others."""
        policy = build_model(config.model, tokenizer, config.run.seed, balance=False)
        lora = add_adapter(config, policy)
        before = None
        if config.algorithm.kl_coef > 0 and lora is None:
            # Whether or not this is a resumption. Beside an adapter the base is there already.
            before = build_model(config.model, tokenizer, config.run.seed, balance=False).requires_grad_(False)
        critic = build_critic(config, tokenizer, policy.config)
        return cls(policy, lora, before, critic, build_teacher(config, tokenizer, policy.config))


def policy_learner(config: RLConfig, models: Models) -> Learner:
    """Trains the policy, and the value head on its trunk where the critic is one; its schedule begins when the critic is warm."""
    critic, updates = config.critic, config.batch.updates
    settings, head, steps = optimizer_settings(config, updates), None, config.run.steps
    if critic is not None:
        steps -= critic.warmup_steps
        if critic.shared:
            settings = replace(settings, head_learning_rate=critic.learning_rate)
            head = value_head(models.policy.config.hidden_size, config.model.path)
    return Learner(
        models.policy,
        settings,
        steps * updates,
        config.batch.tokens_per_microbatch,
        config.sampling.temperature,
        models.lora,
        head=head,
    )
