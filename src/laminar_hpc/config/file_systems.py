"""Which file system a path is on. Imports no torch."""

from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 lustre beegfs gpfs ceph panfs wekafs 9p "
    "fuse.sshfs fuse.glusterfs fuse.juicefs".split()
)


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`, by /proc/mounts."""
    path = path.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(point, kind) for point, kind in mounts if path == Path(point) or Path(point) in path.parents]
    return max(holding, key=lambda m: len(m[0]))[1] if holding else "unknown"
