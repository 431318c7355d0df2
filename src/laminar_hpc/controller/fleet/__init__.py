"""Who is in the run: members, replicas, trainers, and what their coming and going means."""
