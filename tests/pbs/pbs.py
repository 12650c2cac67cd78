"""A stand-in for OpenPBS on one host: server, scheduler, MoM and the commands that people type, in one program.

    python3 pbs.py serve FOLDER            makes qsub, qstat, qdel and the others in FOLDER/bin; runs until SIGTERM;
                                           FOLDER is its users' home, too
    python3 pbs.py call FOLDER COMMAND …   what those are

It starts each job in a session of its own and treats the session as a MoM without cgroups does, measured on OpenPBS
23.06: signals go to every process whose session is the job's, and to no other; when the top process ends, the session
is killed at once. The times are those measured divided by PACE, and of a range the end that is worse for the job. The
words that commands print are OpenPBS's own (src/cmds).

A job of several hosts, `select=2:…` with `place=scatter`, has its top process on the first, and on the others what
`pbsdsh` starts there, each in a session of its own. SIGTERM and qsig's signals go to the first host alone, suspension
to all; the end of the top process kills what is left on all.
"""

import asyncio
import contextlib
import getopt
import itertools
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# How many times faster than a real one this scheduler is.
PACE = float(os.environ.get("PBS_STAND_IN_PACE", "1"))
# From SIGTERM to SIGKILL while the top process lives: 9 to 22 s with the default `kill_delay` of 10 s.
TERM_TO_KILL = 9 / PACE
# The same where SIGTERM ends the top process, as it does every shell with a script: 2.1 to 7.9 s.
TERM_TO_KILL_OF_SCRIPT = 2.1 / PACE
# SIGTERM comes 3 to 16 s after the walltime has ended.
WALLTIME_LATENESS = 3 / PACE
# How many hosts there are, each for one job at a time; 0 is enough for all that come.
HOSTS = int(os.environ.get("PBS_STAND_IN_HOSTS", "0"))
# From the end of one run of a requeued job to the next: the scheduler looks every ten seconds, or is told.
REQUEUED = 2 / PACE

SERVER = "head"
COMMANDS = ("qsub", "qselect", "qstat", "qdel", "qsig", "qrerun", "pbsnodes", "pbsdsh")
# What an array has not, because only its parts run.
OF_A_RUN = ("array_id", "array_index", "exec_host", "exec_vnode", "Exit_status", "jobdir", "run_count", "session_id")
# Each of a job's processes has this variable; its value is the folder of this scheduler.
MARKER = "PBS_STAND_IN"
# Exit codes of the commands: PBSE_UNKJOBID, _BADSTATE, _HISTJOBID, _NOHISTARRAYSUBJOB, _UNKSIG and _NORERUN modulo 256;
# 2 for bad usage.
UNKNOWN_JOB, BAD_STATE, FINISHED, FINISHED_PART, UNKNOWN_SIGNAL, NO_RERUN, USAGE = 153, 168, 35, 55, 165, 190, 2
# 15010 and 15007 modulo 256.
NO_SERVER, UNAUTHORIZED = 162, 159
# What a task of pbsdsh has not of its job's variables.
NOT_IN_TASKS = ("LOGNAME", "MANPATH", "PBS_ARRAY_ID", "PBS_ARRAY_INDEX", "SHELL", "USER")
# Who has this variable, as 1, calls as a manager of PBS, and everybody else as a user.
MANAGER = "PBS_STAND_IN_MANAGER"


class CommandError(Exception):
    """What a command prints to standard error, and its exit code."""

    def __init__(self, code: int, text: str, printed: str = ""):
        """`text` without the name of the command; what it has printed to standard output all the same."""
        super().__init__(text)
        self.code, self.printed = code, printed


