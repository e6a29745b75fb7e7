"""The state of random numbers, read and set by several threads at a time."""

import subprocess
import sys

import pytest
import torch

from rowwise.train.draws import random_state, seed_draws, seeded, set_random_state

# Each object that Python collects calls back, and threads take turns as often as they can.
THREADS = """
import gc, sys, threading, weakref
import pytest
import torch
from rowwise.train.draws import random_state, seed_draws, seeded, set_random_state

class Cycle:
    pass

def call_back(_):
    for _ in range(20):
        pass

def work(refs):
    for k in range(500):
        one = Cycle()
        one.itself = one
        refs.append(weakref.ref(one, call_back))
        del one
        set_random_state(random_state())
        with seeded(k):
            torch.rand(3)
        seed_draws(k)

gc.set_threshold(1, 1, 1)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work, args=([],)) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_threads_do_not_wait_for_each_other_for_ever():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_draws_are_those_of_the_seed_and_the_state_comes_back():
    seed_draws(3)
    before, first = random_state(), torch.rand(4)
    set_random_state(before)
    with seeded(7):
        drawn = torch.rand(4)
    assert torch.equal(torch.rand(4), first)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(7)))
