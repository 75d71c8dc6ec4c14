"""The training batch of two small trajectories, column by column, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nmoe.rl.experience import Experience, policy_batch, selected
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn

PROBLEM = Problem("demo/0", "reverse", "Reverse: 12", "21", "demo")
GRADE = Grade(1.0, {}, "ok", {}, "21")
ADVANTAGES_B = torch.tensor([0.75, -0.5])


def trajectory(prompt_ids: tuple[int, ...], sample: Sample) -> Trajectory:
    return Trajectory(PROBLEM, 0, prompt_ids, (Turn((), sample),), GRADE, Sampling(4))


def two(**of_first: object) -> list[Trajectory]:
    """A prompt [5, 6] answered by [7, 2], of which 2 is the stop token, and a prompt [9] answered by [8], cut off."""
    first = Sample([7, 2], [-0.5, -0.25], [0, 0], "stop", **of_first)  # type: ignore[arg-type]
    return [trajectory((5, 6), first), trajectory((9,), Sample([8], [-1.0], [0], "length"))]


def test_tokens_mask_and_columns() -> None:
    batch = policy_batch(two(), ADVANTAGES_B, "token", 4)
    assert batch.lengths == (3, 1)
    assert batch.inputs_T.tolist() == [5, 6, 7, 9]
    assert batch.targets_T.tolist() == [6, 7, 2, 8]
    # The prompt's own 6 is predicted but was not sampled; the stop token 2 was.
    assert batch.scored_T.tolist() == [False, True, True, True]
    assert batch.behaviour_logprobs_T is not None
    assert batch.behaviour_logprobs_T.tolist() == [0.0, -0.5, -0.25, -1.0]
    assert batch.advantages_T is not None
    assert batch.advantages_T.tolist() == [0.75, 0.75, 0.75, -0.5]
    assert batch.inputs_T.dtype == batch.targets_T.dtype == torch.int64
    assert batch.behaviour_logprobs_T.dtype == batch.weights_T.dtype == torch.float32
    assert (batch.kept_TM, batch.routes_TYK, batch.reference_logprobs_T) == (None, None, None)


def test_tokens_are_counted_by_group() -> None:
    # [7, 2] of group 2, twice, and [8] of group 0; the group in between has no sample left, nor has the last.
    batch = policy_batch([*two(), two()[0]], None, "token", 4)
    experience = Experience(batch, torch.tensor([2, 0, 2]), torch.zeros(3), {})
    assert experience.tokens_by_group(4) == [1, 0, 4, 0]


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token", [0, 1 / 3, 1 / 3, 1 / 3]),  # three sampled tokens
        ("sequence", [0, 1 / 4, 1 / 4, 1 / 2]),  # two sequences, each the mean of its own
        ("constant", [0, 1 / 8, 1 / 8, 1 / 8]),  # two sequences of a nominal 4 tokens
    ],
)
def test_weights(aggregation: str, weights: list[float]) -> None:
    batch = policy_batch(two(), ADVANTAGES_B, aggregation, 4)  # type: ignore[arg-type]
    torch.testing.assert_close(batch.weights_T, torch.tensor(weights))


def test_kept_sets_stand_where_their_token_is_predicted() -> None:
    batch = policy_batch(two(kept_ids=[[7, 0, 3], [2]]), ADVANTAGES_B, "token", 4)
    assert batch.kept_TM is not None
    assert batch.kept_TM.tolist() == [[-1, -1, -1], [7, 0, 3], [2, -1, -1], [-1, -1, -1]]


def test_routes_stand_where_their_token_is_read() -> None:
    routes = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    trajectories = two(routes=routes)
    trajectories[1].turns[0].sample.routes = np.full((1, 2, 2), 77, dtype=np.int16)
    batch = policy_batch(trajectories, ADVANTAGES_B, "token", 4)
    assert batch.routes_TYK is not None
    assert batch.routes_TYK.tolist() == [*routes.tolist(), [[77, 77], [77, 77]]]
    trajectories[1].turns[0].sample.routes = None  # a part cannot be replayed
    assert policy_batch(trajectories, ADVANTAGES_B, "token", 4).routes_TYK is None


def test_each_token_has_the_engine_that_sampled_it() -> None:
    """A trajectory of two turns on two servers, with a tool's answer of two tokens between, and one of another server."""
    turns = (
        Turn((), Sample([7, 8], [-0.5, -0.25], [3, 3], "stop", engine=1)),
        Turn((3, 4), Sample([6, 2], [-2.0, -3.0], [3, 3], "stop", engine=0)),
    )
    first = Trajectory(PROBLEM, 0, (5, 6), turns, GRADE, Sampling(4))
    other = trajectory((5, 6), Sample([9], [-1.0], [3], "length", engine=2))
    batch = policy_batch([first, other], None, "token", 8)
    assert batch.engines_T is not None
    # Prompt (5, 6): the position of its last token predicts the first sampled one.
    assert batch.engines_T.tolist() == [-1, 1, 1, -1, -1, 0, 0, -1, 2]
    assert batch.engines_T[batch.scored_positions].tolist() == [1, 1, 0, 0, 2]
    assert (first.record(1, "")["engines"], policy_batch(two(), None, "token", 8).engines_T) == ([1, 0], None)


