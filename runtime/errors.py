"""RuntimeFault: the one error the runtime shows to a user, in one line, with what to do next."""

import errno


class RuntimeFault(Exception):
    """What was found, where, what was expected, what to try. `exit_code` is what a command line should return."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def no_pool(threads: int, number: int) -> str:
    """Why infc_pool_create (kernels/pool.h) gave no pool of so many threads; `number` is its errno."""
    if number == errno.EPERM:
        return "Linux refuses this process the registers of AMX; compile with --target x86-64-v4-bf16, whose code does without them"
    return f"cannot start {threads} threads; give a smaller number of threads"
