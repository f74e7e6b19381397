"""Definition 1 by experiment: algorithms that are plainly local, plainly global, or noisy, and all that have a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.feature_selection import mutual_info_classif
from torch import Tensor, nn

from glocal.algorithms import ALGORITHMS, ER, Algorithm, Batch, Memory, Step
from glocal.algorithms.algorithm import Locality
from glocal.challenges import Challenge, from_tasks
from glocal.engine.cohort import Cohort, Member
from glocal.engine.loop import train
from glocal.errors import GlocalError
from glocal.lens import independence_test as statistics
from glocal.lens.independence_test import measure_dependence
from glocal.lens.local_or_global import PLACES, ResampledMemory, Verdict, locality
from glocal.networks.mlp import mlp
from glocal.networks.model import Model
from glocal.tree import Params, total


def network(shape: Sequence[int], outputs: int) -> nn.Module:
    return mlp(shape, outputs, (8, 6))


def normalised(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


def blobs(new_classes: bool = False) -> Challenge:
    """Two tasks of classes around random centres."""
    draw, tasks = torch.Generator().manual_seed(0), []
    for task in range(2):
        centres, y = torch.randn(2, 1, 4, 4, generator=draw), torch.arange(80) % 2
        x = centres[y] + 0.5 * torch.randn(80, 1, 4, 4, generator=draw)
        y = y + 2 * task * new_classes
        tasks.append(((x, y), (x, y)))
    return from_tasks("blobs", tasks, setting="class" if new_classes else "domain")


def verdict(
    algorithm: str | Algorithm | type[Algorithm], challenge: Challenge | None = None, **options: Any
) -> Verdict:
    settings: dict[str, Any] = {
        "network": network,
        "epochs": 2,
        "batch_size": 20,
        "solutions": 12,
        "draws": 3,
        "probes": 4,
    }
    return locality(algorithm, challenge or blobs(), **{**settings, **options})


@dataclass(frozen=True)
class Anchored(Algorithm):
    r"""\hat L_o(θ) = ‖θ − θ_o‖²."""

    locality: ClassVar[Locality] = "local"

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {"anchor": {k: p.clone() for k, p in params.items()}}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return lambda params: total((params[k] - a).square() for k, a in memory["anchor"].items())


@dataclass(frozen=True)
class FirstTen(Algorithm):
    r"""\hat L_o(θ): the loss of the task's first ten examples."""

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {"x": data.x[:10].clone(), "y": data.y[:10].clone()}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return lambda params: model.loss(params, memory["x"], memory["y"])


@dataclass(frozen=True)
class AnyThree(FirstTen):
    """The same of three examples, whichever chance chooses."""

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        chosen = data.random.topk(3).indices
        return {"x": data.x[chosen], "y": data.y[chosen]}


@dataclass(frozen=True)
class LastDrawn(FirstTen):
    """The same of the examples that chance chose in the last step: the memory is made while training."""

    def uniforms(self, model: Model) -> int:
        return model.batch_size

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"x": torch.zeros_like(example.x[:2]), "y": torch.zeros_like(example.y[:2])}

    def observe(self, memory: Memory, step: Step) -> Memory:
        chosen = step.batch.random.topk(2).indices
        return {"x": step.batch.x[chosen], "y": step.batch.y[chosen]}

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return memory


UNRULED = np.random.default_rng(5)


@dataclass(frozen=True)
class Unruled(AnyThree):
    """Global, with noise from a stream that nobody holds fixed."""

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        loss, noise = super().approximation(model, memory, task), UNRULED.normal()
        return lambda params: loss(params) + noise


@dataclass(frozen=True)
class AnchoredAndUnruled(Anchored):
    """Local, and as noisy as its values vary among solutions."""

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        square, noise = super().approximation(model, memory, task), UNRULED.normal()
        return lambda params: square(params) + noise


@dataclass(frozen=True)
class Turned(Algorithm):
    r"""\hat L_o(θ) = a coordinate of θ_o, chosen and signed by chance: over many draws, θ_o alone explains little."""

    locality: ClassVar[Locality] = "local"

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        weight = next(iter(params.values())).flatten()
        return {"seen": weight[(data.random[0] * weight.numel()).long()] * (data.random[1] - 0.5).sign()}

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return lambda params: memory["seen"]


def test_plainly_local() -> None:
    found = verdict(Anchored)
    assert found.found == found.declared == "local" and found.agrees
    assert found.p_value == pytest.approx(1 / 1000) and (found.by_probe.p_values <= 0.01).all()
    # No draws and no noise: all of the variance, and which of the twelve it was.
    assert found.variance_explained == pytest.approx(1) and found.variance_involved == pytest.approx(1)
    assert found.information == pytest.approx(np.log(12))
    assert found.values.shape == (12, 3, 2, 4) and found.places == PLACES
    assert found.values.min() > 0.1  # no probe is one of the solutions


