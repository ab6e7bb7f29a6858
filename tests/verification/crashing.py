"""Runtimes that die: importable, as they run in a process of their own."""

import os
import signal
import time

from bitwright.verification.runtimes.onnxruntime import OnnxRuntime


class Dying(OnnxRuntime):
    """Dies of a file that has a Softmax."""

    name = "dying"
    isolated = True

    def session(self, file, threads=0, *, as_is=False):
        honest = super().session(file, threads)
        fatal = any(node.type == "Softmax" for node in file.nodes())

        def run(feeds):
            if fatal:
                self.die()
            return honest(feeds)

        return run

    def die(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class Killed(Dying):
    name = "killed"
    isolated = True

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Quitting(Dying):
    name = "quitting"
    isolated = True

    def die(self):
        os.write(2, b"first line\nout of ideas\n")
        os._exit(7)


class Hanging(Dying):
    name = "hanging"
    isolated = True

    def die(self):
        time.sleep(600)
