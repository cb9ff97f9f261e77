"""Settings that every engine's worker has."""

from __future__ import annotations

from typing import Any

from ..hooks.settings import Setting, non_negative_int, port, positive_int, positive_seconds, seconds, text


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
SOCKET_DIRECTORY: Setting[str | None] = Setting(
    name="socket_directory",
    variable="SMG_ZMQ_SOCKET_DIR",
    default=None,
    parse=text,
    accepted="a directory of this user with mode 0700, which is made where it is missing",
)
WORKER_THREADS = Setting(
    name="worker_threads",
    variable="SMG_SERVICER_WORKER_THREADS",
    default=4,
    parse=positive_int,
    accepted="a number of threads, 1 or more",
)


def drain_secs(prefix: str) -> Setting[float]:
    """How long running calls may go on after a signal, under an engine's prefix such as SMG_VLLM_SERVICER."""
    return Setting(
        name="drain_secs",
        variable=f"{prefix}_DRAIN_SECS",
        default=5.0,
        parse=seconds,
        accepted="a number of seconds, 0 or more",
    )


def rust(prefix: str) -> tuple[Setting[Any], ...]:
    """The settings of a worker that is served from Rust, under an engine's prefix such as SMG_VLLM_SERVICER."""
    return (
        Setting(
            name="handshake_port",
            variable=f"{prefix}_HANDSHAKE_PORT",
            default=0,
            parse=port,
            accepted="a port from 1 to 65535, or 0 for a free one",
        ),
        Setting(
            name="startup_timeout_secs",
            variable=f"{prefix}_STARTUP_TIMEOUT_SECS",
            default=1800.0,
            parse=positive_seconds,
            accepted="a number of seconds above 0",
        ),
        Setting(
            name="startup_ceiling_secs",
            variable=f"{prefix}_STARTUP_CEILING_SECS",
            default=14400.0,
            parse=seconds,
            accepted="a number of seconds, or 0 for no ceiling",
        ),
        Setting(
            name="silence_timeout_secs",
            variable=f"{prefix}_SILENCE_TIMEOUT_SECS",
            default=300.0,
            parse=positive_seconds,
            accepted="a number of seconds above 0",
        ),
        Setting(
            name="prefill_tokens_per_sec",
            variable=f"{prefix}_PREFILL_TOKENS_PER_SEC",
            default=2000,
            parse=non_negative_int,
            accepted="a whole number, 0 or more",
        ),
        *metrics(prefix),
        SOCKET_DIRECTORY,
        WORKER_THREADS,
    )


def metrics(prefix: str) -> tuple[Setting[int | None], Setting[str | None]]:
    """Where metrics are served; without a port they are not."""
    return (
        Setting(
            name="metrics_port",
            flag="--metrics-port",
            variable=f"{prefix}_METRICS_PORT",
            default=None,
            parse=port,
            accepted="a port from 0 (any free one) to 65535",
            help="Port of the Rust implementation's metrics.",
        ),
        Setting(
            name="metrics_host",
            flag="--metrics-host",
            variable=f"{prefix}_METRICS_HOST",
            default=None,
            parse=text,
            accepted="an address of this machine; unset is the gRPC host",
            help="Address of the Rust implementation's metrics.",
        ),
    )
