from __future__ import annotations

import os
import signal

import pytest

from rlhf_pipeline.run.signals import STOPPING, stop_on_signals


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_asks_to_stop_once_and_the_second_interrupts(number):
    """Ctrl-C, SIGTERM and a hang-up alike; the handlers from before come back."""
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal_number == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_hang_up_that_is_ignored_stays_ignored():
    """Under `nohup` a run goes on when its terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_stops_when_its_parent_is_gone():
    """What a supervisor or torchrun started does not outlive it."""
    with stop_on_signals(parent=os.getppid()) as stop:
        assert not stop
    with stop_on_signals(parent=os.getppid() + 1) as stop:
        assert stop
