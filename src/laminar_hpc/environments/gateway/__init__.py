"""Agents by URL: a rollout rank's door for programs that speak OpenAI's chat completions. Called by
rollout/agents.py and rollout/talk.py; the agents themselves run in workers (environments/turns/served.py)."""
