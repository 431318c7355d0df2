"""GPU code of one architecture: what a library holds for other GPUs becomes zeros, which compress to nothing.

A CUDA library has a section `.nv_fatbin`: containers one behind another, each with an entry per architecture
(machine code, kind 2, or PTX, kind 1). The driver reads an entry's header first and takes the payload of the
one that fits its GPU, so the payloads of all others may be anything. Offsets and sizes stay, so the library
loads as before. The layout of both headers is that of the toolkit's `fatbinary_section.h` and of what
`cuobjdump` prints.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zstandard

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes behind it
ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, bytes of header, of payload, ..., architecture
PTX, ELF = 1, 2
ZSTD = b"\x28\xb5\x2f\xfd"
DEBUG = "info abbrev line str loc ranges aranges loclists rnglists line_str".split()
# For linkers of device code and for debuggers.
UNLOADED = ("__nv_relfatbin", ".symtab", ".strtab", *(f".debug_{part}" for part in DEBUG))


class Entry(NamedTuple):
    kind: int
    arch: int  # 90 for sm_90 and sm_90a
    begin: int  # of its payload, in bytes from the file's beginning
    size: int


def section(data: mmap.mmap, name: str) -> tuple[int, int] | None:
    """Offset and size in bytes of an ELF file's section; None where it has none of that name."""
    if data[:4] != b"\x7fELF":
        return None
    table = struct.unpack_from("<Q", data, 0x28)[0]
    width, count, names = struct.unpack_from("<HHH", data, 0x3A)

    def header(index: int) -> tuple[int, int, int]:
        word = struct.unpack_from("<I", data, table + index * width)[0]
        return word, *struct.unpack_from("<QQ", data, table + index * width + 0x18)

    strings = header(names)[1]
    for index in range(count):
        word, offset, size = header(index)
        if data[strings + word : data.find(b"\0", strings + word)] == name.encode():
            return offset, size
    return None


def containers(data: mmap.mmap, begin: int, end: int) -> Iterator[list[Entry]]:
    """The entries of each container of a section. Raises ValueError where an entry has no header."""
    at = begin
    while at + CONTAINER.size <= end:
        magic, _, header, size = CONTAINER.unpack_from(data, at)
        if magic != MAGIC:  # padding between two of them
            at += 8
            continue
        stop, entries = at + header + size, []
        at += header
        while at + ENTRY.size <= stop:
            kind, _, header, size, *_, arch = ENTRY.unpack_from(data, at)
            if header < ENTRY.size:
                raise ValueError(f"the GPU code at byte {at} has an unknown layout")
            entries.append(Entry(kind, arch, at + header, size))
            at += header + size
        yield entries
        at = stop


def wanted(entries: list[Entry], arch: int) -> set[Entry]:
    """What a GPU of `arch` loads: its own machine code, else that of an older one of its generation, else
    PTX."""
    fitting = [each for each in entries if each.arch <= arch]
    own = [each for each in fitting if each.kind == ELF and each.arch // 10 == arch // 10]
    own = own or [each for each in fitting if each.kind == PTX]
    newest = max((each.arch for each in own), default=0)
    return {each for each in own if each.arch == newest}


def kernels(data: mmap.mmap, entry: Entry) -> bytes:
    """The entry's payload as the compiler wrote it; kernels stand there by their mangled names."""
    payload = data[entry.begin : entry.begin + entry.size]
    if payload[:4] != ZSTD:
        return payload
    return zstandard.ZstdDecompressor().decompressobj().decompress(payload)


def keep(library: Path, arch: int, only: re.Pattern[bytes] | None = None) -> int:
    """Zeroes in place what no GPU of `arch` loads, and what no process loads at all. With `only`, containers
    in which it is not found lose all of their code. Returns the bytes of GPU code that stay."""
    with open(library, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for name in UNLOADED:
            if place := section(data, name):
                data[place[0] : sum(place)] = bytes(place[1])
        place = section(data, ".nv_fatbin")
        stay = 0
        for entries in containers(data, place[0], sum(place)) if place else ():
            kept = wanted(entries, arch)
            if only and not any(only.search(kernels(data, each)) for each in kept):
                kept = set()
            stay += sum(each.size for each in kept)
            for each in entries:
                if each not in kept:
                    data[each.begin : each.begin + each.size] = bytes(each.size)
    return stay
