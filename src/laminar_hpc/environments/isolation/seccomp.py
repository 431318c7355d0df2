"""The system calls that sandboxed code is refused, as a BPF program for the kernel.

Refused are calls that reach the network, other processes, namespaces, mounts, kernel keyrings, tracing and
modules, those that go round Landlock or this filter (io_uring, handles of files), and all that are newer than
the tables below. Everything else is allowed: it works on what the process already has.
"""

import errno
import os
import platform
import socket
import struct
from collections.abc import Mapping

_LOAD, _EQUAL, _GREATER, _GREATER_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets into struct seccomp_data
_X32 = 0x40000000  # numbers of x86-64's second calling convention begin there
_NEWEST = 450  # set_mempolicy_home_node, Linux 5.17
_NEW_NAMESPACES = 0x7E020000  # flags of clone
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # and the column of the tables

Numbers = tuple[int, int | None]
# name: number on x86-64, on arm64
_REFUSED = {
    # mounts, namespaces, the machine
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "setns": (308, 268), "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "sethostname": (170, 161), "setdomainname": (171, 162), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "syslog": (103, 116), "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42), "vhangup": (153, 58), "uselib": (134, None), "sysfs": (139, None),
    # other processes, the kernel's insides
    "bpf": (321, 280), "perf_event_open": (298, 241), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438),
    "userfaultfd": (323, 282), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # ways round the checks of files and of this filter
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "memfd_secret": (447, 447),
    # networks, and what outlives a process
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
}  # fmt: skip
# what Landlock lets pass, on files of the same user
_UNCOVERED = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "truncate": (76, 45),
}  # fmt: skip
_UNKNOWN = {"clone3": (435, 435), "openat2": (437, 437)}  # flags in memory: programs fall back to the old
_SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}
_SIGNALS_BY_OTHER_WAYS = {
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}  # fmt: skip
# change another process of the same user, and which argument names it: 0 is the caller
_OF_OTHERS: dict[str, tuple[Numbers, int]] = {
    "prlimit64": ((302, 261), 0), "sched_setaffinity": ((203, 122), 0), "sched_setparam": ((142, 118), 0),
    "sched_setscheduler": ((144, 119), 0), "sched_setattr": ((314, 274), 0), "setpriority": ((141, 140), 1),
    "ioprio_set": ((251, 30), 1),
}  # fmt: skip
_FCNTL, _SIGNAL_OWNERS = (72, 25), (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: whom the kernel signals
_PROCESSES = {"fork": (57, None), "vfork": (58, None)}
_CLONE, _SOCKETPAIR = (56, 220), (53, 199)
_CLONE_THREAD = 0x00010000

Table = Mapping[str, Numbers]
# openat and open, and which argument has the flags
_OPENS: tuple[tuple[Numbers, int], ...] = (((257, 56), 2), ((2, None), 1))


def supported() -> bool:
    return platform.machine() in _ARCHITECTURES


def program(shared_files: bool, shared_signals: bool, processes: bool, own_pid: int = 0) -> bytes:
    """The filter. `shared_files`: files and processes of others can be named, so what Landlock lets pass is
    refused. `shared_signals`: it lets signals pass too, so they go to `own_pid` only. `processes`: whether
    new ones may be started."""
    code, column = _ARCHITECTURES[platform.machine()]
    out = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, code), _give(_KILL), (_LOAD, 0, 0, _NUMBER)]
    if column == 0:
        out += [(_GREATER_EQUAL, 0, 1, _X32), _error(errno.ENOSYS)]
    out += [(_GREATER, 0, 1, _NEWEST), _error(errno.ENOSYS)]

    def refuse(table: Table, number: int) -> None:
        for numbers in table.values():
            if (call := numbers[column]) is not None:
                out.extend([(_EQUAL, 0, 1, call), _error(number)])

    def look_at(call: int | None, argument: int, *rest: tuple[int, int, int, int]) -> None:
        """`rest` decides by an argument's lower half; the call is allowed at its end."""
        if call is not None:
            load = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
            out.extend([(_EQUAL, 0, len(rest) + 2, call), load, *rest, _give(_ALLOW)])

    refuse(_REFUSED, errno.EPERM)
    refuse(_UNKNOWN, errno.ENOSYS)
    if shared_files:
        refuse(_UNCOVERED, errno.EPERM)
        for others, argument in _OF_OTHERS.values():
            look_at(others[column], argument, (_EQUAL, 1, 0, 0), _error(errno.EPERM))
        owners = [line for owner in _SIGNAL_OWNERS for line in ((_EQUAL, 0, 1, owner), _error(errno.EPERM))]
        look_at(_FCNTL[column], 1, *owners)
    if shared_signals:
        refuse(_SIGNALS_BY_OTHER_WAYS, errno.EPERM)
        for pair in _SIGNALS.values():
            look_at(pair[column], 0, (_EQUAL, 1, 0, own_pid), _error(errno.EPERM))
    threads_only = []
    if not processes:
        refuse(_PROCESSES, errno.EAGAIN)
        again = (_LOAD, 0, 0, _ARGUMENTS)
        threads_only = [again, (_AND, 0, 0, _CLONE_THREAD), (_EQUAL, 0, 1, 0), _error(errno.EAGAIN)]
    namespaces = [(_AND, 0, 0, _NEW_NAMESPACES), (_EQUAL, 1, 0, 0), _error(errno.EPERM)]
    look_at(_CLONE[column], 0, *namespaces, *threads_only)
    look_at(_SOCKETPAIR[column], 0, (_EQUAL, 1, 0, socket.AF_UNIX), _error(errno.EPERM))
    for numbers, argument in _OPENS:  # truncates what it may only read, before Landlock's third version
        mask, asked = os.O_ACCMODE | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC
        look_at(numbers[column], argument, (_AND, 0, 0, mask), (_EQUAL, 0, 1, asked), _error(errno.EACCES))
    out.append(_give(_ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in out)


def _give(verdict: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, verdict)


def _error(number: int) -> tuple[int, int, int, int]:
    return _give(_ERRNO | number)
