"""Scalars for TensorBoard, written by the calling thread.

A writer with its own thread loses what a full disk refuses, and waits forever when its queue is
full. Here the error reaches the caller.
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.record_writer import RecordWriter

Event: Any = event_pb2.__dict__["Event"]  # Made at import, so type checkers do not see it.
Summary: Any = summary_pb2.__dict__["Summary"]
SessionLog: Any = event_pb2.__dict__["SessionLog"]
FLUSH_SECONDS = 10.0  # What a killed run may lose; metrics.jsonl loses nothing.


class Events:
    """One file of events.

    Args:
      workdir: the directory that TensorBoard is started with, or one above.
      start: steps taken before this run; TensorBoard drops events of later steps of earlier runs.
    """

    def __init__(self, workdir: Path, start: int):
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"  # TensorBoard's.
        self._writer = RecordWriter(str(workdir / name))
        self._flushed = time.monotonic()
        self._write(Event(file_version="brain.Event:2"))
        begin = SessionLog(status=SessionLog.START)
        self._write(Event(step=start + 1, session_log=begin))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Writes numbers by name, as one event; an OSError says that it could not be written."""
        pairs = values.items()
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in pairs]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        """Hands everything to the operating system."""
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        if time.monotonic() > self._flushed + FLUSH_SECONDS:
            self.flush()