@pytest.mark.parametrize("algorithm", [FirstTen, AnyThree, LastDrawn], ids=lambda a: a.__name__)
def test_plainly_global(algorithm: type[Algorithm]) -> None:
    found = verdict(algorithm)
    assert found.found == found.declared == "global"
    assert found.p_value == 1 and found.information == 0 and found.variance_involved == pytest.approx(0, abs=1e-9)
    assert torch.equal(found.values, found.values[:1].expand_as(found.values))
    differ = found.values[0, 0, 0] != found.values[0, 1, 0]
    assert differ.all() if algorithm is not FirstTen else not differ.any()
    assert found.distance > 0.5


def test_chance_that_nobody_holds_fixed_is_no_dependence() -> None:
    found = verdict(Unruled)
    assert found.values.std(2).min() > 0  # every evaluation is another number
    assert found.found == "global" and found.p_value > 0.05


def test_dependence_is_found_under_chance_that_nobody_holds_fixed() -> None:
    found = verdict(AnchoredAndUnruled)
    assert found.found == "local" and found.variance_explained < 0.99


def test_dependence_that_is_tied_to_the_draws() -> None:
    found = verdict(Turned, draws=4)
    assert found.found == "local" and found.variance_involved > 0.5
    assert found.variance_explained < 0.5 * found.variance_involved


def test_a_false_declaration_is_seen() -> None:
    class Denied(Anchored):
        locality: ClassVar[Locality] = "global"

    found = verdict(Denied)
    assert (found.declared, found.found, found.agrees) == ("global", "local", False)


