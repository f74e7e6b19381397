"""What a user gives the lens: data in any form, losses of torch's, networks of any layers; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quadratics import dense_hessian, network, theta_of
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from glocal import losses
from glocal.errors import GlocalError
from glocal.inputs import read_examples
from glocal.lens import examine
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.forgetting import forgetting
from glocal.lens.rank import rank
from glocal.lens.theorems import ground_truth, ground_truth_of, theorem1, theorem2
from glocal.losses import AutogradLoss

TEN = TensorDataset(torch.arange(10.0).unsqueeze(1), torch.arange(10))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(TEN)


class Bare(Dataset[tuple[Tensor, int]]):
    """A label is a number here."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.tensor([float(i)]), i


def backwards(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*examples[::-1], strict=True)
    return torch.stack(x), torch.stack(y)


SPREAD, FIRST = [0, 3, 6, 9], [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("task", "taken"),
    [
        (TEN.tensors, SPREAD),
        (tuple(part.numpy() for part in TEN.tensors), SPREAD),
        (TEN, SPREAD),
        (Bare(), SPREAD),
        (DataLoader(TEN, batch_size=3), SPREAD),
        (DataLoader(TEN, batch_size=3, shuffle=True, drop_last=True), SPREAD),
        (DataLoader(TEN, batch_size=3, sampler=SubsetRandomSampler([4, 5])), {4, 5}),
        (DataLoader(TEN, batch_size=3, sampler=WeightedRandomSampler([0.0] * 9 + [1.0], 10)), [9, 9, 9, 9]),
        (DataLoader(TEN, batch_size=2, collate_fn=backwards), [1, 0, 3, 2]),
        (Stream(), FIRST),
        (DataLoader(Stream(), batch_size=3), FIRST),
        ([(torch.arange(3.0), torch.arange(3)), (torch.arange(3.0, 9), torch.arange(3, 9))], FIRST),
    ],
)
def test_which_examples_are_taken(task: Any, taken: Any) -> None:
    x, y = read_examples(task, "the task", 4)
    assert x.flatten().tolist() == y.tolist()
    assert (set(y.tolist()) if isinstance(taken, set) else y.tolist()) == taken


def test_all_examples_unless_said() -> None:
    tasks: list[Any] = [TEN.tensors, TEN, DataLoader(TEN, batch_size=3), Stream()]
    for task in tasks:
        assert read_examples(task)[1].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), r"x of the task has shape \(4, 2\) and y \(3,\)"),
        ((torch.zeros(4, 2), torch.tensor(1)), r"y \(\)"),
        ((torch.zeros(0, 2), torch.zeros(0)), "no examples"),
        ([(torch.zeros(4, 2), torch.zeros(3)), (torch.zeros(3, 2), torch.zeros(4))], "the same length"),
        (
            [(torch.zeros(2, 2), torch.zeros(2)), (torch.zeros(2, 3), torch.zeros(2))],
            "differ in more than",
        ),
        ([(object(), object())], "x of the task cannot be converted"),
        (DataLoader([object(), object()], batch_size=1), "item 0 of the task is a object"),  # type: ignore[arg-type]
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), "no examples"),
        (None, "the task is a NoneType"),
    ],
)
def test_data_that_are_refused(task: Any, told: str) -> None:
    with pytest.raises(GlocalError, match=told):
        read_examples(task, "the task", 4)


def by_hand(outputs: Tensor, y: Tensor) -> Tensor:
    """A mean over the samples that have a label."""
    each = outputs.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(each * (y >= 0)).sum() / (y >= 0).sum()


def wrong_labels() -> dict[str, tuple[Any, Any, Any, str]]:
    x, y = torch.randn(20, 5), torch.arange(20) % 3
    beyond, ignored = y.clone(), y.clone()
    beyond[-1], ignored[-1] = 3, -100
    one, unknown = torch.randn(20), torch.zeros(20, 3)
    unknown[17, 2] = torch.nan
    return {
        "labels beyond": (3, "cross-entropy", (x, beyond), "task 1 has labels 0 to 3.*3 outputs allow 0 to 2"),
        "labels ignored": (3, "cross-entropy", (x, ignored), "labels -100 to 2"),
        "torch's ignored": (3, nn.CrossEntropyLoss(), (x, ignored), "labels -100 to 2"),
        "torch's beyond": (3, nn.functional.cross_entropy, (x, beyond), "labels 0 to 3"),
        "not a number": (3, by_hand, (x, ignored), "1 examples of task 1 is NaN, first of example 19, whose y is -100"),
        "y not a number": (
            3,
            "squared-error",
            (x, unknown),
            "1 examples of task 1 is NaN, first of example 17",
        ),
        "classes as floats": (3, "cross-entropy", (x, y.float()), "classes of torch.int64.*torch.float32"),
        "one-hot classes": (3, "cross-entropy", (x, torch.eye(3)[y]), r"\(n, K\) and \(n,\).*y \(20, 3\)"),
        "a column and a row": (1, "squared-error", (x, one), r"outputs \(20, 1\) and y \(20,\)"),
        "torch's column": (1, nn.MSELoss(), (x, one), r"outputs \(20, 1\) and y \(20,\): give both the same shape"),
        "weighed classes": (
            3,
            nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])),
            (x, y),
            "unweighted mean over samples",
        ),
    }


