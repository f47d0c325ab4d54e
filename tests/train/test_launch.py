"""The launcher: that nothing is left behind, and what it sets."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from running import ROOT, Program, children, python

from train import launch, main
from train import supervise as supervision

pytestmark = pytest.mark.usefixtures("handlers")


def wait_for(pids: list[int]) -> None:
    """Returns when none of the processes runs; fails after ten seconds."""
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        (signal.SIGINT, 130, "launch: interrupted; all processes end"),
        (signal.SIGTERM, 143, "launch: SIGTERM: all processes save and end"),
        (signal.SIGHUP, 129, "launch: the terminal has closed; all processes end"),
        (signal.SIGKILL, -9, None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_no_process_outlives_the_launcher(
    program: Program, how: signal.Signals, status: int, says: str | None
) -> None:
    """At its start, when there is nothing to save."""
    config = "--config=configs/digits_resnet.py"
    # Under nohup, of these tests or of the launcher, a terminal that hangs up ends nothing.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        launcher = program.start("train.launch", "--processes=2", "--", config)
    finally:
        signal.signal(signal.SIGHUP, before)
    while len(pids := children(launcher.pid)) < 2:
        time.sleep(0.05)
    launcher.send_signal(how)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == status and "Traceback" not in stderr
    assert says is None or says in stderr.splitlines()
    wait_for(pids)


def test_a_restart_for_what_may_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses, starts = [1, 128 + 9, 0], []

    def start(commands: list[list[str]], *_: object) -> int:
        starts.append(commands[0][-1])
        return statuses.pop(0)

    monkeypatch.setattr(launch, "supervise", start)
    arguments = ["launch", "--processes=1", "--max_restarts=3", "--", f"--workdir={tmp_path}"]
    assert launch.main(arguments) == 0
    assert starts == [f"--workdir={tmp_path}", "--restart=1", "--restart=2"]
    assert capfd.readouterr().err.splitlines() == [
        "launch: restart 1 of 3 from the last checkpoint",
        "launch: restart 2 of 3 from the last checkpoint",
    ]
    for final in (2, 3, 128 + signal.SIGINT):
        statuses = [final]
        assert launch.main(arguments) == final and not statuses
    statuses = [1, 1, 1, 1]
    assert launch.main(arguments) == 1 and not statuses


def test_the_output_of_each_process_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a start that failed too; process 0 writes to the terminal as it does without."""
    logs = tmp_path / "new" / "logs"

    def commands_of(
        processes: int, port: int, arguments: list[str], restart: int
    ) -> list[list[str]]:
        fails = f"import time, sys; print('fails', flush=True); sys.exit({1 - restart})"
        return python("print('zero')", f"print('one of start {restart}')", fails)

    monkeypatch.setattr(launch, "commands_of", commands_of)
    asked = ["launch", "--processes=3", "--max_restarts=1", f"--log_dir={logs}"]
    assert launch.main([*asked, "--", f"--workdir={tmp_path}"]) == 0
    assert capfd.readouterr().out.endswith("zero\n")
    kept = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*.log")}
    assert kept.keys() == {f"{folder}{i}.log" for folder in ("", "restart1/") for i in (1, 2)}
    assert kept["2.log"] == "fails\n" and kept["restart1/1.log"] == "one of start 1\n"
    (tmp_path / "file").touch()
    where = f"--log_dir={tmp_path}/file/below"
    assert launch.main(["launch", "--processes=2", where, "--"]) == 2
    assert capfd.readouterr().err.startswith(f"error: cannot write to {where}: [Errno 20] Not a d")


def test_who_was_asked_to_end_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def interrupted(commands: object, *_: object) -> int:
        starts.append(commands)
        os.kill(os.getpid(), signal.SIGINT)
        return 128 + signal.SIGINT

    monkeypatch.setattr(launch, "supervise", interrupted)
    arguments = ["--processes=1", "--max_restarts=2", "--", f"--workdir={tmp_path}"]
    assert launch.main(["launch", *arguments]) == 128 + signal.SIGINT
    assert len(starts) == 1


def cluster_file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.py"
    path.write_text(
        "from ml_collections import config_dict\n\n\n"
        "def get_config():\n"
        "    return config_dict.create(processes=3, env={'A': 'x', 'B': 'card{process_id}'})\n"
    )
    return str(path)


