"""Blocks of rows are put into another order: the permutation by value, and against a sort of labels."""

from itertools import permutations, product

import torch

from nmoe.parallel.dispatcher import regrouped


def test_the_example_of_the_docstring() -> None:
    assert regrouped(torch.tensor([[1, 2], [1, 0]]), [0, 1], [1, 0]).tolist() == [0, 3, 1, 2]


def test_any_order_is_that_of_sorted_labels() -> None:
    counts = torch.randint(3, (2, 3, 2), generator=torch.Generator().manual_seed(0))
    for lie, wanted in product(permutations(range(3)), repeat=2):
        labels = [
            block
            for at in product(*(range(counts.shape[axis]) for axis in lie))
            for block in [tuple(at[lie.index(a)] for a in wanted)]
            * int(counts[tuple(at[lie.index(a)] for a in range(3))])
        ]
        expected = sorted(range(len(labels)), key=lambda row: (labels[row], row))
        assert regrouped(counts, lie, wanted).tolist() == expected
