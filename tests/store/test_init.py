"""Runs that start from a checkpoint: what they start from, how they are named, and which files are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import glocal
from glocal.challenges import Challenge, make
from glocal.cli.main import main
from glocal.engine.cohort import seeded_network
from glocal.lens.record import open_run

QUICK: dict[str, Any] = {"tasks": 2, "epochs": 1, "batch_size": 500, "keep_parameters": True}


def with_norm(shape: Sequence[int], outputs: int) -> nn.Module:
    body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(body, nn.Linear(8, outputs))


def digits() -> Challenge:
    return make("rotated-digits", tasks=2)


def checkpoint(path: Path, network: Any = with_norm, only: str = "", dtype: torch.dtype = torch.float32) -> Path:
    """Write a network of another seed, with statistics of its own, in half precision."""
    module = seeded_network(network, digits(), seed=99)
    with torch.no_grad():
        module.train()(digits().task(0, 0).train.x[:200].float() / 255)
    state = {k: t.to(dtype) if t.is_floating_point() else t for k, t in module.state_dict().items()}
    save_file({k: t for k, t in state.items() if k.startswith(only)}, path)
    return path


def state_of(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize("execution", ["vectorised", "sequential"])
def test_runs_start_from_parameters_and_buffers_of_the_file(tmp_path: Path, execution: str) -> None:
    file = checkpoint(tmp_path / "net.safetensors", dtype=torch.float16)
    given: dict[str, Any] = {"network": with_norm, "init": file, "execution": execution, **QUICK}
    runs = glocal.sweep("rotated-digits", ["sgd"], [0.1], [1, 2], store=tmp_path / "runs", **given)
    expected = {k: t.float() if t.is_floating_point() else t for k, t in state_of(file).items()}
    network = with_norm((1, 28, 28), 10)
    network.load_state_dict(expected)
    for run in runs:
        start = run.state(0)
        assert all(torch.equal(start[k], t) and start[k].dtype == t.dtype for k, t in expected.items())
        x, y = digits().task(0, run.seed).test
        right = (network.eval()(x.float() / 255).argmax(1) == y).double().mean()
        assert run.arrays["test_class_accuracy"][0, 0] == pytest.approx(float(right))
        assert run.info["notes"] == []
        assert run.arrays["distance_from_init"][0] > 0


def test_a_run_is_named_by_the_content_of_its_file(tmp_path: Path) -> None:
    first, half = checkpoint(tmp_path / "a.safetensors"), checkpoint(tmp_path / "b.safetensors", dtype=torch.float16)
    copied = tmp_path / "c.safetensors"
    copied.write_bytes(first.read_bytes())

    def path(**options: Any) -> Path | None:
        (run,) = glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], **options, store=tmp_path / "runs", **QUICK)
        assert ("init" in run.config["network"]) == ("init" in options)
        return run.path

    own: dict[str, Any] = {"network": with_norm}
    assert path(**own, init=first) == path(**own, init=str(copied))
    assert len({path(**own), path(**own, init=first), path(**own, init=half)}) == 3


def test_a_part_of_a_network_is_noted(tmp_path: Path) -> None:
    """The head, which the file lacks, is as the seed draws it."""
    file = checkpoint(tmp_path / "body.safetensors", only="0.")
    given: dict[str, Any] = {"network": with_norm, "init": file, **QUICK}
    runs = glocal.sweep("rotated-digits", ["sgd"], [0.1], [1, 2], store=tmp_path / "runs", **given)
    for run in runs:
        (note,) = run.info["notes"]
        assert "'1.weight', '1.bias'" in note and "body.safetensors" in note
        start, drawn = run.state(0), seeded_network(with_norm, digits(), run.seed).state_dict()
        assert torch.equal(start["1.weight"], drawn["1.weight"])
        assert torch.equal(start["0.1.weight"], state_of(file)["0.1.weight"])


def test_every_column_of_a_progressive_network_starts_from_the_file(tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "net.safetensors", network=glocal.networks.mlp)
    (run,) = glocal.sweep("rotated-digits", ["pnn"], [0.1], [1], init=file, store=tmp_path / "runs", **QUICK)
    start = run.state(0)
    for column in (0, 1):
        for name, t in state_of(file).items():
            assert torch.equal(start[f"columns.{column}.{name}"], t)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    good = state_of(checkpoint(tmp_path / "net.safetensors"))
    wrong = {
        "unknown": ({**good, "neck.weight": torch.zeros(2)}, r"it has 'neck\.weight'"),
        "shape": ({**good, "1.weight": torch.zeros(1000, 8)}, r"1\.weight.*1000, 8"),
        "prefix": ({f"module.{k}": t for k, t in good.items()}, r"begin with 'module\.'"),
        "integers": ({**good, "1.bias": torch.zeros(10, dtype=torch.int8)}, r"'1\.bias' must be floats"),
        "infinite": ({**good, "1.bias": torch.full((10,), math.nan)}, r"'1\.bias' in '.*' .*finite"),
        "empty": ({}, "holds no tensors"),
    }
    cases: list[tuple[Path, str]] = [(tmp_path / "none.safetensors", "cannot be read")]
    for name, (state, match) in wrong.items():
        save_file(state, tmp_path / f"{name}.safetensors")
        cases.append((tmp_path / f"{name}.safetensors", match))
    torch.save(good, tmp_path / "net.pt")
    cases.append((tmp_path / "net.pt", "must be a safetensors file"))
    for path, match in cases:
        with pytest.raises(glocal.GlocalError, match=match):
            glocal.sweep("rotated-digits", ["sgd"], [0.1], [1], network=with_norm, init=path, store=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_tied_parameters_need_one_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(784, 784), nn.Linear(784, 784), nn.Linear(784, 10)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(x.flatten(1))))

    state = {k: t for k, t in Tied().state_dict().items() if k != "second.weight"}
    save_file(state, tmp_path / "tied.safetensors")
    from glocal.sweeps.resolve import network

    resolved = network(lambda shape, outputs: Tied(), digits(), tmp_path / "tied.safetensors")
    assert resolved.note == ""
    assert torch.equal(resolved.value((1, 28, 28), 10).second.weight, state["first.weight"])


def test_the_lens_reads_a_run_and_retraces_it_with_its_file(tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "net.safetensors", network=glocal.networks.mlp)
    command = ["run", "rotated-digits", "sgd", "--init", str(file), "--store", str(tmp_path / "runs")]
    assert main([*command, "--tasks", "2", "--epochs", "1", "--batch-size", "500", "--keep-parameters"]) == 0
    (run,) = glocal.load(tmp_path / "runs")
    assert run.path is not None
    trace = open_run(run.path).trace()
    assert torch.equal(trace.checkpoints[0].params["layers.0.weight"], state_of(file)["layers.0.weight"])
    with pytest.raises(glocal.GlocalError, match="--init FILE"):
        open_run(run.path).retrace()
    retraced = open_run(run.path, init=file).retrace()
    assert retraced.deviation < 1e-6
    other = checkpoint(tmp_path / "other.safetensors", network=glocal.networks.mlp, dtype=torch.float16)
    with pytest.raises(glocal.GlocalError, match="is not the one of the run"):
        open_run(run.path, init=other)
