"""What a process knows of its machine: processes, locks, files, devices, and what it writes for people."""
