"""docs/own.md: its code runs, its tables are complete, and its algorithms do what their theory promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glocal
from glocal.algorithms import ER, Algorithm, Batch, Step
from glocal.engine.loop import Execution
from glocal.losses import CrossEntropy
from glocal.networks import Model

PAGE = (Path(__file__).parents[1] / "docs" / "own.md").read_text()
EXECUTIONS = pytest.mark.parametrize("execution", ["sequential", "vectorised"])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The variables of the page after its code has run from top to bottom."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("own"))
        code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
        exec(compile(code, "docs/own.md", "exec", dont_inherit=True), namespace)
    return namespace


def test_code_of_the_page_runs(page: dict[str, Any]) -> None:
    table = page["runs"].table()
    assert set(table["algorithm"]) == {"lwf", "mas penalty=0.1", "er-ace slots=20", "er", "ewc"}
    assert table["acc_mean"].is_not_null().all() and len(page["top"].values) == 10
    assert not any(run.info["notes"] for run in page["runs"]), "all of them are vectorised"


def names_in_table(heading: str) -> set[str]:
    """The names in the first column of the table under a heading."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, re.M)
    return {re.match(r"\w+", name)[0] for cell in cells for name in re.findall(r"`(.*?)`", cell)}  # type: ignore[index]


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_tables_list_everything_that_is_public() -> None:
    model = Model(nn.Linear(2, 2), CrossEntropy())
    assert names_in_table("What `model` offers") == public(dir(model))
    inherited = dir(tuple)
    assert names_in_table("What `batch` offers") == public(set(dir(Batch)) - set(inherited))
    assert names_in_table("What `step` offers") == public(set(dir(Step)) - set(inherited))
    methods = {name for name, value in vars(Algorithm).items() if callable(value) and not name.startswith("_")}
    assert names_in_table("Algorithm") == methods


def images(n: int, classes: list[int], seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 1, 6, 6), dtype=torch.uint8, generator=draw), torch.tensor(classes * n)[:n]


def normalised(shape: Any, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, outputs))


def mirror(x: Tensor, key: Tensor) -> Tensor:
    return torch.where(key % 2 == 0, x, x.flip(-1))


@EXECUTIONS
def test_lwf_of_weight_0_is_sgd(page: dict[str, Any], tmp_path: Path, execution: Execution) -> None:
    """With BatchNorm, whose statistics the teacher must not change, and with augmentation."""
    tasks = [(images(40, [2 * t, 2 * t + 1], t), images(10, [2 * t, 2 * t + 1], t + 9)) for t in range(2)]
    challenge = glocal.from_tasks("images", tasks, transform=mirror)
    options: Any = {"network": normalised, "epochs": 2, "batch_size": 8, "execution": execution, "store": tmp_path}
    algorithms = ["sgd", page["LwF"](weight=0.0), page["LwF"](weight=1.0)]
    runs = glocal.sweep(challenge, algorithms, lrs=[0.1], seeds=[1, 2], keep_parameters=True, **options)
    for seed in range(2):
        sgd, zero, one = (runs[seed + 2 * i].state(2) for i in range(3))
        torch.testing.assert_close(zero, sgd, rtol=1e-5, atol=1e-6)
        assert not torch.equal(sgd["4.weight"], one["4.weight"])


def test_importance_of_mas_in_closed_form(page: dict[str, Any]) -> None:
    """For f = W x: the derivative of ‖f‖² in W is 2 f xᵀ, example by example; tasks add up."""
    model = Model(nn.Linear(3, 2, bias=False).double(), CrossEntropy())
    w, mas = torch.randn(2, 3).double(), page["MAS"]()
    data = [Batch(torch.randn(n, 3).double(), torch.zeros(n).long(), torch.tensor(0), torch.tensor(0)) for n in (70, 5)]
    memory = mas.init(model, {"weight": torch.zeros_like(w)}, data[0])
    expected = torch.zeros_like(w)
    for part in data:
        memory = mas.consolidate(model, {"weight": w}, memory, part)
        expected += (2 * (part.x @ w.T).unsqueeze(2) * part.x.unsqueeze(1)).abs().mean(0)
    torch.testing.assert_close(memory["importance"]["weight"], expected)
    moved, batch = {"weight": w + 0.1}, data[1]
    penalty = mas.objective(model, moved, memory, batch) - model.loss(moved, batch.x, batch.y)
    torch.testing.assert_close(penalty, 0.01 * expected.sum())


def test_er_ace_masks_absent_classes(page: dict[str, Any]) -> None:
    """Current examples do not move the outputs of classes that are not in their batch; replayed ones do."""
    model = Model(nn.Linear(3, 4), CrossEntropy(), batch_size=2)
    batch = Batch(torch.randn(6, 3), torch.tensor([0, 2] * 3), torch.tensor(0), torch.tensor(7))

    def moves(algorithm: Algorithm, memory: Any) -> list[bool]:
        params = {name: torch.ones_like(p).requires_grad_() for name, p in model.module.named_parameters()}
        algorithm.objective(model, params, memory, batch).backward()
        return (params["weight"].grad != 0).any(1).tolist()  # type: ignore[union-attr]

    ace, er = page["ERACE"](slots=4), ER(slots=4)
    empty = ace.init(model, {}, batch)
    assert moves(ace, empty) == [True, False, True, False] and moves(er, empty) == [True] * 4
    filled = er.observe(
        er.init(model, {}, batch), Step(batch._replace(y=batch.y + 1), {}, {}, {}, {}, {}, torch.ones(()))
    )
    assert moves(ace, filled) == [True] * 4
