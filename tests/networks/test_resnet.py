"""ResNet-18 against the same network made of torch's layers, and its use by the rest of the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import glocal
from glocal import losses
from glocal.algorithms import ALGORITHMS, OGD, Algorithm, Batch
from glocal.algorithms.ewc import task_fisher
from glocal.challenges import Challenge, from_tasks
from glocal.cli.main import main
from glocal.curvature.layers import affine_layers
from glocal.engine.choose import Execution, choose
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Vectorised
from glocal.engine.loader import Loader
from glocal.engine.loop import Snapshot, train
from glocal.errors import GlocalError
from glocal.networks import ResNet18, resnet18
from glocal.networks.model import MakeNetwork, Model
from glocal.networks.progressive import ProgressiveNetwork
from glocal.risk import Risk
from glocal.tree import Params, flatten

narrow = partial(resnet18, width=2)


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("outputs", "parameters"), [(10, 11_173_962), (200, 11_271_432)])
def test_it_has_the_papers_number_of_parameters(outputs: int, parameters: int) -> None:
    assert size(resnet18((3, 32, 32), outputs)) == parameters


# The same network, made of torch's blocks


class Sum(nn.Module):
    """relu(a(x) + b(x))."""

    def __init__(self, long: nn.Module, short: nn.Module) -> None:
        super().__init__()
        self.long, self.short = long, short

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.long(x) + self.short(x))


def block(inputs: int, outputs: int, stride: int) -> nn.Module:
    long = nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
    )
    if inputs == outputs:
        return Sum(long, nn.Identity())
    project = nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)
    return Sum(long, nn.Sequential(project, nn.BatchNorm2d(outputs)))


def of_torchs_blocks(width: int, outputs: int) -> nn.Module:
    stem = [nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    stages = [
        *(block(width, width, 1), block(width, width, 1)),
        *(block(width, 2 * width, 2), block(2 * width, 2 * width, 1)),
        *(block(2 * width, 4 * width, 2), block(4 * width, 4 * width, 1)),
        *(block(4 * width, 8 * width, 2), block(8 * width, 8 * width, 1)),
    ]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, outputs))


@pytest.mark.parametrize("side", [8, 32, 11])
def test_outputs_are_those_of_torchs_layers(side: int) -> None:
    torch.manual_seed(0)
    ours, theirs = resnet18((3, side, side), 7, width=3).double(), of_torchs_blocks(3, 7).double()
    assert [t.shape for t in ours.state_dict().values()] == [t.shape for t in theirs.state_dict().values()]
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    for training in (True, True, False):
        x = torch.randn(5, 3, side, side, dtype=torch.float64)
        torch.testing.assert_close(ours.train(training)(x), theirs.train(training)(x), rtol=1e-10, atol=1e-12)
    statistics = [(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True) if a.is_floating_point()]
    for mine, other in statistics:  # and not how many batches were seen, on which nothing depends
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_initialization_is_torchs_default() -> None:
    torch.manual_seed(0)
    network = resnet18((3, 32, 32), 10, width=32)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(layer.weight[0].numel())  # torch's default: uniform in ± 1/√fan-in
            weight = layer.weight.detach() / bound
            assert float(weight.abs().max()) <= 1
            spread = math.sqrt(4 / 45 / weight.numel())  # of the mean of u², u uniform in ± 1
            assert float(weight.square().mean()) == pytest.approx(1 / 3, abs=5 * spread)
        elif isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all() and (layer.bias == 0).all()
            assert layer.momentum == 0.1 and layer.eps == 1e-5


def test_inputs_must_be_images() -> None:
    with pytest.raises(GlocalError, match=r"resnet18 takes images.*shape \(784,\)"):
        resnet18((784,), 10)


# In the house


def pictures(sizes: Sequence[int] = (16, 16), side: int = 8) -> Challenge:
    """Noise with a bright quarter, whose position is the class; class-incremental."""
    draw = torch.Generator().manual_seed(0)

    def data(n: int, task: int) -> tuple[Tensor, Tensor]:
        y = 2 * task + torch.arange(n) % 2
        x = torch.randint(120, (n, 3, side, side), generator=draw, dtype=torch.uint8)
        for image, label in zip(x, y.tolist(), strict=True):
            image[:, side // 2 * (label // 2) :, side // 2 * (label % 2) :] += 100
        return x, y

    return from_tasks("pictures", [(data(n, t), data(8, t)) for t, n in enumerate(sizes)], setting="task")


class Double(nn.Module):
    """A network that computes in float64: in float32, rounding alone tells small ResNets apart after a few steps."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.base = narrow(shape, outputs).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.double())


def cohort(algorithm: Algorithm, network: MakeNetwork = Double, lrs: Sequence[float] = (0.05, 0.1)) -> Cohort:
    members = tuple(Member(seed, lr, algorithm) for seed, lr in enumerate(lrs))
    return Cohort(pictures(), network, members, epochs=1, batch_size=8)


def finish(of: Cohort, execution: Execution) -> Snapshot:
    *_, last = train(of, execution=execution)
    return last


OPTIONS = {"agem": {"slots": 8}, "ogd-gtl": {"slots": 8}}