def test_weights_that_cancel_over_all_samples_are_refused() -> None:
    """Class 1 has the larger losses in one half, class 0 in the other: weighed or not, all have the same mean."""
    y = torch.tensor([0, 1, 0, 1])
    right = torch.tensor([2.0, 0.5, 0.5, 2.0])  # the true label's logit
    x = functional.one_hot(y, 2) * right.unsqueeze(1)
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.eye(2))
        module.bias.zero_()
    weighed = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(weighed(module(x), y), functional.cross_entropy(module(x), y))
    with pytest.raises(GlocalError, match="unweighted mean over samples"):
        trace_checkpoints(module, weighed, [(x, y)], [module.state_dict()] * 2)


@pytest.mark.parametrize("head", ["zero", "drawn"])
def test_weights_that_tell_nothing_at_the_beginning_are_refused(head: str) -> None:
    """Where all outputs are 0 no class differs from another: a function of one's own is asked elsewhere too."""
    module, (x, y) = nn.Linear(4, 3), (torch.randn(30, 4), torch.arange(30) % 3)
    states = [{k: torch.zeros_like(p) for k, p in module.state_dict().items()}, module.state_dict()]
    weights = torch.tensor([1.0, 2.0, 4.0])
    weighed = nn.CrossEntropyLoss(weights) if head == "drawn" else partial(functional.cross_entropy, weight=weights)
    with pytest.raises(GlocalError, match="unweighted mean over samples"):
        trace_checkpoints(module, weighed, [(x, y)], states)
    equal = nn.CrossEntropyLoss(torch.full((3,), 5.0))
    assert trace_checkpoints(module, equal, [(x, y)], states).tasks


def test_weights_of_classes_are_no_weights_of_samples_where_labels_are_shares() -> None:
    """Torch divides by the number of samples there."""
    module, x, shares = nn.Linear(4, 3), torch.randn(12, 4), torch.rand(12, 3).softmax(-1)
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 4.0]))
    trace = trace_checkpoints(module, loss, [(x, shares)], [module.state_dict()] * 2)
    torch.testing.assert_close(trace.value(0, trace.checkpoints[0]), loss(module(x), shares).detach())


class Masked(nn.Module):
    """With a buffer that is not finite, and never was."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 4))
        return self.head(self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0][:, -1])


class Squeezed(nn.Linear):
    """Of one example it has one number, and no row of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class InFours(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 4, x.shape[1])).flatten(0, 1)


def test_unusual_networks_are_taken() -> None:
    x, y = torch.randn(12, 8), torch.arange(12) % 3
    assert trace_checkpoints(Masked(), "cross-entropy", [(x, y)], [Masked().state_dict()] * 2).tasks
    assert trace_checkpoints(InFours(8, 3), "cross-entropy", [(x, y)], [nn.Linear(8, 3).state_dict()] * 2).tasks
    two = (x[:2], y[:2].float())
    assert trace_checkpoints(Squeezed(8, 1), nn.MSELoss(), [two], [nn.Linear(8, 1).state_dict()] * 2).tasks


def test_a_task_that_is_fitted_from_the_beginning_hides_no_other() -> None:
    """Its outputs bend by rounding alone."""
    module, y = nn.Linear(3, 3, bias=False), torch.arange(9) % 3
    tasks = [(40 * torch.eye(3)[y], y), (torch.randn(9, 3), y)]
    states = [{"weight": torch.eye(3)}, {"weight": 1.1 * torch.eye(3)}, {"weight": 1.2 * torch.eye(3)}]
    ours, theirs = (trace_checkpoints(module, loss, tasks, states) for loss in ("cross-entropy", nn.CrossEntropyLoss()))
    torch.testing.assert_close(ground_truth_of(ours, 1).__dict__, ground_truth_of(theirs, 1).__dict__)


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.5))


