"""Environments of nmoe as reward functions of TRL's own GRPOTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_templates import QWEN_CONTROLS, save
from test_shared import by_word, capitals

from nmoe.adapters.environment import SharedEnvironment
from nmoe.adapters.trl import dataset, reward_function
from nmoe.config.registry import hand_over
from nmoe.errors import UserError
from nmoe.rollout.collector import GradingError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letters(completions: Any, **columns: Any) -> list[float]:
    """A reward of the user's own, which texts of drawn weights earn to different degrees."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter.isalpha() for letter in text) / max(len(text), 1) for text in texts]


class Spoken:
    """The part of a tokenizer that is asked for."""

    eos_token_id = 2

    def apply_chat_template(
        self, messages: Any, *, tokenize: bool, add_generation_prompt: bool, thinks: bool = False
    ) -> str:
        return f"{messages[0]['content']}\n<think>\n" if thinks else f"{messages[0]['content']}\n<think>\n</think>\n"


@pytest.fixture(scope="module")
def reward() -> Any:
    return reward_function("word_problems", Spoken(), eos_token_id=[3])


def test_rewards_in_the_order_of_completions(reward: Any) -> None:
    rows = dataset("word_problems", 2)
    assert rows.column_names == ["prompt", "label"]
    assert rows[0]["prompt"][0].keys() == {"role", "content"}
    logged: dict[str, float] = {}
    first, second = rows[0]["label"], rows[1]["label"]
    with SharedEnvironment("word_problems") as shared:
        golds = [shared.problem(label).gold for label in (first, second)]
    said = [golds[0], golds[1], golds[0], golds[0], "no number"]
    found = reward(
        prompts=[rows[0]["prompt"]] * 5,
        completions=[[{"role": "assistant", "content": text}] for text in said],
        completion_ids=[[5, 2], [5, 3], [5, 5], [2], [5, 2]],
        label=[first, second, first, second, first],
        trainer_state=None,
        log_extra=None,
        log_metric=logged.__setitem__,
    )
    # The third was cut, and the fourth is the answer to another question.
    assert found == [1.1, 1.1, 0.0, 1.1 if golds[0] == golds[1] else 0.1, 0.1]
    assert logged["word_problems/format"] == 0.8
    assert "word_problems/efficiency" not in logged
    assert reward.__name__ == "word_problems"


def test_what_cannot_be_rewarded_is_said(reward: Any) -> None:
    with pytest.raises(UserError, match="the dataset has no column `label`"):
        reward(prompts=["?"], completions=["4"], completion_ids=[[4, 2]])
    with pytest.raises(UserError, match="gives no completion_ids"):
        reward(prompts=["?"], completions=["4"], label=["train/0/00000000"])
    with pytest.raises(UserError, match="write the records again"):
        reward(prompts=["?"], completions=["4"], completion_ids=[[4, 2]], label=["train/0/00000000"])
    with pytest.raises(UserError, match="a reward function sees the end alone"):
        reward_function("guess", Spoken(), eos_token_id=None)
    with pytest.raises(
        UserError, match="compares the samples of a group; give reward_function the trainer's num_generations"
    ):
        reward_function(own(ranks, replay=False), Spoken(), eos_token_id=None)


def own(function: Any, **more: Any) -> dict[str, Any]:
    rewards = [{"type": "function", "name": "own", "call": hand_over(function)[0], "weight": 1.0, **more}]
    return capitals(rewards=rewards, rubric={"correctness": 0.0, "format": 0.0})


def ranks(completions: Any, **columns: Any) -> list[float]:
    lengths = [len(one[-1]["content"]) for one in completions]
    return [float(sum(length < other for other in lengths)) for length in lengths]


def long(completions: Any, completion_ids: Any, trainer_state: Any, **columns: Any) -> list[float | None]:
    late = trainer_state.global_step / trainer_state.max_steps
    return [None if len(ids) == 1 else len(ids) + late for ids in completion_ids]


def test_prompts_that_open_the_reasoning() -> None:
    with SharedEnvironment("word_problems") as shared:
        label = shared.rows(1)[0]["label"]
        said = [[{"role": "assistant", "content": f"so</think>{shared.problem(label).gold}"}]]
        asked = {"prompts": ["?"], "completions": said, "completion_ids": [[5, 2]], "label": [label]}
        thinks = reward_function(shared, Spoken(), eos_token_id=2, chat_template_kwargs={"thinks": True})
        assert thinks(**asked) == [1.1]
        assert reward_function(shared, Spoken(), eos_token_id=2)(**asked) == [0.0]


