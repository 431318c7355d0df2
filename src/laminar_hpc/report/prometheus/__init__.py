"""A run's figures for Prometheus: a process beside the controller that reads the run's files and answers
scrapes."""