def test_networks_that_are_no_function_of_one_sample_are_refused() -> None:
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    with_batch_statistics = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(GlocalError, match="depend on the other examples"):
        trace_checkpoints(with_batch_statistics, "cross-entropy", [(x, y)], [with_batch_statistics.state_dict()] * 2)
    with pytest.raises(GlocalError, match="change between two passes"):
        trace_checkpoints(Dropping(4, 3), "cross-entropy", [(x, y)], [nn.Linear(4, 3).state_dict()] * 2)
    running = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    assert trace_checkpoints(running, "cross-entropy", [(x, y)], [running.state_dict()] * 2).tasks


def weighed_by_class(outputs: Tensor, y: Tensor) -> Tensor:
    """A mean over samples, of which rare ones count for more."""
    return (torch.tensor([1.0, 30.0]).to(outputs)[y] * functional.cross_entropy(outputs, y, reduction="none")).mean()


@pytest.mark.parametrize("loss", [weighed_by_class, nn.HuberLoss()])
def test_a_loss_that_bends_otherwise_at_rare_labels_is_found_out(loss: Any) -> None:
    """One label of two hundred: a class of weight 30, or a target far away, where Huber's loss is straight."""
    module, x = nn.Linear(4, 2), torch.randn(200, 4)
    y = torch.zeros(200, dtype=torch.int64) if loss is weighed_by_class else torch.zeros(200, 2)
    y[123] = 1 if loss is weighed_by_class else 50
    trace = trace_checkpoints(module, loss, [(x, y)], [module.state_dict()] * 2)
    with pytest.raises(GlocalError, match="does not depend on the labels"):
        trace.loss.output_hessian_sqrt(torch.randn(3, 2))
    common = [(x[:100], y[:100])]
    root = trace_checkpoints(module, loss, common, [module.state_dict()] * 2).loss.output_hessian_sqrt(
        torch.randn(3, 2)
    )
    assert root.shape == (3, 2, 2)


