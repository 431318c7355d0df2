"""A live run as a simulation: the decode curve is found, and what cannot be measured is refused."""

import math
import random

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator.measured import decode_curve, setup_of


def test_a_known_curve_is_found():
    """Least squares recovers the three numbers of a known decode curve."""
    noise = random.Random(0)
    rows = [
        (longest, longest * noise.randint(4, 100)) for longest in (noise.randint(20, 256) for _ in range(60))
    ]
    curve = decode_curve([(0.5 + 0.002 * a + 0.0001 * b + noise.gauss(0, 1e-4), a, b) for a, b in rows])
    assert math.isclose(curve.start, 0.5, rel_tol=0.01) and math.isclose(curve.step, 0.002, rel_tol=0.01)
    assert math.isclose(curve.token, 0.0001, rel_tol=0.01)


def test_no_coefficient_is_negative():
    """What a fit would make negative is left out of it: more tokens never take less time."""
    curve = decode_curve([(1.0, 10, 100), (2.0, 10, 210), (3.0, 10, 330), (4.0, 9, 420)])
    assert min(curve.start, curve.step, curve.token) >= 0 and curve.token > 0


def test_no_run_is_refused(tmp_path):
    """A folder that is no run is refused."""
    with pytest.raises(LaminarError):
        setup_of(tmp_path)
