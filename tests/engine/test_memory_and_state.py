"""What algorithms and networks of other people's may do to a cohort's state, and what they may not."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import glocal
from glocal.algorithms import AGEM, EWC, Algorithm, Batch, Memory, Step
from glocal.challenges import Challenge, make
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import copy_into_
from glocal.engine.loop import Snapshot, train
from glocal.networks import MLP, Model, mlp
from glocal.sweeps import resolve
from glocal.tree import Params, flatten

QUICK: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500}


def small(outputs: int = 3, counts: Sequence[int] = (40, 40)) -> Challenge:
    """Two tasks of random floats; `counts[seed]` training examples."""

    def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(count, 4, generator=draw), torch.arange(count) % 3

    made = glocal.from_tasks("small", [(data(40, t), data(9, t)) for t in range(2)], setting="domain", outputs=outputs)
    base = made.make_task

    def of_seed(task: int, seed: int) -> Any:
        whole = base(task, seed)
        return replace(whole, train=type(whole.train)(*data(counts[seed], task)))

    return replace(made, seeded=True, make_task=of_seed)


def end(algorithm: Algorithm, execution: str, network: Callable[..., nn.Module] = mlp) -> Snapshot:
    members = tuple(Member(seed, 0.1, algorithm) for seed in (0, 1))
    *_, last = train(Cohort(small(), network, members, epochs=2, batch_size=16), execution=execution)  # type: ignore[arg-type]
    return last


@dataclass(frozen=True)
class RemembersTheLastTwoTasks(Algorithm):
    """Keeps a constant under vmap, and moves one leaf of its memory into another."""

    name: ClassVar[str] = "remembers"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"now": torch.zeros(()), "last": torch.zeros(()), "task": torch.zeros((), dtype=torch.long)}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        return model.loss(params, batch.x, batch.y) * (1 + memory["last"] + memory["task"])

    def observe(self, memory: Memory, step: Step) -> Memory:
        return {"now": memory["now"] + 1e-3, "last": memory["now"], "task": step.batch.task}


def test_constants_and_moved_leaves_are_the_runs_own() -> None:
    mapped, one_by_one = (end(RemembersTheLastTwoTasks(), how) for how in ("vectorised", "sequential"))
    for key, expected in one_by_one.state.params.items():
        torch.testing.assert_close(mapped.state.params[key], expected, rtol=1e-5, atol=1e-7)
    assert mapped.state.memory["task"].tolist() == [1, 1]
    torch.testing.assert_close(mapped.state.memory["now"] - mapped.state.memory["last"], torch.full((2,), 1e-3))


@dataclass(frozen=True)
class RemembersParameters(Algorithm):
    """Keeps the very tensors that later steps overwrite, or copies of them."""

    name: ClassVar[str] = "remembers-parameters"
    copied: bool = False

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"now": params, "previous": params, "x": example.stored[0], "used": params}

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Any:
        moved = sum(((memory["now"][k] - memory["previous"][k]) * p).sum() for k, p in params.items())
        return model.loss(params, batch.x, batch.y) - 5 * moved, {"used": params}

    def observe(self, memory: Memory, step: Step) -> Memory:
        own = (lambda tree: {k: t.clone() for k, t in tree.items()}) if self.copied else (lambda tree: tree)
        last = {
            "x": step.batch.stored[0].clone() if self.copied else step.batch.stored[0],
            "used": own(step.aux["used"]),
        }
        return {"now": own(step.params), "previous": memory["now"], **last}


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
def test_a_memory_of_parameters_is_what_they_were(execution: str) -> None:
    kept, copied = (end(RemembersParameters(copied=copied), execution).state for copied in (False, True))
    for part in ("params", "memory"):
        expected = flatten(getattr(copied, part))
        torch.testing.assert_close(flatten(getattr(kept, part)), expected, rtol=0, atol=0)
    assert not torch.equal(kept.memory["now"]["layers.0.weight"], kept.memory["previous"]["layers.0.weight"])


@dataclass(frozen=True)
class ShrinksIfLarge(Algorithm):
    """What it returns depends on values, so that it trains run by run: for one seed it returns its very arguments."""

    name: ClassVar[str] = "shrinks-if-large"

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        return {"shrunk": torch.zeros(())}

    def before_epoch(
        self, model: Model, params: Params, memory: Memory, epoch: int, epochs: int
    ) -> tuple[Params, Memory]:
        if float(params["layers.0.bias"][0]) > 0:
            return {k: 0.9 * p for k, p in params.items()}, {"shrunk": memory["shrunk"] + 1}
        return params, memory

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        return {"shrunk": memory["shrunk"] + 100} if float(params["layers.0.bias"][0]) > 0 else memory


def test_what_returns_its_arguments_for_some_runs_alone() -> None:
    together = end(ShrinksIfLarge(), "sequential").state
    shrunk = together.memory["shrunk"].tolist()
    assert min(shrunk) == 0 and max(shrunk) >= 200
    for seed in (0, 1):
        cohort = Cohort(small(), mlp, (Member(seed, 0.1, ShrinksIfLarge()),), epochs=2, batch_size=16)
        *_, alone = train(cohort, execution="sequential")
        for key, expected in alone.state.params.items():
            assert torch.equal(together.params[key][seed], expected[0])


@dataclass(frozen=True)
class LosesAParameter(Algorithm):
    name: ClassVar[str] = "loses"

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        return dict(list(grads.items())[1:])


def test_a_direction_of_some_parameters_is_refused() -> None:
    with pytest.raises(
        glocal.GlocalError, match=r"direction must return a tensor for every parameter; missing: layers\.0\.weight"
    ):
        end(LosesAParameter(), "sequential")


def test_put_back_reads_before_it_writes() -> None:
    held = {"now": torch.tensor([1.0, 2.0]), "last": torch.zeros(2), "m": torch.arange(4.0).view(2, 2)}
    copy_into_({"now": torch.tensor([5.0, 6.0]), "last": held["now"], "m": held["m"].T}, held)
    assert held["now"].tolist() == [5, 6] and held["last"].tolist() == [1, 2]
    assert held["m"].tolist() == [[0, 2], [1, 3]]


def frozen_first(input_shape: Sequence[int], outputs: int) -> nn.Module:
    network = MLP(4, outputs, (5,))
    network.layers[0].requires_grad_(False)
    return network


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
@pytest.mark.parametrize("algorithm", [EWC(), AGEM(slots=4)], ids=lambda a: a.name)
def test_frozen_parameters_stay_where_they_are(algorithm: Algorithm, execution: str) -> None:
    last = end(algorithm, execution, frozen_first)
    assert set(last.state.params) == {"layers.1.weight", "layers.1.bias"}
    start = Cohort(small(), frozen_first, (Member(0, 0.1, algorithm), Member(1, 0.1, algorithm)), 1, 16).initial()
    for key, value in start[1].items():
        assert torch.equal(last.state.buffers[key], value)
    assert not torch.equal(last.state.params["layers.1.weight"], start[0]["layers.1.weight"])


class Tempered(MLP):
    """A network with a parameter that is a single number."""

    def __init__(self, outputs: int) -> None:
        super().__init__(4, outputs, (5,))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


@pytest.mark.parametrize("algorithm", [EWC(), AGEM(slots=4)], ids=lambda a: a.name)
def test_a_parameter_may_be_a_single_number(algorithm: Algorithm) -> None:
    ends = [end(algorithm, how, lambda shape, outputs: Tempered(outputs)) for how in ("vectorised", "sequential")]
    mapped, one_by_one = (e.state.params["temperature"] for e in ends)
    assert mapped.shape == (2,) and (mapped != 2).all()
    torch.testing.assert_close(mapped, one_by_one)


def test_seeds_with_different_amounts_of_data_are_refused() -> None:
    members = tuple(Member(seed, 0.1, AGEM(slots=4)) for seed in (0, 1))
    with pytest.raises(glocal.GlocalError, match="equally many examples"):
        next(iter(train(Cohort(small(counts=(40, 60)), mlp, members, 1, 16))))


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"kept": {}}, "is an empty dict"),
        ({"a/b": torch.zeros(1)}, "has a '/' in its name"),
        ({"n": 3}, "the type int"),
    ],
)
def test_a_memory_that_could_not_be_written_down_is_refused(memory: dict[str, Any], message: str) -> None:
    class Odd(Algorithm):
        def init(self, model: Model, params: Params, example: Batch) -> Memory:
            return memory

    with pytest.raises(glocal.GlocalError, match=message):
        end(Odd(), "sequential")


def of_width(width: int) -> Callable[..., nn.Module]:
    return lambda shape, outputs: MLP(784, outputs, (width,))


def test_a_network_is_named_by_what_it_makes(tmp_path: Path) -> None:
    challenge = make("rotated-digits", tasks=2)
    names = [resolve.network(of_width(w), challenge).config for w in (5, 6, 5)]
    assert names[0] == names[2] != names[1]
    partials = [resolve.network(partial(mlp, hidden=(w,)), challenge).config for w in (5, 6, 5)]
    assert partials[0] == partials[2] != partials[1]


def test_frozen_parameters_are_part_of_a_networks_name() -> None:
    """Also those of a network that a function copies."""
    challenge, backbone = make("rotated-digits", tasks=2), nn.Linear(784, 5)

    def network(shape: Any, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), copy.deepcopy(backbone), nn.Linear(5, outputs))

    configs, sources = [], []
    for trainable in (True, False, True):
        backbone.requires_grad_(trainable)
        configs.append(resolve.network(network, challenge).config)
        sources.append(resolve.source_hash(network))
    assert configs[0] == configs[2] and sources[0] == sources[2] != sources[1]
    assert configs[0]["made"] != configs[1]["made"]


def test_networks_may_hold_any_real_type() -> None:
    class Half(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.last, self.scale = nn.Linear(784, 2), nn.Buffer(torch.tensor(scale, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x.flatten(1)) * self.scale.float()

    challenge = make("split-digits", tasks=2, setting="task")

    def scaled(scale: float, shape: Any, outputs: int) -> nn.Module:
        return nn.Sequential(Half(scale), nn.Linear(2, outputs))

    made = [resolve.network(partial(scaled, x), challenge).config["made"] for x in (1.0, 2.0)]
    assert made[0] != made[1]


class Scaled(nn.Linear):
    """A linear layer with a factor that its code does not show, as if it were read from a file."""

    def __init__(self, factor: Any, kind: str) -> None:
        super().__init__(784, 2)
        if kind == "buffer":
            self.register_buffer("factor", torch.tensor(factor), persistent=False)
        else:
            self.factor = {"number": factor, "tensor": torch.tensor(factor), "dict": {"factors": [factor]}}[kind]

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor["factors"][0] if isinstance(self.factor, dict) else self.factor
        return factor * super().forward(x.flatten(1))


LAYERS = (nn.Linear(3, 4), nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(8), nn.GRU(3, 4, num_layers=2))


@pytest.mark.parametrize("layer", [*LAYERS, nn.LayerNorm(4), nn.Embedding(5, 3, padding_idx=0), nn.Dropout(0.3)])
def test_torchs_layers_are_named_by_what_they_print_and_their_state(layer: nn.Module) -> None:
    """Their other attributes depend on torch's version, and so would the name."""
    before = resolve._fingerprint(layer)
    layer.other = 1  # type: ignore[assignment]
    assert resolve._fingerprint(layer) == before


