"""Agents by URL: a rollout rank's door for programs that speak OpenAI's chat completions. Called by
rollout/agents.py and rollout/talk.py; environments/workers/process.py runs the agents themselves
(served.py)."""
