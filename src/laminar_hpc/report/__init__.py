"""What reads a run directory: summary, page, plots, `laminar top`. Nothing here talks to a process."""
