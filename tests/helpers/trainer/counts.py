"""bench/trainer_counts.py, for the tests that hold its counts against their limits."""

import sys

from helpers.paths import BENCH

sys.path.insert(0, str(BENCH))

import trainer_counts as trainer_counts