@pytest.mark.parametrize("name", ["sgd", "agem", "ogd-gtl", "pnn"])
def test_a_cohort_and_single_runs_agree(name: str) -> None:
    algorithm = ALGORITHMS[name](**OPTIONS.get(name, {}))
    of = cohort(algorithm) if name != "pnn" else cohort(algorithm, narrow, (1e-4, 1e-3))
    together, one_by_one = (finish(of, how).state for how in ("vectorised", "sequential"))
    parts = [flatten({"params": s.params, "buffers": s.buffers}) for s in (together, one_by_one)]
    for key, value in parts[0].items():
        torch.testing.assert_close(value, parts[1][key], rtol=1e-4, atol=1e-5)
    means = next(v for k, v in together.buffers.items() if k.endswith("running_mean"))
    assert not torch.allclose(means[0], means[1])
    # They are carried from step to step: from 1, one step alone with a momentum of 0.1 leads no lower than 0.9.
    lowest = torch.stack([v.flatten(1).min(1).values for k, v in together.buffers.items() if k.endswith("running_var")])
    assert (lowest.min(0).values < 0.9).all()


def test_it_can_be_vectorised() -> None:
    of = cohort(ALGORITHMS["sgd"](), narrow)
    loader = Loader(of)
    loader.load_task(0)
    executor = choose(of, loader, "auto")
    assert isinstance(executor, Vectorised) and executor.note == ""


def test_one_command_trains_it(tmp_path: Path) -> None:
    source = tmp_path / "tiny.py"
    source.write_text(
        "import torch, glocal\n"
        "def make_challenge():\n"
        "    x, y = torch.arange(12 * 3 * 64).remainder(256).byte().view(12, 3, 8, 8), torch.arange(12) % 2\n"
        "    return glocal.from_tasks('tiny', [((x, y), (x, y))], setting='domain')\n"
    )
    command = ["run", f"{source}:make_challenge", "sgd", "--lr", "0.01", "--network", "resnet18"]
    assert main([*command, "--epochs", "1", "--batch-size", "4", "--store", str(tmp_path / "store")]) == 0
    (run,) = glocal.load(tmp_path / "store")
    assert run.config["network"] == {"name": "resnet18"}


def test_progressive_columns_are_counted_and_connected() -> None:
    torch.manual_seed(0)
    one = narrow((3, 8, 8), 4)
    columns = ProgressiveNetwork(narrow, (3, 8, 8), 4, 3)
    layers = [m for m in one.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 21 and len(columns.connected) == 20
    lateral = sum(m.weight.shape[0] * m.weight.shape[1] for m in layers[1:])  # 1 × 1 for every convolution
    assert size(columns) == 3 * size(one) + (1 + 2) * lateral
    x = torch.randn(4, 3, 8, 8)
    columns(x, 2).sum().backward()
    reached = {k.split(".")[1] for k, p in columns.named_parameters() if p.grad is not None and k[:7] == "columns"}
    assert reached == {"2"}


def test_curvature_sees_its_convolutions() -> None:
    network = narrow((3, 8, 8), 4).eval()
    params = dict(network.named_parameters())
    risk = Risk(network, params, {}, torch.zeros(1, 3, 8, 8), torch.zeros(1).long(), losses.get("cross-entropy"))
    found = affine_layers(risk)
    expected = {k for k, m in network.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert set(found) == expected and len(expected) == 21


def trained_model() -> tuple[Model, Params, Params, nn.Module]:
    """A narrow one in float64 with random running statistics."""
    torch.manual_seed(0)
    module = narrow((3, 8, 8), 4).double()
    for _ in range(3):
        module(torch.rand(16, 3, 8, 8, dtype=torch.float64))
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    model = Model(module, losses.get("cross-entropy"), tasks=1, batch_size=4)
    return model.bind(buffers), params, buffers, module


def some_data(n: int = 5) -> Batch:
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(n, 3, 8, 8, dtype=torch.float64, generator=draw)
    return Batch(x, torch.arange(n) % 4, torch.tensor(0), torch.tensor(1))


def test_ewcs_fisher_matrix_is_that_of_single_images_in_evaluation_mode() -> None:
    model, params, buffers, module = trained_model()
    data = some_data()
    found = task_fisher(model, params, data, "empirical")
    expected = {k: torch.zeros_like(p) for k, p in params.items()}
    module.eval()
    for x, y in zip(data.x, data.y, strict=True):
        leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
        outputs = functional_call(module, {**leaves, **buffers}, (x[None],))
        slopes = torch.autograd.grad(functional.cross_entropy(outputs, y[None]), list(leaves.values()))
        for k, slope in zip(leaves, slopes, strict=True):
            expected[k] += slope.square() / len(data.y)
    module.train()
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)
    assert all(torch.equal(model.buffers[k], b) for k, b in buffers.items())


def test_ogd_leaves_the_outputs_of_stored_images_in_evaluation_mode() -> None:
    model, params, buffers, module = trained_model()
    data = some_data(3)
    algorithm = OGD(slots=12, passes=2)
    memory = algorithm.consolidate(model, params, algorithm.init(model, params, data), data)
    draw = torch.Generator().manual_seed(2)
    followed = {k: torch.randn(p.shape, dtype=p.dtype, generator=draw) for k, p in params.items()}
    moves = algorithm.direction(model, followed, params, memory, data), followed
    module.eval()
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    for output in functional_call(module, {**leaves, **buffers}, (data.x,)).flatten():
        slopes = torch.autograd.grad(output, list(leaves.values()), retain_graph=True)
        moved, free = (sum(float((s * v[k]).sum()) for k, s in zip(leaves, slopes, strict=True)) for v in moves)
        assert abs(moved) < 1e-8 < abs(free)
    module.train()
    assert all(torch.equal(model.buffers[k], b) for k, b in buffers.items())


def test_features_are_the_means_over_positions() -> None:
    model, params, _, _ = trained_model()
    assert isinstance(model.module, ResNet18)
    assert model.eval_mode().features(params, some_data().x).shape == (5, 16)
