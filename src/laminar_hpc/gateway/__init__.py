"""Agents by URL: a rollout rank's door for programs that speak OpenAI's chat completions. rollout/agents.py
is the only caller; environments/reward_worker.py runs the agents themselves (served.py)."""
