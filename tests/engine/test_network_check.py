"""Networks that are more than a function of parameters and buffers: refused, or trained run by run, never wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import glocal
from glocal import challenges
from glocal.algorithms import SGD
from glocal.engine.choose import choose
from glocal.engine.cohort import Cohort, Member
from glocal.engine.executors import Executor
from glocal.engine.loader import Loader
from glocal.errors import GlocalError

FEATURES = 6


class Base(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x).relu())

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x)


class Checkpointed(Base):
    def hidden(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False)


class ParameterHook(Base):
    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.first.weight.register_hook(torch.zeros_like)


class PatchedForward(Base):
    """The function holds the first layer itself, not the copy that training makes."""

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        original = self.first.forward
        vars(self.first)["forward"] = lambda x: 2 * original(x)


class OwnProjection(Base):
    """Draws a tensor for every seed that is no buffer."""

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.projection = torch.randn(FEATURES, FEATURES)

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x @ self.projection)


class Counter(Base):
    calls = 0

    def hidden(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.first(x) * (1 - self.calls / 1000)


class NumpyNoise(Base):
    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x) * np.random.default_rng().uniform(0.5, 1.5)


class PythonNoise(Base):
    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x) * random.uniform(0.5, 1.5)


class PythonBranch(Base):
    """Two passes may well take the same branch."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x) * (1 if random.random() < 0.5 else 2)


class Keeps(Base):
    """Passes the last batch's hidden state on, with its graph."""

    state: Any = 0.0

    def hidden(self, x: Tensor) -> Tensor:
        self.state = self.first(x) + 0.1 * self.state
        return self.state


class InPlace(Base):
    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x.sub_(1))


class Reversal(Base):
    """Reverses a gradient by a hook on a tensor, which `vmap` does not call."""

    def hidden(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: -g)
        return h


def doubled(module: nn.Module, given: Any, received: Any) -> Any:
    return tuple(2 * g for g in given)


class BackwardHook(Base):
    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.last.register_full_backward_hook(doubled)


class Padded(Base):
    """torch's rule for `vmap` keeps the padding row of the first run only."""

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.embedding = nn.Embedding(5, FEATURES, padding_idx=0)

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(self.embedding((x > 0).long()).mean(1))


class Registered(Base):
    """A counter and a projection as they should be kept."""

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.projection = nn.Buffer(torch.randn(FEATURES, FEATURES))
        self.calls: Tensor = nn.Buffer(torch.zeros(()))
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def hidden(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.dropout(self.norm(self.first(x @ self.projection))) / (1 + self.calls)


def lazy(outputs: int) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(outputs))


def chosen(make: Callable[[int], nn.Module], members: Sequence[tuple[int, float]]) -> Executor:
    draw = np.random.default_rng(0)
    tasks: Any = [((draw.normal(size=(40, FEATURES)), draw.integers(2, size=40)),) * 2 for _ in range(2)]
    cohort = Cohort(
        challenges.from_tasks("small", tasks, setting="domain"),
        lambda shape, outputs: make(outputs),
        tuple(Member(seed, lr, SGD()) for seed, lr in members),
        epochs=1,
        batch_size=10,
    )
    loader = Loader(cohort)
    loader.load_task(0)
    return choose(cohort, loader)


ALONE, SEEDS, RATES = [(1, 0.1)], [(1, 0.1), (2, 0.1)], [(1, 0.1), (1, 0.2)]


@pytest.mark.parametrize("members", [ALONE, SEEDS])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Checkpointed, r"first\.weight.*activation checkpointing"),
        (ParameterHook, r"first\.weight.*Hooks"),
        (PatchedForward, r"first\.weight.*functions that hold layers"),
        (Counter, "register_buffer"),
        (NumpyNoise, "generator of its own"),
        (PythonNoise, "Python's random"),
        (PythonBranch, "Python's random"),
        (Keeps, "keeps other state"),
        (InPlace, "in place"),
    ],
)
@pytest.mark.parametrize("dropout", [False, True])
def test_networks_with_other_gradients_than_plain_pytorch_are_refused(
    make: Callable[[int], nn.Module], named: str, members: list[tuple[int, float]], dropout: bool
) -> None:
    with pytest.raises(GlocalError, match=named):
        chosen(lambda outputs: nn.Sequential(make(outputs), nn.Dropout(0.1 * dropout)), members)


def test_inputs_that_only_training_changes_are_refused() -> None:
    with pytest.raises(GlocalError, match="in place"):
        chosen(lambda outputs: nn.Sequential(nn.Dropout(0.5, inplace=True), Base(outputs)), ALONE)


