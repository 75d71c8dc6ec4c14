"""Token log-probabilities and entropies from hidden states: values by hand, gradients, cut-out tokens, bounded memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nmoe.model import logprobs
from nmoe.model.logprobs import head_logprobs, restrict_to_kept
from nmoe.model.ops.cpu import library, operations
from nmoe.model.ops.cpu.ops import CpuOps

INF = float("inf")


def of_logits(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Hidden states that are the logits, under a head that is the identity."""
    return head_logprobs(logits, torch.eye(logits.shape[-1], dtype=logits.dtype), targets, temperature)


def test_values_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log() + 7
    logprobs, entropy = of_logits(logits, torch.tensor([1, 0]))
    assert logprobs.tolist() == pytest.approx([math.log(2 / 8), math.log(1 / 3)], rel=1e-12)
    by_hand = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert entropy.tolist() == pytest.approx([by_hand, math.log(3)], rel=1e-12)


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0]], dtype=torch.float64).log()
    logprobs, entropy = of_logits(logits, torch.tensor([2]), temperature=0.5)  # probabilities squared
    assert logprobs.item() == pytest.approx(math.log(25 / 30))
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 30, 4 / 30, 25 / 30)))


def test_large_logits_do_not_overflow() -> None:
    logprobs, entropy = of_logits(torch.tensor([[1e4, 1e4 - 1, -1e4]]), torch.tensor([1]))
    assert logprobs.item() == pytest.approx(-1 - math.log1p(math.exp(-1)), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log1p(math.exp(-1)) + math.exp(-1) / (1 + math.exp(-1)), abs=1e-6)


def small_pieces(monkeypatch: pytest.MonkeyPatch, kept_logits: int) -> None:
    """Two rows of seven logits to a piece; `kept_logits = 0` computes everything again in the backward pass."""
    monkeypatch.setattr(logprobs, "_PIECE_LOGITS", 20)
    monkeypatch.setattr(logprobs, "_LEAST_ROWS", 1)
    monkeypatch.setattr(logprobs, "_KEPT_LOGITS", kept_logits)


