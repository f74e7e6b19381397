"""On a GPU, mapped over runs, every kind of curvature is what the CPU finds for each run alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import NETWORKS, make, some_vector
from torch.func import vmap

from glocal import losses
from glocal.curvature.hessian import functional_hessian, ggn, hessian
from glocal.curvature.jacobian import every_output, jacobian, jvp_and_vjp
from glocal.curvature.kronecker import kronecker_factors, kronecker_product
from glocal.curvature.lanczos import lanczos
from glocal.curvature.operators import ggn_operator, hessian_operator
from glocal.risk import Risk
from glocal.tree import Params, Tree, map_tree, select, stack, to_vector

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def everything(risk: Risk, v: Params) -> Tree:
    """One run's curvature in every form."""
    chunked = replace(risk, chunk_size=4)
    kronecker = kronecker_factors(chunked)
    pairs = lanczos(hessian_operator(chunked), to_vector(v), 4)
    jvp, vjp = jvp_and_vjp(risk.module, jacobian(risk, every_output), v)
    return {
        "hessian": {"whole": hessian(risk), "outer": ggn(risk), "functional": functional_hessian(risk)},
        "gauss-newton": ggn_operator(risk) @ v,
        "kronecker": kronecker,
        "multiplied": kronecker_product(kronecker, v),
        "values": pairs.values,
        "residuals": pairs.residuals,
        "jvp": jvp,
        "vjp": vjp(jvp),
    }


@pytest.mark.parametrize("loss", losses.LOSSES)
@pytest.mark.parametrize("network", NETWORKS)
def test_cohort_on_a_gpu_is_the_loop_on_a_cpu(network: str, loss: str) -> None:
    runs = [make(network, loss, seed=seed) for seed in range(3)]
    v = some_vector(runs[0].params)
    alone = [everything(risk, v) for risk in runs]

    def to_gpu(tree: Any) -> Tree:
        return map_tree(lambda leaf: leaf.cuda(), tree)

    module, x, y, v_there = runs[0].module.cuda(), runs[0].x.cuda(), runs[0].y.cuda(), to_gpu(v)

    def one(params: Params, buffers: Params) -> Tree:
        return everything(Risk(module, params, buffers, x, y, runs[0].loss), v_there)

    together = vmap(one)(to_gpu(stack([c.params for c in runs])), to_gpu(stack([c.buffers for c in runs])))
    for run in range(3):
        here = map_tree(lambda leaf: leaf.cpu(), select(together, run))
        torch.testing.assert_close(here, alone[run], rtol=1e-7, atol=1e-9)