def test_a_padding_row_that_no_checked_example_has_stays_zero(tmp_path: Path) -> None:
    """Token 0 is in seven of 40 examples."""
    x = torch.randint(1, 5, (40, 3), generator=torch.Generator().manual_seed(0))
    x[5:12, 2] = 0
    tokens = challenges.from_tasks("tokens", [((x, x[:, 0] % 2),) * 2], setting="domain")

    def embedded(shape: Sequence[int], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, outputs))

    options: Any = {"epochs": 3, "batch_size": 10, "network": embedded, "keep_parameters": True}
    for run in glocal.sweep(tokens, ["sgd"], [0.5], [1, 2], store=tmp_path, **options):
        rows = run.state(1)["0.weight"]
        assert not rows[0].any() and rows[1:].any()


class NoGradient(Base):
    """Has no gradient in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training):
            return nn.functional.dropout(super().forward(x), 0.1, self.training)


def embedded(frozen: bool) -> Callable[[int], nn.Module]:
    class Words(Base):
        def __init__(self, outputs: int) -> None:
            super().__init__(outputs)
            self.embedding = nn.Embedding(5, FEATURES, padding_idx=0)
            self.embedding.requires_grad_(not frozen)

        def hidden(self, x: Tensor) -> Tensor:
            return self.first(self.embedding((x > 0).long()).mean(1))

    return Words


def test_what_is_no_obstacle_is_trained_together() -> None:
    assert chosen(NoGradient, SEEDS).name == "vectorised"
    assert chosen(embedded(True), RATES).name == "vectorised"
    assert chosen(embedded(False), RATES).name == "sequential"


def complex_weights(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, outputs, dtype=torch.complex64))


def test_state_outside_of_buffers_is_refused_only_where_it_differs() -> None:
    assert chosen(OwnProjection, ALONE).name == "sequential"
    assert chosen(OwnProjection, RATES).name == "vectorised"
    with pytest.raises(GlocalError, match=r"OwnProjection.*register_buffer"):
        chosen(OwnProjection, SEEDS)


@pytest.mark.parametrize("make", [Reversal, BackwardHook, Padded])
@pytest.mark.parametrize("members", [SEEDS, RATES])
def test_what_vmap_computes_wrongly_is_trained_run_by_run(
    make: Callable[[int], nn.Module], members: list[tuple[int, float]]
) -> None:
    executor = chosen(make, members)
    assert executor.name == "sequential" and "vectorised is not possible" in executor.note


@pytest.mark.parametrize("make", [Base, Registered, lazy])
@pytest.mark.parametrize("members", [SEEDS, RATES])
def test_functions_of_parameters_and_buffers_are_trained_together(
    make: Callable[[int], nn.Module], members: list[tuple[int, float]]
) -> None:
    executor = chosen(make, members)
    assert executor.name == "vectorised" and not executor.note


def encoder(shape: Sequence[int], outputs: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, FEATURES)), layer, nn.Flatten(), nn.Linear(FEATURES, outputs))


def test_encoders_with_dropout_are_trained_together(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """In evaluation mode torch fuses them to one operation, which has neither a derivative nor a rule for `vmap`."""
    data = [((np.eye(FEATURES, dtype=np.float32), np.arange(FEATURES) % 2),) * 2] * 2
    small = challenges.from_tasks("small", data, setting="domain")
    for run in glocal.sweep(small, ["sgd"], [0.1], [1, 2], network=encoder, epochs=1, store=tmp_path):
        assert run.info["cost"]["executor"] == "vectorised" and not run.info["notes"]
    assert not [w for w in recwarn if "performance drop" in str(w.message)]
    assert torch.backends.mha.get_fastpath_enabled()


def batch_norm(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


def old_weight_norm(shape: Sequence[int], outputs: int) -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, outputs))


def sparse(shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(10, 8, sparse=True), nn.Linear(8, outputs))


def pairs(sizes: Sequence[int]) -> list[Any]:
    draw = np.random.default_rng(0)
    return [((draw.normal(size=(size, FEATURES)), np.arange(size) % 2),) * 2 for size in sizes]


@pytest.mark.parametrize("sizes", [(40, 41), (41, 40), (42, 49), (12, 3)])
@pytest.mark.parametrize("batch_size", [1, 2, 10, 50])
def test_batch_norm_is_refused_where_plain_pytorch_fails(sizes: Sequence[int], batch_size: int, tmp_path: Path) -> None:
    tasks, fails = pairs(sizes), False
    for (x, _), _ in tasks:
        for part in torch.as_tensor(x, dtype=torch.float32).split(batch_size):
            try:
                batch_norm((FEATURES,), 2)(part)
            except ValueError:
                fails = True
    challenge = challenges.from_tasks("small", tasks, setting="domain")
    options: dict[str, Any] = {"epochs": 1, "batch_size": batch_size, "store": tmp_path}
    if fails:
        with pytest.raises(GlocalError, match=r"task . of small has \d+: batches of"):
            glocal.sweep(challenge, "sgd", [0.1], [1], network=batch_norm, **options)
    else:
        assert len(glocal.sweep(challenge, "sgd", [0.1], [1], network=batch_norm, **options)) == 1


class MaskedEncoder(nn.Module):
    """An encoder of tokens, of which 0 is padding."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.enter, self.encoder = nn.Embedding(20, 8), nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.enter(x), src_key_padding_mask=x == 0).mean(1))


