"""Relays die, stand still and come late, with real processes and real gloo: nobody hangs, and every survivor has the newest weights soon."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from chain_roles import ChainRun

MEGABYTE = 1 << 20


@pytest.fixture
def chain(tmp_path):
    run = ChainRun(tmp_path, 3, 12 * MEGABYTE)
    yield run
    run.close()


def start(run):
    run.publish()
    run.wait([0, 1, 2], 1, 60)



@pytest.mark.timeout(120)
def test_deaths_a_standstill_and_late_comers(chain):
    start(chain)
    t=time.time()
    for i in range(5):
        chain.publish(); print(i, chain.wait([0,1,2], chain.step, 10))
    chain.relays[0].kill(); chain.publish(); print('master', chain.wait([1,2], chain.step, 5)); 
    chain.start_relay(0); print('back', chain.wait([0], chain.step, 20)); print(chain.chains())
    chain.publish(); chain.relays[2].kill(); print('middle', chain.wait([1,0], chain.step, 5))
    os.kill(chain.relays[1].pid, signal.SIGSTOP); chain.publish(); print('stop', chain.wait([0], chain.step, 6))
    os.kill(chain.relays[1].pid, signal.SIGCONT); print('cont', chain.wait([1], chain.step, 6))
    print(chain.chains(), time.time()-t)
    print(chain.said())
