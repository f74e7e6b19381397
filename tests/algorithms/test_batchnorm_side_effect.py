"""The published side effect on BatchNorm: running statistics after single-image passes in training mode."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from glocal import losses
from glocal.algorithms import EWC, OGDPublished
from glocal.algorithms.algorithm import Algorithm, Batch
from glocal.algorithms.ewc import disturb_batchnorm, task_fisher
from glocal.challenges import from_tasks
from glocal.challenges.challenge import Augment
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import Execution, Snapshot, train
from glocal.errors import GlocalError
from glocal.networks.model import Model
from glocal.networks.preprocess import InputTransform
from glocal.networks.resnet import resnet18

NARROW = partial(resnet18, width=2)


def test_it_is_a_loop_over_images_through_torchs_own_network() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 9, 2)
    ).double()
    params = {k: p.detach() for k, p in network.named_parameters()}
    buffers = {k: b.clone() for k, b in network.named_buffers()}
    x = torch.randn(7, 1, 5, 5, dtype=torch.float64)
    model = Model(copy.deepcopy(network), losses.get("cross-entropy")).bind(buffers)
    disturb_batchnorm(model, params, x)
    actual = model.buffers
    network.train()
    for image in x:
        network(image[None])
    for key, value in network.named_buffers():
        torch.testing.assert_close(actual[key], value)
    assert torch.equal(buffers["1.running_mean"], torch.zeros(3, dtype=torch.float64)), "what was given stays"


def test_the_published_fisher_is_a_loop_over_images_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = resnet18((3, 16, 16), 3, width=2).double()
    params = {k: p.detach().clone() for k, p in network.named_parameters()}
    buffers = {k: b.clone() + 0.1 for k, b in network.named_buffers()}
    x, y = torch.randn(5, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    model = Model(copy.deepcopy(network), losses.get("cross-entropy")).bind(buffers)
    data = Batch(x, y, torch.tensor(0), torch.tensor(5))
    network.train()
    expected = {k: torch.zeros_like(p) for k, p in params.items()}
    for image, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(network(image[None]), label[None])
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        for (k, _), g in zip(network.named_parameters(), gradients, strict=True):
            expected[k] += (-loss).exp().detach() * g.square() / 5
    for chunk in (500, 2):
        monkeypatch.setattr("glocal.algorithms.ewc.max_chunk_size", lambda _, chunk=chunk: chunk)
        actual = task_fisher(model, params, data, "published", "published")
        for k, f in actual.items():
            torch.testing.assert_close(f, expected[k], rtol=1e-6, atol=1e-12 * float(expected[k].max() + 1))
    kept = task_fisher(model, params, data, "published", "kept")
    assert not torch.allclose(kept["conv.weight"], actual["conv.weight"], rtol=0.1)


def test_other_batchnorm_is_refused_instead_of_left_in_evaluation_mode() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    params = {k: p.detach() for k, p in network.named_parameters()}
    model = Model(network, losses.get("cross-entropy")).bind(dict(network.named_buffers()))
    data = Batch(torch.randn(5, 8), torch.arange(5) % 3, torch.tensor(0), torch.tensor(5))
    with pytest.raises(GlocalError, match=r"statistics=published is for nn\.BatchNorm2d; the network has BatchNorm1d"):
        EWC(statistics="published").init(model, params, data)
    assert task_fisher(model, params, data, "published", "kept").keys() == params.keys()


def test_its_images_are_augmented_from_the_runs_own_stream() -> None:
    torch.manual_seed(0)
    network = resnet18((3, 16, 16), 3, width=2)
    params = {k: p.detach().clone() for k, p in network.named_parameters()}
    buffers = {k: b.clone() for k, b in network.named_buffers()}
    x, y = torch.randint(0, 255, (6, 3, 16, 16), dtype=torch.uint8), torch.arange(6) % 3
    data = Batch(x, y, torch.tensor(0), torch.tensor(6))
    model = Model(network, losses.get("cross-entropy"), transform=InputTransform(augment=Augment(2, flip=True)))
    keyed = lambda key: model.bind(buffers, key=torch.tensor(key))  # noqa: E731
    first, again, other = (task_fisher(keyed(k), params, data, "published", "published") for k in (3, 3, 4))
    plain = task_fisher(model.bind(buffers), params, data, "published", "published")
    assert torch.equal(first["conv.weight"], again["conv.weight"])
    assert not torch.allclose(first["conv.weight"], other["conv.weight"], rtol=1e-3)
    assert not torch.allclose(first["conv.weight"], plain["conv.weight"], rtol=1e-3)


def cohort(algorithm: Algorithm) -> Cohort:
    draw = torch.Generator().manual_seed(0)
    part = lambda n: (torch.randn(n, 3, 16, 16, generator=draw), torch.arange(n) % 2)  # noqa: E731
    built = from_tasks("noise", [(part(16), part(8)) for _ in range(2)], setting="domain")
    return Cohort(built, NARROW, (Member(0, 0.01, algorithm), Member(1, 0.05, algorithm)), 1, 8)


def last(algorithm: Algorithm, execution: Execution = "vectorised") -> Snapshot:
    *_, snapshot = train(cohort(algorithm), execution=execution)
    return snapshot


@pytest.mark.parametrize(
    "make",
    [partial(EWC, penalty=0.0, fisher="published"), partial(OGDPublished, slots=12)],
    ids=["ewc", "ogd-published"],
)
def test_training_stays_the_same_and_what_is_measured_does_not(make: partial) -> None:
    kept, published = (last(make(statistics=name)) for name in ("kept", "published"))
    for key, value in kept.state.params.items():
        torch.testing.assert_close(published.state.params[key], value, rtol=1e-5, atol=1e-6)
    mean = next(k for k in kept.state.buffers if k.endswith("running_var"))
    assert not torch.allclose(kept.state.buffers[mean], published.state.buffers[mean], rtol=0.01)
    losses_of = [s.record.arrays["test_class_loss"][:, 1:] for s in (kept, published)]
    assert (losses_of[0] - losses_of[1]).abs().mean() > 1e-3
    alone = last(make(statistics="published"), "sequential")
    for key, value in published.state.buffers.items():
        assert (alone.state.buffers[key] - value).double().norm() <= 1e-3 * value.double().norm(), key


@pytest.mark.parametrize("images", [1, 6])
def test_at_once_they_leave_what_they_leave_one_by_one(images: int) -> None:
    """Also where there are few, so that something of the old statistics is left."""
    torch.manual_seed(0)
    network = resnet18((3, 16, 16), 3, width=2).double()
    params = {k: p.detach().clone() for k, p in network.named_parameters()}
    buffers = {k: torch.rand_like(b) if b.is_floating_point() else b for k, b in network.named_buffers()}
    x = torch.randn(images, 3, 16, 16, dtype=torch.float64)
    model = Model(network, losses.get("cross-entropy"))
    one_by_one = model.bind(buffers)
    for image in x:
        one_by_one.outputs(params, image[None])
    bound = model.bind(buffers)
    disturb_batchnorm(bound, params, x)
    actual = bound.buffers
    assert actual.keys() == one_by_one.buffers.keys()
    for key, value in one_by_one.buffers.items():
        torch.testing.assert_close(actual[key], value)
        assert not torch.equal(actual[key], buffers[key]) or not value.is_floating_point()