def test_a_folder_or_a_device_is_no_part_of_a_networks_name() -> None:
    """They differ between the machines of a cluster."""
    network = Scaled(1.0, "number")
    before = resolve._fingerprint(network)
    network.device, network.cache = "cuda", "/home/me/.cache"  # type: ignore[assignment]
    assert resolve._fingerprint(network) == before


@pytest.mark.parametrize("kind", ["buffer", "number", "tensor", "dict"])
def test_what_a_network_takes_from_elsewhere_is_part_of_its_name(kind: str) -> None:
    challenge = make("split-digits", tasks=2, setting="task")

    def network(shape: Any, outputs: int) -> nn.Module:
        return nn.Sequential(Scaled(float(os.environ["GLOCAL_TEST_FACTOR"]), kind), nn.Linear(2, outputs))

    configs = []
    with pytest.MonkeyPatch.context() as patch:
        for factor in ("1", "2", "1"):
            patch.setenv("GLOCAL_TEST_FACTOR", factor)
            configs.append(resolve.network(network, challenge).config)
    assert configs[0] == configs[2] != configs[1] and configs[0]["source"] == configs[1]["source"]


def test_arguments_that_layers_do_not_print_are_part_of_a_networks_name() -> None:
    """Heads of attention change neither what is printed nor a shape."""

    def network(heads: list[int], shape: Any, outputs: int) -> nn.Module:
        encoder = nn.TransformerEncoderLayer(8, heads[0], 8, batch_first=True)
        enter = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (98, 8)))
        return nn.Sequential(enter, encoder, nn.Flatten(), nn.Linear(784, outputs))

    challenge = make("rotated-digits", tasks=2)
    heads = [2]
    names = []
    for heads[0] in (2, 4, 2):
        names.append(resolve.network(partial(network, heads), challenge).config["made"])
    assert names[0] == names[2] != names[1]


