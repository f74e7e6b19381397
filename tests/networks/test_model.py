"""The network as functions of its parameters: against plain modules, plain autograd and single samples."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from glocal import losses
from glocal.networks.mlp import MLP
from glocal.networks.model import Model
from glocal.tree import Params, select, stack

QUICK = settings(deadline=None, max_examples=30, derandomize=True)
CLASSES = 3


class WithBatchNorm(nn.Module):
    """A convolution and a hidden layer, each with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm2d = nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2)
        self.hidden, self.norm1d, self.head = nn.Linear(18, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2d(self.conv(x)).relu().flatten(1)
        return self.head(self.norm1d(self.hidden(x)).tanh())


def seeded(make: type[nn.Module], seed: int = 0, *arguments: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(*arguments).double()


def parameters_of(module: nn.Module) -> Params:
    return {k: p.detach().clone() for k, p in module.named_parameters()}


def buffers_of(module: nn.Module) -> Params:
    return {k: b.clone() for k, b in module.named_buffers()}


def model_of(module: nn.Module, vectorised: bool = False) -> Model:
    return Model(copy.deepcopy(module), losses.get("cross-entropy"), 2, vectorised=vectorised)


def images(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(n) % CLASSES


def assert_same(a: Params, b: Params) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def torchs_gradients(module: nn.Module, x: Tensor, y: Tensor) -> Params:
    """Return ∇ of the mean cross-entropy as an ordinary training loop computes it; updates the module's buffers."""
    module.zero_grad()
    functional.cross_entropy(module(x), y).backward()
    return {k: p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}


def test_uint8_inputs_are_scaled() -> None:
    model = Model(MLP(16, CLASSES, (5,)), losses.get("cross-entropy"), 1)
    params = parameters_of(model.module)
    raw = torch.arange(256, dtype=torch.uint8).view(16, 1, 4, 4)
    scaled = torch.tensor([i / 255 for i in range(256)]).view(16, 1, 4, 4)
    y = torch.arange(16) % CLASSES
    assert torch.equal(model.outputs(params, raw), model.outputs(params, scaled))
    assert_same(model.grad(params, raw, y), model.grad(params, scaled, y))
    assert torch.equal(model.prepare(scaled * 300), scaled * 300)


class Tokens(nn.Module):
    """The mean of embedded tokens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


class Doubled(nn.Module):
    """A network in float64 whatever its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(25, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.double().flatten(1))


def test_outputs_keep_the_precision_of_the_network() -> None:
    module, (x, _) = Doubled(), images(4)
    outputs = model_of(module).outputs(parameters_of(module), x.float())
    assert outputs.dtype == torch.float64
    assert torch.equal(outputs, module(x.float()))


def test_tokens_reach_the_network_as_they_are() -> None:
    module, x = Tokens(), torch.tensor([[0, 1, 299], [255, 7, 7]])
    params = parameters_of(module)
    assert torch.equal(model_of(module).outputs(params, x), module(x))
    halves = Model(copy.deepcopy(module), losses.get("cross-entropy"), precision="bf16").outputs(params, x)
    assert halves.dtype == torch.float32
    assert torch.equal(halves, copy.deepcopy(module).bfloat16()(x).float())


def test_loss_is_the_mean_and_losses_are_its_terms() -> None:
    module = seeded(MLP, 0, 25, CLASSES)
    model, params = model_of(module), parameters_of(module)
    x, y = images(7)
    expected = functional.cross_entropy(module(x), y, reduction="none").detach()
    torch.testing.assert_close(model.losses(params, x, y), expected)
    torch.testing.assert_close(model.loss(params, x, y), expected.mean())


@pytest.mark.parametrize("chunk", [1, 3, 7, 2000])
def test_mean_loss_does_not_depend_on_its_chunks(chunk: int) -> None:
    module = seeded(MLP, 0, 25, CLASSES)
    x, y = images(7)
    expected = functional.cross_entropy(module(x), y).detach()
    torch.testing.assert_close(model_of(module).mean_loss(parameters_of(module), x, y, chunk), expected)


WEIGHTS = st.lists(st.sampled_from([0.0, 0.0625, 0.5, 1.0, 2.0]), min_size=5, max_size=5)


@QUICK
@given(WEIGHTS)
def test_a_weighted_loss_is_the_weighted_mean(weights: list[float]) -> None:
    module = seeded(MLP, 0, 25, CLASSES)
    x, y = images(5)
    each = functional.cross_entropy(module(x), y, reduction="none").tolist()
    expected = sum(w * e for w, e in zip(weights, each, strict=True)) / (sum(weights) or 1)
    weighted = model_of(module).loss(parameters_of(module), x, y, torch.tensor(weights, dtype=torch.float64))
    assert float(weighted) == pytest.approx(expected, rel=1e-12)


def test_weights_of_zero_and_one_choose_examples() -> None:
    module = seeded(MLP, 0, 25, CLASSES)
    x, y = images(6)
    chosen = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    expected = torchs_gradients(module, x[chosen.bool()], y[chosen.bool()])
    assert_same(model_of(module).grad(parameters_of(module), x, y, chosen), expected)


def test_zero_weights_give_a_zero_gradient() -> None:
    module = seeded(MLP, 0, 25, CLASSES)
    x, y = images(6)
    gradients = model_of(module).grad(parameters_of(module), x, y, torch.zeros(6))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients.values())


@pytest.mark.parametrize("vectorised", [False, True])
def test_grad_of_an_unused_parameter_is_zero(vectorised: bool) -> None:
    module = seeded(MLP, 0, 25, CLASSES)
    module.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
    x, y = images(4)
    assert model_of(module, vectorised).grad(parameters_of(module), x, y)["idle"].tolist() == [0, 0]


def test_binding_leaves_the_original_buffers_untouched() -> None:
    module = seeded(WithBatchNorm)
    model, held = model_of(module), buffers_of(module)
    x, y = images(8)
    bound = model.bind(held)
    bound.loss(parameters_of(module), x, y)
    assert_same(held, buffers_of(module))
    assert_same(buffers_of(model.module), buffers_of(module))
    assert model.buffers == {}
    assert any(not torch.equal(bound.buffers[k], held[k]) for k in held)


def test_two_training_passes_update_the_buffers_as_torch_does() -> None:
    module = seeded(WithBatchNorm)
    bound, params = model_of(module).bind(buffers_of(module)), parameters_of(module)
    module.train()
    for seed in (1, 2):
        x, y = images(8, seed)
        expected = functional.cross_entropy(module(x), y).detach()
        torch.testing.assert_close(bound.loss(params, x, y), expected)
    assert_same(bound.buffers, buffers_of(module))
    assert int(bound.buffers["norm2d.num_batches_tracked"]) == 2


def test_evaluation_changes_nothing_and_uses_the_running_statistics() -> None:
    module = seeded(WithBatchNorm)
    module.train()
    module(images(30, 4)[0])
    trained = buffers_of(module)
    evaluating = model_of(module).bind(trained).eval_mode()
    x, y = images(8)
    expected = functional.cross_entropy(module.eval()(x), y).detach()
    torch.testing.assert_close(evaluating.loss(parameters_of(module), x, y), expected)
    assert_same(evaluating.buffers, trained)
    one_by_one = torch.cat([evaluating.outputs(parameters_of(module), row[None]) for row in x])
    torch.testing.assert_close(evaluating.outputs(parameters_of(module), x), one_by_one)


def test_eval_mode_leaves_the_original_model_in_training() -> None:
    module = seeded(WithBatchNorm)
    bound = model_of(module).bind(buffers_of(module))
    bound.eval_mode()
    bound.loss(parameters_of(module), *images(8))
    assert int(bound.buffers["norm2d.num_batches_tracked"]) == 1


@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_grad_and_its_buffers_are_torchs(vectorised: bool, training: bool) -> None:
    module = seeded(WithBatchNorm)
    module.train()
    module(images(30, 4)[0])
    bound, params = model_of(module, vectorised).bind(buffers_of(module), training), parameters_of(module)
    module.train(training)
    x, y = images(8)
    expected = torchs_gradients(module, x, y)
    assert_same(bound.grad(params, x, y), expected)
    assert_same(bound.buffers, buffers_of(module))


@pytest.mark.parametrize("make", [WithBatchNorm, lambda: MLP(25, CLASSES, (6,))], ids=["batchnorm", "mlp"])
def test_grad_batched_over_runs(make: type[nn.Module]) -> None:
    modules = [seeded(make, seed) for seed in range(4)]
    model = model_of(modules[0], vectorised=True)
    data = [images(8, 10 + run) for run in range(4)]

    def one(params: Params, buffers: Params, x: Tensor, y: Tensor) -> tuple[Params, Params]:
        bound = model.bind(buffers)
        return bound.grad(params, x, y), bound.buffers

    stacked = stack([parameters_of(m) for m in modules]), stack([buffers_of(m) for m in modules])
    x, y = (torch.stack(part) for part in zip(*data, strict=True))
    gradients, buffers = vmap(one)(*stacked, x, y)
    for run, module in enumerate(modules):
        module.train()
        assert_same(select(gradients, run), torchs_gradients(module, *data[run]))
        assert_same(select(buffers, run), buffers_of(module))