class Heads(nn.Module):
    """As many outputs as the task has classes; which one it is, the first input says."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.heads[int(x[0, 0])](x)
        return outputs


def test_tasks_of_different_numbers_of_classes() -> None:
    module, tasks = Heads().double(), []
    for t in range(2):
        x = torch.randn(20, 4, dtype=torch.float64)
        x[:, 0] = t
        tasks.append((x, torch.arange(20) % (2 + t)))
    states = [{k: p + 0.1 * t for k, p in module.state_dict().items()} for t in range(3)]
    ours, theirs = (trace_checkpoints(module, loss, tasks, states) for loss in ("cross-entropy", nn.CrossEntropyLoss()))
    torch.testing.assert_close(theorem2(theirs).outer, theorem2(ours).outer, equal_nan=True)
    for task in range(2):
        a, b = ground_truth_of(ours, task), ground_truth_of(theirs, task)
        torch.testing.assert_close(a.__dict__, b.__dict__)


def test_confidence_is_told_where_the_loss_is_a_likelihood() -> None:
    outputs, y = torch.randn(6, 3), torch.arange(6) % 3
    p = outputs.double().softmax(-1)[torch.arange(6), y]
    every: list[tuple[Any, Tensor, bool]] = [
        (nn.CrossEntropyLoss(), outputs, True),
        (lambda f, y: functional.cross_entropy(f, y), outputs, True),
        (nn.CrossEntropyLoss(label_smoothing=0.2), outputs, False),
        (lambda f, y: functional.cross_entropy(f[:, :3], y), torch.cat([outputs, outputs], 1), False),
    ]
    for mean, f, known in every:
        loss = AutogradLoss(mean)
        loss.examples.append((f, y))
        found = ground_truth(loss, f, y)
        torch.testing.assert_close(found.confidence, p if known else p * torch.nan, equal_nan=True)
    for regressed in (outputs, torch.eye(3)[y] / 2):
        with pytest.raises(GlocalError, match=r"no true label; give classes .* probabilities .* sum to 1"):
            ground_truth(losses.get("squared-error"), outputs, regressed)
    for coded in (torch.eye(3)[y], 2 * torch.eye(3)[y] - 1):
        assert ground_truth(losses.get("squared-error"), outputs, coded).entry.tolist() == [1.0] * 6


def test_sparse_embeddings_are_looked_at_as_dense_ones() -> None:
    torch.manual_seed(0)
    words, y = torch.randint(7, (12, 3)), torch.arange(12) % 2
    both = [
        nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 2)) for sparse in (True, False)
    ]
    states = [{k: p + 0.1 * t for k, p in both[0].state_dict().items()} for t in range(2)]
    a, b = (examine(module, "cross-entropy", [(words, y)], states, epsilon=0.1) for module in both)
    torch.testing.assert_close(a.eigenvalues, b.eigenvalues)
    assert both[0][0].sparse


@pytest.mark.parametrize("case", wrong_labels())
def test_labels_that_are_refused(case: str) -> None:
    outputs, loss, task, told = wrong_labels()[case]
    module = nn.Linear(5, outputs)
    for asked in (examine, trace_checkpoints):
        with pytest.raises(GlocalError, match=told):
            asked(module, loss, [task], [module.state_dict()] * 2)


class WithFeatures(nn.Linear):
    """Returns its inputs beside its outputs."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def test_other_mistakes(tmp_path: Path) -> None:
    module = nn.Linear(5, 3)
    state, task = module.state_dict(), (torch.randn(4, 5), torch.arange(4) % 3)
    frozen = nn.Linear(5, 3).requires_grad_(False)
    nowhere, moved = {k: p * torch.nan for k, p in state.items()}, {k: p + 1 for k, p in state.items()}
    partly = nn.Linear(5, 3)
    partly.bias.requires_grad_(False)
    lightning = {"epoch": 3, "state_dict": {f"model.{k}": t for k, t in state.items()}}
    wrong: list[tuple[tuple[Any, ...], str]] = [
        (
            (module, "cross-entropy", [task], [lightning] * 2),
            r"a dict was given that holds one: give its \['state_dict'\]",
        ),
        ((module, "cross-entropy", [task], [lightning["state_dict"]] * 2), r"begin with 'model\.': give"),
        ((module, "cross-entropy", [task], [nowhere, state]), "checkpoint 0 has values.*give the initialization"),
        ((module, "cross-entropy", [task], [state, nowhere]), "checkpoint 1 has values.*training diverged"),
        (
            (partly, "cross-entropy", [task], [state, moved]),
            "'bias' has requires_grad=False in the given network.*0 and 1",
        ),
        ((module, "cross-entropy", None, [state, state]), "tasks must be a list.*NoneType"),
        ((module, "cross-entropy", task, [state, state]), r"tasks must be a list.*one pair \(x, y\)"),
        ((module, "cross-entropy", DataLoader(TEN), [state, state]), "tasks must be a list.*a DataLoader"),
        ((module, "cross-entropy", [task], None), "checkpoints must be a list.*NoneType"),
        ((module, "cross-entropy", [task], state), "checkpoints must be a list.*OrderedDict"),
        ((module, "cross-entropy", [task], [module, module]), r"a Linear was given.*state_dict\(\)"),
        ((module, "cross-entropy", [task], ["a.pt", "b.pt"]), r"torch\.load\('a\.pt'\)"),
        ((module, "cross-entropy", [task], [tmp_path, tmp_path]), "torch.load"),
        ((module, "cross-entropy", [task], [3, 3]), "a int was given"),
        (
            (module, "cross-entropy", [task], [{f"_orig_mod.{k}": t for k, t in state.items()}] * 2),
            "begin with '_orig_",
        ),
        ((module, "cross-entropy", [task], [dict.fromkeys(state, 3)] * 2), "does not fit the network"),
        ((nn.Flatten(), "cross-entropy", [task], [{}, {}]), "Flatten has no parameters with requires_grad=True"),
        ((frozen, "cross-entropy", [task], [state, state]), "no parameters with requires_grad=True"),
        (("net", "cross-entropy", [task], [state, state]), "nn.Module; a str"),
        ((WithFeatures(5, 3), "cross-entropy", [task], [state, moved]), "the network returns a tuple; .* one tensor"),
    ]
    for arguments, told in wrong:
        for asked in (examine, trace_checkpoints):
            with pytest.raises(GlocalError, match=told):
                asked(*arguments)


