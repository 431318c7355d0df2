"""Responses of several turns: a conversation as token ids, tool calls in it, and the environments that answer
them. rollout/episodes.py is the only caller on the way of a trajectory; the rest is here."""