def processes_of(session: int) -> dict[int, str]:
    """The processes of a session by pid, with the letter of their state; zombies do not count."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        # The name may hold spaces and brackets; the fields after the last bracket do not.
        with contextlib.suppress(OSError):
            state, _, _, its_session = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state not in "ZX":
                found[int(entry)] = state
    return found


def signal_session(session: int, number: int) -> int:
    """Sends a signal to every process of a session; how many there were."""
    members = processes_of(session)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(members)


def seconds(walltime: str) -> int:
    """`1:00:00`, `10:00` or `600` as seconds."""
    total = 0
    for part in walltime.split(":"):
        total = total * 60 + int(part)
    return total


def clock(duration: float) -> str:
    """Seconds as PBS writes them: `01:00:00`."""
    whole = int(duration)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"


def printable(value: str) -> str:
    """As qstat shows control characters, for which it takes some bytes of UTF-8 too (show_nonprint_chars)."""
    shown = bytearray()
    for byte in value.encode():
        signed = byte - 256 if byte > 127 else byte
        control = signed < 32 and byte not in b"\n\t"
        shown += bytes((ord("^"), (signed + 64) % 256)) if control else bytes((byte,))
    return shown.decode(errors="surrogateescape")


def as_json(value, indent: int = 4) -> str:
    """As OpenPBS 23.06 writes JSON, which is none where a value has a backslash or a letter beyond ASCII or is a number
    for strtod alone, such as `nan` (pbs_json.c). Releases after it leave that to cJSON."""
    if isinstance(value, dict):
        blank = " " * indent
        items = (f'{blank}"{name}":{as_json(one, indent + 4)}' for name, one in value.items())
        return "{\n" + ",\n".join(items) + f"\n{' ' * (indent - 4)}}}"
    text = str(value)
    if re.fullmatch(r"\s*[+-]?(nan|inf|infinity|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)\s*", text, re.IGNORECASE) and (
        text[0] != "0" or float(text) < 1
    ):
        return text
    text = re.sub(r"\\(['\",])", r"\1", text)
    text = re.sub(r'(?<!\\)"', r'\\"', text)
    for character, escaped in {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.items():
        text = text.replace(character, escaped)
    return f'"{printable(text)}"'


def escape(word: str) -> str:
    """An argument as PBS keeps it."""
    for character, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;"}.items():
        word = word.replace(character, entity)
    return word


def as_dsv(jobs: dict[str, dict], delimiter: str) -> str:
    """As `qstat -f -F dsv -D DELIMITER` prints jobs: one in a line, and attributes within others by both names."""
    lines = []
    for id, job in jobs.items():
        words = [f"Job Id: {id}"]
        for name, value in job.items():
            if name == "Variable_List":
                words.append(f"{name}={','.join(f'{key}={one}' for key, one in value.items())}")
            elif isinstance(value, dict):
                words += [f"{name}.{key}={one}" for key, one in value.items()]
            else:
                words.append(f"{name}={value}")
        escaped = [
            word.replace("\\", "\\\\").replace(delimiter, f"\\{delimiter}").replace("\n", "\\n") for word in words
        ]
        lines.append(delimiter.join(map(printable, escaped)))
    return "\n".join(lines)


class Submission:
    """What a call of qsub asks for."""

    def __init__(self, call: dict):
        """Reads flags, then the directives of the script, whose flags lose to those of the command line."""
        arguments, environment, folder = call["arguments"], call["environment"], call["folder"]
        own, program = arguments, []
        if "--" in arguments:
            at = arguments.index("--")
            own, program = arguments[:at], arguments[at + 1 :]
        flags, rest = self._flags(own)
        self.program, self.script = program, ""
        if not program:
            self.script = Path(folder, rest[0]).read_text() if rest else call["stdin"]
            directives = re.findall(r"^#PBS\s+(.*)$", self.script, re.MULTILINE)
            flags = self._flags([word for line in directives for word in shlex.split(line, comments=True)])[0] + flags
        self.user, self.arguments, self.environment, self.folder = call["user"], arguments, environment, folder
        self.name = Path(rest[0]).name if rest else "STDIN"
        if program:
            self.name = Path(program[0]).name
        self.resources = {"ncpus": "1", "nodect": "1", "place": "pack", "select": "1:ncpus=1"}
        self.array: range | None = None
        self.join, self.output, self.error, self.rerunable = False, None, None, True
        self.after = ""
        self.account, self.queue = "", "workq"
        self.variables: dict[str, str] = {}
        for flag, value in flags:
            self._take(flag, value)

    @staticmethod
    def _flags(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
        try:
            return getopt.getopt(words, "A:e:fj:J:k:l:m:N:o:P:q:r:S:v:VW:")
        except getopt.GetoptError as error:
            raise CommandError(USAGE, str(error)) from error

    def _take(self, flag: str, value: str) -> None:
        match flag:
            case "-N":
                self.name = value
            case "-l":
                # `select=` and `place=` hold commas of no list; `ncpus=1,walltime=60` is one.
                for item in [value] if value.startswith(("select=", "place=")) else value.split(","):
                    name, _, amount = item.partition("=")
                    self.resources[name] = clock(seconds(amount)) if name == "walltime" else amount
            case "-J":
                first, last = re.fullmatch(r"(\d+)-(\d+)", value).groups()
                self.array = range(int(first), int(last) + 1)
            case "-j":
                self.join = value == "oe"
            case "-o":
                self.output = value
            case "-e":
                self.error = value
            case "-A":
                self.account = value
            case "-q":
                self.queue = value
            case "-W":
                # The job after whose end it may run, however that one ends.
                self.after = value.removeprefix("depend=afterany:")
            case "-r":
                self.rerunable = value == "y"
            case "-V":
                self.variables |= self.environment
            case "-v":
                for item in value.split(","):
                    name, equals, given = item.partition("=")
                    self.variables[name] = given if equals else self.environment.get(name, "")

    def slots(self) -> list[int]:
        """The hosts of the job by their numbers, each as often as its chunk has `mpiprocs`: what PBS_NODEFILE lists."""
        count, *words = self.resources["select"].split(":")
        scattered = self.resources["place"].startswith("scatter") and count.isdigit()
        amounts = dict(word.split("=", 1) for word in words)
        return [host for host in range(int(count) if scattered else 1) for _ in range(int(amounts.get("mpiprocs", 1)))]

    def origin(self) -> dict[str, str]:
        """What qsub sends of the environment that it was called in."""
        names = {"HOME": "/", "LANG": "C", "LOGNAME": "nobody", "PATH": "/bin:/usr/bin", "SHELL": "/bin/sh"}
        variables = {f"PBS_O_{name}": self.environment.get(name, default) for name, default in names.items()}
        variables |= {"PBS_O_SYSTEM": "Linux", "PBS_O_WORKDIR": self.folder, "PBS_O_QUEUE": self.queue}
        return variables | {"PBS_O_HOST": socket.gethostname(), **self.variables}


class Task:
    """What pbsdsh has started on a host of a job: a session of its own."""

    def __init__(self, id: str, host: int, process: asyncio.subprocess.Process):
        """It runs."""
        self.id, self.host, self.process = id, host, process


class Job:
    """One job, or one part of an array: its runs, one after the other, each a session."""

    def __init__(self, server: "Server", number: int, index: int | None, submission: Submission):
        """Queued; the server starts it."""
        self.server, self.number, self.index, self.submission = server, number, index, submission
        self.id = f"{number}.{SERVER}" if index is None else f"{number}[{index}].{SERVER}"
        self.state, self.run_count = "Q", 0
        self.queued_at, self.started_at, self.walltime_used = time.time(), 0.0, 0.0
        self.first_started_at = 0.0
        self.session, self.exit_status, self.requeue = 0, None, False
        self.terminated_at: float | None = None
        """When SIGTERM was sent to end this run."""
        self.top: asyncio.subprocess.Process | None = None
        self.slots = submission.slots()
        self.tasks: dict[str, Task] = {}
        self.spool = [server.folder / "spool" / f"{self.id}.{stream}" for stream in ("OU", "ER")]
        self.killing: asyncio.TimerHandle | None = None
        self.life: asyncio.Task | None = None

    def start(self) -> None:
        """Begins a run, on a host that is free."""
        self.state, self.session, self.run_count = "R", 0, self.run_count + 1
        self.requeue, self.terminated_at, self.started_at, self.tasks = False, None, time.time(), {}
        self.first_started_at = self.first_started_at or self.started_at
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        await self._run()
        if self.requeue:
            self.state = "Q"
            asyncio.get_running_loop().call_later(REQUEUED, self.server.queue, self)
        else:
            self._stage_output()
            self.state = "F"
        self.server.start_next()

    def delete(self) -> None:
        """What qdel does: a job that waits is gone at once."""
        if self.state == "F":
            if self.is_part_of_living():
                raise CommandError(FINISHED_PART, f"Request invalid for finished array subjob {self.id}")
            raise CommandError(FINISHED, f"Job has finished {self.id}")
        if self.state == "E":
            self._demand("R")
        if self.state in "HQ":
            self.state = "F"
        self.requeue = False
        self.terminate()

    async def _run(self) -> None:
        tmpdir = self.server.folder / "tmp" / f"pbs.{self.id}"
        tmpdir.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._start(self._environment(tmpdir))
        if self.terminated_at:
            # It was deleted while it started.
            self.signal(signal.SIGTERM)
        ends = None
        if walltime := self.submission.resources.get("walltime"):
            late = seconds(walltime) + WALLTIME_LATENESS
            ends = asyncio.get_running_loop().call_later(late, self.terminate)
        code = await self.top.wait()
        if self.terminated_at and code == -signal.SIGTERM:
            # The MoM learns of it at its next look, and the others of the session live on until then.
            await asyncio.sleep(max(0.0, self.terminated_at + TERM_TO_KILL_OF_SCRIPT - time.time()))
        self.state = "E"
        for timer in (ends, self.killing):
            if timer:
                timer.cancel()
        while self.signal(signal.SIGKILL, everywhere=True):
            await asyncio.sleep(0.01)
        self.exit_status = code if code >= 0 else 256 - code
        self.walltime_used = time.time() - self.started_at
        shutil.rmtree(tmpdir, ignore_errors=True)

    async def _start(self, environment: dict[str, str]) -> None:
        """The top process in a session of its own: the program itself, or a login shell that runs the script."""
        command, script = self.submission.program, ""
        if not command:
            body = self.server.folder / "spool" / f"{self.id}.SC"
            body.write_text(self.submission.script)
            body.chmod(0o700)
            # Two shells, as with a real MoM: the one that reads the script's name, and the one that runs it.
            command, script = ["/bin/bash", "-l"], f"{shlex.quote(str(body))}\n"
        output, error = (path.open("ab") for path in self.spool)
        with output, error:
            self.top = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output if self.submission.join else error,
                cwd=environment["HOME"],
                env=environment,
                start_new_session=True,
            )
        self.session = self.top.pid
        with contextlib.suppress(ConnectionError):
            self.top.stdin.write(script.encode())
            await self.top.stdin.drain()
        self.top.stdin.close()

    def _environment(self, tmpdir: Path) -> dict[str, str]:
        origin = self.submission.origin()
        threads = re.search(r"ncpus=(\d+)", self.submission.resources["select"])
        threads = threads[1] if threads else self.submission.resources["ncpus"]
        nodefile = self.server.folder / "aux" / self.id
        nodefile.write_text("".join(f"{self.host(slot)}\n" for slot in self.slots))
        variables = origin | {
            **{name: origin[f"PBS_O_{name}"] for name in ("HOME", "LOGNAME", "SHELL")},
            "USER": origin["PBS_O_LOGNAME"],
            "PATH": f"{self.server.folder}/bin:/bin:/usr/bin",
            "TMPDIR": str(tmpdir),
            **{"NCPUS": threads, "OMP_NUM_THREADS": threads, "ENVIRONMENT": "BATCH"},
            **{"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": self.id, "PBS_JOBNAME": self.submission.name},
            **{"PBS_JOBCOOKIE": os.urandom(16).hex().upper(), "PBS_JOBDIR": origin["PBS_O_HOME"]},
            "PBS_QUEUE": self.submission.queue,
            **{"PBS_NODEFILE": str(nodefile), "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_MOMPORT": "15003"},
            MARKER: str(self.server.folder),
        }
        if self.index is not None:
            variables |= {"PBS_ARRAY_INDEX": str(self.index), "PBS_ARRAY_ID": f"{self.number}[].{SERVER}"}
        return variables

    @staticmethod
    def host(number: int) -> str:
        """The name of the job's host with this number; in truth all are this one."""
        return f"{socket.gethostname()}-{number}" if number else socket.gethostname()

    async def spawn(self, slot: int, command: list[str]) -> Task:
        """Starts a task of pbsdsh on a host of the job, with all that a task has."""
        host = self.slots[slot % len(self.slots)]
        id = f"{0x40000000 * host + len(self.tasks) + 1 + (host == 0):08X}"
        environment = self._environment(self.server.folder / "tmp" / f"pbs.{self.id}")
        environment = {name: value for name, value in environment.items() if name not in NOT_IN_TASKS}
        environment |= {"PATH": "/bin:/usr/bin", "PBS_NODENUM": str(host), "PBS_TASKNUM": id}
        output, error = (path.open("ab") for path in self.spool)
        with output, error:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if self.submission.join else error,
                cwd=environment["HOME"],
                env=environment,
                start_new_session=True,
            )
        self.tasks[id] = Task(id, host, process)
        return self.tasks[id]

    def signal(self, number: int, everywhere: bool = False) -> int:
        """Sends it to every process of the job's sessions on its first host, or on all; how many there were."""
        tasks = [task.process.pid for task in self.tasks.values() if everywhere or task.host == 0]
        return sum(signal_session(session, number) for session in [self.session, *tasks] if session)

    def terminate(self) -> None:
        """SIGTERM now, SIGKILL after the delay: for qdel, qrerun and the end of the walltime."""
        if self.terminated_at or self.state not in "RS":
            return
        self.terminated_at = time.time()
        self.signal(signal.SIGTERM)
        self.killing = asyncio.get_running_loop().call_later(TERM_TO_KILL, self.signal, signal.SIGKILL)

    def suspend(self) -> None:
        """Stops all processes of the sessions."""
        self._demand("R")
        self.signal(signal.SIGSTOP, everywhere=True)
        self.state = "S"

    def resume(self) -> None:
        """Has them continue."""
        self._demand("S")
        self.signal(signal.SIGCONT, everywhere=True)
        self.state = "R"

    def rerun(self) -> None:
        """Ends this run as qdel would, and queues the job again under the same id."""
        self._demand("R")
        if not self.submission.rerunable:
            raise CommandError(NO_RERUN, f"Job is not rerunnable {self.id}")
        self.requeue = True
        self.terminate()

    def is_part_of_living(self) -> bool:
        """Whether it is a part of an array that has not ended."""
        return self.index is not None and self.server.is_alive(self.number)

    def _demand(self, state: str) -> None:
        if self.state != state:
            raise CommandError(BAD_STATE, f"Request invalid for state of job {self.id}")

    def _stage_output(self) -> None:
        """Copies what the job printed to where it was submitted, only now."""
        number = str(self.number) if self.index is None else f"{self.number}.{self.index}"
        asked = [(self.submission.output, "o"), (self.submission.error, "e")]
        for spooled, (path, letter) in zip(self.spool, asked[: 1 if self.submission.join else 2], strict=False):
            to = Path(self.submission.folder, path or f"{self.submission.name}.{letter}{number}")
            if to.is_dir():
                to /= f"{self.id}.{'OU' if letter == 'o' else 'ER'}"
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(spooled, to)

    def attributes(self) -> dict:
        """What `qstat -f -F json` prints of it."""
        host, run = socket.gethostname(), self.submission
        shown = {
            "Job_Name": run.name,
            "Job_Owner": f"{run.user}@{host}",
            "job_state": "X" if self.state == "F" and self.is_part_of_living() else self.state,
            "queue": run.queue,
            "server": SERVER,
            "Checkpoint": "u",
            "ctime": time.ctime(self.queued_at),
            "Hold_Types": "s" if self.state == "H" else "n",
            "Join_Path": "oe" if run.join else "n",
            "Keep_Files": "n",
            "mtime": time.ctime(self.started_at or self.queued_at),
            "qtime": time.ctime(self.queued_at),
            "Rerunable": str(run.rerunable),
            "Resource_List": dict(sorted(run.resources.items())),
            "Variable_List": run.origin(),
            "etime": time.ctime(self.queued_at),
            "Submit_arguments": " ".join(run.arguments),
            "project": "_pbs_project_default",
            "Submit_Host": host,
        }
        if self.started_at:
            used = time.time() - self.started_at if self.state in "RSE" else self.walltime_used
            resources = {"cpupercent": 0, "cput": "00:00:00", "mem": "0b", "ncpus": 1, "vmem": "0b"}
            shown["resources_used"] = resources | {"walltime": clock(used)}
            shown |= {"stime": time.ctime(self.started_at), "session_id": self.session, "run_count": self.run_count}
        if self.state in "RSE":
            hosts = "+".join(f"{self.host(number)}/0" for number in dict.fromkeys(self.slots))
            shown |= {"exec_host": hosts, "exec_vnode": f"({host}:ncpus=1)", "jobdir": run.origin()["PBS_O_HOME"]}
        if run.program:
            shown["executable"] = f"<jsdl-hpcpa:Executable>{run.program[0]}</jsdl-hpcpa:Executable>"
            arguments = (f"<jsdl-hpcpa:Argument>{escape(one)}</jsdl-hpcpa:Argument>" for one in run.program[1:])
            shown["argument_list"] = "".join(arguments)
        began = self.index is not None and self.server.array_began(self.number)
        if self.state == "Q" and began:
            # A part that waits has what its array has.
            shown |= {"comment": time.strftime("Job Array Began at %a %b %d at %H:%M", time.localtime(began))}
            shown["stime"] = time.ctime(began)
        elif self.state == "Q":
            shown["comment"] = f"Not Running: Insufficient amount of resource: ncpus (R: 1 A: 0 T: {HOSTS})"
        elif self.state in "RSE":
            at = time.strftime("%a %b %d at %H:%M", time.localtime(self.started_at))
            shown["comment"] = f"Job run at {at} on ({host}:ncpus=1)"
        if run.after:
            shown["depend"] = f"afterany:{run.after}@{SERVER}"
        if run.account:
            shown["Account_Name"] = run.account
        if self.state == "F" and self.exit_status is not None:
            shown["Exit_status"] = self.exit_status
        if self.index is not None:
            shown |= {"array_id": f"{self.number}[].{SERVER}", "array_index": self.index}
        return shown