class Packed(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.enter, self.recur, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1).clamp(min=1).cpu()
        sequence = pack_padded_sequence(self.enter(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.recur(sequence)[1][-1])


def padded_words() -> challenges.Challenge:
    tokens = torch.randint(1, 20, (2, 24, 5), generator=torch.Generator().manual_seed(0))
    tokens[..., 3:] = 0
    data = [((x, torch.arange(24) % 2),) * 2 for x in tokens]
    return challenges.from_tasks("words", data, setting="domain")


@pytest.mark.parametrize("algorithm", ["stable-sgd", "pnn"])
def test_layers_are_found_though_padding_masks_all(algorithm: str, tmp_path: Path) -> None:
    """Layers are found with inputs of zeros, which are padding."""
    runs = glocal.sweep(
        padded_words(), algorithm, [0.1, 0.2], [1], network=lambda _, k: MaskedEncoder(k), epochs=1, store=tmp_path
    )
    assert [run.diverged for run in runs] == [None, None]


def test_packed_sequences_train_where_no_example_is_differentiated_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"network": lambda _, k: Packed(k), "epochs": 1, "store": tmp_path}
    assert len(glocal.sweep(padded_words(), "er", [0.1, 0.2], [1], **options)) == 2
    with pytest.raises(GlocalError, match="Packed"):
        glocal.sweep(padded_words(), "ewc", [0.1, 0.2], [1], **options)


def sparse_buffer(shape: Sequence[int], outputs: int) -> nn.Module:
    network = nn.Linear(FEATURES, outputs)
    network.register_buffer("graph", torch.eye(FEATURES).to_sparse())
    return network


def batch_statistics(shape: Sequence[int], outputs: int) -> nn.Module:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    return nn.Sequential(nn.Linear(FEATURES, 8), norm, nn.Linear(8, outputs))


def test_batch_norm_without_running_statistics_trains(tmp_path: Path) -> None:
    small = challenges.from_tasks("small", pairs([20, 20]), setting="domain")
    runs = glocal.sweep(small, "sgd", [0.1], [1], network=batch_statistics, epochs=1, batch_size=10, store=tmp_path)
    assert runs[0].diverged is None


def test_networks_that_cannot_be_trained_are_named(tmp_path: Path) -> None:
    small = challenges.from_tasks("small", pairs([20, 20]), setting="domain")
    tokens: Any = [((torch.randint(10, (20, 5)), torch.randint(2, (20,))),) * 2 for _ in range(2)]
    words = challenges.from_tasks("words", tokens, setting="domain")
    with pytest.raises(GlocalError, match=r"'old_weight_norm' cannot be copied: .*weight_norm"):
        glocal.sweep(small, "sgd", [0.1], [1], network=old_weight_norm, store=tmp_path)
    with pytest.raises(GlocalError, match=r"'sparse_buffer' has sparse buffers \(graph\)"):
        glocal.sweep(small, "sgd", [0.1], [1], network=sparse_buffer, store=tmp_path)
    with pytest.raises(GlocalError, match=r"'complex_weights' has complex parameters \(0.weight, 0.bias\)"):
        glocal.sweep(small, "sgd", [0.1], [1], network=complex_weights, store=tmp_path)
    with pytest.raises(GlocalError, match="'sparse' has an embedding with sparse gradients"):
        glocal.sweep(words, "sgd", [0.1], [1], network=sparse, store=tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GlocalError, match=r"float64.*set_default_dtype"):
            glocal.sweep(small, "sgd", [0.1], [1], store=tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
