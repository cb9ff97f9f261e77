"""KV events without a flag: vLLM's ZMQ publisher on free ports of this host, and where a relay finds it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import re
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..hooks.settings import ConfigurationError, Setting, Settings, flag_value

logger = logging.getLogger(__name__)

KV_EVENTS = Setting(
    name="kv_events",
    variable="SMG_VLLM_SERVICER_KV_EVENTS",
    default=True,
    parse=flag_value,
    accepted="1/true/yes/on or 0/false/no/off",
)
DRAWS = 32

_FIRST_PORT = 10000
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL_START = 32768
_ANY_INTERFACE = re.compile(r"\Atcp://(?:\*|0\.0\.0\.0|\[::\]):")


def publish_by_default(args: argparse.Namespace, settings: Settings) -> None:
    """Give a command line without --kv-events-config vLLM's ZMQ publisher with replay, unless it is turned off.

    Raises ConfigurationError when no ports are free.
    """
    if args.kv_events_config is not None or not settings["kv_events"]:
        return
    if args.enable_prefix_caching is False:
        logger.info("KV events are not published: prefix caching is off")
        return
    endpoint, replay_endpoint = _free_endpoints(args, settings)
    from vllm.config import KVEventsConfig

    args.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay_endpoint
    )
    logger.info(
        "KV events are published on %s, replayed on %s (each port + data-parallel rank); %s=0 turns them off",
        endpoint,
        replay_endpoint,
        KV_EVENTS.variable,
    )


def endpoints(config: Any) -> tuple[str, str, str]:
    """Endpoint, replay endpoint and topic of a KVEventsConfig, as a relay on this host connects to them.

    Empty where there is none, all three without a ZMQ publisher.
    """
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return "", "", ""
    return _on_this_host(config.endpoint), _on_this_host(config.replay_endpoint or ""), config.topic


def free_ports(count: int, within: range, taken: Collection[int]) -> range | None:
    """Consecutive ports that nothing holds on any interface, drawn at random; None when 32 draws find none."""
    starts = range(within.start, within.stop - count + 1)
    if not starts:
        return None
    for _ in range(DRAWS):
        first = random.choice(starts)
        ports = range(first, first + count)
        if not any(port in ports for port in taken) and _are_free(ports):
            return ports
    return None


def _free_endpoints(args: argparse.Namespace, settings: Settings) -> tuple[str, str]:
    """Endpoint and replay endpoint of rank 0; the ports of all further ranks are free as well."""
    # A publisher adds its global rank to the port, on whichever host it runs: one port for each rank there is.
    ranks = args.data_parallel_size
    within = _port_range()
    ports = free_ports(2 * ranks, within, _configured_ports(args, settings))
    if ports is None:
        raise ConfigurationError(
            [
                f"KV events: {DRAWS} draws found no {2 * ranks} consecutive free ports from {within.start} to "
                f"{within.stop - 1}; set --kv-events-config, or {KV_EVENTS.variable}=0 for none"
            ]
        )
    # vLLM's PUB socket binds to a wildcard only (it connects to any other address); the replay socket always binds,
    # and its history of prompts is for the relay in this worker alone.
    return f"tcp://*:{ports[0]}", f"tcp://127.0.0.1:{ports[ranks]}"


def _port_range() -> range:
    """Ports below those that the machine gives to outgoing connections, which could take one before vLLM does."""
    try:
        end = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = _USUAL_EPHEMERAL_START
    # Machines tuned for many connections give them nearly all ports.
    return range(_FIRST_PORT, end if end > _FIRST_PORT else _USUAL_EPHEMERAL_START)


def _configured_ports(args: argparse.Namespace, settings: Settings) -> set[int]:
    """Ports that the operator gave to something else, perhaps not bound yet."""
    named = (*vars(args).items(), *settings.items())
    return {value for name, value in named if name.endswith("port") and isinstance(value, int)}


def _are_free(ports: range) -> bool:
    try:
        with contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("", port))
    except OSError:
        return False
    return True


def _on_this_host(endpoint: str) -> str:
    return _ANY_INTERFACE.sub("tcp://127.0.0.1:", endpoint)