class Server:
    """All jobs, and the commands that are about them."""

    def __init__(self, folder: Path):
        """An empty queue; makes the commands in `folder`."""
        self.folder = folder
        self.jobs: dict[str, Job] = {}
        self.waiting: list[Job] = []
        self.numbers = itertools.count(11)
        for name in ("bin", "spool", "aux", "tmp"):
            (folder / name).mkdir()
        # A login shell forgets the path that it inherits; on a real host /etc/profile.d puts the commands back.
        (folder / ".bash_profile").write_text(f"PATH={shlex.quote(str(folder))}/bin:$PATH\n")
        for command in COMMANDS:
            path = folder / "bin" / command
            program = shlex.join([sys.executable, str(Path(__file__).resolve()), "call", str(folder), command])
            path.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            path.chmod(0o755)

    async def serve(self) -> None:
        """Answers commands until SIGTERM, then kills every session."""
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        async with await asyncio.start_unix_server(self._answer, self.folder / "server.sock"):
            await ended.wait()
        while living := [job for job in self.jobs.values() if job.life and not job.life.done()]:
            # Again and again: one that was just starting has no process yet that could hear it.
            for job in living:
                job.requeue = False
                job.signal(signal.SIGKILL, everywhere=True)
            self.waiting.clear()
            await asyncio.wait([job.life for job in living], timeout=0.1)

    def queue(self, job: Job) -> None:
        """Has it run as soon as a host is free."""
        self.waiting.append(job)
        self.start_next()

    def start_next(self) -> None:
        """Starts those that wait, first come first served, while hosts are free. What waits for the end of another job
        is held."""
        self.waiting = [job for job in self.waiting if job.state in "HQ"]
        for job in self.waiting:
            after = job.submission.after.partition(".")[0]
            job.state = "H" if after and self.is_alive(int(after)) else "Q"
        taken = sum(job.slots[-1] + 1 for job in self.jobs.values() if job.state in "RSE")
        for job in [job for job in self.waiting if job.state == "Q"]:
            taken += job.slots[-1] + 1
            if HOSTS and taken > HOSTS:
                break
            self.waiting.remove(job)
            job.start()

    def is_alive(self, number: int) -> bool:
        """Whether a job or a part of the array has not ended."""
        return any(job.number == number and job.state != "F" for job in self.jobs.values())

    def array_began(self, number: int) -> float:
        """When the first part of an array started; 0 where none has."""
        return min(
            (job.first_started_at for job in self.jobs.values() if job.number == number and job.run_count), default=0.0
        )

    @staticmethod
    def _take_zone(environment: dict[str, str]) -> None:
        """Times are printed in the zone of the one who asks."""
        os.environ.pop("TZ", None)
        os.environ |= {name: zone for name, zone in environment.items() if name == "TZ"}
        time.tzset()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = json.loads(await reader.read())
        command = call["command"]
        self._take_zone(call["environment"])
        try:
            printed = getattr(self, command)(call)
            printed = await printed if asyncio.iscoroutine(printed) else printed
            answer = {"printed": printed, "complaint": "", "code": 0}
        except CommandError as error:
            answer = {"printed": error.printed, "complaint": f"{command}: {error}", "code": error.code}
        writer.write(json.dumps(answer).encode())
        # A pbsdsh that waited may have been killed.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    def chosen(self, ids: list[str]) -> list[Job]:
        """The jobs of these ids: one each, or all parts of an array."""
        if not ids:
            raise CommandError(USAGE, "no job identifier is given")
        found = []
        for given in ids:
            number = given.partition(".")[0]
            if number.endswith("[]"):
                parts = [job for job in self.jobs.values() if str(job.number) == number[:-2] and job.index is not None]
            else:
                parts = [job for job in self.jobs.values() if job.id.partition(".")[0] == number]
            if not parts:
                raise CommandError(UNKNOWN_JOB, f"Unknown Job Id {given}")
            found += parts
        return found

    def qsub(self, call: dict) -> str:
        """Queues a job, or one for each index, and starts it where a host is free."""
        submission = Submission(call)
        number = next(self.numbers)
        for index in submission.array or [None]:
            job = Job(self, number, index, submission)
            self.jobs[job.id] = job
            self.queue(job)
        return f"{number}[].{SERVER}" if submission.array else job.id

    def qselect(self, call: dict) -> str:
        """`qselect [-u USER] [-N NAME]`: the ids of jobs and arrays that have not ended."""
        options = dict(getopt.gnu_getopt(call["arguments"], "N:u:")[0])
        found = []
        for job in self.jobs.values():
            asked = job.submission
            is_chosen = options.get("-N", asked.name) == asked.name and options.get("-u", asked.user) == asked.user
            if is_chosen and self.is_alive(job.number):
                found.append(self.parent_id(job))
        return "\n".join(dict.fromkeys(found))

    def qstat(self, call: dict) -> str:
        """`qstat -f -F json|dsv [-D DELIMITER] [-E] [-t] [-x] [ID…]`, and `qstat -B -f`: the server itself."""
        flags, ids = getopt.gnu_getopt(call["arguments"], "BfxtwED:F:")
        options = dict(flags)
        if "-B" in options and "-f" in options and not ids:
            return f"Server: {SERVER}\n    server_state = Active\n    server_host = {socket.gethostname()}\n"
        if "-f" not in options or options.get("-F") not in ("json", "dsv"):
            raise CommandError(USAGE, "this stand-in knows `qstat -f -F json` and `qstat -f -F dsv`")
        shown, complaint = {}, None
        for given in ids or list(dict.fromkeys(self.parent_id(job) for job in self.jobs.values())):
            try:
                found = self.shown(given, "-t" in options, "-x" in options)
            except CommandError as error:
                complaint = error if ids else complaint
                continue
            # Without -E, releases after 23.06 print the first of several alone.
            if not shown or "-E" in options or not ids:
                shown |= found
        head = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": SERVER}
        if options["-F"] == "dsv":
            printed = as_dsv(shown, options.get("-D", "|"))
        else:
            printed = as_json(head | ({"Jobs": shown} if shown else {}))
        if complaint and not (shown and "-E" in options):
            raise CommandError(complaint.code, str(complaint), printed)
        return printed

    @staticmethod
    def parent_id(job: Job) -> str:
        """The id of a job, or of the array that it is a part of."""
        return job.id if job.index is None else f"{job.number}[].{SERVER}"

    def shown(self, given: str, with_parts: bool, with_history: bool) -> dict[str, dict]:
        """What qstat prints of an id: of an array with its parts, or of it alone."""
        jobs = self.chosen([given])
        if not with_history and not self.is_alive(jobs[0].number):
            text = f"{given} Job has finished, use -x or -H to obtain historical job information"
            raise CommandError(FINISHED, text)
        shown = {job.id: job.attributes() for job in jobs}
        if "[]" not in given:
            return shown
        first = jobs[0]
        array = {name: value for name, value in first.attributes().items() if name not in OF_A_RUN}
        if at := self.array_began(first.number):
            array |= {
                "comment": time.strftime("Job Array Began at %a %b %d at %H:%M", time.localtime(at)),
                "stime": time.ctime(at),
            }
        began = any(job.run_count or job.state == "F" for job in jobs)
        array["job_state"] = "F" if not self.is_alive(first.number) else "B" if began else "Q"
        array |= {"array": "True", "array_indices_submitted": f"{first.index}-{jobs[-1].index}"}
        return {self.parent_id(first): array} | (shown if with_parts else {})

    def qdel(self, call: dict) -> str:
        """SIGTERM to the sessions of these jobs, SIGKILL later. Those it cannot delete are complained of at the end."""
        complaints = []
        given_ids = getopt.gnu_getopt(call["arguments"], "W:x")[1]
        parts = [id for id in given_ids if re.match(r"\d+\[\d+\]", id)]
        if parts and len({id.partition("[")[0] if id in parts else id for id in given_ids}) > 1:
            with contextlib.suppress(CommandError):
                if any(job.state == "Q" for job in self.chosen(given_ids)):
                    # The server of 23.06.06 dies of a part beside other jobs where one of them waits.
                    os._exit(139)
        for given in [id for id in given_ids if id not in parts] + self.kept_of_parts(parts):
            try:
                jobs = self.chosen([given])
                # An array is deleted with the parts that it still has.
                for job in [job for job in jobs if job.state not in "EF"] or jobs[:1]:
                    job.delete()
            except CommandError as error:
                complaints.append(error)
        self.start_next()
        if complaints:
            raise CommandError(complaints[-1].code, "\nqdel: ".join(map(str, complaints)))
        return ""

    @staticmethod
    def kept_of_parts(ids: list[str]) -> list[str]:
        """Which of several parts qdel deletes: it loses some of an array without a word (range_join)."""

        def index(id: str) -> int:
            return int(re.search(r"\[(\d+)\]", id)[1])

        arrays: dict[str, list[list[str]]] = {}
        for id in sorted(set(ids), key=index):
            ranges = arrays.setdefault(id.partition("[")[0], [])
            if ranges and index(ranges[-1][-1]) + 1 == index(id):
                ranges[-1].append(id)
            elif not ranges or (len(ranges) == 1 and len(ranges[0]) == 1):
                ranges.append([id])
        return [id for ranges in arrays.values() for kept in ranges for id in kept]

    @staticmethod
    def _demand_manager(call: dict, ids: list[str]) -> None:
        if call["environment"].get(MANAGER) != "1":
            raise CommandError(UNAUTHORIZED, f"Unauthorized Request  {ids[0] if ids else ''}")

    def qsig(self, call: dict) -> str:
        """A signal to every process of a job, or `suspend` and `resume`, which are for managers."""
        flags, ids = getopt.gnu_getopt(call["arguments"], "s:")
        name = dict(flags).get("-s", "SIGTERM")
        if name in ("suspend", "resume"):
            self._demand_manager(call, ids)
        for job in self.chosen(ids):
            if name in ("suspend", "resume"):
                getattr(job, name)()
                continue
            wanted = name if name.startswith("SIG") else f"SIG{name}"
            if not name.isdigit() and wanted not in signal.Signals.__members__:
                raise CommandError(UNKNOWN_SIGNAL, f"Unknown/illegal signal name {name}")
            if job.state != "R":
                raise CommandError(BAD_STATE, f"Request invalid for state of job {job.id}")
            job.signal(int(name) if name.isdigit() else signal.Signals[wanted])
        return ""

    def qrerun(self, call: dict) -> str:
        """Ends these runs and starts others under the same ids. It is for managers."""
        self._demand_manager(call, call["arguments"])
        for job in self.chosen(call["arguments"]):
            job.rerun()
        return ""

    async def tm_spawn(self, call: dict) -> str:
        """`pbsdsh -n SLOT -- PROGRAM …` begins: the id of the task that it has started in its caller's job."""
        flags, command = getopt.getopt(call["arguments"], "n:")
        if not command or [flag for flag, _ in flags] != ["-n"]:
            raise CommandError(USAGE, "this stand-in knows `pbsdsh -n INDEX -- PROGRAM`")
        job = self.jobs[call["environment"]["PBS_JOBID"]]
        return (await job.spawn(int(flags[0][1]), command)).id

    async def tm_obit(self, call: dict) -> str:
        """The exit status of a task, once it has one."""
        code = await self._task(call).process.wait()
        return str(code if code >= 0 else 256 - code)

    def tm_kill(self, call: dict) -> str:
        """A signal to a task's session."""
        signal_session(self._task(call).process.pid, int(call["arguments"][1]))
        return ""

    def _task(self, call: dict) -> Task:
        return self.jobs[call["environment"]["PBS_JOBID"]].tasks[call["arguments"][0]]

    def pbsnodes(self, call: dict) -> str:
        """`pbsnodes -a -F json`, or `-F dsv -D SEPARATOR`: this host, and whose it is."""
        options = dict(getopt.gnu_getopt(call["arguments"], "avF:D:")[0])
        if options.get("-F") not in ("json", "dsv"):
            raise CommandError(USAGE, "this stand-in knows `pbsnodes -a -F json` and `pbsnodes -a -F dsv`")
        host = socket.gethostname()
        jobs = [f"{job.id}/0" for job in self.jobs.values() if job.state in "RSE"]
        available = {"arch": "linux", "host": host, "ncpus": os.cpu_count(), "vnode": host}
        node = {"Mom": host, "ntype": "PBS", "state": "job-busy" if jobs else "free", "jobs": jobs}
        if options["-F"] == "dsv":
            plain = {"Name": host} | node | {"jobs": ",".join(jobs)}
            plain |= {f"resources_available.{name}": value for name, value in available.items()}
            return options.get("-D", "|").join(f"{name}={value}" for name, value in plain.items()) + "\n"
        node |= {"resources_available": available, "resources_assigned": {}}
        head = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": SERVER}
        return as_json(head | {"nodes": {host: node}})


