"""Orthogonal gradient descent against dense gradients, dense bases and the quadratic of Theorem 5.1."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_problems import (
    CLASSES,
    batch_of,
    blobs,
    cohort_of,
    double_model,
    elsewhere,
    examples,
    flat,
    gradient,
    linear_network,
    small_mlp,
    train_to_the_end,
)
from torch import Tensor, nn
from torch.nn import functional

from glocal import challenges, losses
from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.ogd import OGD, OGDGTL, OGDAve, Orthogonal
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import MakeNetwork
from glocal.engine.loop import train
from glocal.errors import GlocalError
from glocal.networks.mlp import MLP, mlp
from glocal.networks.model import Model
from glocal.tree import Params, nbytes, select

VARIANTS = (OGD, OGDGTL, OGDAve)
QUICK = settings(deadline=None, max_examples=30, derandomize=True)


def scalar_outputs(variant: type[Orthogonal], outputs: Tensor, y: Tensor) -> list[Tensor]:
    """Of one sample's outputs, the numbers whose gradients a variant stores."""
    if variant is OGD:
        return list(outputs)
    return [outputs[int(y)]] if variant is OGDGTL else [outputs.sum() / outputs.shape[0]]


def gradients_by_hand(variant: type[Orthogonal], model: Model, params: Params, x: Tensor, y: Tensor) -> Tensor:
    """One plain backward pass a stored gradient, in evaluation mode: (M, P)."""
    rows = []
    for a, b in zip(x, y, strict=True):
        count = len(scalar_outputs(variant, model.eval_mode().outputs(params, a[None])[0], b))
        for k in range(count):
            value = lambda p, a=a, b=b, k=k: scalar_outputs(variant, model.eval_mode().outputs(p, a[None])[0], b)[k]  # noqa: E731
            rows.append(flat(gradient(value, params)))
    return torch.stack(rows)


def unflat(vector: Tensor, like: Params) -> Params:
    parts = vector.split([p.numel() for p in like.values()])
    return {k: part.view_as(p).to(p.dtype) for part, (k, p) in zip(parts, like.items(), strict=True)}


def outside_by_svd(j: Tensor, g: Tensor) -> Tensor:
    """g without its part in the rows' span, by a dense orthonormal basis."""
    _, values, basis = torch.linalg.svd(j.double(), full_matrices=False)
    basis = basis[values > 1e-10 * values[0]]
    return g.double() - basis.mT @ (basis @ g.double())


def learn(algorithm: Orthogonal, model: Model, params: Params, tasks: Sequence[tuple[Tensor, Tensor]]) -> Memory:
    """The memory after tasks that are stored whole, all at the same θ."""
    memory = algorithm.init(model, params, batch_of((tasks[0][0][:2], tasks[0][1][:2])))
    for number, task in enumerate(tasks):
        memory = algorithm.consolidate(model, params, memory, batch_of(task, 0, number))
    return memory


def followed(algorithm: Orthogonal, model: Model, memory: Memory, grads: Params) -> Tensor:
    return flat(algorithm.direction(model, grads, grads, memory, batch_of(examples(2, 0))))


# In real training, step by step.


