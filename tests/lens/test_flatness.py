"""Top eigenvalue and trace of every task's Hessian, beside the forgetting that followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quadratics import anywhere, dense_hessian, diverged, network, theta_of

from glocal.errors import GlocalError
from glocal.lens.forgetting import flatness


@pytest.mark.parametrize("spans", [1, 4])
def test_on_quadratics_it_is_exact(spans: int) -> None:
    known = anywhere(0, 3, spans)
    found = flatness(known.trace)
    for o in range(3):
        matrix = known.hessian(o)
        np.testing.assert_allclose(found.top[o], np.linalg.eigvalsh(matrix)[-1], rtol=1e-10)
        np.testing.assert_allclose(found.trace[o], np.trace(matrix), rtol=1e-10)
        assert found.top_error[o] < 1e-9
        assert found.trace_error[o] < 1e-9
        if o == 2:
            continue
        learnt = known.loss(o, known.solution(o))
        np.testing.assert_allclose(found.after_next[o], known.loss(o, known.solution(o + 1)) - learnt, rtol=1e-9)
        np.testing.assert_allclose(found.at_end[o], known.loss(o, known.solution(2)) - learnt, rtol=1e-9)
        np.testing.assert_allclose(found.moved[o], np.linalg.norm(known.solution(2) - known.solution(o)), rtol=1e-9)
    assert all(part[2].isnan() for part in (found.after_next, found.at_end, found.moved))


def test_on_a_network_it_is_as_near_as_it_says() -> None:
    trace = network(tasks=3)
    found = flatness(trace, steps=8, probes=8)
    assert found.trace_error.min() > 1e-4
    for o in range(3):
        matrix = dense_hessian(trace, o)
        assert abs(found.top[o] - torch.linalg.eigvalsh(matrix)[-1]) <= found.top_error[o] + 1e-12
        assert abs(found.trace[o] - matrix.trace()) < 5 * found.trace_error[o]
    torch.testing.assert_close(found.moved[0], (theta_of(trace, 2) - theta_of(trace, 0)).norm())


def test_a_seed_decides_all_that_is_random() -> None:
    one, same, other = (flatness(network(), probes=4, seed=seed).trace for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_one_task_has_a_curvature_and_nothing_that_followed() -> None:
    found = flatness(network(tasks=1))
    assert found.top.isfinite().all()
    assert found.at_end.isnan().all()


def test_a_run_that_diverged_has_no_flatness_from_there_on() -> None:
    found = flatness(diverged(network(), 3))
    assert found.top.isnan().tolist() == found.trace.isnan().tolist() == [False, False, True]
    assert found.after_next.isnan().tolist() == [False, True, True]
    assert found.at_end.isnan().all()


@pytest.mark.parametrize("options", [{"steps": 0}, {"probes": 2}, {"probes": 7}], ids=str)
def test_mistakes_are_told(options: dict[str, int]) -> None:
    ((name, given),) = options.items()
    with pytest.raises(GlocalError, match=f"{name} = {given} was given"):
        flatness(network(), **options)
