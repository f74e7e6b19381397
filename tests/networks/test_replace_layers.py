"""Layers in place of torch's compute the same, for every run of a cohort, and count their batches."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import vmap

from glocal import tree
from glocal.networks.model import FunctionalModule
from glocal.networks.replace_layers import replace_layers
from glocal.tree import Params

RUNS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4, affine=False), nn.Hardswish(inplace=True)),
        *(nn.Conv2d(4, 3, (1, 2)), nn.BatchNorm2d(3, momentum=0.3), nn.Flatten()),
    )


def test_runs_of_the_replaced_network_are_those_of_torchs() -> None:
    module = network()
    ours, theirs = replace_layers(copy.deepcopy(module)), module
    x, draw = torch.randn(RUNS, 6, 2, 8, 8), torch.Generator().manual_seed(1)
    params = {k: torch.randn(RUNS, *p.shape, generator=draw) for k, p in module.named_parameters()}
    buffers = {k: b.expand(RUNS, *b.shape).clone() for k, b in module.named_buffers()}

    def one(params: Params, buffers: Params, x: Tensor) -> tuple[Tensor, Params]:
        own = {k: b.clone() for k, b in buffers.items()}
        outputs, changed = FunctionalModule(ours)({**params, **own}, x)
        return outputs, own | changed

    leaves = {k: p.requires_grad_() for k, p in params.items()}
    outputs, statistics = vmap(one)(leaves, buffers, x)
    grads = torch.autograd.grad(outputs.square().sum(), list(leaves.values()))
    for run in range(RUNS):
        theirs.load_state_dict({**tree.select(params, run), **tree.select(buffers, run)})
        expected = theirs.train()(x[run])
        torch.testing.assert_close(outputs[run], expected, rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(expected.square().sum(), list(theirs.parameters()))
        for ours_of_run, gradient in zip(grads, gradients, strict=True):
            torch.testing.assert_close(ours_of_run[run], gradient, rtol=1e-3, atol=1e-3)
        for name, buffer in theirs.named_buffers():
            torch.testing.assert_close(statistics[name][run], buffer, rtol=1e-4, atol=1e-5)


def test_only_layers_of_torch_itself_are_replaced() -> None:
    class OwnConvolution(nn.Conv2d):
        pass

    module = nn.Sequential(OwnConvolution(2, 2, 1), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False))
    types = [type(part) for part in replace_layers(module).children()]
    assert types[0] is OwnConvolution and types[1] is not nn.Conv2d and types[2] is nn.BatchNorm2d
