"""Landlock: which files a process and its descendants may still reach (Linux 5.13 and later).

It does not cover changes of mode, owner, times and attributes, nor truncation before its third version; the
filter of seccomp.py refuses those.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

from laminar_hpc.environments.isolation import kernel

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_CREATE_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE  # other rights are those of folders
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by version
_TCP, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals
SCOPED_SIGNALS = 6  # the first version that keeps signals inside


def version() -> int:
    """The kernel's; 0 where it has none, or it is switched off."""
    try:
        return kernel.syscall(_CREATE, "landlock", None, ctypes.c_size_t(0), ctypes.c_uint(_CREATE_VERSION))
    except OSError:
        return 0


def restrict(read: Sequence[str], write: Sequence[str]) -> None:
    """From now on only what lies below these paths, with execution: `read` for reading, `write` for all; a
    path that is not there is left out. After kernel.drop_privileges. Raises OSError."""
    known = version()
    rights = _RIGHTS[max(v for v in _RIGHTS if v <= known)]
    words = [rights, _TCP if known >= 4 else 0, _SCOPES if known >= SCOPED_SIGNALS else 0]
    attributes = struct.pack("=3Q", *words)[: 8 if known < 4 else 16 if known < SCOPED_SIGNALS else 24]
    size, flags = ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    ruleset = kernel.syscall(_CREATE, "landlock_create_ruleset", attributes, size, flags)
    try:
        for path in read:
            _allow(ruleset, path, _READ)
        for path in write:
            _allow(ruleset, path, rights)
        kernel.syscall(_RESTRICT, "landlock_restrict_self", ctypes.c_int(ruleset), flags)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        kind, flags = ctypes.c_int(_PATH_BENEATH), ctypes.c_uint(0)
        kernel.syscall(_ADD_RULE, "landlock_add_rule", ctypes.c_int(ruleset), kind, rule, flags)
    finally:
        os.close(descriptor)
