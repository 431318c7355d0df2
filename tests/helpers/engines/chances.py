"""The chi-squared test of bench/speculation.py, for the test that holds an engine against it."""

import sys

from helpers.paths import BENCH

sys.path.insert(0, str(BENCH))

from speculation import p_value as p_value