@pytest.mark.parametrize("kept_logits", [0, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("restricted", [False, True])
def test_gradients_by_finite_differences(
    monkeypatch: pytest.MonkeyPatch, temperature: float, kept_logits: int, restricted: bool
) -> None:
    small_pieces(monkeypatch, kept_logits)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])
    kept = torch.tensor([[0, 2, 5], [6, -1, -1], [-1, -1, -1], [3, 1, -1], [1, 0, 6]]) if restricted else None

    def call(states: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        return head_logprobs(states, head, targets, temperature, kept)

    # Both outputs together, each alone, and with a fixed head or fixed states.
    assert torch.autograd.gradcheck(call, (states, head))
    assert torch.autograd.gradcheck(lambda states, head: call(states, head)[0], (states, head))
    assert torch.autograd.gradcheck(lambda states, head: call(states, head)[1], (states, head))
    assert torch.autograd.gradcheck(lambda states: call(states, head.detach()), (states,))
    assert torch.autograd.gradcheck(lambda head: call(states.detach(), head), (head,))


@pytest.mark.parametrize("kept_logits", [0, 1000])
@pytest.mark.parametrize("restricted", [False, True])
def test_the_entropy_s_gradient_is_autograd_s_on_dense_logits(
    monkeypatch: pytest.MonkeyPatch, kept_logits: int, restricted: bool
) -> None:
    small_pieces(monkeypatch, kept_logits)
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    targets, temperature = torch.tensor([2, 6, 3, 3, 1]), 0.7
    kept = torch.tensor([[0, 2, 5], [6, -1, -1], [-1, -1, -1], [3, 1, -1], [1, 0, 6]]) if restricted else None
    upstream = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs_N, entropy = head_logprobs(ours, torch.eye(7, dtype=torch.float64), targets, temperature, kept)
    dense = theirs / temperature
    if kept is not None:
        dense = restrict_to_kept(dense, kept).clamp(min=-1e4)  # -inf times 0 has no gradient
    reference = torch.distributions.Categorical(logits=dense)
    torch.testing.assert_close(entropy, reference.entropy(), rtol=1e-12, atol=1e-12)
    (upstream[0] @ logprobs_N + upstream[1] @ entropy).backward()
    (upstream[0] @ reference.log_prob(targets) + upstream[1] @ reference.entropy()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_an_entropy_that_no_loss_uses_leaves_the_backward_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(5, 3, requires_grad=True)
    head, targets = torch.randn(7, 3), torch.tensor([0, 6, 3, 3, 1])
    called: list[Tensor] = []
    entr = torch.special.entr
    monkeypatch.setattr(torch.special, "entr", lambda p, out: called.append(p) or entr(p, out=out))
    head_logprobs(states, head, targets)[0].sum().backward()
    assert not called
    head_logprobs(states, head, targets)[1].sum().backward()
    assert called


@pytest.mark.parametrize("kept_logits", [0, 2**24])
def test_agrees_with_torch_over_a_real_vocabulary(monkeypatch: pytest.MonkeyPatch, kept_logits: int) -> None:
    monkeypatch.setattr(logprobs, "_KEPT_LOGITS", kept_logits)
    generator = torch.Generator().manual_seed(1)
    rows = 250  # of 5000 logits: more than is taken in one piece
    states, head = torch.randn(rows, 16, generator=generator), torch.randn(5000, 16, generator=generator)
    targets, upstream = torch.randint(5000, (rows,), generator=generator), torch.randn(rows, generator=generator)
    ours = [states.clone().requires_grad_(), head.clone().requires_grad_()]
    theirs = [states.clone().requires_grad_(), head.clone().requires_grad_()]
    logprobs_N, entropy = head_logprobs(ours[0], ours[1], targets)
    reference = F.log_softmax(theirs[0] @ theirs[1].T, -1)
    torch.testing.assert_close(logprobs_N, reference[torch.arange(rows), targets], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(reference.exp() * reference).sum(-1), rtol=1e-4, atol=1e-5)
    logprobs_N.backward(upstream)
    reference[torch.arange(rows), targets].backward(upstream)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_of_low_precision_products_everything_else_is_fp32() -> None:
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(300, 16, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(300, (40,), generator=generator)
    logprobs_N, entropy = head_logprobs(states, head, targets)
    assert (logprobs_N.dtype, entropy.dtype) == (torch.float32, torch.float32)
    logits = F.linear(states.float(), head.float())  # not rounded to bf16 on the way
    reference = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs_N, reference[torch.arange(40), targets], rtol=1e-6, atol=1e-5)
    logprobs_N.sum().backward()
    d_logits = F.one_hot(targets, 300).float() - logits.softmax(-1)
    assert states.grad is not None
    assert head.grad is not None
    assert states.grad.dtype == head.grad.dtype == torch.bfloat16
    torch.testing.assert_close(states.grad.float(), d_logits @ head.float(), rtol=0.02, atol=0.05)
    torch.testing.assert_close(head.grad.float(), d_logits.T @ states.float(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("kept_logits", [0, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_vocabulary_goes_through_the_head_by_many_rows(
    monkeypatch: pytest.MonkeyPatch, kept_logits: int, dtype: torch.dtype
) -> None:
    """A piece of few rows would read the whole head for each, and add to its whole gradient."""
    monkeypatch.setattr(logprobs, "_KEPT_LOGITS", kept_logits)
    monkeypatch.setattr(logprobs, "_PIECE_LOGITS", 2**12)
    monkeypatch.setattr(logprobs, "_LEAST_ROWS", 32)
    rows: list[int] = []
    through_head = logprobs._Head.logits

    def counted(*args):
        out = through_head(*args)
        rows.append(out.shape[0])
        return out

    monkeypatch.setattr(logprobs._Head, "logits", counted)
    monkeypatch.setattr(CpuOps, "takes_head", lambda *_: False)  # as where there is no compiler
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(80, 16, generator=generator).to(dtype).requires_grad_()
    head = (0.3 * torch.randn(3000, 16, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(3000, (80,), generator=generator)
    logprobs_N, _ = head_logprobs(states, head, targets)
    logprobs_N.sum().backward()
    assert rows == [32, 32, 16] * (1 if kept_logits else 2)
    logits = states.detach().float() @ head.detach().float().T
    torch.testing.assert_close(logprobs_N, logits.log_softmax(-1)[torch.arange(80), targets], rtol=1e-5, atol=1e-5)
    d_logits = F.one_hot(targets, 3000).float() - logits.softmax(-1)
    assert states.grad is not None
    assert head.grad is not None
    assert head.grad.is_contiguous()
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.03}
    torch.testing.assert_close(states.grad.float(), d_logits @ head.detach().float(), **tolerance)
    torch.testing.assert_close(head.grad.float(), d_logits.T @ states.detach().float(), **tolerance)


with_kernels = pytest.mark.skipif(library.library() is None, reason="no C++ compiler")

# More than one chunk of the vocabulary, block of tokens and round of tokens, none of them full, and a width that fills no vector.
WIDE = (2300, 5001, 21)


def wide(rows: int, vocabulary: int, width: int, scale: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    states, head = torch.randn(rows, width, generator=generator), torch.randn(vocabulary, width, generator=generator)
    return states, head.mul_(scale), torch.randint(vocabulary, (rows,), generator=generator)


@with_kernels
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("shape", "temperature"), [(WIDE, 1.0), (WIDE, 0.7), ((1, 4500, 16), 1.0), ((3, 6000, 40), 2.0)]
)
def test_a_wide_vocabulary_against_autograd_in_fp64(
    shape: tuple[int, int, int], temperature: float, exact: bool
) -> None:
    *ours, targets = wide(*shape)
    upstream = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(1))
    theirs = [x.double().requires_grad_() for x in ours]
    for x in ours:
        x.requires_grad_()
    logprobs_N, entropy = head_logprobs(*ours, targets, temperature, exact=exact)
    assert type(logprobs_N.grad_fn).__name__.startswith("_WideHead")
    dense = (theirs[0] @ theirs[1].T / temperature).log_softmax(-1)
    expected = dense[torch.arange(shape[0]), targets], -(dense.exp() * dense).sum(-1)
    ((logprobs_N * upstream[0]).sum() + (entropy * upstream[1]).sum()).backward()
    ((expected[0] * upstream[0]).sum() + (expected[1] * upstream[1]).sum()).backward()
    # Logits go beyond 16, where fp32's numbers lie 2e-6 apart.
    torch.testing.assert_close(logprobs_N.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=3e-5)


@with_kernels
def test_a_wide_vocabulary_in_bf16_rounds_gradients_alone() -> None:
    if not operations.multiplies_bf16():
        pytest.skip("this machine multiplies no pairs of bf16")
    states, head, targets = wide(300, 5000, 20)
    ours = [x.bfloat16().requires_grad_() for x in (states, head)]
    theirs = [x.detach().double().requires_grad_() for x in ours]
    logprobs_N, entropy = head_logprobs(*ours, targets, 0.7)
    assert type(logprobs_N.grad_fn).__name__.startswith("_WideHead")
    dense = (theirs[0] @ theirs[1].T / 0.7).log_softmax(-1)
    expected = dense[torch.arange(300), targets], -(dense.exp() * dense).sum(-1)
    (logprobs_N.sum() + entropy.sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    torch.testing.assert_close(logprobs_N.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        # Each logit's gradient is rounded to 8 bits, and so is the sum of their products.
        error = mine.grad.double() - other.grad
        assert error.norm() < 2**-8 * other.grad.norm()
        assert error.abs().max() < 2**-7 * other.grad.abs().max()


@with_kernels
def test_a_wide_vocabulary_s_gradients_each_alone() -> None:
    states, head, targets = wide(300, 5000, 12)
    both = states.clone().requires_grad_(), head.clone().requires_grad_()
    head_logprobs(*both, targets)[0].sum().backward()
    frozen, fixed = states.clone().requires_grad_(), head.clone().requires_grad_()
    head_logprobs(frozen, head, targets)[0].sum().backward()
    head_logprobs(states, fixed, targets)[0].sum().backward()
    for alone, beside in ((frozen, both[0]), (fixed, both[1])):
        assert alone.grad is not None
        assert torch.equal(alone.grad, beside.grad)
    of_entropy = states.clone().requires_grad_()
    head_logprobs(of_entropy, head, targets)[1].sum().backward()
    dense = (reference := states.clone().requires_grad_()).matmul(head.T).log_softmax(-1)
    (-(dense.exp() * dense).sum()).backward()
    torch.testing.assert_close(of_entropy.grad, reference.grad, rtol=1e-4, atol=1e-5)


@with_kernels
def test_a_wide_vocabulary_s_bits_depend_neither_on_the_batch_nor_on_threads() -> None:
    states, head, targets = wide(*WIDE)
    whole = head_logprobs(states, head, targets)
    for some in (slice(0, 1), slice(40, 77), slice(2200, 2300)):
        for all_rows, part in zip(whole, head_logprobs(states[some], head, targets[some]), strict=True):
            assert torch.equal(all_rows[some], part)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for one, three in zip(whole, head_logprobs(states, head, targets), strict=True):
            assert torch.equal(one, three)
        ours, theirs = ([x.clone().requires_grad_() for x in (states, head)] for _ in range(2))
        head_logprobs(*ours, targets)[0].sum().backward()
        torch.set_num_threads(1)
        head_logprobs(*theirs, targets)[0].sum().backward()
    finally:
        torch.set_num_threads(threads)
    # Threads add up the states' gradients of their parts of the vocabulary.
    torch.testing.assert_close(ours[0].grad, theirs[0].grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours[1].grad, theirs[1].grad)


@with_kernels
def test_no_rows_of_a_wide_vocabulary() -> None:
    states, head = torch.zeros(0, 8, requires_grad=True), torch.ones(5000, 8, requires_grad=True)
    head_logprobs(states, head, torch.zeros(0, dtype=torch.int64))[0].sum().backward()
    assert head.grad is not None
    assert not head.grad.any()


@with_kernels
@pytest.mark.parametrize("lost", [float("nan"), INF])
def test_a_wide_vocabulary_with_states_that_are_not_finite(lost: float) -> None:
    states, head, targets = wide(70, 5000, 8)
    states[3, 2] = lost
    logprobs_N, _ = head_logprobs(states, head, targets)
    assert not logprobs_N[3].isfinite()
    assert logprobs_N[[0, 2, 4, 69]].isfinite().all()


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return out


@pytest.mark.parametrize("restricted", [False, True])
def test_no_tensor_holds_the_logits_of_all_rows(monkeypatch: pytest.MonkeyPatch, restricted: bool) -> None:
    rows, vocabulary, width = 4000, 500, 4
    monkeypatch.setattr(logprobs, "_PIECE_LOGITS", 50 * vocabulary)
    monkeypatch.setattr(logprobs, "_LEAST_ROWS", 1)
    monkeypatch.setattr(logprobs, "_KEPT_LOGITS", 0)
    states = torch.randn(rows, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    kept = torch.zeros(rows, 1, dtype=torch.int64) if restricted else None
    with Largest() as largest:
        head_logprobs(states, head, torch.zeros(rows, dtype=torch.int64), kept_NM=kept)[0].sum().backward()
    assert head.grad is not None
    assert 16_000 <= largest.elements <= 50 * vocabulary


def test_what_is_kept_for_the_backward_pass_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    states, head = torch.randn(30, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    targets = torch.zeros(30, dtype=torch.int64)
    for bound, expected in ((3000, 3000), (2999, 400)):
        monkeypatch.setattr(logprobs, "_KEPT_LOGITS", bound)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            head_logprobs(states, head, targets)
        assert max(saved) == expected
    with torch.no_grad(), Largest() as largest:
        monkeypatch.setattr(logprobs, "_KEPT_LOGITS", 3000)
        monkeypatch.setattr(logprobs, "_PIECE_LOGITS", 200)
        monkeypatch.setattr(logprobs, "_LEAST_ROWS", 1)
        head_logprobs(states, head, targets)
    assert largest.elements < 1000  # without a gradient there is nothing to keep


def test_no_rows_have_no_logprobs() -> None:
    logprobs, entropy = of_logits(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert (logprobs.tolist(), entropy.tolist()) == ([], [])


def test_tokens_cut_out_count_for_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0, 1.0]]).log().requires_grad_()
    kept = torch.tensor([[3, 0, 1]])
    logprobs, entropy = head_logprobs(logits, torch.eye(4), torch.tensor([1]), kept_NM=kept)
    assert logprobs.item() == pytest.approx(math.log(2 / 4))
    assert entropy.item() == pytest.approx(1.5 * math.log(2))
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.25, 0.5, 0.0, -0.25])


def test_restriction_keeps_each_row_its_own_set() -> None:
    logits = torch.arange(16, dtype=torch.float32).view(4, 4)
    kept = torch.tensor([[2, 0, -1], [1, -1, -1], [-1, -1, -1], [3, 2, 1]])
    assert restrict_to_kept(logits, kept).tolist() == [
        [0.0, -INF, 2.0, -INF],
        [-INF, 5.0, -INF, -INF],
        [8.0, 9.0, 10.0, 11.0],
        [-INF, 13.0, 14.0, 15.0],
    ]
    logprobs, _ = head_logprobs(logits, torch.eye(4), torch.tensor([2, 1, 3, 1]), kept_NM=kept)
    assert logprobs[0].item() == pytest.approx(-math.log1p(math.exp(-2)))
    assert logprobs[1].item() == 0.0
