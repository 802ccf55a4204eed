"""A SLURM cluster of two nodes on one machine, for tests and for trying out job scripts. Not a test itself.

    python tests/support/slurm_cluster.py /tmp/cluster    # until Ctrl-C; prints the variable for other shells
    python tests/support/slurm_cluster.py --check         # lists missing packages
    with cluster(folder) as environment: subprocess.run(["sbatch", ...], env=environment)

Needs Debian's slurm-wlm and munge, without any set-up: munged, slurmctld and two slurmd (n1 and n2, each with four CPUs
and two pretended GPUs) run from one folder, with their own key and ports, as children of this process and with its
rights. Partition `urgent` pre-empts jobs of `normal`.
"""

import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NODES = ("n1", "n2")
PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}  # of Debian
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"  # where the daemons are, for any user

# cred_expire is also how long a requeued job waits: by default two minutes, and at least five seconds.
# config_overrides: the machine may have fewer cores than the nodes claim.
SLURM_CONF = """\
ClusterName=t5_foundry
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:2
PartitionName=normal Nodes=n1,n2 Default=YES PriorityTier=1
PartitionName=urgent Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
"""
# A GPU that is only counted and named in CUDA_VISIBLE_DEVICES can be any character device.
GRES_CONF = (
    "NodeName=n[1-2] Name=gpu File=/dev/null Flags=nvidia_gpu_env\n"
    "NodeName=n[1-2] Name=gpu File=/dev/zero Flags=nvidia_gpu_env\n"
)


def missing_packages() -> list[str]:
    """Debian's packages whose programs are not there: ["munge", "slurmd"], or nothing."""
    return [package for name, package in PACKAGES.items() if shutil.which(name, path=SEARCH_PATH) is None]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def write_configuration(folder: Path) -> None:
    ports, host = free_ports(1 + len(NODES)), socket.gethostname().split(".")[0]
    text = SLURM_CONF.format(folder=folder, host=host, user=getpass.getuser(), ports=ports)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(GRES_CONF)
    version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, env={"PATH": SEARCH_PATH}).stdout
    if [int(number) for number in re.findall(r"\d+", version)[:2]] >= [23, 11]:
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")  # older ones start without control groups
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def commands(folder: Path) -> dict[str, list[str]]:
    """The daemons in the order in which they start; all stay in the foreground, as children of this process."""
    munge = [
        f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file", "seed-file")
    ]
    return {
        "munged": ["munged", "--foreground", "--force", *munge],
        "slurmctld": ["slurmctld", "-D"],
        **{f"slurmd-{node}": ["slurmd", "-D", "-N", node] for node in NODES},
    }


@contextlib.contextmanager
def cluster(folder: str | Path, timeout: float = 60) -> Iterator[dict[str, str]]:
    """Starts the cluster in the empty or new `folder` (a short path: sockets lie in it) and yields the environment for
    sbatch and the others. Raises RuntimeError with what the daemons wrote if the nodes are not idle after `timeout`
    seconds. At the end all jobs are cancelled and the daemons stopped, by their process ids."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_configuration(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCH_PATH}
    daemons = []
    try:
        for name, command in commands(folder).items():
            with (folder / f"{name}.out").open("wb") as output:
                # A session of its own: Ctrl-C must reach this process only, which then stops the daemons in order.
                pipes = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
                daemons.append(subprocess.Popen(command, env=environment, cwd=folder, **pipes))
            if name == "munged":
                wait_until((folder / "munge.socket").exists, timeout, folder)
        wait_until(lambda: idle_nodes(environment) == len(NODES), timeout, folder)
        try:
            yield environment
        finally:
            cancel_all_jobs(environment)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def wait_until(condition, timeout: float, folder: Path) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            logs = [path for path in sorted(folder.glob("*.out")) if path.stat().st_size]
            raise RuntimeError(
                "\n".join(["the cluster did not start", *(f"{p}:\n{p.read_text()[-2000:]}" for p in logs)])
            )
        time.sleep(0.2)


def query(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def idle_nodes(environment: dict[str, str]) -> int:
    return (
        query(environment, "sinfo", "--noheader", "--Node", "--partition=normal", "--format=%t").split().count("idle")
    )


def cancel_all_jobs(environment: dict[str, str], patience: float = 15) -> None:
    """Cancels all jobs before the daemons stop: their processes are not children of the daemons."""
    query(environment, "scancel", f"--user={getpass.getuser()}")
    end = time.monotonic() + patience
    while query(environment, "squeue", "--noheader", "--states=all", "--format=%T").count("COMPLETING"):
        if time.monotonic() > end:
            query(environment, "scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
            end = time.monotonic() + patience
        time.sleep(0.2)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print(__doc__)
        return 2
    if missing_packages():
        print(f"a SLURM of its own needs the Debian packages {' '.join(missing_packages())}")
        return 2
    if argv == ["--check"]:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as Ctrl-C
    with cluster(argv[0]) as environment, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={environment['SLURM_CONF']}", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
