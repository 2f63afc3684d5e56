"""The base of errors that a user can mend. Nothing else lives here."""


class UserError(Exception):
    """Something is wrong with the input or the machine; the message says what and where.

    A command that raises one ends with that line and its `exit_status`.
    """

    exit_status = 1