def test_a_challenge_is_named_by_its_outputs_and_setting() -> None:
    assert resolve.challenge(small(3)).config != resolve.challenge(small(7)).config


def test_the_same_number_written_otherwise_is_the_same_run() -> None:
    ways = [
        resolve.algorithm(EWC(penalty=10)),
        resolve.algorithm(EWC(penalty=10.0)),
        resolve.algorithm("ewc", {"penalty": "10"}),
    ]
    assert ways[0].config == ways[1].config == ways[2].config


def test_seeds_and_rates_from_numpy(tmp_path: Path) -> None:
    runs = glocal.sweep("rotated-digits", ["sgd"], np.array([0.1]), np.arange(2), store=tmp_path / "s", **QUICK)
    assert [r.seed for r in runs] == [0, 1]


def test_an_interrupted_cohort_finished_in_parts_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glocal.store.store import Claim

    save = Claim.save
    store = tmp_path / "s"

    def save_then_die(self: Claim, snapshot: Snapshot) -> None:
        save(self, snapshot)
        raise KeyboardInterrupt

    monkeypatch.setattr(Claim, "save", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        glocal.sweep("rotated-digits", ["sgd"], [0.1, 0.2, 0.3], [1], store=store, **QUICK)
    monkeypatch.setattr(Claim, "save", save)
    glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], store=store, **QUICK)
    both = glocal.sweep("rotated-digits", ["sgd"], [0.1, 0.2], [1], store=store, **QUICK)
    assert both[1].info["cost"]["cohort_runs"] == 1, "the finished one did not train again"
    glocal.sweep("rotated-digits", ["sgd"], [0.3], [1], store=store, **QUICK)
    assert not list((store / "cohorts").glob("[!.]*"))
