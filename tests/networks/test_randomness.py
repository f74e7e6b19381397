"""Random numbers in a network that come from a key: their distributions, and that nothing else is drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from glocal.networks.randomness import KeyedRandomness, draws_random_numbers
from glocal.rng import uniform


def drawn(function: Callable[[], Tensor], key: int | Tensor = 7) -> Tensor:
    """Call a function with a key; it must leave torch's global generator alone."""
    before = torch.get_rng_state()
    with KeyedRandomness(torch.as_tensor(key)):
        result = function()
    assert before.equal(torch.get_rng_state())
    return result


def test_dropout_drops_a_share_and_keeps_the_mean() -> None:
    x = torch.ones(200, 100)
    for module, share in ((nn.Dropout(0.3), 0.3), (nn.Dropout(0.0), 0.0), (nn.Dropout(1.0), 1.0)):
        y = drawn(partial(module, x))
        assert float((y == 0).float().mean()) == pytest.approx(share, abs=0.01)
        torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - share)) if share < 1 else y[y != 0])
    assert drawn(lambda: nn.Dropout(0.5).eval()(x)).equal(x)


@pytest.mark.parametrize(
    ("module", "shape", "axes"),
    [
        (nn.Dropout1d(0.5), (40, 30, 5), (2,)),
        (nn.Dropout2d(0.5), (40, 30, 5, 4), (2, 3)),
        (nn.Dropout3d(0.5), (40, 30, 2, 2, 2), (2, 3, 4)),
        (nn.Dropout2d(0.5), (30, 5, 4), (1, 2)),
    ],
)
def test_whole_channels_are_dropped(module: nn.Module, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    y = drawn(lambda: module(torch.ones(shape)))
    assert y.amax(axes).equal(y.amin(axes))
    assert 0.3 < float((y == 0).float().mean()) < 0.7


def test_in_place_dropout_changes_its_input() -> None:
    x = torch.ones(50)
    assert drawn(lambda: functional.dropout(x, 0.5, inplace=True)) is x
    assert set(x.tolist()) == {0.0, 2.0}


def test_noise_has_its_distribution() -> None:
    like = torch.zeros(400, 500)
    for normal in (drawn(lambda: torch.randn_like(like)), drawn(lambda: torch.randn(400, 500))):
        assert normal.isfinite().all() and abs(float(normal.mean())) < 0.01
        assert float(normal.std()) == pytest.approx(1, abs=0.01)
        assert float((normal.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.005)
    for flat in (drawn(lambda: torch.rand_like(like)), drawn(lambda: torch.rand((400, 500)))):
        assert float(flat.mean()) == pytest.approx(0.5, abs=0.005) and float(flat.min()) >= 0 and float(flat.max()) < 1
    chances = torch.tensor([0.0, 0.25, 1.0]).repeat(20_000, 1)
    for coins in (drawn(lambda: torch.bernoulli(chances)), drawn(lambda: chances.bernoulli())):
        torch.testing.assert_close(coins.mean(0), torch.tensor([0.0, 0.25, 1.0]), rtol=0, atol=0.01)
    assert float(drawn(lambda: torch.empty(10_000).bernoulli_(0.25)).mean()) == pytest.approx(0.25, abs=0.02)


def test_draws_differ_within_a_pass_and_between_keys_and_repeat_with_the_key() -> None:
    def two() -> Tensor:
        return torch.stack([functional.dropout(torch.ones(60)), functional.dropout(torch.ones(60))])

    first = drawn(two)
    assert not first[0].equal(first[1])
    assert drawn(two).equal(first) and not drawn(two, 8).equal(first)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_drops_its_weights(need_weights: bool, causal: bool) -> None:
    """With the identity as values, the output is the weights: dropped ones are 0, others twice as large."""
    tokens, batch = 6, 50
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(tokens, 1, dropout=0.5, batch_first=True)
    with torch.no_grad():
        attention.in_proj_weight[2 * tokens :] = torch.eye(tokens)
        attention.out_proj.weight.copy_(torch.eye(tokens))
    x, value = torch.randn(batch, tokens, tokens), torch.eye(tokens).expand(batch, -1, -1)
    mask = nn.Transformer.generate_square_subsequent_mask(tokens) if causal else None
    options: Any = {"attn_mask": mask, "need_weights": need_weights}
    weights = attention.eval()(x, x, value, **options)[0]
    found = drawn(lambda: attention.train()(x, x, value, **options)[0])
    kept = found != 0
    torch.testing.assert_close(found[kept], 2 * weights[kept], rtol=1e-4, atol=1e-6)
    assert float(kept[weights > 0].float().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attention_to_nothing_is_zero_as_in_torch(kind: str) -> None:
    """The second example has no key. A dropout that drops none must give torch's output and gradient."""
    query = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.tensor([[True, True, False], [False, False, False]])[:, None, :]
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)

    def attend(dropout: float) -> tuple[Tensor, Tensor]:
        attention = functional.scaled_dot_product_attention
        output = drawn(lambda: attention(query, query, query, mask, dropout))
        (gradient,) = torch.autograd.grad(output.square().sum(), query)
        return output, gradient

    for value, expected in zip(attend(1e-9), attend(0.0), strict=True):
        assert not expected.isnan().any() and not expected[1].any()
        torch.testing.assert_close(value, expected)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x + 0.1 * torch.randn_like(x))


def test_a_network_draws_the_same_alone_and_mapped() -> None:
    torch.manual_seed(0)
    module, keys, x = Noisy(), torch.tensor([3, 4, 5]), torch.randn(3, 4, 5, 8)

    def one(key: Tensor, x: Tensor) -> Tensor:
        return drawn(lambda: module(x), key)

    together = vmap(one)(keys, x)
    for run, key in enumerate(keys):
        torch.testing.assert_close(together[run], one(key, x[run]), rtol=1e-4, atol=1e-5)
    assert not together[0].equal(one(keys[1], x[0]))


def test_what_draws_is_found() -> None:
    x = torch.zeros(2, 5, 8)
    assert draws_random_numbers(Noisy(), x)
    assert not draws_random_numbers(nn.Linear(8, 3), x)


@pytest.mark.parametrize("expected", [0, 10, 25, 100])
def test_numbers_computed_ahead_are_those_of_the_sequence(expected: int) -> None:
    with KeyedRandomness(torch.tensor(7), expected) as random:
        parts = [torch.rand(2, 5), torch.rand(15), torch.rand(10)]
    assert torch.cat([part.flatten() for part in parts]).equal(uniform(torch.tensor(7), 35)) and random.drawn == 35