def test_rewards_of_your_own_get_what_the_trainer_has() -> None:
    from transformers import TrainerState

    table = own(long)
    with SharedEnvironment(table | {"rubric": {"format": 1.0}}) as shared:
        label = by_word(shared)["expert"]
        logged: dict[str, float] = {}
        found = reward_function(shared, Spoken(), eos_token_id=2)(
            prompts=["?"] * 3,
            completions=["ééé", "b", ""],
            completion_ids=[[5, 6, 2], [2], [8, 2]],
            label=[label] * 3,
            trainer_state=TrainerState(global_step=5, max_steps=10),
            log_metric=logged.__setitem__,
        )
    assert found == [4.5, 1.0, 2.5]
    # The mean is over the completions that have the component.
    assert logged["capitals/own"] == 3.0
    with SharedEnvironment(own(ranks, replay=False)) as shared:
        label = by_word(shared)["expert"]
        compared = reward_function(shared, Spoken(), eos_token_id=2, num_generations=2)
        asked = {"prompts": ["?"] * 4, "completions": ["a", "bb", "c", "ddd"], "label": [label] * 4}
        assert compared(**asked, completion_ids=[[2]] * 4) == [1.0, 0.0, 1.0, 0.0]
        with pytest.raises(UserError, match="completions 2 to 3 of 3 are not 2 of one problem"):
            compared(**{name: values[:3] for name, values in asked.items()}, completion_ids=[[2]] * 3)


def drawn(tokenizer: Any) -> Any:
    """A model of two layers with drawn weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **shape))


class Trained:
    """Two steps of TRL's trainer."""

    def __init__(self, directory: Path, environment: Any, rows: Any) -> None:
        from transformers import AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        tokenizer = AutoTokenizer.from_pretrained(save(directory / "tokenizer", TEMPLATE, QWEN_CONTROLS))
        model = drawn(tokenizer)
        # Text of drawn weights does not end by itself, and is graded as if it had.
        reward = reward_function(environment, tokenizer, eos_token_id=range(len(tokenizer)))
        settings = GRPOConfig(
            output_dir=str(directory / "out"),
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=6,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        self.before = model.lm_head.weight.detach().clone()
        self.trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=settings, train_dataset=rows, processing_class=tokenizer
        )
        self.trainer.train()
        self.after = model.lm_head.weight.detach()


def test_two_steps_of_the_real_trainer(tmp_path: Path) -> None:
    own = {"type": "function", "name": "letters", "call": hand_over(letters)[0], "weight": 2.0}
    pool = {"type": "python", "call": hand_over([{"prompt": f"Say {word}."} for word in ("a", "b", "c")])[0]}
    table = {"env_id": "words", "task": "open", "task_pool": pool, "rewards": [own], "rubric": {"format": 0.5}}
    trained = Trained(tmp_path, table, dataset(table))
    logs = [one for one in trained.trainer.state.log_history if "reward" in one]
    assert len(logs) == 2
    for one in logs:
        assert one["reward"] == one["rewards/words/mean"]
        assert one["reward"] == pytest.approx(0.5 * one["words/format"] + 2 * one["words/letters"], rel=1e-5)
        assert one["reward_std"] > 0
    assert (trained.after != trained.before).any()


def test_a_grader_that_raises_stops_the_trainer(tmp_path: Path) -> None:
    shared = SharedEnvironment(capitals())
    rows = dataset(shared)
    rows = rows.filter(lambda row: "bug" in row["prompt"][0]["content"])
    with pytest.raises(GradingError, match="the grader has a bug"):
        Trained(tmp_path, shared, rows)
    shared.close()


def test_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/ecosystem.md, with a small model and few steps."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save(tmp_path / "model", TEMPLATE, QWEN_CONTROLS))
    drawn(tokenizer).save_pretrained(tmp_path / "model")
    page = (Path(__file__).parents[2] / "docs" / "ecosystem.md").read_text().partition("### TRL")[2]
    code = page.partition("```python\n")[2].partition("```")[0]
    few = "max_steps=1, max_completion_length=4, per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy='no'"
    for said, here in (
        ("Qwen/Qwen2.5-0.5B-Instruct", "model"),
        ("max_steps=100, max_completion_length=256", few),
        ("10_000", "16"),
    ):
        assert said in code
        code = code.replace(said, here)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["trainer"].state.global_step == 1