def test_samples_of_one_prompt_share_it() -> None:
    prompts = [(5, 6), (9,), (5, 6), (5, 6), (9,)]
    tokens = [[7, 2], [8], [], [4], [3]]
    trajectories = [
        trajectory(prompt, Sample(ids, [-1.0] * len(ids), [0] * len(ids), "length"))
        for prompt, ids in zip(prompts, tokens, strict=True)
    ]
    batch = policy_batch(trajectories, torch.zeros(5), "token", 4)
    assert batch.prefixes == ((0, 2), (1, 1), (2, 0), (0, 2), (1, 1))
    rows, place = batch.shared_rows() or (None, None)
    assert rows is not None
    assert place is not None
    assert batch.inputs_T[rows][place].tolist() == batch.inputs_T.tolist()
    assert len(rows) == batch.tokens - 3


def test_what_tools_answered_is_read_and_not_learned() -> None:
    """A prompt [5, 6] and the turns [7, 2] and [8, 3], with the tool's [4, 4, 9] between them."""
    routes = np.arange(8, dtype=np.int16).reshape(8, 1, 1)
    recomputed = routes + 100  # the second turn's prefill saw the first turn's positions once more
    turns = (
        Turn((), Sample([7, 2], [-0.5, -0.25], [3, 3], "stop", kept_ids=[[7, 0], [2]], routes=routes[:3])),
        Turn((4, 4, 9), Sample([8, 3], [-2.0, -3.0], [3, 4], "stop", kept_ids=[[8], [3, 1]], routes=recomputed)),
    )
    of_turns = Trajectory(PROBLEM, 0, (5, 6), turns, GRADE, Sampling(4))
    batch = policy_batch([of_turns], torch.tensor([0.5]), "sequence", 4)
    assert batch.inputs_T.tolist() == [5, 6, 7, 2, 4, 4, 9, 8]
    assert batch.targets_T.tolist() == [6, 7, 2, 4, 4, 9, 8, 3]
    assert batch.scored_T.tolist() == [False, True, True, False, False, False, True, True]
    assert batch.weights_T.tolist() == [0, 0.25, 0.25, 0, 0, 0, 0.25, 0.25]
    assert batch.behaviour_logprobs_T is not None
    assert batch.behaviour_logprobs_T.tolist() == [0, -0.5, -0.25, 0, 0, 0, -2.0, -3.0]
    assert batch.routes_TYK is not None
    assert batch.routes_TYK.flatten().tolist() == [0, 1, 2, 103, 104, 105, 106, 107]
    assert batch.kept_TM is not None
    assert batch.kept_TM.tolist() == [[-1, -1], [7, 0], [2, -1], *[[-1, -1]] * 3, [8, -1], [3, 1]]
    assert (of_turns.mask, of_turns.versions) == ([1, 1, 0, 0, 0, 1, 1], [3, 3, -1, -1, -1, 3, 4])
    assert of_turns.spans == (("sampled", 0, 0, 2), ("tool", 1, 2, 5), ("sampled", 1, 5, 7))
    assert of_turns.sampled_tokens == 4


