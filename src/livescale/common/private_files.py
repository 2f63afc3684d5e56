"""Files with secrets: who may be able to read them."""

from __future__ import annotations


def is_private(mode: int, owner: int, reader: int) -> bool:
    """Whether a secret in a file of this mode and this owner (user ids) was meant for
    the reader alone.

    A file of root's may be readable for a group: Kubernetes (`fsGroup`) and systemd (credentials)
    hand secrets to a user in no other way.
    """
    is_handed_over = owner == 0 and reader != 0
    return not mode & (0o037 if is_handed_over else 0o077)