# By Definition 1, from each algorithm's \hat L_o: stored examples that chance chose, all examples, or nothing are the
# same at every solution; a quadratic at θ_o, its outputs, or the constant L_o(θ_o) (the paper's own example of a local
# approximation) are not. The paper calls si and the partitions global all the same.
GLOBAL = {"sgd", "stable-sgd", "joint", "er", "gem", "agem"}
DISPUTED = {"si", "pnn", "packnet", "hat"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_that_has_a_name(name: str) -> None:
    kind = ALGORITHMS[name]
    options = {} if "slots" not in kind.__dataclass_fields__ else {"slots": 40}
    found = verdict(kind(**options), blobs("domain" not in kind.settings))
    assert found.found == ("global" if name in GLOBAL else "local")
    assert found.agrees == (name not in DISPUTED)
    if name in GLOBAL:
        assert torch.equal(found.values, found.values[:1].expand_as(found.values))


def test_a_probe_brings_the_batch_statistics_it_is_seen_with() -> None:
    assert verdict(ER(slots=40), network=normalised).found == "global"
    assert verdict("ewc", network=normalised).found == "local"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    for name, found in (("er", "global"), ("agem", "global"), ("ewc", "local"), ("der", "local"), ("si", "local")):
        assert verdict(name, device="cuda").found == found


def test_it_is_the_same_again_and_another_with_another_seed() -> None:
    first, again, other = (verdict("er", seed=seed).values for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_beside_one_memory_nothing_is_trained_otherwise() -> None:
    algorithm = ER(slots=15)

    def end(algorithm: Algorithm) -> tuple[Params, Memory]:
        members = tuple(Member(seed, 0.1, algorithm) for seed in (0, 1))
        *_, last = train(Cohort(blobs(), network, members, 2, 20))
        return last.state.params, last.state.memory

    (alone, kept), (beside, memories) = end(algorithm), end(ResampledMemory(algorithm, 1))
    torch.testing.assert_close(beside, alone)  # a step that is watched rounds otherwise
    assert all(torch.equal(kept[k], m) for k, m in memories["0"].items())


def test_what_cannot_be_tested_is_told() -> None:
    for wrong, told in (
        ({"solutions": 2}, "at least 3 solutions"),
        ({"draws": 1}, "at least 2 draws"),
        ({"probes": 0}, "1 probe"),
        ({"level": 0.0}, "level"),
        ({"epochs": 0}, "at least 1"),
        ({"lr": 1e30}, "diverged"),
    ):
        with pytest.raises(GlocalError, match=told):
            verdict(Anchored, **wrong)
    with pytest.raises(GlocalError, match="icarl is for the setting"):
        verdict("icarl")


@dataclass(frozen=True)
class Stating(Anchored):
    """Whatever it is told to."""

    what: str = "none"

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        found: dict[str, Any] = {"float": 1.0, "vector": torch.ones(3)}
        return lambda params: found[self.what]


def test_what_is_no_approximation_is_told() -> None:
    for what, told in (
        ("float", "holds one number; it returned a float"),
        ("vector", r"holds one number; it returned one of shape \(3,\)"),
        ("none", r"test_local_or_global.py:Stating' failed: line \d+: KeyError"),
    ):
        with pytest.raises(GlocalError, match=told):
            verdict(Stating(what=what))


def alike(shape: Sequence[int], outputs: int) -> nn.Module:
    """Whoever makes it, the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return network(shape, outputs)


def test_solutions_that_are_one_point_tell_nothing() -> None:
    with pytest.raises(GlocalError, match="the same point"):
        verdict(Anchored, network=alike, epochs=1)


@pytest.mark.parametrize(("name", "expected"), [("ewc", "local"), ("er", "global"), ("agem", "global")])
def test_solutions_differ_in_the_order_of_their_data_and_memories_do_not(name: str, expected: str) -> None:
    """From one initialisation, by order alone; what a reservoir holds is the same for all."""
    found = verdict(name, network=alike, epochs=2)
    assert found.distance > 0 and found.found == expected


# The statistics alone.


def table(s: int, d: int, k: int, sizes: tuple[float, float, float, float], seed: int = 0, sets: int = 1) -> Tensor:
    """Numbers with parts of these standard deviations: of s, of d, of both, of neither."""
    draw = np.random.default_rng(seed)
    shapes = ((s, 1, 1, sets), (1, d, 1, sets), (s, d, 1, sets), (s, d, k, sets))
    parts = (size * draw.normal(size=shape) for size, shape in zip(sizes, shapes, strict=True))
    return torch.from_numpy(sum(parts, np.zeros((s, d, k, sets))) + 3.0)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_parts_of_the_variance_are_recovered() -> None:
    found = measure_dependence(table(60, 60, 2, (1.0, 2**0.5, 0.5**0.5, 0.5), sets=8), stream())
    assert float(found.explained.mean()) == pytest.approx(1 / 3.75, abs=0.05)
    assert float(found.involved.mean()) == pytest.approx(1.5 / 3.75, abs=0.05)
    # Were s as many as there are numbers, −½ log(1 − η²) of Gaussian parts; of 60 it is a little less.
    assert float(found.information.mean()) == pytest.approx(-0.5 * np.log(1 - 1 / 3.75), abs=0.05)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 0, 0, 1), (3, 0.1, 0.1, 0.1), (0, 1, 0, 1)])
def test_information_is_that_of_scikit_learn(sizes: tuple[float, float, float, float]) -> None:
    """Which scales the numbers and adds a little noise to them."""
    values = table(12, 12, 2, sizes, sets=3)  # of fewer it finds neighbours by a formula that rounds
    found = measure_dependence(values, stream()).information
    for p in range(3):
        each = []
        for k in range(2):
            x, s = values[:, :, k, p].reshape(-1, 1).numpy(), np.arange(12).repeat(12)
            each.append(mutual_info_classif(x, s, discrete_features=False, n_neighbors=3, random_state=0)[0])
        if min(each) > 0:  # it gives no negative estimates, of which a mean is made here
            assert float(found[p]) == pytest.approx(min(np.mean(each), np.log(12)), abs=1e-6)
        else:
            assert float(found[p]) <= np.mean(each) + 1e-6


def test_repetitions_that_differ_a_little_tell_no_more() -> None:
    """Of draws alone, and of what s makes of them; twins of one draw are not two witnesses."""
    drawn = table(24, 3, 2, (0, 1, 1, 0), sets=6)
    noisy = drawn + table(24, 3, 2, (0, 0, 0, 1e-5), seed=1, sets=6)
    quiet, loud = (float(measure_dependence(values, stream()).information.mean()) for values in (drawn, noisy))
    assert loud == pytest.approx(quiet, abs=0.01) and quiet < 0.2


def test_information_of_numbers_that_are_the_same() -> None:
    """All of s where they are its own; none where they are everybody's; log 2 where they tell in which half it is."""
    own, shared = table(8, 3, 2, (1, 0, 0, 0)), table(8, 3, 2, (0, 1, 0, 0))
    halves = (torch.arange(8) // 4).double().view(8, 1, 1, 1).expand(8, 3, 2, 1)
    for values, expected in ((own, np.log(8)), (shared, 0.0), (halves, np.log(2)), (torch.zeros(8, 3, 2, 1), 0.0)):
        assert float(measure_dependence(values, stream()).information) == pytest.approx(expected, abs=1e-12)


def test_p_values_are_uniform_where_there_is_no_dependence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PERMUTATIONS", 39)
    found = np.array(
        [measure_dependence(table(6, 3, 2, (0, 2, 0, 1), seed), stream(seed)).p_value for seed in range(300)]
    )
    for level in (0.1, 0.5):  # within four standard errors
        assert (found <= level).mean() == pytest.approx(level, abs=4 * (level * (1 - level) / 300) ** 0.5)


def test_rounding_is_no_dependence() -> None:
    drawn = table(12, 3, 2, (0, 1, 0, 0)).float()
    rounded = drawn * (1 + 1e-7 * table(12, 3, 2, (1, 0, 1, 1), seed=1).float())
    assert measure_dependence(drawn, stream()).p_value == 1
    assert measure_dependence(rounded, stream()).p_value == 1
    assert measure_dependence(drawn + table(12, 3, 2, (1e-3, 0, 0, 0), seed=2).float(), stream()).p_value < 0.01


def test_too_few_numbers_for_a_test() -> None:
    with pytest.raises(GlocalError, match="2 repetitions"):
        measure_dependence(table(5, 3, 1, (1, 1, 1, 1)), stream())
