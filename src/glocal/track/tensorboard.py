"""TensorBoard: one folder per run, WHERE/CHALLENGE/ALGORITHM-LR-SEED-HASH, with one event file."""

from __future__ import annotations

import time

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from glocal.files import user_path
from glocal.track.tracking import RunLog

FILE = "events.out.tfevents.0.glocal"


class Tracker:
    """Writes event files without a thread or an open file per run: a cohort may have hundreds of runs."""

    def __init__(self, where: str) -> None:
        self._folder = user_path(where or "tensorboard")
        self._last: dict[str, int] = {}

    def write(self, log: RunLog) -> None:
        path = self._folder / log.group / log.name / FILE
        begin: list[bytes] | None = None
        if log.run.hash not in self._last:  # its file may end in a part of a record, so write the others again
            begin = list(RawEventFileLoader(str(path)).Load()) if path.exists() else []
            self._last[log.run.hash] = max((Event.FromString(record).step for record in begin[2:]), default=-1)
        if self._last[log.run.hash] >= log.last_step:
            return
        now = time.time()
        if begin is not None and len(begin) < 2:
            settings = hparams_pb(log.settings, trial_id=log.run.hash, start_time_secs=now)
            events = [Event(wall_time=now, file_version="brain.Event:2"), Event(wall_time=now, summary=settings)]
            begin = [event.SerializeToString() for event in events]
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab" if begin is None else "wb") as file:
            writer = RecordWriter(file)
            for record in begin or ():
                writer.write(record)
            for step, metrics in log.steps(self._last[log.run.hash]):
                values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
                writer.write(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())
        self._last[log.run.hash] = log.last_step

    def close(self) -> None: ...
