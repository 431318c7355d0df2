"""Files that outlive a power cut, folders that belong to a process, and append-only JSON lines."""
