"""The chunked cross entropy against torch's own on all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from accel_train import chunked_cross_entropy
from accel_train.errors import ArgumentTypeError, LossError, OptionError

ROWS, WIDTH, VOCABULARY = 13, 6, 17


def inputs(dtype=torch.float64, ignored=3, shape=(ROWS,), size=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes):
        return (
            (size * torch.randn(*sizes, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        )

    labels = torch.randint(VOCABULARY, shape, generator=generator)
    labels.view(-1)[:ignored] = -100
    return draw(*shape, WIDTH), draw(VOCABULARY, WIDTH), draw(VOCABULARY), labels


def plain(hidden, weight, labels, bias=None, scale=1.0, softcap=None, **options):
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def gradients(loss, tensors, factor=1.0):
    return torch.autograd.grad(loss * factor, [tensor for tensor in tensors if tensor.requires_grad])


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.2},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "all": {"reduction": "sum", "label_smoothing": 0.1, "scale": -1.5, "softcap": 3.0},
    "ignored": {"ignore_index": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk_size", [1, 5, 13, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_equals_torch_in_float64(name, chunk_size, with_bias):
    options = OPTIONS[name]
    hidden, weight, bias, labels = inputs(ignored=0 if name == "ignored" else 3)
    if name == "ignored":
        labels[2:5] = 4
    used = (hidden, weight, bias) if with_bias else (hidden, weight)
    given = {**options, "bias": bias} if with_bias else options
    found = chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk_size, **given)
    wanted = plain(hidden, weight, labels, **given)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradients(found, used, 0.37),
        gradients(wanted, used, 0.37),
        rtol=1e-12,
        atol=1e-12,
    )


def test_leading_dimensions_of_hidden_states_and_labels():
    hidden, weight, _, labels = inputs(shape=(2, 3, 4))
    found = chunked_cross_entropy(hidden, weight, labels, chunk_size=5)
    wanted = plain(hidden, weight, labels)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    used = (hidden, weight)
    torch.testing.assert_close(gradients(found, used), gradients(wanted, used), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_what_needs_no_gradient(frozen):
    used = inputs()
    for position in frozen:
        used[position].requires_grad_(False)
    hidden, weight, bias, labels = used
    found = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=4)
    wanted = plain(hidden, weight, labels, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert found.requires_grad == wanted.requires_grad
    if wanted.requires_grad:
        torch.testing.assert_close(gradients(found, used), gradients(wanted, used), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"softcap": 3.0}, {"label_smoothing": 0.1}])
def test_no_label_counts(options):
    hidden, weight, bias, labels = inputs(ignored=ROWS)
    found = chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_size=4, **options)
    wanted = plain(hidden, weight, labels, bias, **options)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    used = (hidden, weight, bias)
    torch.testing.assert_close(gradients(found, used), gradients(wanted, used), equal_nan=True)


def test_no_rows():
    hidden, weight, _, labels = inputs(shape=(0,), ignored=0)
    found = chunked_cross_entropy(hidden, weight, labels, reduction="sum")
    assert found.item() == 0
    assert not gradients(found, (hidden, weight))[1].any()


def relative(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.5}])
def test_lower_precisions_are_as_exact_as_torch(dtype, autocast, options):
    if autocast and dtype is torch.float32:
        pytest.skip("autocast computes in 16 bits")
    errors = [[], []]
    for seed in range(5):
        start = torch.float32 if autocast else dtype
        hidden, weight, bias, labels = inputs(start, shape=(600,), size=0.7, seed=seed)
        used = (hidden, weight, bias)
        exact_inputs = [tensor.detach().double().requires_grad_() for tensor in used]
        loss = plain(exact_inputs[0], exact_inputs[1], labels, exact_inputs[2], **options)
        exact = (loss.detach(), *gradients(loss, exact_inputs, 0.3))
        for function, found, given in (
            (chunked_cross_entropy, errors[0], {"chunk_size": 64}),
            (plain, errors[1], {}),
        ):
            with torch.autocast("cpu", dtype, enabled=autocast):
                value = function(hidden, weight, labels, bias=bias, **given, **options)
            result = (value, *gradients(value, used, 0.3))
            assert [g.dtype for g in result[1:]] == [start] * 3
            assert value.dtype == torch.float32 or function is plain
            found.append([relative(a, b) for a, b in zip(result, exact, strict=True)])
    ours, theirs = (torch.tensor(found).mean(0) for found in errors)
    assert (ours <= 1.2 * theirs + 1e-7).all(), (ours, theirs)


def test_small_gradients_in_float16_survive_with_a_loss_scale():
    hidden, weight, _, labels = inputs(torch.float16, shape=(4,), ignored=0)
    with torch.no_grad():
        weight[:, 0] += 30 * F.one_hot(labels[0], VOCABULARY)
        hidden.fill_(0)[:, 0] = 0.7
        labels.fill_(labels[0])
    found = gradients(chunked_cross_entropy(hidden, weight, labels), (hidden, weight), 2.0**16)
    wanted = gradients(plain(hidden.float(), weight.float(), labels), (hidden, weight), 2.0**16)
    assert wanted[1].abs().max() > 0
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-6)


def test_a_kept_graph_gives_its_gradients_again():
    hidden, weight, _, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=4)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(2 * loss, (hidden, weight))
    torch.testing.assert_close([2 * g for g in first], list(again))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_second_derivative_is_refused():
    hidden, weight, _, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels)
    with pytest.raises(LossError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_without_gradients_the_loss_is_the_same():
    hidden, weight, _, labels = inputs()
    with torch.no_grad():
        found = chunked_cross_entropy(hidden, weight, labels, chunk_size=4)
    torch.testing.assert_close(found, plain(hidden, weight, labels).detach())
    assert not found.requires_grad


def test_checkpointing_computes_it_twice():
    from torch.utils.checkpoint import checkpoint

    hidden, weight, _, labels = inputs()
    found = checkpoint(chunked_cross_entropy, hidden * 1, weight, labels, use_reentrant=False)
    wanted = plain(hidden, weight, labels)
    used = (hidden, weight)
    torch.testing.assert_close(gradients(found, used), gradients(wanted, used), rtol=1e-12, atol=1e-12)


def test_compiled_code_calls_it():
    hidden, weight, _, labels = inputs()

    def loss_of(hidden):
        return chunked_cross_entropy(hidden.sin(), weight, labels, chunk_size=4) * 2

    found = torch.compile(loss_of, backend="eager")(hidden)
    wanted = loss_of(hidden)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, (hidden, weight)), gradients(wanted, (hidden, weight)))


@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_a_label_outside_of_the_vocabulary(label):
    hidden, weight, _, labels = inputs()
    labels[5] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"chunk_size": 0}, OptionError, "chunk_size=0"),
        ({"chunk_size": 2.0}, OptionError, "chunk_size=2.0"),
        ({"reduction": "none"}, OptionError, "'mean' or 'sum'"),
        ({"label_smoothing": 1.5}, OptionError, "from 0 to 1"),
        ({"softcap": 0.0}, OptionError, "greater than 0"),
    ],
)
def test_options_that_are_refused(changed, kind, message):
    hidden, weight, _, labels = inputs()
    with pytest.raises(kind, match=message):
        chunked_cross_entropy(hidden, weight, labels, **changed)


def test_shapes_that_are_refused():
    hidden, weight, _, labels = inputs()
    with pytest.raises(OptionError, match="12 labels"):
        chunked_cross_entropy(hidden, weight, labels[1:])
    with pytest.raises(OptionError, match=r"6 labels \(shape \(3, 2\)\) .* of shape \(2, 3\)"):
        chunked_cross_entropy(torch.randn(2, 3, 5), torch.randn(17, 5), torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(OptionError, match=r"\(13, 6\) and the head's weight \(17, 5\)"):
        chunked_cross_entropy(hidden, weight[:, 1:], labels)
    with pytest.raises(ArgumentTypeError, match="int32"):
        chunked_cross_entropy(hidden, weight, labels.int())
