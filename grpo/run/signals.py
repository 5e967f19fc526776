"""Ctrl-C and SIGTERM: finish the step first."""

import signal
import threading

from grpo import distributed


class StopSignals:
    """Inside `with`, a signal only gets noted in `received`. A second one ends the program.

    Under torchrun, which may send the same signal twice, the second one is noted, too. Python
    handles signals only in its main thread, so in any other one nothing happens.
    """

    def __init__(self):
        self.received = 0  # the signal that arrived
        self.before = {}  # {signal: what it did}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in signal.SIGINT, signal.SIGTERM:
                self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number: int, _):
        self.received = number
        if distributed.PROCESSES == 1:
            self.__exit__()

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