def test_a_cluster_file_sets_variables_which_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    show = "import os, sys; print(*(os.environ[k] for k in ('A', 'B', 'JAX_LOCAL_DEVICE_IDS')))"
    shown_by_0 = tmp_path / "shown"  # before the failure of another process ends process 0
    first = f"{show}; sys.stdout.flush(); open({str(shown_by_0)!r}, 'w')"
    last = f"{show}\nwhile not os.path.exists({str(shown_by_0)!r}): pass\nsys.exit(1)"

    def commands_of(
        processes: int, port: int, arguments: list[str], restart: int
    ) -> list[list[str]]:
        assert restart == 0 and arguments == ["--flag"]
        return python(first, *[show] * (processes - 2), last)

    monkeypatch.setattr(launch, "commands_of", commands_of)
    status = launch.main(["launch", f"--cluster={cluster_file(tmp_path)}", "--", "--flag"])
    shown = capfd.readouterr()
    assert status == 1 and shown.out == "x card0 0\n"
    assert shown.err.splitlines()[:2] == [
        "launch: A=x",
        "launch: B=card{process_id}",
    ]
    assert shown.err.splitlines()[-1] == "x card2 2"


def test_what_a_cluster_file_says_of_devices_and_memory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    said = {"JAX_LOCAL_DEVICE_IDS": "{process_id},4", "MALLOC_ARENA_MAX": "4"}
    path = tmp_path / "cluster.py"
    path.write_text(f"def get_config():\n    return {{'processes': 2, 'env': {said}}}\n")
    settings = launch.parse(["launch", f"--cluster={path}", "--"]).settings
    assert {name: settings[name] for name in said} == said
    assert "MALLOC_TOP_PAD_" not in settings  # who sets one of them sets all


def test_several_processes_are_told_of_each_other() -> None:
    commands = launch.commands_of(2, 1234, ["--config=a.py"], 0)
    together = ["--coordinator=127.0.0.1:1234", "--num_processes=2"]
    common = [sys.executable, "-m", "train", "--config=a.py", *together]
    assert commands == [[*common, "--process_id=0"], [*common, "--process_id=1"]]


def test_one_process_is_told_by_its_own_flags() -> None:
    command = [sys.executable, "-m", "train", "--process_id=3"]
    assert launch.commands_of(1, 1234, ["--process_id=3"], 0) == [command]
    assert launch.names_of(1, ["--process_id=3"]) == [f"3 on {socket.gethostname()}"]
    assert launch.names_of(1, []) == ["0"] and launch.names_of(2, []) == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --processes is missing"),
        (["--processes=0"], "error: flag --processes=0: 0 is not a positive integer"),
        (["--procs=2"], "error: Unknown command line flag 'procs'. Did you mean: processes ?"),
        (
            ["--processes=2", "--config=a.py"],
            "error: Unknown command line flag 'config'; flags of the training program follow `--`",
        ),
        (["2"], "error: not a flag: 2; flags of the training program follow `--`"),
        (["--cluster=no.py"], "error: --cluster=no.py: there is no such file"),
        (["--processes=2", "--port=80000"], "error: port 80000 is not one of 1 to 65535"),
        (
            ["--processes=2", "--max_restarts=1", "--", "--config=x.py"],
            "error: --max_restarts needs --workdir=DIR after `--`: a restart continues there",
        ),
        (
            ["--processes=2", "--max_restarts=1", "--", "--config=x.py", "--workdir="],
            "error: --max_restarts needs --workdir=DIR after `--`: a restart continues there",
        ),
        (
            ["--cluster="],
            "error: --cluster is empty; name a file of configs/cluster, or leave it out",
        ),
        (
            ["--processes=2", "--", "--config=x.py", "--coordinator=a:1"],
            "error: --coordinator=a:1 does not go with --processes=2, which tells the processes of "
            "one machine how to find each other; leave out one of them",
        ),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch", *arguments]) == 2
    assert capsys.readouterr().err.splitlines() == [message]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def get_config(): return None", "get_config() returns None, not a ConfigDict"),
        ("x = 1", "the file has no function 'get_config'"),
        ("def get_config(:", "SyntaxError: invalid syntax"),
        ("def get_config(): return {'env': {'A': 1}}", "env must map names to texts, and is"),
        ("def get_config(): return {'env': {'A=B': '1'}}", "env has the name 'A=B'; names are"),
        ("def get_config(): return {'processes': 0}", "processes is 0, not a whole number"),
        ("def get_config(): return {'proceses': 2}", "there is no 'proceses'; did you mean 'proc"),
    ],
)
def test_mistakes_in_a_cluster_file(
    source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.py"
    path.write_text(source + "\n")
    assert launch.main(["launch", f"--cluster={path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --cluster={path}: {message}")


def test_a_variable_may_hold_braces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.py"
    env = {"JSON": '{"a": 1}', "DEVICE": "{process_id}", "EMPTY": "{}"}
    path.write_text(f"def get_config(): return {{'processes': 2, 'env': {env}}}\n")
    given = []
    monkeypatch.setattr(launch, "supervise", lambda _, envs, *rest: given.extend(envs) or 0)
    assert launch.main(["launch", f"--cluster={path}"]) == 0
    assert [{name: e[name] for name in env} for e in given] == [
        {**env, "DEVICE": "0"},
        {**env, "DEVICE": "1"},
    ]


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert launch.main(["launch", "--processes=2", f"--port={port}"]) == 2
    assert capsys.readouterr().err == f"error: port {port} is in use; choose another\n"


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "cluster").glob("*.py")), ids=str)
def test_cluster_files(path: Path) -> None:
    cluster = launch.read_cluster(str(path))
    assert set(cluster) == {"processes", "env"} and cluster["processes"] > 0
    assert all(isinstance(value, str) for value in cluster["env"].values())


