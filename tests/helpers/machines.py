"""Machines on one machine, for the tests of `laminar launch`: each has a network interface, processes, a
host name and shared memory of its own, and a real sshd. Root, Linux, iproute2, openssh-server.

Nothing of this machine's own ssh is used or changed: keys and settings are in `folder`.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from helpers.paths import BENCH

sys.path.insert(0, str(BENCH))

import network

SSHD = "/usr/sbin/sshd"
_PORT = 2222
# the first process of a machine: with it all others end, as by a power cut
_INIT = """
hostname "$1"; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /run; mkdir -m 755 /run/sshd
exec {sshd} -D -e -f "$2"
"""


def missing() -> str:
    """Why there can be no machines here, or ""."""
    if why := network.missing():
        return why
    tools = [name for name in (SSHD, "ssh", "ssh-keygen", "unshare") if shutil.which(name) is None]
    return f"{', '.join(tools)} not found; install openssh-server and openssh-client" if tools else ""


class Machines:
    """m1, m2, ...; commands are typed on a login node, which is none of them."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self.network = folder, network.Network(count + 1, None)
        self._processes: dict[str, subprocess.Popen] = {}
        try:
            for name in ("host_key", "user_key"):
                words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
                subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
            shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
            self.hosts = folder / "hosts.txt"
            self.names = [f"m{number}" for number in range(1, count + 1)]
            self.hosts.write_text("".join(f"{name}\n" for name in self.names))
            self.config = folder / "ssh_config"
            self.config.write_text("".join(self._entry(name) for name in self.names))
            (folder / "sshd_config").write_text(
                f"Port {_PORT}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
                "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
            )
            for name in self.names:
                self.on(name)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        return self.network.address(int(name[1:]))

    def _entry(self, name: str) -> str:
        key = f"{self.address(name)} {(self._folder / 'host_key.pub').read_text()}"
        with open(self._folder / "known_hosts", "a") as file:
            file.write(f"[{self.address(name)}]:{_PORT} {key.split(' ', 1)[1]}")
        return (
            f"Host {name}\n  HostName {self.address(name)}\n  Port {_PORT}\n  User root\n"
            f"  IdentityFile {self._folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self._folder}/known_hosts\n"
        )

    def on(self, name: str) -> None:
        """Power; returns when its sshd takes connections."""
        inside = ["ip", "netns", "exec", self.network.namespace(int(name[1:]))]
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = _INIT.format(sshd=SSHD)
        with open(self._folder / f"sshd-{name}.log", "a") as log:
            self._processes[name] = subprocess.Popen(
                [*inside, *apart, "bash", "-c", script, "init", name, str(self._folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while self.on_login_node("ssh", "-F", str(self.config), name, "true").wait() != 0:
            assert time.monotonic() < deadline, (self._folder / f"sshd-{name}.log").read_text()
            time.sleep(0.1)

    def run(self, name: str, line: str) -> str:
        """A line of shell there; what it prints."""
        process = self.on_login_node(
            *["ssh", "-F", str(self.config), name, line], stdout=subprocess.PIPE, text=True
        )
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, (line, said)
        return str(said)

    def off(self, name: str) -> None:
        """Its power fails: all its processes are gone at once, and nobody is told."""
        self.network.cut(int(name[1:]))
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def on_login_node(self, *words: str, **more: object) -> subprocess.Popen:
        """A process there."""
        command = ["ip", "netns", "exec", self.network.namespace(0), *words]
        return subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, **more})

    def launch(self, out: Path, *words: str, **environment: str) -> subprocess.Popen:
        """`laminar launch`, its output in `out`."""
        with open(out, "a") as file:
            return self.on_login_node(
                *[sys.executable, "-m", "laminar_hpc.launch.cli", "launch", f"--hosts={self.hosts}"],
                f"--ssh=-F {self.config}",
                *words,
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
            )

    @staticmethod
    def processes(run_dir: Path) -> list[int]:
        """Of all machines, those that have to do with this run."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if f"run_dir={run_dir}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:  # it has ended
                continue
        return found

    def close(self) -> None:
        for name in list(self._processes):
            self.off(name)
        self.network.close()
