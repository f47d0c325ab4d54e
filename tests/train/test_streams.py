"""Standard streams that nobody reads, or that were closed."""

import subprocess
import sys

import pytest
from running import ROOT

PRINTS = """
import sys, time
from train import streams
streams.open_closed()
streams.outlive_readers()
for i in range(300):
    print("x" * 1000, flush=True)
    print("y" * 1000, file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("went on")
"""


@pytest.mark.parametrize("shell", ["2>&1 | head -c 10", "<&- >&- 2>&-", ">&- | true"])
def test_a_program_outlives_its_readers(shell: str, tmp_path: object) -> None:
    said, program = f"{tmp_path}/said", f"{tmp_path}/prints.py"
    with open(program, "w") as file:
        file.write(PRINTS)
    command = f"PYTHONPATH={ROOT} {sys.executable} {program} {said} {shell}"
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=60)
    with open(said) as file:
        assert file.read() == "went on"


def test_what_a_disk_has_no_room_for_is_still_an_error() -> None:
    program = "from train import streams; streams.outlive_readers(); print('x' * 9999, flush=True)"
    command = f'PYTHONPATH={ROOT} {sys.executable} -c "{program}" > /dev/full'
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and "No space left on device" in ended.stderr


def test_a_name_that_the_terminal_cannot_show_is_no_error() -> None:
    program = "from train import streams; streams.outlive_readers(); print(chr(233))"
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "\\xe9\n"), ended.stderr
