"""The named challenges: their tasks, options, errors and catalogue."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from glocal.challenges import catalogue, make
from glocal.challenges.datasets import load_digits, load_mnist
from glocal.challenges.download import SOURCES, Source, fingerprint
from glocal.challenges.rotated import random_angle
from glocal.errors import GlocalError

MNIST = SOURCES["mnist"]
FASHION = SOURCES["fashion-mnist"]
FILES = [file.name for file in MNIST.files]
DIGITS = ("rotated-digits", "permuted-digits", "split-digits")


def pillow(images: torch.Tensor, angle: float) -> np.ndarray:
    rotated = [Image.fromarray(image).rotate(angle, Image.Resampling.NEAREST) for image in images[:, 0].numpy()]
    return np.stack([np.asarray(image) for image in rotated])[:, None]


def test_the_catalogue_describes_every_challenge_correctly(mnist_folder: Path) -> None:
    assert [(entry.name, entry.tasks) for entry in catalogue()] == [
        ("rotated-digits", 5),
        ("permuted-digits", 5),
        ("split-digits", 5),
        ("rotated-mnist", 20),
        ("permuted-mnist", 10),
        ("split-mnist", 5),
        ("permuted-fashion-mnist", 10),
        ("split-fashion-mnist", 5),
        ("split-cifar10", 5),
        ("split-cifar100", 20),
        ("split-cifar100-by-10", 10),
        ("cifar100-superclass", 5),
        ("split-tinyimagenet", 10),
    ]
    for entry in (entry for entry in catalogue() if entry.source in ("digits", "mnist")):
        challenge = make(entry.name, data=mnist_folder)
        assert (challenge.name, challenge.setting, challenge.tasks) == (entry.name, entry.setting, entry.tasks)
        assert (challenge.outputs, challenge.input_shape) == (10, (1, 28, 28))
        indices = range(entry.tasks) if entry.setting == "class" else [entry.tasks - 1]
        tasks = [challenge.task(index, 3) for index in indices]
        assert sum(len(task.train.y) for task in tasks) == entry.train * len(tasks)
        assert sum(len(task.test.y) for task in tasks) == entry.test * len(tasks)
        assert all(task.train.x.dtype == torch.uint8 and task.train.x.shape[1:] == (1, 28, 28) for task in tasks)


def test_rotated_mnist_equals_pillow(mnist_folder: Path) -> None:
    challenge = make("rotated-mnist", data=mnist_folder)
    original = make("permuted-mnist", data=mnist_folder).task(0, 0)
    assert original.train.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert original.test.y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    task = challenge.task(19, seed=11)
    np.testing.assert_array_equal(task.test.x[:50].numpy(), pillow(original.test.x[:50], random_angle(11, 19)))
    assert torch.equal(task.test.y, original.test.y)


def test_rotated_tasks_equal_digits_rotated_by_pillow() -> None:
    original = load_digits()
    task = make("rotated-digits").task(0, seed=5)
    angle = random_angle(5, 0)
    for ours, theirs in ((task.train, original.train), (task.test, original.test)):
        np.testing.assert_array_equal(ours.x[:30].numpy(), pillow(theirs.x[:30], angle))
        assert torch.equal(ours.y, theirs.y)
    assert task.classes == tuple(range(10))


def test_random_angles_are_uniform() -> None:
    drawn = np.array([random_angle(seed, task) for seed in range(50) for task in range(20)])
    assert 0 <= drawn.min() < 2
    assert 178 < drawn.max() < 180
    counts, _ = np.histogram(drawn, bins=6, range=(0, 180))
    # 1,000 draws in 6 bins: mean 167, standard deviation 12; five of these on either side.
    assert counts.min() > 107
    assert counts.max() < 227


@pytest.mark.parametrize("name", ["rotated-digits", "permuted-digits"])
def test_a_task_depends_on_the_seed_and_not_on_the_number_of_tasks(name: str) -> None:
    few, many = make(name, tasks=2), make(name, tasks=9)
    assert few.seeded
    assert torch.equal(few.task(1, 7).test.x, many.task(1, 7).test.x)
    assert torch.equal(many.first(3).task(1, 7).test.x, many.task(1, 7).test.x)
    assert not torch.equal(many.task(1, 7).test.x, many.task(1, 8).test.x)
    assert not torch.equal(many.task(1, 7).test.x, many.task(2, 7).test.x)


def test_a_list_of_angles_is_used_for_every_seed() -> None:
    challenge = make("rotated-digits", angles=[0, 90.0, 33])
    assert (challenge.tasks, challenge.seeded, challenge.options) == (3, False, {"angles": [0.0, 90.0, 33.0]})
    original = load_digits()
    assert torch.equal(challenge.task(0, 1).train.x, original.train.x)
    assert torch.equal(challenge.task(1, 2).train.x, original.train.x.rot90(1, (2, 3)))
    np.testing.assert_array_equal(challenge.task(2, 3).test.x[:20].numpy(), pillow(original.test.x[:20], 33))
    assert make("rotated-digits", tasks=2, angles=[0, 90.0, 33]).tasks == 2


def test_angles_may_differ_by_seed() -> None:
    challenge = make("rotated-digits", angles={11: [90, 0], "13": [180, 0, 5]})
    assert (challenge.tasks, challenge.seeded) == (2, True)
    test = load_digits().test.x
    assert torch.equal(challenge.task(0, 11).test.x, test.rot90(1, (2, 3)))
    assert torch.equal(challenge.task(0, 13).test.x, test.flip(2, 3))
    with pytest.raises(GlocalError, match="no angles for seed 12; they are given for the seeds 11, 13"):
        challenge.task(0, 12)


def test_permuted_tasks_apply_one_permutation_to_all_images() -> None:
    original = load_digits()
    challenge = make("permuted-digits")
    assert torch.equal(challenge.task(0, 4).train.x, original.train.x)
    task = challenge.task(3, 4)
    flat, permuted = original.train.x.flatten(1).numpy(), task.train.x.flatten(1).numpy()
    np.testing.assert_array_equal(np.sort(permuted, axis=1), np.sort(flat, axis=1))
    # Columns as multisets: one order of columns serves all images, train and test alike.
    both = np.concatenate([flat, original.test.x.flatten(1).numpy()]).T
    both_moved = np.concatenate([permuted, task.test.x.flatten(1).numpy()]).T
    assert sorted(map(bytes, both_moved)) == sorted(map(bytes, both))
    assert not torch.equal(task.train.x, original.train.x)
    assert torch.equal(task.test.y, original.test.y)
    assert not torch.equal(make("permuted-digits", identity_first=False).task(0, 4).train.x, original.train.x)


def test_split_tasks_have_two_classes_each() -> None:
    original = load_digits()
    challenge = make("split-digits")
    assert (challenge.setting, challenge.seeded) == ("class", False)
    for index in range(5):
        task = challenge.task(index, 0)
        assert task.classes == (2 * index, 2 * index + 1)
        for ours, theirs in ((task.train, original.train), (task.test, original.test)):
            rows = theirs.y.numpy() // 2 == index
            np.testing.assert_array_equal(ours.x.numpy(), theirs.x.numpy()[rows])
            np.testing.assert_array_equal(ours.y.numpy(), theirs.y.numpy()[rows])


def test_classes_per_task() -> None:
    challenge = make("split-digits", classes_per_task=3, setting="task")
    assert (challenge.tasks, challenge.setting, challenge.outputs) == (3, "task", 10)
    assert challenge.task(2, 0).classes == (6, 7, 8)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("rotated-digits", {}),
        ("rotated-digits", {"angles": [1, 2]}),
        ("rotated-digits", {"angles": {3: [1.5], 4: [2]}}),
        ("permuted-digits", {"tasks": 7, "identity_first": False}),
        ("split-digits", {"tasks": 2}),
        ("split-digits", {"classes_per_task": 5, "setting": "task"}),
    ],
)
def test_a_challenge_can_be_rebuilt_from_its_stored_options(name: str, arguments: dict[str, Any]) -> None:
    challenge = make(name, **arguments)
    options = json.loads(json.dumps(challenge.options))
    assert make(challenge.name, challenge.tasks, **options) == challenge


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rotated-digit", {}, r"unknown challenge 'rotated-digit'\. Did you mean 'rotated-digits'\?"),
        ("rotated-digits", {"angle": [1]}, r"unknown option of rotated-digits 'angle'\. Did you mean 'angles'\?"),
        ("split-digits", {"angles": [1]}, "unknown option of split-digits 'angles'"),
        ("rotated-digits", {"tasks": 0}, "0 tasks of rotated-digits were requested; allowed: 1 or more"),
        ("rotated-digits", {"tasks": 2.5}, "2.5 tasks"),
        ("permuted-digits", {"tasks": -1}, "-1 tasks"),
        ("permuted-digits", {"identity_first": "no"}, "identity_first is 'no'"),
        ("split-digits", {"tasks": 0}, "allowed: 1 or more"),
        ("split-digits", {"tasks": 6}, "6 tasks of 2 classes.* 1 to 5"),
        ("split-digits", {"tasks": 3, "classes_per_task": 4}, "1 to 2"),
        ("split-digits", {"classes_per_task": 11}, "classes_per_task is 11"),
        ("split-digits", {"classes_per_task": 0}, "classes_per_task is 0"),
        ("split-digits", {"setting": "domain"}, "allowed: 'class' or 'task'"),
        ("rotated-digits", {"angles": [0, 1], "tasks": 3}, "2 angles are given for 3 tasks"),
        ("rotated-digits", {"angles": {1: [0, 1], 2: [5]}, "tasks": 2}, "1 angles are given for seed 2 for 2 tasks"),
        ("rotated-digits", {"angles": []}, "0 angles are given for 1 tasks"),
        ("rotated-digits", {"angles": {}}, r"for the seeds \[\]"),
        ("rotated-digits", {"angles": "many"}, "angles are 'many'"),
        ("rotated-digits", {"angles": 45}, "angles are 45"),
        ("rotated-digits", {"angles": [float("nan")]}, "angles are"),
        ("rotated-digits", {"angles": {"x": [1]}}, r"for the seeds \['x'\]"),
        ("rotated-digits", {"angles": {1: 5}}, "angles for seed 1 are 5"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GlocalError, match=message) as raised:
        make(name, **arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", DIGITS)
def test_task_indices_out_of_range_are_refused(name: str) -> None:
    for index in (-1, 5):
        with pytest.raises(GlocalError, match=f"index {index}; allowed: 0 to 4"):
            make(name).task(index, 0)


@pytest.mark.parametrize("name", ["rotated-mnist", "permuted-mnist", "split-mnist"])
def test_mnist_is_verified_by_make_and_read_by_task(name: str, tmp_path: Path, tiny_mnist: Any) -> None:
    with pytest.raises(GlocalError, match="glocal data fetch mnist"):
        make(name, data=tmp_path)
    tiny_mnist.write(tmp_path)
    misses = load_mnist.cache_info().misses
    challenge = make(name, data=tmp_path)
    assert challenge.fingerprint == fingerprint(*tiny_mnist.source.files)
    assert load_mnist.cache_info().misses == misses
    challenge.task(0, 0)
    challenge.task(1, 0)
    assert load_mnist.cache_info().misses == misses + 1
    (tmp_path / FILES[0]).write_bytes(b"damaged")
    with pytest.raises(GlocalError, match="damaged"):
        make(name, data=tmp_path)


@pytest.mark.parametrize("unzipped", [False, True])
def test_mnist_files_are_read_as_tensors(tmp_path: Path, tiny_mnist: Any, unzipped: bool) -> None:
    tiny_mnist.write(tmp_path, unzipped)
    task = make("permuted-mnist", data=tmp_path).task(0, 0)
    for data, part in ((task.train, "train"), (task.test, "t10k")):
        np.testing.assert_array_equal(data.x[:, 0].numpy(), tiny_mnist.arrays[f"{part}-images-idx3-ubyte"])
        np.testing.assert_array_equal(data.y.numpy(), tiny_mnist.arrays[f"{part}-labels-idx1-ubyte"])
        assert data.y.dtype == torch.int64


def test_fashion_mnist_is_read_from_a_folder_of_its_own(
    tmp_path: Path, tiny_mnist: Any, only_source: Callable[[Source], None]
) -> None:
    """Its files have the names of MNIST's, so neither data set may be taken for the other."""
    only_source(replace(SOURCES["mnist"], name="fashion-mnist", search=FASHION.search, folder=FASHION.folder))
    tiny_mnist.write(tmp_path / "mnist")
    with pytest.raises(GlocalError, match=r"fashion-mnist is not complete: no good .*/fashion-mnist,"):
        make("split-fashion-mnist", data=tmp_path)
    tiny_mnist.write(tmp_path / "FashionMNIST" / "raw")
    images, labels = (tiny_mnist.arrays[f"train-{part}-ubyte"] for part in ("images-idx3", "labels-idx1"))
    for index in range(5):
        task = make("split-fashion-mnist", data=tmp_path).task(index, 0)
        np.testing.assert_array_equal(task.train.x[:, 0].numpy(), images[labels // 2 == index])
    permuted = make("permuted-fashion-mnist", data=tmp_path)
    assert (permuted.tasks, permuted.setting) == (10, "domain")
    np.testing.assert_array_equal(permuted.task(0, 1).train.x[:, 0].numpy(), images)
    (tmp_path / "FashionMNIST" / "raw" / FILES[1]).write_bytes(b"damaged")
    with pytest.raises(GlocalError, match=r"damaged: .*FashionMNIST/raw"):
        make("split-fashion-mnist", data=tmp_path)


def test_fingerprints_differ_between_data_sets(tmp_path: Path, tiny_mnist: Any) -> None:
    tiny_mnist.write(tmp_path)
    tiny = make("split-mnist", data=tmp_path).fingerprint
    assert len({tiny, fingerprint(*MNIST.files), make("split-digits").fingerprint}) == 3
