"""Challenges from a user's own data: accepted forms, conversions and errors."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from glocal.challenges import Challenge, from_tasks
from glocal.errors import GlocalError


def pair(classes: list[int], n: int = 6, shape: tuple[int, ...] = (3,)) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(sum(classes))
    return random.random((n, *shape), dtype=np.float32), np.resize(np.array(classes), n)


def two_tasks(**changes: Any) -> list[Any]:
    """Return two valid tasks (train, test); `changes` replace 'train', 'test', 'x' or 'y' of the second one."""
    x, y = pair([2, 3])
    train = changes.get("train", (changes.get("x", x), changes.get("y", y)))
    return [(pair([0, 1]), pair([0, 1], 4)), (train, changes.get("test", pair([2, 3], 4)))]


def test_arrays_become_tasks() -> None:
    tasks = two_tasks()
    challenge = from_tasks("my-data", tasks, "class")
    assert (challenge.name, challenge.setting, challenge.tasks) == ("my-data", "class", 2)
    assert (challenge.outputs, challenge.input_shape, challenge.seeded) == (4, (3,), False)
    for index, classes in enumerate([(0, 1), (2, 3)]):
        task = challenge.task(index, 0)
        assert task.classes == classes
        for data, (x, y) in zip((task.train, task.test), tasks[index], strict=True):
            np.testing.assert_array_equal(data.x.numpy(), x)
            np.testing.assert_array_equal(data.y.numpy(), y)
            assert (data.x.dtype, data.y.dtype) == (torch.float32, torch.int64)


class Items(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


X, Y = np.random.default_rng(0).random((5, 2, 4), dtype=np.float32), np.array([0, 1, 0, 1, 1])


@pytest.mark.parametrize(
    "source",
    [
        (X, Y),
        (X.astype(np.float64), Y.astype(np.int8)),
        (torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y)),
        (list(X), Y.tolist()),
        [X.tolist(), Y.astype(np.float64)],
        ([torch.from_numpy(x) for x in X], [torch.tensor(int(y)) for y in Y]),
        (X.astype(">f4"), Y.astype(">i8")),
        (X[::-1].copy()[::-1], Y.astype(bool)),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Items([(x, int(y)) for x, y in zip(X, Y, strict=True)]),
        Items([[x, np.int32(y)] for x, y in zip(X, Y, strict=True)]),
        DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=2, shuffle=True),
        [(X[:3], Y[:3]), (X[3:], Y[3:])],
    ],
    ids=[
        "arrays",
        "wide",
        "tensors",
        "lists",
        "numbers",
        "lists of tensors",
        "big-endian",
        "reversed",
        "td",
        "ds",
        "ds2",
        "loader",
        "batches",
    ],
)
def test_every_form_of_data_gives_the_same_challenge(source: Any) -> None:
    challenge = from_tasks("my-data", [(source, source)], "class")
    task = challenge.task(0, 0)
    np.testing.assert_array_equal(task.train.x.numpy(), X)
    np.testing.assert_array_equal(task.test.y.numpy(), Y)
    assert challenge.fingerprint == from_tasks("my-data", [((X, Y), (X, Y))], "class").fingerprint
    assert not task.train.x.requires_grad


@pytest.mark.parametrize(("mode", "shape"), [("L", (1, 4, 6)), ("RGB", (3, 4, 6))])
def test_pil_images_become_uint8_with_channels_first(mode: str, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    pictures = [Image.fromarray(p[0] if mode == "L" else p.transpose(1, 2, 0)) for p in pixels]
    assert pictures[0].mode == mode
    data = Items(list(zip(pictures, [0, 1], strict=True)))
    challenge = from_tasks("my-data", [(data, data)])
    assert challenge.input_shape == shape
    np.testing.assert_array_equal(challenge.task(0, 0).train.x.numpy(), pixels)


def test_uint8_is_kept_and_read_only_memory_is_accepted(recwarn: pytest.WarningsRecorder) -> None:
    x = np.frombuffer(bytes(range(12)), dtype=np.uint8).reshape(4, 3, 1, 1)
    challenge = from_tasks("my-data", [((x, [0, 1, 0, 1]), (x, [0, 1, 1, 1]))])
    assert challenge.task(0, 0).train.x.dtype == torch.uint8
    assert not recwarn.list


def test_outputs_may_be_more_than_the_classes() -> None:
    numbers: list[Any] = [10, np.int64(10)]
    for outputs in numbers:
        assert from_tasks("my-data", two_tasks(), outputs=outputs).outputs == 10


def test_domain_challenges_keep_their_classes() -> None:
    tasks = [(pair([0, 1]), pair([0, 1])), (pair([1, 0]), pair([0, 1]))]
    assert from_tasks("my-data", tasks, "domain").setting == "domain"


@pytest.mark.parametrize("y", [np.zeros((6, 2)), np.arange(12).reshape(6, 2)])
def test_squared_error_accepts_real_targets(y: np.ndarray) -> None:
    challenge = from_tasks("my-data", [((pair([0])[0], y), (pair([0])[0], y))], "domain", loss="squared-error")
    task = challenge.task(0, 0)
    assert (challenge.outputs, challenge.loss, task.classes) == (2, "squared-error", ())
    assert task.train.y.dtype == torch.float32
    np.testing.assert_array_equal(task.train.y.numpy(), y)


def test_one_target_per_example_becomes_one_column() -> None:
    x = pair([0])[0]
    challenge = from_tasks("my-data", [((x, x[:, 0]), (x, x[:, 1]))], "domain", loss="squared-error")
    assert challenge.outputs == 1
    np.testing.assert_array_equal(challenge.task(0, 0).test.y.numpy(), x[:, 1:2])


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.float32, (4, 2), elements=st.floats(-10, 10, width=32)), st.integers(0, 7))
def test_the_fingerprint_depends_on_bytes_and_shape(x: np.ndarray, where: int) -> None:
    y = [0, 1, 0, 1]

    def challenge_of(values: np.ndarray) -> Challenge:
        return from_tasks("my-data", [((values, y), (values, y))])

    other = x.copy()
    other.flat[where] += 1
    assert challenge_of(x.copy()).fingerprint == challenge_of(x).fingerprint
    assert challenge_of(other).fingerprint != challenge_of(x).fingerprint
    assert challenge_of(x.reshape(4, 1, 2)).fingerprint != challenge_of(x).fingerprint


x6, nan = pair([2, 3])[0], np.full((6, 3), np.nan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": x6[:, :2]}, r"inputs of task 2 \(train\) have shape \(2,\) .* those of task 1 \(train\) \(3,\)"),
        (
            {"x": (x6 * 255).astype(np.uint8)[:, None, None]},
            r"inputs of task 2 \(train\) have shape \(1, 1, 3\) and torch.uint8",
        ),
        ({"x": x6.astype(np.uint8)}, r"x of task 2 \(train\) is uint8 of shape \(6, 3\), .* tokens as x.long"),
        ({"x": torch.tensor(x6).to_sparse()}, r"x of task 2 \(train\) is a sparse tensor"),
        ({"x": {"a": x6}}, r"x of task 2 \(train\) is a dict of length 1 \('a'\)"),
        ({"x": [{"a": x} for x in x6]}, r"x of task 2 \(train\) is a dict of length 1 \('a'\)"),
        ({"x": x6 > 0.5}, r"x of task 2 \(train\) has dtype torch.bool; give uint8"),
        ({"x": nan}, r"x of task 2 \(train\) contains NaN or infinity in 6 of 6 examples, the first at index 0"),
        ({"x": x6[:5]}, r"x of task 2 \(train\) has shape \(5, 3\) and y \(6,\)"),
        ({"x": x6[:0], "y": []}, r"task 2 \(train\) has no examples"),
        ({"x": []}, r"x of task 2 \(train\) has shape \(0,\) and y \(6,\)"),
        ({"y": []}, r"x of task 2 \(train\) has shape \(6, 3\) and y \(0,\)"),
        ({"x": x6[:, 0]}, r"x of task 2 \(train\) has shape \(6,\)"),
        ({"x": [[1.0], [1.0, 2.0]]}, r"x of task 2 \(train\) cannot be converted to one tensor"),
        ({"x": [["a"]] * 6}, r"x of task 2 \(train\) cannot be converted to one tensor"),
        ({"y": [2, 3, 2, 3, 2, -1]}, r"y of task 2 \(train\) contains class -1"),
        ({"y": [2, 3, 2, 3, 2, 10**9]}, r"y of task 2 \(train\) contains class 1000000000, .*: renumber"),
        ({"y": [2, 3, 2, 3, 2, 0.5]}, r"y of task 2 \(train\) has labels that are not integers"),
        ({"y": [2, 3, 2, 3, 2, np.nan]}, r"y of task 2 \(train\) has labels that are not integers"),
        ({"y": np.eye(6)}, r"y of task 2 \(train\) has shape \(6, 6\)"),
        ({"train": x6}, r"task 2 \(train\) is a ndarray; give a pair"),
        ({"train": (x6,)}, r"batch 0 of task 2 \(train\) is a ndarray; batches must be pairs"),
        ({"train": iter([])}, r"task 2 \(train\) has no examples"),
        ({"train": Items([x6[0]])}, r"item 0 of task 2 \(train\) is a ndarray"),
        ({"train": Items([])}, r"task 2 \(train\) has no examples"),
        ({"test": (x6[:, :1], [2, 3] * 3)}, r"inputs of task 2 \(test\) have shape \(1,\)"),
        ({"y": [0, 1] * 3, "test": pair([0, 1])}, r"all tasks have the classes \[0, 1\]"),
    ],
)
def test_errors_name_the_task(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GlocalError, match=message) as raised:
        from_tasks("my-data", two_tasks(**changes), "class")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name is ''"),
        ({"setting": "classes"}, r"unknown setting 'classes'\. Did you mean 'class'\?"),
        ({"setting": "domain"}, r"task 2 has the classes \[2, 3\] and task 1 \[0, 1\]"),
        ({"loss": "mse"}, "unknown loss 'mse'"),
        ({"loss": "squared-error"}, "give setting='domain'"),
        ({"outputs": 3}, "outputs is 3, but class 3 occurs; give 4 or more"),
        ({"outputs": np.int64(3)}, "outputs is .*3.*, but class 3 occurs; give 4 or more"),
        ({"outputs": 0}, "outputs is 0"),
        ({"outputs": "ten"}, "outputs is 'ten'"),
        ({"tasks": []}, "tasks of my-data are a list of length 0"),
        ({"tasks": {}}, "tasks of my-data are a dict of length 0"),
        ({"tasks": [5]}, "task 1 is a int; give a pair"),
        ({"tasks": [(pair([0]),)]}, r"task 1 is a tuple of length 1 \(tuple\); give a pair"),
        (
            {"tasks": [((x6, x6), (x6, x6[:, :2]))], "setting": "domain", "loss": "squared-error"},
            r"targets of task 1 \(test\) have shape \(2,\)",
        ),
        (
            {"tasks": [((x6, x6), (x6, nan))], "setting": "domain", "loss": "squared-error"},
            r"y of task 1 \(test\) contains NaN",
        ),
        (
            {"tasks": [((x6, x6), (x6, x6))], "setting": "domain", "loss": "squared-error", "outputs": 2},
            "outputs is 2, but the targets have 3 columns",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GlocalError, match=message) as raised:
        from_tasks(**{"name": "my-data", "tasks": two_tasks(), **arguments})
    assert "\n" not in str(raised.value)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("labels", "names", "codes"),
    [
        (["dog", "cat", "dog", "ant"], ["ant", "cat", "dog"], [2, 1, 2, 0]),
        (np.array(["dog", "cat", "dog", "ant"]), ["ant", "cat", "dog"], [2, 1, 2, 0]),
        (np.array(["b", 7, "b", "a"], dtype=object), ["b", "7", "a"], [0, 1, 0, 2]),
        ([("b", 1), ("a", 2), ("a", 1), ("b", 1)], ["('a', 1)", "('a', 2)", "('b', 1)"], [2, 1, 0, 2]),
        ([Colour.RED, Colour.BLUE, Colour.BLUE, Colour.RED], [repr(c) for c in Colour], [0, 1, 1, 0]),
        ([b"x", b"y", b"x", b"y"], ["b'x'", "b'y'"], [0, 1, 0, 1]),
    ],
)
def test_labels_of_any_kind_are_numbered_and_recorded(labels: Any, names: list[str], codes: list[int]) -> None:
    x = np.random.default_rng(0).random((4, 2), dtype=np.float32)
    items = Items(list(zip(x, labels, strict=True)))
    sources: list[Any] = [(x, labels), items, DataLoader(items, batch_size=3, collate_fn=unchanged)]
    for source in sources:
        challenge = from_tasks("named", [(source, (x, labels))], setting="domain")
        assert challenge.options == {"classes": names} and challenge.outputs == len(names)
        assert challenge.task(0, 0).train.y.tolist() == challenge.task(0, 0).test.y.tolist() == codes


def unchanged(items: list[Any]) -> tuple[np.ndarray, list[Any]]:
    x, y = zip(*items, strict=True)
    return np.stack(x), list(y)


def test_names_of_classes_are_numbered_over_all_tasks() -> None:
    x = np.zeros((2, 3), dtype=np.float32)
    tasks = [((x, y), (x, y)) for y in (["dog", "cat"], ["eel", "cat"], ["ant", "dog"])]
    challenge = from_tasks("animals", tasks)
    assert challenge.options == {"classes": ["ant", "cat", "dog", "eel"]}
    assert [challenge.task(index, 0).classes for index in range(3)] == [(1, 2), (1, 3), (0, 2)]
    renamed = [((x, y), (x, y)) for y in (["dog", "cat"], ["fox", "cat"], ["ant", "dog"])]
    assert from_tasks("animals", renamed).options != challenge.options


def test_names_are_refused_where_they_have_no_meaning() -> None:
    x, names = np.zeros((2, 3), dtype=np.float32), ["dog", "cat"]
    with pytest.raises(GlocalError, match=r"some tasks have labels that are numbers and others have \['dog'\]"):
        from_tasks("mixed", [((x, [0, 1]), (x, [0, 1])), ((x, names), (x, names))])
    with pytest.raises(GlocalError, match=r"y of task 1 \(train\) cannot be converted to one tensor"):
        from_tasks("regression", [((x, names), (x, names))], setting="domain", loss="squared-error")
    for missing in (None, float("nan")):
        with pytest.raises(GlocalError, match=r"y of task 1 \(test\) has no label at index 1 \(None or NaN\)"):
            from_tasks("missing", [((x, names), (x, ["dog", missing]))])


def test_tuples_of_numbers_stay_targets() -> None:
    x, y = np.zeros((2, 3), dtype=np.float32), [(0.5, 1.0), (0.25, 2.0)]
    challenge = from_tasks(
        "regression", [(Items(list(zip(x, y, strict=True))), (x, y))], "domain", loss="squared-error"
    )
    assert challenge.task(0, 0).train.y.tolist() == [list(row) for row in y]


def test_classes_may_come_back_and_tasks_may_have_unequal_numbers_of_them() -> None:
    classes = [[0, 1, 2], [0, 3], [1, 0], [1, 2, 3, 4]]  # the third brings nothing new
    challenge = from_tasks("blurry", [(pair(c, 12), pair(c, 12)) for c in classes])
    assert [challenge.task(index, 0).classes for index in range(4)] == [tuple(sorted(c)) for c in classes]
    assert challenge.outputs == 5


@pytest.mark.parametrize("kind", ["iterable", "generator", "loader"])
def test_streams_are_read_once(kind: str) -> None:
    x, y = pair([0, 1], 10)
    reads = []

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            reads.append(1)
            return iter(zip(x, y, strict=True))

    batches = ((x[i : i + 5], y[i : i + 5]) for i in (0, 5))
    sources: dict[str, Any] = {"iterable": Stream(), "loader": DataLoader(Stream(), batch_size=4), "generator": batches}
    challenge = from_tasks("stream", [(sources[kind], (x, y))], setting="domain")
    for _ in range(2):
        np.testing.assert_array_equal(challenge.task(0, 0).train.x.numpy(), x)
    assert sum(reads) == (kind != "generator")


def test_a_test_set_of_another_task_is_pointed_out() -> None:
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    with pytest.warns(
        UserWarning, match=r"task 1 \(test\) has labels that the task is not trained on, such as \[2, 3\]"
    ):
        from_tasks("swapped", [((x, y), (x, y + 2)), ((x, y + 2), (x, y + 2))], setting="class")