def of_branches() -> Trajectory:
    """A prompt [5, 6], the turn [7, 2], and a branch that begins with [5, 4, 4], whose turns are [8, 2] and, after the user's [9],
    [3]."""
    routes = np.arange(12, dtype=np.int16).reshape(12, 1, 1)
    turns = (
        Turn((), Sample([7, 2], [-0.5, -0.25], [3, 3], "stop", kept_ids=[[7, 0], [2]], routes=routes[:3])),
        Turn((5, 4, 4), Sample([8, 2], [-2.0, -3.0], [3, 4], "stop", routes=routes[4:8]), "prompt"),
        Turn((9,), Sample([3], [-4.0], [4], "stop", routes=routes[4:10]), "user"),
    )
    return Trajectory(PROBLEM, 0, (5, 6), turns, GRADE, Sampling(4))


def test_a_branch_is_a_sequence_and_shares_its_trajectorys_advantage() -> None:
    trajectories = [two()[1], of_branches()]
    batch = policy_batch(trajectories, ADVANTAGES_B, "sequence", 4)
    assert batch.lengths == (1, 3, 6)
    assert batch.samples == (0, 1, 1)
    assert batch.inputs_T.tolist() == [9, 5, 6, 7, 5, 4, 4, 8, 2, 9]
    assert batch.targets_T.tolist() == [8, 6, 7, 2, 4, 4, 8, 2, 9, 3]
    assert batch.scored_T.tolist() == [True, False, True, True, False, False, True, True, False, True]
    assert batch.behaviour_logprobs_T is not None
    assert batch.behaviour_logprobs_T.tolist() == [-1.0, 0, -0.5, -0.25, 0, 0, -2.0, -3.0, 0, -4.0]
    assert batch.advantages_T is not None
    assert batch.advantages_T.tolist() == [0.75] + [-0.5] * 9
    # Five tokens of the second trajectory weigh as much as the one of the first.
    assert batch.weights_T.tolist() == pytest.approx([0.5, 0, 0.1, 0.1, 0, 0, 0.1, 0.1, 0, 0.1])
    assert batch.routes_TYK is None
    alone = policy_batch(trajectories[1:], None, "sequence", 4)
    assert alone.routes_TYK is not None
    assert alone.routes_TYK.flatten().tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert alone.kept_TM is not None
    assert alone.kept_TM.tolist() == [[-1, -1], [7, 0], [2, -1], *[[-1, -1]] * 6]
    assert policy_batch(two(), ADVANTAGES_B, "sequence", 4).samples is None


def test_a_part_of_a_batch_counts_the_samples_that_are_in_it() -> None:
    batch = policy_batch([two()[1], of_branches(), two()[0]], None, "constant", 4)
    part = selected(batch, [1, 2, 3], "constant", 4)
    assert part.samples == (1, 1, 2)
    assert part.weights_T.max() == pytest.approx(1 / 8)


def test_what_a_branched_trajectory_says_of_its_tokens() -> None:
    whole = of_branches()
    assert whole.token_ids == [7, 2, 5, 4, 4, 8, 2, 9, 3]
    assert whole.mask == [1, 1, 0, 0, 0, 1, 1, 0, 1]
    assert whole.versions == [3, 3, -1, -1, -1, 3, 4, -1, 4]
    assert whole.spans == (
        ("sampled", 0, 0, 2),
        ("prompt", 1, 2, 5),
        ("sampled", 1, 5, 7),
        ("user", 2, 7, 8),
        ("sampled", 2, 8, 9),
    )
    assert [(branch.prompt_ids, branch.token_ids) for branch in whole.branches] == [
        ((5, 6), [7, 2]),
        ((5, 4, 4), [8, 2, 9, 3]),
    ]
