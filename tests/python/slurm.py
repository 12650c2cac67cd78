"""Real Slurm on one host: its controller, two nodes and their key, with all state in one folder and on free ports."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from batch import kill_all, marked
from processes import environment, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
NODES = ("n1", "n2")
# From SIGTERM to SIGKILL; the default is 30 s. Agents leave five seconds of it unused.
KILL_WAIT = 14

# `config_overrides` lets each node have more cores than there are. Two daemons on one host need ports of their own, and
# %n in their paths. Most sites have `proctrack/cgroup`, which not every machine for tests can: `pgid` sends SIGTERM to
# tasks alone, as that does; SIGKILL, too, so agents and keepers have to end the rest. A requeued job waits until the
# credentials of its last run have expired, two minutes unless told.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now. Slurm takes none that the system chooses."""
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Slurm:
    """The daemons, and Slurm's commands as methods."""

    def __init__(self, folder: Path):
        """Starts all; both nodes are idle when this returns."""
        self.folder = folder
        folder.mkdir(mode=0o755)
        (folder / "state").mkdir()
        (folder / "out").mkdir()
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(folder=folder, host=host, ports=free_ports(3), kill_wait=KILL_WAIT)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        self.daemons: dict[str, subprocess.Popen] = {}
        try:
            names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
            files = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in names]
            self._start("munged", "munged", "--foreground", "--force", *files)
            wait_until((folder / "munge.socket").exists, 60, "munged answers")
            self._start("slurmctld", "slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            self.wait_idle()
        except BaseException:
            self.stop()
            raise

    def _environment(self, **more: str) -> dict[str, str]:
        return environment() | {"SLURM_CONF": f"{self.folder}/slurm.conf"} | more

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command,
                **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True},
                env=self._environment(SLURM_TEST_DAEMON=f"{self.folder}/{name}"),
            )

    def start_node(self, node: str) -> None:
        """Starts its daemon."""
        self._start(node, "slurmd", "-D", "-N", node)

    def wait_idle(self) -> None:
        """Returns when both nodes take jobs and have none."""

        def idle() -> bool:
            with contextlib.suppress(AssertionError):
                return self.call("sinfo", "--noheader", "--format=%T %D") == f"idle {len(NODES)}"
            return False

        wait_until(idle, 120, "both nodes are idle", pause=0.2)

    def call(self, command: str, *arguments: str, stdin: str = "") -> str:
        """Runs one of its commands as a user would and returns what it prints."""
        ended = subprocess.run(
            [command, *arguments],
            **{"capture_output": True, "text": True, "input": stdin, "cwd": self.folder, "timeout": 30, "check": False},
            env=self._environment(SLURM_TEST=str(self.folder)),
        )
        assert ended.returncode == 0, f"{command} {' '.join(arguments)}: {ended.stderr}"
        return ended.stdout.strip()

    def submit(self, script: str) -> str:
        """A job of this script; its id."""
        output = f"--output={self.folder}/out/%j"
        return self.call("sbatch", "--parsable", output, "--open-mode=append", stdin=script)

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of it, also for some minutes after its end."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "--oneliner", "show", "job", job)))

    def ended(self, job: str, seconds: float) -> dict[str, str]:
        """Waits until it has ended, and says how."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        def said() -> dict[str, str] | None:
            known = self.job(job)
            return known if known["JobState"] in ends else None

        return wait_until(said, seconds, f"job {job} ended", pause=0.2)

    def output(self, job: str) -> str:
        """What it has printed."""
        return (self.folder / "out" / job).read_text(errors="replace")

    def left(self) -> dict[int, str]:
        """The processes of all its jobs."""
        return marked(str(self.folder), "SLURM_TEST")

    def daemon(self, name: str) -> set[int]:
        """A daemon and what it started to watch over jobs; not the jobs."""
        return {*marked(f"{self.folder}/{name}", "SLURM_TEST_DAEMON")}

    def printed(self) -> dict[str, str]:
        """The end of what each job and daemon has printed."""
        logs = [*self.folder.glob("out/*"), *self.folder.glob("*.log")]
        return {path.name: path.read_text(errors="replace")[-3000:] for path in logs}

    def stop(self) -> None:
        """Ends the daemons and whatever they started."""
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=60)

        kill_all(lambda: [*self.left(), *(pid for name in self.daemons for pid in self.daemon(name))])
        shutil.rmtree(self.folder.parent, ignore_errors=True)
