"""The same matrices by another library's operators: Hessian, Gauss–Newton matrix and KFAC of curvlinops."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from cases import CLASSES, ON_ALL, make
from torch import Tensor, nn

from glocal import losses
from glocal.curvature.hessian import hessian, to_dense
from glocal.curvature.kronecker import kronecker_factors, kronecker_product
from glocal.curvature.operators import Operator, ggn_operator
from glocal.risk import Risk

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a library it depends on still scripts functions
    from curvlinops import GGNLinearOperator, HessianLinearOperator, KFACLinearOperator

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
CRITERIA: dict[str, tuple[nn.Module, float]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), 1),
    "squared-error": (nn.MSELoss(), CLASSES / 2),
    "binary-cross-entropy": (nn.BCEWithLogitsLoss(), CLASSES),
}


def by_curvlinops(operator: Any, case: Risk, wanted: Mapping[str, Tensor], **options: Any) -> Tensor:
    """An operator's dense matrix. nn.MSELoss is our squared error times 2/K, nn.BCEWithLogitsLoss ours times 1/K."""
    own = dict(case.module.named_parameters())
    for k, p in case.params.items():
        own[k].data.copy_(p)
    criterion, factor = CRITERIA[case.loss.name]
    data = [(case.x[:3], case.y[:3]), (case.x[3:], case.y[3:])]
    matrix = operator(case.module, criterion, [own[k] for k in wanted], data, check_deterministic=False, **options)
    identity = torch.eye(sum(p.numel() for p in wanted.values()), dtype=torch.float64)
    return (matrix @ identity).detach() * factor


@ON_ALL
def test_hessian(network: str, loss: str) -> None:
    case = make(network, loss)
    expected = by_curvlinops(HessianLinearOperator, case, case.params)
    torch.testing.assert_close(hessian(case), expected, rtol=1e-9, atol=1e-12)


@ON_ALL
def test_gauss_newton_matrix(network: str, loss: str) -> None:
    case = make(network, loss)
    expected = by_curvlinops(GGNLinearOperator, case, case.params)
    torch.testing.assert_close(to_dense(ggn_operator(case)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("loss", losses.LOSSES)
@pytest.mark.parametrize("network", ["linear", "relu", "tanh", "gelu", "conv", "conv with BatchNorm"])
def test_kronecker_factors(network: str, loss: str, fisher: str) -> None:
    case = make(network, loss)

    def output_gradient(f: Tensor, y: Tensor) -> Tensor:
        return case.loss.output_gradient(f, y).unsqueeze(1)

    curvature = kronecker_factors(case, None if fisher == "type-2" else output_gradient)
    held = {k: p for k, p in case.params.items() if k not in curvature["diagonal"]}
    ours = to_dense(Operator(lambda v: kronecker_product({**curvature, "diagonal": {}}, v), held))
    theirs = by_curvlinops(
        KFACLinearOperator, case, held, fisher_type=fisher, kfac_approx="expand", separate_weight_and_bias=False
    )
    if fisher == "empirical" and loss == "squared-error":
        theirs /= 2  # squares of scores that are 2 (f − y) instead of f − y, where a Hessian is 2 instead of 1
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
