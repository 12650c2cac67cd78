#!/usr/bin/env python3
"""A stand-in for `apptainer exec`, which does to processes and mounts what Apptainer 1.4.5 was seen to do.

The process that was called stays as the container's parent: it passes signals on and ends as the container's program
ends, by the same signal or code. The program is its child, in a user and a mount namespace of its own and in no other:
it has the host's processes, network, devices and user, and the files of the image, which is a folder. It dies with its
parent. Of the host it sees /proc, /sys, /dev, /tmp, home, the working folder and what is bound, at the same paths;
APPTAINER_NO_MOUNT leaves out `tmp`, `home` and `cwd`, as some sites do.

It reads no image files, has no options but those of the agent, and `--nv` changes nothing.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

NEW_USERS, NEW_MOUNTS = 0x1000_0000, 0x0002_0000
BIND, RECURSIVE, PRIVATE, DETACH = 4096, 16384, 1 << 18, 2
DEATH_SIGNAL = 1
KERNEL = ctypes.CDLL(None, use_errno=True)
# A folder that each host has, on which the container's own root is mounted; nobody else sees that.
SESSION = "/tmp"


def fail(words: str):
    """Ends as Apptainer does where there is no container."""
    print(f"FATAL:   {words}", file=sys.stderr, flush=True)
    sys.exit(255)


def call(name: str, *arguments):
    """A system call, by the name of its function in libc."""
    words = [one.encode() if isinstance(one, str) else one for one in arguments]
    if getattr(KERNEL, name)(*words) != 0:
        fail(f"container creation failed: {name}{arguments}: {os.strerror(ctypes.get_errno())}")


def enter_namespaces():
    """A user namespace in which this user is the same one, and mounts of its own."""
    user, group = os.geteuid(), os.getegid()
    if KERNEL.unshare(NEW_USERS | NEW_MOUNTS) != 0:
        fail(f"Failed to create user namespace: {os.strerror(ctypes.get_errno())}")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def mount_tree(root: Path, source: Path, target: str):
    """Has a host's file or folder at a path of the new root, whose folders are made as they are needed."""
    place = root / target.lstrip("/")
    with contextlib.suppress(FileExistsError):
        if source.is_dir():
            place.mkdir(parents=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    call("mount", str(source), str(place), None, BIND | RECURSIVE, None)


def enter_image(image: Path, bound: list[str]):
    """Makes the image this process's root, with what is the host's in it."""
    folder = os.getcwd()
    left_out = os.environ.get("APPTAINER_NO_MOUNT", "").split(",")
    own = {"tmp": "/tmp", "home": os.environ.get("HOME", "/"), "cwd": folder}
    paths = [path for name, path in own.items() if name not in left_out] + bound
    call("mount", "none", "/", None, RECURSIVE | PRIVATE, None)
    # The new root hides what is in the folder on which it is mounted.
    images = os.open(image, os.O_RDONLY)
    handles = {path: os.open(path, os.O_PATH) for path in paths if path != "/" and os.path.exists(path)}
    call("mount", "tmpfs", SESSION, "tmpfs", 0, None)
    root = Path(SESSION)
    for entry in os.listdir(images):
        source = Path(f"/proc/self/fd/{images}/{entry}")
        if source.is_symlink():
            (root / entry).symlink_to(os.readlink(source))
        elif entry not in ("proc", "sys", "dev", "tmp"):
            mount_tree(root, source, entry)
    (root / "tmp").mkdir()
    for path in ("/proc", "/sys", "/dev"):
        mount_tree(root, Path(path), path)
    for path, handle in handles.items():
        mount_tree(root, Path(f"/proc/self/fd/{handle}"), path)
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", DETACH)
    os.chdir(folder if os.path.isdir(folder) else "/")


def be_container(parent: int, image: Path, bound: list[str], program: list[str]):
    """The child: becomes the program in the container."""
    call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(255)
    enter_namespaces()
    enter_image(image, bound)
    os.environ["PATH"] = "/usr/local/bin:/usr/bin:/bin"
    os.environ["APPTAINER_CONTAINER"] = str(image)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvp(program[0], program)
    except OSError:
        fail(f'"{program[0]}": executable file not found in $PATH')


def main():
    """`apptainer exec [--nv] [--bind PATH]… IMAGE PROGRAM [ARGUMENT]…`."""
    words = sys.argv[1:]
    if words[:1] != ["exec"]:
        fail("this stand-in has `exec` alone")
    words, bound = words[1:], []
    while words and words[0].startswith("--"):
        option = words.pop(0)
        if option == "--bind":
            bound.append(words.pop(0))
        elif option != "--nv":
            fail(f"unknown flag: {option}")
    image = Path(words.pop(0))
    if not image.is_dir():
        fail(f"While checking container encryption: could not open image {image}: no such file or directory")
    passed_on = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        be_container(parent, image, bound, words)
    while True:
        came = signal.sigwait(passed_on | {signal.SIGCHLD})
        if came != signal.SIGCHLD:
            os.kill(child, came)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended == child:
            break
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(parent, number)
        sys.exit(128 + number)
    sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
