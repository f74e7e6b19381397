"""The top ten eigenpairs of trained networks' Hessians: ours in single precision, beside ARPACK on another library's
operators and on plain autograd in double precision."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from glocal import challenges, losses
from glocal.curvature.lanczos import Eigenpairs, eigenpairs
from glocal.networks import mlp, resnet18
from glocal.risk import Risk

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a library it depends on still scripts functions
    from curvlinops import HessianLinearOperator

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
COUNT = 10


class PlainBlock(nn.Module):
    """A residual block of torch's own layers, under the names of ours."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.shortcut(x)).relu()


class PlainResNet18(nn.Module):
    """ResNet-18 of torch's own layers: our convolution has no forward-mode derivative, which curvlinops takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        sides = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
        pairs = [(PlainBlock(a, b, stride), PlainBlock(b, b, 1)) for a, b, stride in sides]
        self.blocks = nn.Sequential(*(block for pair in pairs for block in pair))
        self.head = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.conv(x)).relu()).mean((-2, -1)))


class Trained(NamedTuple):
    """A network in evaluation mode after some training, its data, and what we find."""

    network: nn.Module
    x: Tensor
    y: Tensor
    found: Eigenpairs

    @property
    def size(self) -> int:
        return self.found.vectors.shape[1]

    def times(self) -> Callable[[np.ndarray], np.ndarray]:
        """v ↦ H v by autograd alone, in double precision."""
        network = copy.deepcopy(self.network).double()
        params = list(network.parameters())
        loss = cross_entropy(network(self.x.double()), self.y)
        slope = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, create_graph=True)])

        def product(v: np.ndarray) -> np.ndarray:
            along = torch.from_numpy(v).double().flatten()
            parts = torch.autograd.grad(slope @ along, params, retain_graph=True)
            return torch.cat([part.flatten() for part in parts]).numpy()

        return product

    def agrees_with(self, operator: LinearOperator) -> None:
        """Eigenvalues to 1e-4 of each; eigenvectors, none of which is one of two, up to their sense."""
        values, vectors = eigsh(operator, COUNT, which="LM", tol=1e-6)
        order = np.argsort(-np.abs(values))
        np.testing.assert_allclose(self.found.values.double().numpy(), values[order], rtol=1e-4)
        along = (self.found.vectors.double().numpy() * vectors.T[order]).sum(1)
        np.testing.assert_allclose(np.abs(along), 1, atol=1e-4)


def trained(make: Callable[..., nn.Module], examples: int, pooled: int, steps: int, lr: float) -> Trained:
    data = challenges.make("rotated-digits", 1).task(0, 0).train
    x, y = avg_pool2d(data.x[:examples].float() / 255, pooled), data.y[:examples]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = make(tuple(x.shape[1:]), 10)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(network(x), y).backward()
        optimizer.step()
    network.eval()
    params = {k: p.detach().clone() for k, p in network.named_parameters()}
    risk = Risk(network, params, dict(network.named_buffers()), x, y, losses.get("cross-entropy"))
    return Trained(network, x, y, eigenpairs(risk, COUNT))


@pytest.fixture(scope="module")
def perceptron() -> Trained:
    """The paper's MLP, 784-100-100-10."""
    return trained(mlp, examples=300, pooled=1, steps=50, lr=0.1)


@pytest.fixture(scope="module")
def residual() -> Trained:
    """ResNet-18, narrow, on images of 7×7 pixels."""
    return trained(partial(resnet18, width=2), examples=40, pooled=4, steps=30, lr=0.05)


def by_curvlinops(network: nn.Module, case: Trained) -> LinearOperator:
    network = copy.deepcopy(network).double().eval()
    data = [(case.x.double(), case.y)]
    params = list(network.parameters())
    made = HessianLinearOperator(network, nn.CrossEntropyLoss(), params, data, check_deterministic=False)
    return made.to_scipy()


def by_autograd(case: Trained) -> LinearOperator:
    return LinearOperator((case.size, case.size), matvec=case.times(), dtype=np.float64)


def test_the_papers_mlp_beside_curvlinops(perceptron: Trained) -> None:
    assert perceptron.size == 89_610
    perceptron.agrees_with(by_curvlinops(perceptron.network, perceptron))


def test_a_resnet_beside_plain_autograd(residual: Trained) -> None:
    residual.agrees_with(by_autograd(residual))


def test_a_resnet_beside_curvlinops(residual: Trained) -> None:
    twin = PlainResNet18(width=2)
    twin.load_state_dict(residual.network.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(twin.eval()(residual.x), residual.network(residual.x), rtol=1e-4, atol=1e-5)
    residual.agrees_with(by_curvlinops(twin, residual))


@pytest.mark.parametrize("network", ["perceptron", "residual"])
def test_true_residuals_are_no_larger_than_reported(network: str, request: pytest.FixtureRequest) -> None:
    """Reported in single precision and measured in double."""
    case: Trained = request.getfixturevalue(network)
    times, vectors = case.times(), case.found.vectors.double().numpy()
    for reported, value, vector in zip(case.found.residuals.tolist(), case.found.values.tolist(), vectors, strict=True):
        true = np.linalg.norm(times(vector) - value * vector)
        assert 0 < true <= reported < 1e-5 * case.found.values.abs().max()
