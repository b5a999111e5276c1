"""For all tests: Ctrl-C reaches the processes they start, also where the run itself is in the background and ignores it."""
import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
