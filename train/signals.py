"""What signals do to a run: SIGTERM asks it to save and end, Ctrl-C ends it immediately.

Python runs a handler between two instructions of the main thread, which may wait for another
process in C++ forever. So a separate thread reads signals from a pipe. It ends the process without
an exception, which would pass through whatever the main thread is doing.

A process also ends with its launcher. It holds the reading end of a pipe, and the launcher alone
holds the other, so the pipe closes however the launcher ends.
"""

import contextlib
import os
import signal
import sys
import threading

LAUNCHER = "JAXCOMM_LAUNCHER"  # The descriptor of the launcher's pipe.
LEAVE_SECONDS = 20.0  # The launcher kills after 25.
ENDED = 128  # A shell's status for a process that signal n has ended is 128 + n.


class StoppedError(Exception):
    """SIGTERM came after everything was saved: all processes stop measuring."""


stop = threading.Event()  # SIGTERM has asked this process to save and end.
_saves = threading.Event()  # The training loop looks at `stop`.
_with_others = False  # All is saved, and other processes wait for this one's messages.
_status = ENDED + signal.SIGTERM  # The status if SIGTERM comes when nothing is to be saved.


def install() -> None:
    """Takes over SIGINT and SIGTERM, and watches the launcher if there is one."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # Without a handler, nothing comes through the pipe.
    threading.Thread(target=_watch_signals, args=(reading,), daemon=True).start()
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is not None:
        threading.Thread(target=_watch_launcher, args=(int(launcher),), daemon=True).start()


def ask_to_stop() -> None:
    """From now on SIGTERM sets `stop`; before, it ends the process as if it had no handler."""
    _saves.set()


def all_is_saved(alone: bool) -> None:
    """From now on SIGTERM, even one that has just come, ends the process with status 0.

    A process that ended immediately would bring down the others, which wait for its messages. So
    one of several continues until all learn of it in `leave_if`, or ends alone where that takes
    long.

    Args:
      alone: whether this is the only process.
    """
    global _status, _with_others
    _status, _with_others = 0, not alone
    _saves.clear()
    if stop.is_set():
        _leave()


def leave_if(asked: bool) -> None:
    """Raises `StoppedError` once all is saved, if any of several processes was asked to end.

    Args:
      asked: whether one was; all processes call this with the same answer.
    """
    if asked and _with_others:
        raise StoppedError


def _leave() -> None:
    """Ends the process; if others wait for its messages, after a time for all to end together."""
    if not _with_others:
        end(_status, "ended by SIGTERM")
    later = threading.Timer(LEAVE_SECONDS, end, (_status, "ended by SIGTERM"))
    later.daemon = True
    later.start()


def _watch_signals(reading: int) -> None:
    while True:
        number = os.read(reading, 1)[0]
        if number == signal.SIGINT:
            end(ENDED + signal.SIGINT, "interrupted")
        if number == signal.SIGTERM:
            stop.set()
            if not _saves.is_set():
                _leave()


def _watch_launcher(pipe: int) -> None:
    os.read(pipe, 1)  # Nothing is ever written: this returns when the launcher ends.
    end(1, "the launcher has ended; this process ends too")


def say(line: str) -> None:
    """Writes a line from any thread, without a lock that another thread may hold."""
    with contextlib.suppress(OSError):  # Nobody may be reading any more.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())


def end(status: int, line: str = "") -> None:
    """Ends the process at once: no handler of another library runs, and none can hang."""
    if line:
        say(line)
    os._exit(status)
