"""For all tests: Ctrl-C reaches the processes they start, also where the run itself is in the background and ignores it.

Triton's kernels are interpreted in the process of the tests: it decides that once, when it is imported, whoever imports it first.
"""
import os
import signal

os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
