"""A run's bulk door, and a rollout on a machine with a folder of its own, with a proxy between them."""

from pathlib import Path

from helpers.links.proxy import Proxy
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.bulk_door import BulkDoor
from laminar_hpc.line.address import new_address
from laminar_hpc.line.join_key import JOIN_FILE, read_join_key, write_join_key
from laminar_hpc.store.payload.upload import PayloadUploader


class BulkStand:
    def __init__(self, folder: Path, patience: float = 60.0, key_file: str = JOIN_FILE) -> None:
        """`key_file`: where the rollout has its key."""
        self.run_dir, self.here = folder / "run", folder / "here"
        for path in (self.run_dir, self.here / "away"):
            path.mkdir(parents=True, exist_ok=True)
        self.open()
        self.proxy = Proxy(self.door.key.port)
        key = read_join_key(self.run_dir / JOIN_FILE)
        key.port = self.proxy.port
        write_join_key(self.here / key_file, key)
        self.uploader = PayloadUploader(self.here, self.here / "away", "rollout3", patience)

    def open(self) -> None:
        config = RunConfig(run_dir=str(self.run_dir), role="controller")
        config.cluster.storage = "stream"
        self.door = BulkDoor(config, "store", new_address("run", "127.0.0.1", "here")[0], "run")

    def close(self) -> None:
        self.uploader.close()
        self.proxy.close()
        self.door.close(is_over=True)
