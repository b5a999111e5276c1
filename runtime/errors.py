"""RuntimeFault: the one error the runtime shows to a user, in one line, with what to do next."""


class RuntimeFault(Exception):
    """What was found, where, what was expected, what to try. `exit_code` is what a command line should return."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
