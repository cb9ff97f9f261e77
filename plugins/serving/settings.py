"""Settings that every engine's worker has."""

from ..hooks.settings import Setting


def message_bytes(text: str) -> int:
    """A ceiling in bytes, -1 for none."""
    value = int(text)
    if value != -1 and not 0 < value < 2**31:
        raise ValueError(text)
    return value


MAX_MESSAGE_BYTES = Setting(
    name="max_message_bytes",
    variable="SMG_GRPC_MAX_MESSAGE_BYTES",
    default=-1,
    parse=message_bytes,
    accepted="a number of bytes from 1 to 2147483647, or -1 for no ceiling",
)