@pytest.mark.parametrize("name", ["slurm.sbatch", "bare_ssh.sh"])
def test_scripts(name: str) -> None:
    path = ROOT / "configs" / "cluster" / name
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.read_text().startswith("#!/bin/bash")
    assert name == "slurm.sbatch" or os.access(path, os.X_OK)


def flags_under_slurm(folder: Path, variables: dict[str, str]) -> list[str]:
    """What `slurm.sbatch` gives to srun, where the job has these variables."""
    srun = folder / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    script = ROOT / "configs" / "cluster" / "slurm.sbatch"
    done = subprocess.run(
        ["bash", script], env=path | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("restarts", ["", "2"])
def test_a_job_that_slurm_queues_again_goes_on(tmp_path: Path, restarts: str) -> None:
    variables = {"SLURM_JOB_ID": "7"} | ({"SLURM_RESTART_COUNT": restarts} if restarts else {})
    assert f"--restart={restarts or 0}" in flags_under_slurm(tmp_path, variables)


@pytest.mark.parametrize("workdir", ["", "workdir/earlier"])
def test_another_slurm_job_goes_on_where_it_is_told(tmp_path: Path, workdir: str) -> None:
    variables = {"SLURM_JOB_ID": "7"} | ({"RESUME": workdir} if workdir else {})
    found = flags_under_slurm(tmp_path, variables)
    assert f"--workdir={workdir or 'workdir/fashion_resnet-7'}" in found
    assert ("--config.checkpoint.resume=True" in found) == bool(workdir)


def test_the_kubernetes_manifest() -> None:
    """As many pods as processes, and flags that the program has."""
    manifest = yaml.safe_load((ROOT / "configs" / "cluster" / "kubernetes.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    bash, option, command = container["command"]
    assert (bash, option) == ("bash", "-c")
    subprocess.run(["bash", "-n", "-c", command], check=True)
    script = command.replace("exec .venv/bin/python -m train", "printf '%s\\n'")
    index = {"JOB_COMPLETION_INDEX": "3", "RESTART": "1", "PATH": os.environ["PATH"]}
    shown = subprocess.run(["bash", "-c", script], env=index, capture_output=True, text=True)
    flags = dict(flag.removeprefix("--").split("=") for flag in shown.stdout.split())
    assert flags["process_id"] == "3" and flags["restart"] == "1"
    assert spec["parallelism"] == spec["completions"] == int(flags["num_processes"]) == 4
    assert spec["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"
    (restarts,), (policy,) = (
        manifest["spec"]["failurePolicy"]["rules"],
        spec["podFailurePolicy"]["rules"],
    )
    assert restarts == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    final = [status for status in supervision.FINAL if 0 < status < supervision.ENDED]
    assert policy["action"] == "FailJob" and policy["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": final,
    }
    assert set(flags) <= set(main.flags.FLAGS) and (ROOT / flags["config"]).exists()
    host, port = flags["coordinator"].split(":")
    assert (
        host == f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    )
    assert int(port) == container["ports"][0]["containerPort"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] > supervision.GRACE_SECONDS


@pytest.mark.slow
@pytest.mark.multiprocess
def test_machines_by_ssh_restart_together(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `ssh` that stays on this machine; a launcher for each host, one of whose workers dies."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/bash\nexec bash -c "${@: -1}"\n')
    ssh.chmod(0o755)
    workdir = tmp_path / "run"
    arguments = ["--config=configs/digits_resnet.py", f"--workdir={workdir}"]
    arguments += ["--config.steps=60", "--config.checkpoint.every=5", "--config.measure_steps=4"]
    script = ["configs/cluster/bare_ssh.sh", "localhost", "localhost", "--", *arguments]
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MAX_RESTARTS": "2"}
    variables |= {"PORT": str(launch.free_port()), "JAX_PLATFORMS": "cpu"}
    variables |= {"TFDS_DATA_DIR": program.data_dir}
    started = subprocess.Popen(
        script, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    program.started.append(started)
    deadline = time.monotonic() + 100
    while not list((workdir / "checkpoints").glob("[0-9]*")):
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.1)
    launchers = [pid for pid in children(started.pid)]
    workers = [worker for pid in launchers for worker in children(pid)]
    assert len(launchers) == len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    output, _ = started.communicate(timeout=200)
    assert started.returncode == 0, output
    assert output.count("launch: restart 1 of 2") == 2 and '"processes": 2' in output
