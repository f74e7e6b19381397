"""Fixtures of all tests: one thread per process, and no access to the user's data, cache or working folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# With two threads each, torch here and in the processes that tests start would wait for one another. Read at import.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

import glocal  # noqa: F401  (first: it asks for reproducible products before any are computed)

SLOW = (
    *("paper/", "fast/", "report/test_reproduction_page", "cli/test_commands"),
    *("networks/test_resnet_cohorts", "networks/test_convolution", "curvature/test_eigenpairs_of_networks"),
    *("curvature/test_fused_layers", "engine/test_augmentation", "engine/test_exemplars", "engine/test_step_seconds"),
    *("algorithms/test_batchnorm_side_effect", "algorithms/test_divergence"),
    *("lens/test_examination", "lens/test_instruments", "lens/test_monitor", "lens/test_perturbation"),
    *("lens/test_retrace", "lens/test_rank", "lens/test_local_or_global", "lens/test_task_inputs"),
    *("curvature/test_spectrum", "report/test_plots", "lens/test_theorem2", "lens/test_pretrained_start"),
    *("store/test_optimizer_sweeps",),
)
"""Folders and files that `make test` leaves out; `make test-all` runs them too."""
QUICK = ("paper/test_table1_grid", "paper/test_claims")
"""Exceptions among them."""
SLOW_CASES = (
    *("optimal-hard structure=full", "low-rank rank=4", "SmallResidual", "test_other_exact_structures"),
    *("test_the_same_in_a_cohort_and_run_by_run", "test_concurrent_writers", "test_a_large_penalty_keeps"),
    *("torchvision-", "test_as_run_by_run", "test_threads_store_the_results"),
    *("test_sweep_file", "test_pretrained_features_with_adapters", "test_a_cohort_and_single_runs_agree"),
)
"""Parts of the names of other tests that take long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        name = item.path.relative_to(folder).as_posix() if item.path.is_relative_to(folder) else ""
        slow_file = name.startswith(SLOW) and not name.startswith(QUICK)
        if slow_file or any(case in item.name for case in SLOW_CASES):
            item.add_marker("slow")


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """For tests of what must not depend on how work is split."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of the test's own, with an empty cache and no data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GLOCAL_DATA", raising=False)
    return tmp_path
