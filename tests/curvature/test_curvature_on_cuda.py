"""On a GPU, mapped over runs, every kind of curvature is what the CPU finds for each run alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import NETWORKS, make, some_vector
from factors import along, combine
from torch import Tensor, nn
from torch.func import vmap

from glocal import losses
from glocal.curvature.hessian import decomposition, hessian
from glocal.curvature.kronecker import mean_factors, multiply
from glocal.curvature.lanczos import lanczos
from glocal.curvature.layers import affine_layers
from glocal.curvature.output_jacobians import every_output, factored
from glocal.curvature.products import gauss_newton_product, hessian_product
from glocal.curvature.vector import flatten, unflatten
from glocal.tree import Params, Tree, map_tree, select, stack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def everything(module: nn.Module, params: Params, buffers: Params, x: Tensor, y: Tensor, loss: Any, v: Params) -> Tree:
    """One run's curvature in every form."""
    plain = affine_layers(module, x.shape[1:], x)
    gradients = factored(module, params, buffers, x, every_output, plain)
    kronecker = mean_factors(module, params, buffers, x, loss.output_hessian_sqrt, chunk=4)
    product = hessian_product(module, params, buffers, x, y, loss, chunk=4)
    pairs = lanczos(lambda e: flatten(product(unflatten(e, params))), flatten(v), 4)
    outer, functional = decomposition(module, params, buffers, x, y, loss)
    return {
        "hessian": {"whole": hessian(module, params, buffers, x, y, loss), "outer": outer, "functional": functional},
        "gauss-newton": gauss_newton_product(module, params, buffers, x, loss)(v),
        "kronecker": kronecker,
        "multiplied": multiply(kronecker, v),
        "values": pairs.values,
        "residuals": pairs.residuals,
        "along": along(gradients, plain, v),
        "combined": combine(gradients, plain, along(gradients, plain, v), params),
    }


@pytest.mark.parametrize("loss", losses.LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_cohort_on_a_gpu_is_the_loop_on_a_cpu(network: str, loss: str) -> None:
    runs = [make(network, loss, seed=seed) for seed in range(3)]
    module, params, _, x, y, criterion = runs[0]
    v = some_vector(params)
    alone = [everything(*case, v) for case in runs]

    def to_gpu(tree: Params) -> Tree:
        return map_tree(lambda leaf: leaf.cuda(), tree)

    module, v_there = module.cuda(), to_gpu(v)

    def one(params: Params, buffers: Params) -> Tree:
        return everything(module, params, buffers, x.cuda(), y.cuda(), criterion, v_there)

    together = vmap(one)(to_gpu(stack([c.params for c in runs])), to_gpu(stack([c.buffers for c in runs])))
    for run in range(3):
        here = map_tree(lambda leaf: leaf.cpu(), select(together, run))
        torch.testing.assert_close(here, alone[run], rtol=1e-7, atol=1e-9)
