"""Ctrl-C and SIGTERM: finish the step first."""

import os
import signal
import threading


class StopSignals:
    """From `with` on, a signal only gets noted in `received`. A second one ends the program.

    Under torchrun, which may send the same signal twice, the second one is noted, too. If Ctrl-C is
    ignored, as in a shell's background job, it stays ignored. Python handles signals only in its
    main thread, so in any other one nothing happens.
    """

    def __init__(self, second_one_ends: bool = True):
        self.received = 0  # the signal that arrived
        self.second_one_ends = second_one_ends
        self.handlers = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in signal.SIGINT, signal.SIGTERM:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.handlers[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number: int, _):
        self.received = number
        if self.second_one_ends:
            for each in self.handlers:
                signal.signal(each, signal.SIG_DFL)
            os.write(2, b"\nfinishing this step; press Ctrl-C again to stop now\n")

    def __exit__(self, *_):
        """Let the signals do again what they did before."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}
