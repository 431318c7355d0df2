"""Discrete events over the policies of the live controller, the planner, and runs with emulated engines."""
