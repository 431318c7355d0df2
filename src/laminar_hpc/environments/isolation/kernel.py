"""Linux system calls that Python does not have, by ctypes. Each raises OSError with the call's name."""

import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 0x1, 0x2
_SYS_MOUNT_SETATTR = 442  # on every architecture, as all calls since Linux 5.1
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def check(returned: int, what: str) -> int:
    """The value of a call, or its OSError."""
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return returned


def syscall(number: int, what: str, *arguments: object) -> int:
    """Any system call by its number."""
    return check(_libc.syscall(ctypes.c_long(number), *arguments), what)


def prctl(option: int, value: int, what: str) -> None:
    """With one value; the others are 0."""
    zero = ctypes.c_ulong(0)
    check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), what)


def unshare(flags: int) -> None:
    """Leaves namespaces for new ones of its own; a new PID namespace is for the children that come."""
    check(_libc.unshare(flags), "unshare")


def children_in(pid_namespace: int) -> None:
    """Children that come are in the PID namespace that this descriptor names: with that of this process
    itself, `unshare` can make another for them."""
    check(_libc.setns(pid_namespace, CLONE_NEWPID), "setns")


def unmount(path: str) -> None:
    """Takes a mount out of sight; it is gone when nobody uses it any more."""
    check(_libc.umount2(path.encode(), _MNT_DETACH), f"umount {path}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def make_read_only(path: str, below: bool = True) -> None:
    """A mount, with all mounts `below` it (Linux 5.12)."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = ctypes.c_uint(_AT_RECURSIVE if below else 0)
    words = (ctypes.c_int(_AT_FDCWD), path.encode(), flags, attributes)
    syscall(_SYS_MOUNT_SETATTR, "mount_setattr", *words, ctypes.c_size_t(len(attributes)))


def pivot_root(path: str) -> None:
    """Makes the mount at `path` the root; nothing else of the old one can be reached."""
    os.chdir(path)
    check(_libc.pivot_root(b".", b"."), "pivot_root")  # the old root now lies on top of the new one
    check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def map_own_user() -> None:
    """In a new user namespace: this user and group keep their numbers, and nobody else is known."""
    for file, line in (("setgroups", "deny"), ("uid_map", "{0} {0} 1"), ("gid_map", "{0} {0} 1")):
        number = os.getgid() if file == "gid_map" else os.getuid()
        with open(f"/proc/self/{file}", "w") as out:
            out.write(line.format(number))


def set_dumpable() -> None:
    """Gives this process's files in /proc to the new user, after a change of user."""
    prctl(_PR_SET_DUMPABLE, 1, "PR_SET_DUMPABLE")


def set_subreaper() -> None:
    """Descendants whose parent has died become this process's children."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def drop_privileges() -> None:
    """No capability is left, and no program that it starts gains any."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    check(_libc.capset(header, struct.pack("=6I", *[0] * 6)), "capset")


def install_filter(program: bytes) -> None:
    """A seccomp filter, for this process and all that it starts; after `drop_privileges`."""
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    pointer = ctypes.byref(Program(len(program) // 8, ctypes.addressof(code)))
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    check(_libc.prctl(_PR_SET_SECCOMP, mode, pointer, zero, zero), "seccomp")