def ask_server(folder: Path, command: str, arguments: list[str], stdin: str = "") -> dict:
    """What the server says to a command; nothing where it has died of it."""
    called = {"command": command, "arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    called |= {"user": pwd.getpwuid(os.getuid()).pw_name, "stdin": stdin}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / "server.sock"))
        connection.sendall(json.dumps(called).encode())
        connection.shutdown(socket.SHUT_WR)
        answered = b"".join(iter(lambda: connection.recv(65536), b""))
    return json.loads(answered or '{"printed": "", "complaint": "", "code": 0}')


def call_server(folder: Path, command: str, arguments: list[str]) -> int:
    """One command: sends what it was called with, prints what the server says."""
    if command == "pbsdsh":
        return run_task(folder, arguments)
    reads = command == "qsub" and "--" not in arguments and not sys.stdin.isatty()
    stdin = sys.stdin.read() if reads else ""
    try:
        answer = ask_server(folder, command, arguments, stdin)
    except OSError:
        print(f"Connection refused\n{command}: cannot connect to server {SERVER} (errno=15010)", file=sys.stderr)
        return 255 if command == "qstat" else NO_SERVER
    if answer["printed"]:
        sys.stdout.buffer.write(answer["printed"].encode(errors="surrogateescape") + b"\n")
    if answer["complaint"]:
        print(answer["complaint"], file=sys.stderr)
    if (
        command == "qsub"
        and answer["code"] == 0
        and "-f" not in arguments[: arguments.index("--") if "--" in arguments else None]
    ):
        leave_behind()
    return answer["code"]


def run_task(folder: Path, arguments: list[str]) -> int:
    """What pbsdsh does: runs a task to its end, and prints its exit code without passing it on.

    SIGTERM goes on to the task and ends pbsdsh; a signal that pbsdsh does not know ends it alone."""
    task = ask_server(folder, "tm_spawn", arguments)
    if task["code"]:
        print(task["complaint"], file=sys.stderr)
        return 1

    def bail_out(number: int, _) -> None:
        print(f"pbsdsh: killing task 0x{task['printed']} signal {number}", flush=True)
        ask_server(folder, "tm_kill", [task["printed"], str(number)])
        os._exit(1)

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, bail_out)
    code = ask_server(folder, "tm_obit", [task["printed"]])["printed"]
    if code not in ("", "0"):
        print(f"pbsdsh: task 0x00000000 exit status {code}")
    return 0


def leave_behind() -> None:
    """The process that qsub leaves for its next call, with all files that it has inherited. The real one stays a minute."""
    nothing = subprocess.DEVNULL
    subprocess.Popen(
        ["sleep", "20"], stdin=nothing, stdout=nothing, stderr=nothing, close_fds=False, start_new_session=True
    )


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        # asyncio makes the sessions' pipes inheritable to nobody; all else of ours is closed in jobs, too.
        asyncio.run(Server(Path(sys.argv[2]).resolve()).serve())
    else:
        sys.exit(call_server(Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
