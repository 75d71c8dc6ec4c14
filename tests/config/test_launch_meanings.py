"""What single keys of other trainers mean, by their own source, and what the import makes of them: a value, or a remark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_launches import CASES, LAUNCHES

from nmoe.config.launches.command import PROGRAMS, imported
from nmoe.config.launches.convert import Imported, convert, recognised
from nmoe.config.launches.read import Given, Launch, read_launch
from nmoe.config.launches.rows import Program
from nmoe.errors import UserError

TRL = "trl grpo --model_name_or_path m --num_processes 1 "
VERL = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m actor_rollout_ref.rollout.name=vllm "
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
OPENRLHF = "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --algo.advantage.estimator group_norm "
SKYRL = "python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=m "
SLIME = "python train.py --hf-checkpoint m --prompt-data a.jsonl --rollout-batch-size 8 --n-samples-per-prompt 4 --colocate "
PRIME = "uv run rl --model.name m --orchestrator.batch-size 64 --orchestrator.group-size 8 "
SKYRL_LOSS = f"{SKYRL} trainer.algorithm"

# A launch, values that it becomes, a remark that it gets, and where the trainer's own definition stands.
MEANINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    # verl 0.9.1, trainer/config/actor/actor.yaml and compute_policy_loss_vanilla: clip_ratio counts where the others are null.
    "verl: clip_ratio beside the defaults of low and high": (
        f"{VERL} {ACTOR}.clip_ratio=0.1",
        {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2},
        "clip_ratio = 0.1: verl takes its defaults",
    ),
    "verl: clip_ratio for bounds that are null": (
        f"{VERL} {ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=0.3",
        {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3},
        "",
    ),
    # core_algos.kl_penalty: "k3+" has the gradient of k2; as a reward it has no gradient, and is k3.
    "verl: KL with the gradient of k2": (
        f"{VERL} {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3+",
        {"algorithm.kl_estimator": "k2", "algorithm.kl_coef": 0.001},
        "KL by k3+ shows the value of k3 and has the gradient of k2",
    ),
    "verl: the same in the reward": (
        f"{VERL} algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3+",
        {"algorithm.kl_estimator": "k3", "algorithm.kl_in": "reward"},
        "",
    ),
    # compute_policy_loss_dppo_tv: torch.clamp(ratio, max=clip_ratio_c).
    "verl: the cap of dppo": (
        f"{VERL} {ACTOR}.policy_loss.loss_mode=dppo_tv {ACTOR}.clip_ratio_c=20",
        {"algorithm.loss": "dppo"},
        "caps the ratio at clip_ratio_c = 20",
    ),
    # compute_policy_loss_bypass_mode: ppo_clip applies no further weights.
    "verl: weights of a ratio that is to the sampler already": (
        f"{VERL} {CORRECTION}.bypass_mode=True {CORRECTION}.rollout_is=token {ACTOR}.ppo_mini_batch_size=1024",
        {"batch.updates_per_step": 1},
        "",
    ),
    "verl: the sampler as the old policy, over several updates": (
        f"{VERL} {CORRECTION}.bypass_mode=True", {"batch.updates_per_step": 4}, "bypass_mode takes the sampler's",
    ),
    "verl: ratios to the learner before a single update": (
        f"{VERL} {ACTOR}.ppo_mini_batch_size=1024", {"batch.updates_per_step": 1}, "verl's to the learner's own before",
    ),
    # rollout/rollout.yaml: response_length is data.max_response_length unless it is given.
    "verl: the rollout's own length": (
        f"{VERL} data.max_response_length=512 actor_rollout_ref.rollout.response_length=2048",
        {"sampling.max_new_tokens": 2048},
        "",
    ),
    "verl: another constant of aggregation": (
        f"{VERL} {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor=8192",
        {"algorithm.aggregation": "constant"},
        "loss_scale_factor = 8192",
    ),
    "verl: files of several kinds": (
        f"{VERL} data.train_files=['a.parquet','b.jsonl']",
        {"environment.task_pool.path": "a.parquet"},
        "2 datasets: only the first is written",
    ),
    "verl: nucleus sampling in evaluations": (
        f"{VERL} actor_rollout_ref.rollout.val_kwargs.top_p=0.7", {}, "val_kwargs.top_p = 0.7: nmoe's evaluations",
    ),
    # GRPOTrainer._compute_loss of TRL 1.16.0: num_items_in_batch spans the generation batch.
    "trl: dapo with several updates": (
        f"{TRL} --gradient_accumulation_steps 2 --steps_per_generation 8",
        {"batch.updates_per_step": 4, "algorithm.aggregation": "token"},
        "dapo divides each update by the tokens of the whole generation batch",
    ),
    # The bonus is a mean over tokens, whatever the loss type.
    "trl: entropy beside a mean of sequences": (
        f"{TRL} --loss_type grpo --entropy_coef 0.01",
        {"algorithm.aggregation": "sequence", "algorithm.entropy_coef": 0.01},
        "TRL's bonus is the mean entropy of tokens",
    ),
    # mask.sum(-1).clamp(min=1)).mean(): a masked sequence counts in the mean.
    "trl: masked completions in a mean of sequences": (
        f"{TRL} --loss_type grpo --mask_truncated_completions true",
        {"algorithm.mask_truncated": True},
        "TRL still divides by their number",
    ),
    "trl: a bound of negative advantages beside one ratio per sequence": (
        f"{TRL} --loss_type grpo --importance_sampling_level sequence --delta 2.0",
        {"algorithm.loss": "gspo"},
        "delta = 2.0: nmoe's gspo does not bound",
    ),
    "trl: the weight of the KL term of sequences": (
        f"{TRL} --loss_type grpo --importance_sampling_level sequence --beta 0.1",
        {"algorithm.kl_importance_weights": True},
        "the KL term is weighed by the ratio of the sequence",
    ),
    # TrainingArguments: save_steps and eval_steps count optimizer steps, as ref_model_sync_steps does (SyncRefModelCallback).
    "trl: periods in optimizer steps": (
        f"{TRL} --gradient_accumulation_steps 1 --steps_per_generation 4 --num_iterations 2 --save_steps 80 --beta 0.1 "
        "--sync_ref_model true --ref_model_sync_steps 16 --ref_model_mixup_alpha 1.0 --dataset_name d.jsonl "
        "--eval_strategy steps --eval_steps 44",
        {"checkpoint.every_steps": 10, "algorithm.reference_every_steps": 2, "eval.0.every_steps": 6},
        "44 steps between evaluations are no multiple of the 8",
    ),
    "trl: an unknown word": (f"{TRL} --scale_rewards rows", {"algorithm.advantage": "grpo"}, "scale_rewards = rows: nmoe has none"),
    # dpo_trainer: the sum of each loss times its weight.
    "trl: weights of two preference losses": (
        "trl dpo --model_name_or_path m --loss_type sigmoid sft --loss_weights 0.5 1.0",
        {"preference.loss": "sigmoid", "preference.sft_weight": 2.0},
        "nmoe's loss of preferences has weight 1, TRL's 0.5",
    ),
    # openrlhf 0.11.2, models/loss.py, PolicyLoss.forward: gspo takes the ratio to the rollout, and corrects nothing.
    "openrlhf: gspo with a correction": (
        f"{OPENRLHF} --actor.policy_loss_type gspo --algo.advantage.is_correction_level token",
        {"algorithm.loss": "gspo"},
        "gspo with a correction takes the ratio to the engine",
    ),
    # models/loss.py, DPOLoss: sums of log-probabilities; TRL and nmoe take means for IPO.
    "openrlhf: ipo": (
        "python -m openrlhf.cli.train_dpo --model.model_name_or_path m --model.ipo_enable",
        {"preference.loss": "ipo"},
        "OpenRLHF takes sums of log ratios",
    ),
    "openrlhf: an unknown estimator": (
        OPENRLHF.replace("group_norm", "opo"), {"algorithm.advantage": "grpo"}, "advantage.estimator = opo: nmoe has none",
    ),
    # skyrl 0.4.0, workers/worker.py: "The KL and entropy loss terms are not pre-scaled".
    "skyrl: the aggregation of the KL term": (
        f"{SKYRL_LOSS}.use_kl_loss=true", {"algorithm.kl_in": "loss"}, "the KL term is averaged in each micro-batch",
    ),
    "skyrl: none where the loss is a mean of sequences": (
        f"{SKYRL_LOSS}.loss_reduction=sequence_mean", {"algorithm.aggregation": "sequence"}, "",
    ),
    # train/utils/utils.py: seq_mean_token_sum_norm needs max_seq_len; apply_loss_reduction_to_advantages_minibatch divides by it.
    "skyrl: the constant of aggregation": (
        f"{SKYRL_LOSS}.loss_reduction=seq_mean_token_sum_norm trainer.algorithm.max_seq_len=4096 "
        "generator.sampling_params.max_generate_length=1024",
        {"algorithm.aggregation": "constant"},
        "max_seq_len = 4096: nmoe divides sums over tokens by sampling.max_new_tokens = 1024",
    ),
    "skyrl: masked completions in a mean of sequences": (
        f"{SKYRL_LOSS}.loss_reduction=sequence_mean generator.apply_overlong_filtering=true",
        {"algorithm.mask_truncated": True},
        "SkyRL still divides by their number",
    ),
    # off_policy_correction_utils.py: a mask and truncated weights are applied one after the other.
    "skyrl: a mask and truncated weights": (
        f"{SKYRL_LOSS}.off_policy_correction.sequence_mask_metric=geometric "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token "
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=3.0",
        {"algorithm.correction": "sequence_mask", "algorithm.correction_cap": 3.0},
        "",
    ),
    "skyrl: a mask alone": (
        f"{SKYRL_LOSS}.off_policy_correction.sequence_mask_metric=geometric",
        {"algorithm.correction": "sequence_mask"},
        "nmoe weighs the tokens of the other sequences by their own ratio",
    ),
    # compute_policy_loss_cispo: clamp(ratio, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high).
    "skyrl: the lower bound of cispo": (
        f"{SKYRL_LOSS}.policy_loss_type=cispo trainer.algorithm.cispo.cispo_eps_clip_low=0.5",
        {"algorithm.clip_high": 4.0},
        "the ratio is also held above 0.5",
    ),
    "skyrl: KL twice": (f"{SKYRL_LOSS}.use_kl_in_reward=true", {"algorithm.kl_in": "loss"}, "which SkyRL refuses"),
    "skyrl: nucleus sampling in evaluations": (
        f"{SKYRL} generator.eval_sampling_params.top_p=0.9", {}, "eval_sampling_params.top_p = 0.9: nmoe's evaluations",
    ),
    # Megatron's get_muon_scale_factor: max(rows, columns) ** 0.5, times muon_extra_scale_factor.
    "slime: Muon": (
        f"{SLIME} --optimizer muon --muon-momentum 0.9", {"optimizer.kind": "muon", "optimizer.momentum": 0.9}, "by 0.2 of it",
    ),
    "slime: neither AdamW nor Muon": (f"{SLIME} --optimizer sgd", {"optimizer.kind": "adamw"}, "sgd: nmoe has AdamW and Muon"),
    # slime_validate_args: colocated engines take all GPUs unless rollout_num_gpus is given; one path alone is of AIME.
    "slime: some of the GPUs": (
        f"{SLIME} --actor-num-gpus-per-node 4 --rollout-num-gpus 2 --eval-interval 5 --eval-prompt-data a.jsonl",
        {"placement.learner_gpus": 4, "placement.engines": 2, "eval.0.environment.env_id": "aime_eval", "eval.0.every_steps": 5},
        "",
    ),
    "openrlhf: Muon": (
        f"{OPENRLHF} --actor.optim muon", {"optimizer.kind": "muon", "optimizer.momentum": 0.95}, "takes steps of muon.lr",
    ),
    "trl: another optimizer": (f"{TRL} --optim adafactor", {"optimizer.kind": "adamw"}, "adafactor: nmoe has AdamW"),
    # prime-rl 004274e, configs/rl.py: MultiNodeDeploymentConfig counts inference nodes of each replica.
    "prime-rl: several machines": (
        f"{PRIME} --deployment.type multi_node --deployment.num-train-nodes 2 --deployment.num-infer-nodes 1 "
        "--deployment.num-infer-replicas 3 --deployment.gpus-per-node 4 --inference.parallel.tp 2",
        {"placement.learner_gpus": 8, "placement.engines": 6, "placement.launcher": "ray"},
        "",
    ),
    # configs/orchestrator.py: pre_batch_filters only watch unless they enforce; the filter behind the batch enforces by itself.
    "prime-rl: a batch full of groups with a signal": (
        f"{PRIME} --orchestrator.pre-batch-filters.0.type zero_advantage --orchestrator.pre-batch-filters.0.enforce true",
        {"batch.max_refills": 8},
        "samples until the batch is full",
    ),
    "prime-rl: a filter that watches": (
        f"{PRIME} --orchestrator.pre-batch-filters.0.type zero_advantage --orchestrator.pre-batch-filters.0.enforce false", {}, "",
    ),
    "prime-rl: groups without a signal in the mean": (
        f"{PRIME} --orchestrator.post-batch-filters.0.type zero_advantage --orchestrator.post-batch-filters.0.enforce false",
        {},
        "their tokens count in the mean",
    ),
    "prime-rl: Muon": (
        f"{PRIME} --trainer.optim.type muon", {"optimizer.kind": "muon", "optimizer.momentum": 0.95}, "steers the routers by Muon",
    ),
    "prime-rl: activations on the host alone": (
        f"{PRIME} --trainer.model.ac-offloading.max-inflight-activations 2", {"model.checkpoint_activations": True}, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("command", "values", "remark"), MEANINGS.values(), ids=list(MEANINGS))
def test_a_key_means_what_the_trainers_source_says(command: str, values: dict[str, Any], remark: str) -> None:
    found = imported(command)
    assert {key: found.values.get(key) for key in values} == values
    if remark:
        assert any(remark in line for line in found.differs), found.differs


# Launches whose remarks would be false.
QUIET: dict[str, tuple[str, str]] = {
    "a single update of dapo": (f"{TRL} --gradient_accumulation_steps 2", "generation batch"),
    "masked completions in a mean of tokens": (f"{TRL} --mask_truncated_completions true", "their number"),
    "an engine corrected for": (f"{VERL} {ACTOR}.ppo_mini_batch_size=1024 {CORRECTION}.rollout_is=token", "own before"),
    "the sampler as the old policy, in a single update": (
        f"{VERL} {CORRECTION}.bypass_mode=True {ACTOR}.ppo_mini_batch_size=1024", "bypass_mode",
    ),
    "the same constant of aggregation": (
        f"{SKYRL_LOSS}.loss_reduction=seq_mean_token_sum_norm trainer.algorithm.max_seq_len=1024", "max_seq_len",
    ),
    "the whole distribution": (f"{VERL} actor_rollout_ref.rollout.val_kwargs.top_p=1.0", "whole distribution"),
}  # fmt: skip


@pytest.mark.parametrize(("command", "remark"), QUIET.values(), ids=list(QUIET))
def test_what_is_equal_gets_no_remark(command: str, remark: str) -> None:
    assert not any(remark in line for line in imported(command).differs)


# Keys that are given without the others of their row.
ALONE: dict[str, tuple[str, str]] = {
    "weights of a correction that is off": (f"{VERL} {CORRECTION}.rollout_is_threshold=5.0", "rollout_is_threshold = 5.0"),
    "weights that the ratio replaces": (
        f"{VERL} {CORRECTION}.bypass_mode=True {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=5.0",
        "rollout_is_threshold = 5.0",
    ),
    "the coefficient of the reward beside the loss": (
        f"{VERL} {ACTOR}.use_kl_loss=True algorithm.kl_ctrl.kl_coef=0.005", "algorithm.kl_ctrl.kl_coef = 0.005",
    ),
    "batches of filtered groups": (f"{VERL} data.gen_batch_size=2048", "data.gen_batch_size = 2048"),
    "the name of a function without its file": (f"{VERL} reward.custom_reward_function.name=score", "function.name = score"),
    "a dual clip beside gspo": (f"{VERL} {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_c=5", "clip_ratio_c = 5"),
    "a share beside steps of warm-up": (
        f"{VERL} {ACTOR}.optim.lr_warmup_steps=20 {ACTOR}.optim.lr_warmup_steps_ratio=0.1", "lr_warmup_steps_ratio = 0.1",
    ),
    "the end of a constant schedule": (f"{VERL} {ACTOR}.optim.min_lr_ratio=0.1", "min_lr_ratio = 0.1"),
    "passes beside steps": (f"{VERL} trainer.total_training_steps=10 trainer.total_epochs=3", "trainer.total_epochs = 3"),
    "adapters that are off": (f"{TRL} --lora_r 32", "lora_r = 32"),
    "the lower bound of cispo": (f"{TRL} --loss_type cispo --epsilon 0.1 --epsilon_high 5", "epsilon = 0.1"),
    "a warm-up of a constant schedule": (f"{TRL} --lr_scheduler_type constant --warmup_ratio 0.1", "warmup_ratio = 0.1"),
    "steps beside a generation batch": (f"{TRL} --generation_batch_size 64 --steps_per_generation 2", "steps_per_generation = 2"),
    "the split of a file": (f"{TRL} --dataset_name d.jsonl --dataset_train_split all", "dataset_train_split = all"),
    "an estimator of a KL term that is off": (
        f"{OPENRLHF} --algo.kl.init_coef 0 --algo.kl.estimator k3", "algo.kl.estimator = k3",
    ),
    "a discount without a critic": (f"{OPENRLHF} --algo.advantage.gamma 0.9", "algo.advantage.gamma = 0.9"),
    "the coefficient of a bonus that is off": (f"{SKYRL_LOSS}.entropy_loss_coef=0.1", "entropy_loss_coef = 0.1"),
    "the cap of another ratio": (
        f"{SKYRL_LOSS}.off_policy_correction.sequence_tis_ratio_clip_high=9.0", "sequence_tis_ratio_clip_high = 9.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("command", "key"), ALONE.values(), ids=list(ALONE))
def test_a_key_without_the_others_of_its_row_is_named(command: str, key: str) -> None:
    (line,) = [line for line in imported(command).without if key in line]
    assert "has no effect beside the other keys" in line


# A word that is no number, and which one word of the trainer decides; whether it is given is all that counts.
_GIVEN_OR_NOT = (
    "logger.wandb.key",
    "eval_strategy",
    "ckpt.output_dir",
    "ckpt_path",
    "default_local_dir",
    "ac.mode",
    "ac.freq",
    "max_inflight_activations",
    "recompute-granularity",
)


def other_values(value: Any) -> list[Any]:
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int | float):
        return [value * 2 + 1, value / 2]
    return [f"{value}x"] if isinstance(value, str) else []


def silent(launch: Launch, program: Program) -> Iterator[str]:
    """Yields the keys of a launch that may have another value without any other result, and without being named."""
    before = judged(convert(launch, program))
    for key, one in launch.given.items():
        row = program.row_of(program.canonical(key))
        if (
            row is None
            or row.convert is None
            or key.endswith(_GIVEN_OR_NOT)
            or program.canonical(key).endswith(_GIVEN_OR_NOT)
        ):
            continue
        changed = False
        for value in (others := other_values(one.value)):
            given = {**launch.given, key: Given(key, value, one.where)}
            try:
                found = convert(Launch(launch.program, launch.where, given, launch.starter), program)
            except UserError:
                changed = True
            else:
                changed |= judged(found) != before or any(line.startswith(one.key) for line in found.without)
        if others and not changed:
            yield key


def judged(found: Imported) -> tuple[Any, ...]:
    return found.values, found.differs, found.to_fill


def test_no_key_of_a_launch_is_dropped_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(LAUNCHES)  # the files that the launches name
    found = {}
    for case in CASES:
        launch = read_launch(str(case.values[0]))
        found[case.id] = list(silent(launch, recognised(launch, PROGRAMS, None)))
    assert len(found) == 64
    assert {name: keys for name, keys in found.items() if keys} == {}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_no_number_alone_is_dropped_silently(program: Program) -> None:
    numbers = {
        key: value
        for key, value in program.defaults.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    assert len(numbers) > 10
    for key, value in numbers.items():
        row = program.row_of(key)
        if row is not None and row.convert is not None:
            launch = Launch(program.name, "launch", {key: Given(key, value * 2 + 3, "launch:1")})
            assert list(silent(launch, program)) == [], key


def test_a_table_of_toml_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(LAUNCHES)
    given = read_launch("rl.toml").given
    assert given["orchestrator.train.env.0.id"] == Given("orchestrator.train.env.0.id", "reverse-text", "rl.toml:20")
    assert read_launch("uv run rl @ rl.toml --max-steps 5").given["max-steps"].where == "command:1"
    found = imported("uv run rl @ rl.toml --max-steps 5 --orchestrator.algo.kind x --model.nam m")
    assert found.values["run.steps"] == 5
    assert [line.partition(":")[0] for line in found.without if "model.nam" in line] == ["model.nam = m"]
    with pytest.raises(UserError, match=r"absent\.toml: no such file \(named at command:1\)"):
        imported("uv run rl @ absent.toml")


def test_an_array_that_nothing_sets_is_named_and_takes_no_key_s_place(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"source models/qwen.sh\nA=(--lr 2e-6)\n{SLIME} ${{MODEL_ARGS[@]}} --seed 7 ${{MORE[@]}} ${{A[@]}}\n"
    )
    found = imported(str(script))
    assert (found.values["placement.layout"], found.values["run.seed"]) == ("colocated", 7)
    assert found.values["optimizer.learning_rate"] == 2e-6
    named = [line for line in found.without if "an array that the script does not set" in line]
    assert [line.partition(": $")[2].partition(":")[0] for line in named] == ["{MODEL_ARGS[@]}", "{MORE[@]}"]
    assert found.unknown == []