def test_checkpoints_are_read_from_safetensors(tmp_path: Path) -> None:
    """As `safetensors.torch` writes them, by path or by the text of it, beside state dicts."""
    ours = network(seed=1, tasks=2)
    states = [point.params for point in ours.checkpoints]
    files = [tmp_path / f"{t}.safetensors" for t in range(3)]
    for state, file in zip(states, files, strict=True):
        save_file({k: p.contiguous() for k, p in state.items()}, file)
    mixed: list[Any] = [files[0], str(files[1]), states[2]]
    expected, found = (trace_checkpoints(ours.module, "cross-entropy", ours.tasks, given) for given in (states, mixed))
    for a, b in zip(expected.checkpoints, found.checkpoints, strict=True):
        assert all(torch.equal(a.params[k], p) for k, p in b.params.items())
    files[0].write_bytes(b"cut off")
    for wrong in (files[0], tmp_path / "none.safetensors"):
        with pytest.raises(GlocalError, match=f"'{wrong}' (cannot be read|is damaged)"):
            trace_checkpoints(ours.module, "cross-entropy", ours.tasks, [wrong, *states[1:]])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_subject_with_torchs_loss_is_the_one_with_ours(loss: Any) -> None:
    ours = network(seed=1, tasks=3)
    module, states = copy.deepcopy(ours.module).train(), [point.params for point in ours.checkpoints]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
    loaders = [DataLoader(TensorDataset(*task), batch_size=4, shuffle=True) for task in ours.tasks]
    theirs = trace_checkpoints(module, loss, loaders, states)
    assert module.training and all(bool((p == 7).all()) for p in module.parameters())
    a, b = theorem2(ours), theorem2(theirs)
    for name in ("outer", "functional", "lengths", "norms"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), equal_nan=True, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(theorem1(ours).condition, theorem1(theirs).condition, equal_nan=True)
    torch.testing.assert_close(forgetting(ours).measured, forgetting(theirs).measured, equal_nan=True)
    torch.testing.assert_close(rank(ours).effective, rank(theirs).effective)
    torch.testing.assert_close(ground_truth_of(ours, 1).__dict__, ground_truth_of(theirs, 1).__dict__)


def test_means_over_outputs_too() -> None:
    """nn.MSELoss is 2/K times the squared error here."""
    ours = network(seed=2, tasks=2, loss="squared-error")
    states = [point.params for point in ours.checkpoints]
    theirs = trace_checkpoints(ours.module, nn.MSELoss(), ours.tasks, states)
    torch.testing.assert_close(theorem2(theirs).outer, theorem2(ours).outer * 2 / 3, equal_nan=True)
    a = examine(ours.module, nn.MSELoss(), ours.tasks, states, 0.02 * 2 / 3)
    b = examine(ours.module, "squared-error", ours.tasks, states, 0.02)
    torch.testing.assert_close(a.eigenvalues, b.eigenvalues * 2 / 3)
    torch.testing.assert_close(a.radius, b.radius, equal_nan=True, rtol=1e-3, atol=0)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(2, 1, 3, dropout=0.1, batch_first=True)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.view(-1, 3, 2)).flatten(1)[:, :2])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(2, 2, batch_first=True)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(-1, 3, 2))[0][:, -1])


@pytest.mark.parametrize("make", [Attentive, Recurrent])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_networks_of_fused_layers(make: type[nn.Module], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().double()
    walk = [copy.deepcopy(module.state_dict())]
    for _ in range(2):
        steps = {k: 0.3 * torch.randn(p.shape, generator=draw) for k, p in walk[-1].items()}
        walk.append({k: p + steps[k] for k, p in walk[-1].items()})
    tasks = [(torch.randn(9, 6, generator=draw).double(), torch.arange(9) % 3) for _ in range(2)]
    exact = trace_checkpoints(module, "cross-entropy", tasks, walk)
    given = [(x.to(dtype), y) for x, y in tasks]
    states = [{k: p.to(dtype) for k, p in state.items()} for state in walk]
    found = examine(module.to(dtype), nn.CrossEntropyLoss(), given, states, 0.1, eigenvalues=3)
    for o in range(2):
        values = torch.linalg.eigvalsh(dense_hessian(exact, o))
        largest = values[values.abs().argsort(descending=True)[:3]]
        torch.testing.assert_close(found.eigenvalues[o], largest, rtol=2e-3, atol=1e-4)
    moved = theta_of(exact, 1) - theta_of(exact, 0)
    expected = exact.gradient(0) @ moved + moved @ dense_hessian(exact, 0) @ moved / 2
    assert float(found.forgetting.predicted[1, 0]) == pytest.approx(float(expected), rel=1e-3, abs=1e-4)
    assert module.training
