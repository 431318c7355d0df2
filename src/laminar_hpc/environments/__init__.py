"""What a response is scored with and speaks to: rewards, tools, environments, sandboxes and agents. Users
name the shipped ones by `laminar_hpc.environments.<name>`."""
