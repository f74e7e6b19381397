"""Read what trackers have written, with their own libraries: {name of the run: (settings, {step: metrics})}."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, TypeAlias

Logged: TypeAlias = dict[str, tuple[dict[str, Any], dict[int, dict[str, float]]]]


def tensorboard(where: str) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found: Logged = {}
    for folder in Path(where).glob("*/*"):
        accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        accumulator.Reload()
        content = accumulator.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        hparams = HParamsPluginData.FromString(content).session_start_info.hparams
        settings = {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}
        steps: dict[int, dict[str, float]] = defaultdict(dict)
        for tag in accumulator.Tags()["scalars"]:
            points = accumulator.Scalars(tag)
            assert len({point.step for point in points}) == len(points), f"{tag} has a step twice"
            for point in points:
                steps[point.step][tag] = point.value
        assert folder.name not in found
        found[folder.name] = settings, dict(steps)
    return found


def mlflow(where: str) -> Logged:
    from mlflow import MlflowClient

    client, found = MlflowClient(where), Logged()
    for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        steps: dict[int, dict[str, float]] = defaultdict(dict)
        for key in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, key)
            assert len({point.step for point in history}) == len(history), f"{key} has a step twice"
            for point in history:
                steps[point.step][key] = point.value
        assert run.info.run_name not in found
        diverged = run.data.metrics.get("final/diverged", 2)
        assert run.info.status == ("FINISHED", "FAILED", "RUNNING")[int(diverged)]
        found[run.info.run_name] = run.data.params, dict(steps)
    return found


def wandb(where: str) -> Logged:
    """Read the files that `wandb sync` uploads; of several with one id, the last one."""
    import wandb as library
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    library.teardown()  # its process writes the end of a file after the run is finished
    found: Logged = {}
    for path in sorted(Path("wandb").glob("offline-run-*/*.wandb")):
        name, project, settings = "", "", {}
        steps: dict[int, dict[str, float]] = {}
        for data in leveldb_records(path.read_bytes()[7:]):
            record = Record.FromString(data)
            if record.HasField("run"):
                name, project = record.run.display_name, record.run.project
                settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("history"):
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                assert record.history.step.num not in steps
                steps[record.history.step.num] = {k: v for k, v in row.items() if not k.startswith("_")}
            elif record.HasField("exit"):
                assert record.exit.exit_code == bool(max(steps.items())[1].get("final/diverged", 1))
        if project == where:
            found[name] = settings, steps
    return found


def leveldb_records(data: bytes) -> list[bytes]:
    """Return the records of a file in LevelDB's log format, without its header: blocks of 32 KiB."""
    records, position, whole = [], 0, b""
    while position + 7 <= len(data):
        left = 32768 - (position + 7) % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            records.append(whole)
            whole = b""
    return records


def trackio(where: str) -> Logged:
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    found: Logged = {}
    for run in Api().runs(where):
        rows = SQLiteStorage.get_logs(where, run.name, run_id=run.id)
        assert len({row["step"] for row in rows}) == len(rows), "a step is there twice"
        steps = {row.pop("step"): {k: v for k, v in row.items() if k != "timestamp"} for row in rows}
        assert run.name not in found
        found[run.name] = run.config or {}, steps
    return found