@contextmanager
def noted_steps() -> Iterator[list[Tensor]]:
    """Every direction that is followed, as it moves θ."""
    steps: list[Tensor] = []
    direction = Orthogonal.direction

    def noted(self: Orthogonal, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        result = direction(self, model, grads, params, memory, batch)
        steps.append(flat({k: v.clone() for k, v in result.items()}))
        return result

    with patch.object(Orthogonal, "direction", noted):
        yield steps


def worst_cosine(
    algorithm: Orthogonal, challenge: Challenge, network: MakeNetwork, lr: float = 0.1, batch_size: int = 32
) -> tuple[float, int]:
    """The largest |cosine| between any step and any gradient stored before it, and how many gradients were stored.

    Stored samples are recognised in the data by their first layer's inputs; their gradients are taken by hand, in
    float64, at the θ_o where the task ended.
    """
    cohort = cohort_of(challenge, algorithm, [(0, lr)], network, epochs=1, batch_size=batch_size)
    model = Model(network(challenge.input_shape, challenge.outputs).double(), losses.get(challenge.loss))
    stored = torch.zeros(0)
    worst, known = 0.0, 0
    with noted_steps() as noted:
        for snapshot in train(cohort, execution="sequential"):
            if len(stored):
                assert len(noted) == -(-len(challenge.task(snapshot.finished - 1, 0).train.y) // batch_size)
                steps = torch.stack(noted).double()
                cosines = stored @ steps.mT / stored.norm(dim=1)[:, None] / steps.norm(dim=1)
                worst = max(worst, float(cosines.abs().max()))
            noted.clear()
            if snapshot.finished:
                data = challenge.task(snapshot.finished - 1, 0).train
                held = snapshot.state.memory["span"]["rows"]["inputs"]["layers.0"][0, known:]
                known += len(held)
                images = data.x.flatten(1).float() / (255 if data.x.dtype == torch.uint8 else 1)
                actual = [int((images == row).all(1).nonzero()[0]) for row in held]
                theta = {k: p[0].double() for k, p in snapshot.state.params.items()}
                new = gradients_by_hand(type(algorithm), model, theta, images[actual].double(), data.y[actual])
                stored = torch.cat([stored, new]) if len(stored) else new
    return worst, len(stored)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_is_orthogonal_to_every_stored_gradient_even_after_twenty_tasks(variant: type[Orthogonal]) -> None:
    worst, stored = worst_cosine(variant(slots=80), blobs((40,) * 20), small_mlp)
    assert stored == 80 and worst < 1e-5


def test_so_it_is_with_the_papers_network_on_digits() -> None:
    rotated = challenges.make("rotated-digits", tasks=3)
    tasks = [rotated.task(t, 0).train for t in range(3)]
    challenge = from_tasks(
        "digits", [((x[:600], y[:600]), (x[600:700], y[600:700])) for x, y in tasks], setting="domain"
    )
    worst, stored = worst_cosine(OGDGTL(slots=90), challenge, partial(mlp, hidden=(100, 100)), batch_size=100)
    assert stored == 90 and worst < 1e-5


def test_the_first_task_is_learnt_as_by_sgd() -> None:
    model, params = double_model()
    memory = OGD(slots=9).init(model, params, batch_of(examples(2, 0)))
    grads = elsewhere(params)
    assert torch.equal(followed(OGD(slots=9), model, memory, grads), flat(grads))


# Against a dense basis.


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 12, 3, stride=2)
        self.head = nn.Linear(12 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(self.wide(x).relu()).relu().flatten(1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


NETWORKS = {"mlp": lambda: MLP(36, CLASSES, (20, 10)), "convolutions": Convolutional, "normed": Normed}


def float_model(name: str, seed: int = 0) -> tuple[Model, Params]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = NETWORKS[name]()
        for k, buffer in module.named_buffers():
            if k.endswith(("mean", "var")):
                buffer.uniform_(0.2, 1.5)
    model = Model(module, losses.get("cross-entropy"), tasks=2, batch_size=4)
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    return model.bind(dict(module.named_buffers())), params


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(n, 1, 6, 6, generator=draw), torch.arange(n) % CLASSES


def in_double(model: Model, params: Params) -> tuple[Model, Params]:
    double = Model(copy.deepcopy(model.module).double(), model.criterion)
    buffers = {k: b.double() if b.is_floating_point() else b for k, b in model.buffers.items()}
    return double.bind(buffers), {k: p.double() for k, p in params.items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_projection_by_a_dense_basis(name: str, variant: type[Orthogonal]) -> None:
    model, params = float_model(name)
    tasks = [images(8, 1), images(8, 2)]
    algorithm = variant(slots=2 * 8 * (CLASSES if variant is OGD else 1))
    memory = learn(algorithm, model, params, tasks)
    x, y = (torch.cat(parts) for parts in zip(*tasks, strict=True))
    j = gradients_by_hand(variant, *in_double(model, params), x.double(), y)
    for seed in range(3):
        grads = elsewhere({k: torch.zeros_like(p) for k, p in params.items()}, seed)
        expected = outside_by_svd(j, flat(grads))
        actual = followed(algorithm, model, memory, grads).double()
        assert float((actual - expected).norm()) < 1e-5 * float(expected.norm())


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_outside_stays_as_it_is(variant: type[Orthogonal]) -> None:
    model, params = float_model("mlp")
    algorithm = variant(slots=48)
    memory = learn(algorithm, model, params, [images(8, 1), images(8, 2)])
    once = followed(algorithm, model, memory, elsewhere(params))
    twice = followed(algorithm, model, memory, unflat(once, params))
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-6 * float(once.norm()))


# Gradients that depend on each other.


def repeated(noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Eight images twice, the second time with some noise, and a black one."""
    x, y = images(8, seed)
    draw = torch.Generator().manual_seed(seed + 1)
    again = x + noise * torch.randn(x.shape, generator=draw)
    return torch.cat([x, again, torch.zeros(1, 1, 6, 6)]), torch.cat([y, y, y[:1]])


@QUICK
@given(st.integers(0, 1000), st.sampled_from([0.0] + [10.0**-e for e in range(1, 10)]), st.sampled_from([1, 2]))
def test_nearly_dependent_gradients_do_no_harm(seed: int, noise: float, passes: int) -> None:
    """Also where the step leads right into what two of them differ by. Twice applied, it is orthogonal all the same."""
    model, params = float_model("mlp", seed)
    x, y = repeated(noise, seed)
    algorithm = OGDGTL(slots=34, passes=passes)
    memory = learn(algorithm, model, params, [(x, y)])
    j = gradients_by_hand(OGDGTL, *in_double(model, params), x.double(), y)
    unit = j / j.norm(dim=1, keepdim=True)
    draw = torch.Generator().manual_seed(seed)
    g = torch.randn(j.shape[1], generator=draw, dtype=torch.float64) / j.shape[1] ** 0.5
    g = g + torch.nan_to_num(functional.normalize(unit[0] - unit[8], dim=0))
    actual = followed(algorithm, model, memory, unflat(g, params)).double()
    cosine = float((unit @ actual).abs().max() / g.norm())
    assert cosine < (1e-3 if passes == 1 else 5e-5)
    assert float(actual.norm()) < 1.001 * float(g.norm())


def test_equal_samples_are_as_good_as_one() -> None:
    model, params = double_model(tasks=1)
    x, y = examples(6, 3)
    grads = elsewhere(params)
    once = learn(OGD(slots=60), model, params, [(x, y)])
    twice = learn(OGD(slots=60), model, params, [(torch.cat([x, x]), torch.cat([y, y]))])
    a, b = (followed(OGD(slots=60), model, memory, grads) for memory in (once, twice))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_a_gradient_of_zeros_constrains_nothing() -> None:
    """A network that is one layer without bias, and an input of zeros."""
    model = Model(nn.Linear(5, CLASSES, bias=False).double(), losses.get("cross-entropy"))
    params = {"weight": torch.randn(CLASSES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    x, y = examples(3, 3)
    grads = elsewhere(params)
    without = learn(OGD(slots=12), model, params, [(x, y)])
    padded = learn(OGD(slots=12), model, params, [(torch.cat([x, torch.zeros_like(x[:1])]), torch.cat([y, y[:1]]))])
    a, b = (followed(OGD(slots=12), model, memory, grads) for memory in (without, padded))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert 0 < float(a.norm()) < float(flat(grads).norm())


def test_when_the_gradients_fill_the_space_nothing_is_left_to_learn() -> None:
    model, params = double_model(tasks=1, hidden=())
    memory = learn(OGD(slots=60), model, params, [examples(20, 3)])
    grads = elsewhere(params)
    assert float(followed(OGD(slots=60), model, memory, grads).norm()) < 1e-9 * float(flat(grads).norm())


# What Theorem 5.1 promises.


def test_a_linear_models_outputs_on_stored_samples_never_move() -> None:
    model, params = double_model(tasks=2, hidden=())
    first, second = examples(4, 3), examples(30, 4)
    ogd = OGD(slots=24)
    memory = learn(ogd, model, params, [first])
    before, elsewhere_before = model.outputs(params, first[0]), model.outputs(params, second[0])
    for _ in range(100):
        grads = model.grad(params, *second)
        step = ogd.direction(model, grads, params, memory, batch_of(second))
        params = {k: p - 0.5 * step[k] for k, p in params.items()}
    torch.testing.assert_close(model.outputs(params, first[0]), before, rtol=0, atol=1e-10)
    assert float((model.outputs(params, second[0]) - elsewhere_before).abs().max()) > 0.1


def test_so_it_is_in_the_engines_training() -> None:
    challenge = blobs((60, 60, 60))
    ends = states(OGD(slots=36), challenge)
    held = ends[-1][1]["span"]["rows"]["inputs"]["layers.0"][:3]
    outputs = [held @ params["layers.0.weight"].T + params["layers.0.bias"] for params, _ in ends]
    torch.testing.assert_close(outputs[3], outputs[1], rtol=0, atol=1e-5)
    assert float((outputs[1] - outputs[0]).abs().max()) > 0.1


def states(algorithm: Orthogonal, challenge: Challenge) -> list[tuple[Params, Memory]]:
    """θ and memory at every task boundary."""
    snapshots = train(cohort_of(challenge, algorithm, [(0, 0.05)], linear_network, epochs=5))
    return [({k: p[0].clone() for k, p in s.state.params.items()}, select(s.state.memory, 0)) for s in snapshots]


def hessian_by_hand(variant: type[Orthogonal], model: Model, params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Eq. Hessian-decomp's outer product, ∇²_f ℓ by autograd, its rows and columns projected on what is stored."""
    total = torch.zeros(())
    for a, b in zip(x, y, strict=True):
        j = gradients_by_hand(OGD, model, params, a[None], b[None])
        f = model.outputs(params, a[None])[0]
        inner = torch.autograd.functional.hessian(lambda f, b=b: functional.cross_entropy(f, b), f)
        projection = torch.eye(CLASSES, dtype=f.dtype)
        if variant is OGDGTL:
            projection = torch.diag(functional.one_hot(b, CLASSES)).to(f.dtype)
        if variant is OGDAve:
            projection = torch.full_like(projection, 1 / CLASSES)
        total = total + j.mT @ projection @ inner @ projection @ j / len(x)
    return total


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_approximation_is_the_outer_product_quadratic_at_the_solution(variant: type[Orthogonal]) -> None:
    model, params = double_model(tasks=2)
    solutions = [elsewhere(params, seed) for seed in (1, 2)]
    tasks = [examples(5, 3), examples(5, 4)]
    algorithm = variant(slots=10 * CLASSES)
    memory = algorithm.init(model, params, batch_of(examples(2, 0)))
    for number, (theta, task) in enumerate(zip(solutions, tasks, strict=True)):
        memory = algorithm.consolidate(model, theta, memory, batch_of(task, 0, number))
    for number, (theta, task) in enumerate(zip(solutions, tasks, strict=True)):
        hessian = hessian_by_hand(variant, model, theta, *task)
        final_loss = functional.cross_entropy(model.outputs(theta, task[0]), task[1])
        for at in (theta, params, elsewhere(params, 9)):
            moved = flat(at) - flat(theta)
            expected = final_loss + 0.5 * moved @ hessian @ moved
            torch.testing.assert_close(algorithm.approximation(model, memory, number)(at), expected)


def test_on_linear_regression_its_approximation_is_the_loss_itself() -> None:
    model, params = double_model(tasks=1, loss="squared-error", hidden=())
    x, _ = examples(9, 3)
    y = torch.randn(9, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    design = torch.cat([x, torch.ones(9, 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(design, y).solution
    solution = {"layers.0.weight": best[:-1].T.contiguous(), "layers.0.bias": best[-1]}
    memory = learn(OGD(slots=27), model, solution, [(x, y)])
    at = elsewhere(params)
    torch.testing.assert_close(OGD(slots=27).approximation(model, memory, 0)(at), model.loss(at, x, y))


def test_moving_as_it_allows_leaves_the_approximation_where_it_was() -> None:
    model, params = double_model(tasks=1)
    memory = learn(OGD(slots=12), model, params, [examples(4, 3)])
    step = unflat(followed(OGD(slots=12), model, memory, elsewhere(params)), params)
    away = {k: p - 3 * step[k] for k, p in params.items()}
    quadratic = OGD(slots=12).approximation(model, memory, 0)
    torch.testing.assert_close(quadratic(away), quadratic(params), rtol=0, atol=1e-12)
    assert float(quadratic(elsewhere(params)) - quadratic(params)) > 1e-3


def test_mean_outputs_have_no_curvature_under_a_softmax() -> None:
    model, params = double_model(tasks=1)
    memory = learn(OGDAve(slots=4), model, params, [examples(4, 3)])
    quadratic = OGDAve(slots=4).approximation(model, memory, 0)
    torch.testing.assert_close(quadratic(elsewhere(params)), quadratic(params), rtol=0, atol=1e-12)


# Memory.


@pytest.mark.parametrize(("variant", "samples"), [(OGD, 5), (OGDGTL, 20), (OGDAve, 20)])
def test_slots_are_gradients_in_every_variant(variant: type[Orthogonal], samples: int) -> None:
    """Three tasks, four classes: 60 slots are 60 gradients, of 15 samples or of 60."""
    end = train_to_the_end(cohort_of(blobs((70, 33, 50)), variant(slots=62), [(0, 0.1), (1, 0.1)], epochs=1)).state
    assert end.memory["task"].tolist() == [[0] * samples + [1] * samples + [2] * samples] * 2
    assert end.memory["span"]["whitening"].shape == (2, 60, 60)
    inputs = end.memory["span"]["rows"]["inputs"]["layers.0"]
    assert not torch.equal(inputs[0], inputs[1]), "every run draws its own samples"


def test_a_task_smaller_than_its_share_is_stored_whole() -> None:
    end = train_to_the_end(cohort_of(blobs((60, 8)), OGDGTL(slots=40), epochs=1)).state
    assert end.memory["task"].tolist() == [[0] * 20 + [1] * 8]


def test_five_hundred_gradients_of_the_papers_network_take_a_twentieth_of_a_dense_basis() -> None:
    module = MLP(784, 10)
    params = {k: p.detach() for k, p in module.named_parameters()}
    numbers = sum(p.numel() for p in params.values())
    assert numbers == 89_610
    model = Model(module, losses.get("cross-entropy"), tasks=1)
    draw = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (500, 28, 28), generator=draw, dtype=torch.uint8), torch.arange(500) % 10
    for algorithm, share in ((OGDGTL(slots=500), 0.05), (OGD(slots=500), 0.02)):
        memory = learn(algorithm, model, params, [data])
        assert memory["span"]["whitening"].shape == (500, 500)
        assert nbytes(memory) < share * numbers * 500 * 4


# Execution.


@pytest.mark.parametrize("variant", VARIANTS)
def test_vectorised_and_run_by_run_agree(variant: type[Orthogonal]) -> None:
    cohort = cohort_of(blobs((60, 50, 40)), variant(slots=48), [(s, lr) for s in (0, 1) for lr in (0.05, 0.2)])
    a, b = (train_to_the_end(cohort, how).state for how in ("vectorised", "sequential"))
    for k, value in a.params.items():
        torch.testing.assert_close(b.params[k], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(b.memory["span"], a.memory["span"], rtol=1e-4, atol=1e-5)


def convolutional(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, outputs)
    )


def test_convolutions_with_batch_statistics_train_in_cohorts_too() -> None:
    cohort = cohort_of(blobs((40, 40)), OGDGTL(slots=12), [(0, 0.05), (1, 0.1)], convolutional, epochs=1)
    a, b = (train_to_the_end(cohort, how).state for how in ("vectorised", "sequential"))
    for k, value in a.params.items():
        torch.testing.assert_close(b.params[k], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_diverges_leaves_the_others_alone(variant: type[Orthogonal]) -> None:
    sane, mad = [(0, 0.05), (1, 0.1)], (2, 1e30)
    without = train_to_the_end(cohort_of(blobs(), variant(slots=24), sane), "vectorised").state
    among = train_to_the_end(cohort_of(blobs(), variant(slots=24), [*sane, mad]), "vectorised").state
    assert among.diverged[2] >= 0 and among.diverged[:2].tolist() == [-1, -1]
    for k, value in without.params.items():
        assert torch.equal(among.params[k][:2], value)
    train_to_the_end(cohort_of(blobs(), variant(slots=24), [mad]), "sequential")


def test_it_forgets_less_than_sgd_where_learning_is_local() -> None:
    from glocal.algorithms.baselines import SGD

    challenge = blobs((150,) * 3, seed=3)
    forgotten = []
    for algorithm in (SGD(), OGD(slots=240)):
        record = train_to_the_end(cohort_of(challenge, algorithm, [(s, 0.02) for s in range(3)])).record
        losses_of_the_first = record.arrays["test_class_loss"][:, :, 0]
        forgotten.append(float((losses_of_the_first[:, 3] - losses_of_the_first[:, 1]).mean()))
    assert forgotten[1] < 0.5 * forgotten[0]


# Errors.


@pytest.mark.parametrize(("variant", "smallest"), [(OGD, 12), (OGDGTL, 3), (OGDAve, 3)])
def test_too_few_slots_raise_an_error_with_the_minimum(variant: type[Orthogonal], smallest: int) -> None:
    challenge = blobs((20, 20, 20))
    with pytest.raises(GlocalError, match=f"slots={smallest - 1} .* slots of at least {smallest}"):
        train_to_the_end(cohort_of(challenge, variant(slots=smallest - 1)))
    train_to_the_end(cohort_of(challenge, variant(slots=smallest), epochs=1))


def test_there_is_no_true_class_in_a_regression() -> None:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    challenge = from_tasks("regression", [((x, x[:, :1]), (x, x[:, :1]))], setting="domain", loss="squared-error")
    with pytest.raises(GlocalError, match=r"ogd-gtl .* squared-error tasks have no classes"):
        train_to_the_end(cohort_of(challenge, OGDGTL(), network=linear_network))
    train_to_the_end(cohort_of(challenge, OGD(), network=linear_network))


@pytest.mark.parametrize("options", [{"slots": 0}, {"passes": 0}])
def test_options_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(GlocalError, match="= 0 was given; it must be at least 1"):
        OGD(**options)
