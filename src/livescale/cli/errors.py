"""What a command raises when the user can mend it."""


class UserError(Exception):
    """Something is wrong with the input or the machine; the message says what and where."""
