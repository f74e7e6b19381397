"""`FunctionalModule` against `torch.func.functional_call`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations

from glocal.networks.batchnorm import BatchNorm2d
from glocal.networks.model import FunctionalModule


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("fleeting", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) + self.shift) * self.fleeting


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))


def parametrized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.parametrize("make", [Tied, normalised, parametrized])
def test_it_is_functional_call(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make().train()
    before = copy.deepcopy(module.state_dict())
    tensors = {k: t.detach() for k, t in (*module.named_parameters(), *module.named_buffers())}
    ours = {k: t + 0.5 if t.is_floating_point() else t.clone() for k, t in tensors.items()}
    theirs = {k: t.clone() for k, t in ours.items()}
    x = torch.randn(5, 4)
    outputs, replaced = FunctionalModule(module)(ours, x)
    assert torch.equal(outputs, functional_call(module, theirs, (x,)))
    assert not replaced
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), "what a forward pass changes, it changes in the tensors given"
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[key]), "the module's own tensors are back and as they were"


def test_under_vmap_and_grad() -> None:
    torch.manual_seed(0)
    module = Tied()
    call = FunctionalModule(module)
    tensors = {k: t.detach() for k, t in (*module.named_parameters(), *module.named_buffers())}
    stacked = {k: torch.stack([t, 2 * t]) for k, t in tensors.items()}
    x = torch.randn(5, 4)
    torch.testing.assert_close(
        vmap(call, in_dims=(0, None))(stacked, x)[0][1], call({k: 2 * t for k, t in tensors.items()}, x)[0]
    )
    slope = torch.func.grad(lambda t: call(t, x)[0].sum())(tensors)
    expected = torch.func.grad(lambda t: functional_call(module, t, (x,)).sum())(tensors)
    for key in slope:
        torch.testing.assert_close(slope[key], expected[key])


def test_replaced_buffers_are_returned() -> None:
    torch.manual_seed(0)
    module, x = BatchNorm2d(3).train(), torch.randn(4, 3, 2, 2)
    given = {k: t.detach().clone() for k, t in (*module.named_parameters(), *module.named_buffers())}
    kept = {k: t.clone() for k, t in given.items()}
    _, replaced = FunctionalModule(module)(given, x)
    torchs = nn.BatchNorm2d(3).train()
    torchs(x)
    assert replaced.keys() == {"running_mean", "running_var"}
    for key, tensor in replaced.items():
        torch.testing.assert_close(tensor, torchs.get_buffer(key))
    assert all(torch.equal(given[k], kept[k]) for k in given)
    assert torch.equal(module.get_buffer("running_mean"), torch.zeros(3))


def test_the_modules_tensors_are_restored_after_an_error() -> None:
    module = nn.Linear(4, 2)
    own = module.weight
    with pytest.raises(RuntimeError):
        FunctionalModule(module)({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, torch.zeros(1, 9))
    assert module.weight is own
