"""What the tests share, by subject: whole emulated runs, a scripted controller, engines, trainers, links.

Pytest puts tests/ on the path (pyproject.toml); `paths.environment()` does so for a process that a test
starts."""
