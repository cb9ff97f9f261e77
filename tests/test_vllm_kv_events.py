"""Where KV events are published when nobody says where, without vLLM."""

from __future__ import annotations

import argparse
import logging
import re
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

from smg_grpc_servicer.hooks.settings import ConfigurationError, Settings, Source, Value, resolve
from smg_grpc_servicer.vllm import kv_events
from smg_grpc_servicer.vllm.kv_events import KV_EVENTS, endpoints, free_ports, publish_by_default


@pytest.fixture(autouse=True)
def vllm_config(monkeypatch):
    """A stand-in for vllm.config."""
    module = ModuleType("vllm.config")
    module.KVEventsConfig = lambda **fields: SimpleNamespace(topic="", **fields)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", module)


@pytest.fixture
def ephemeral(tmp_path, monkeypatch):
    """`ephemeral(text)`: what the machine says of its ephemeral ports."""

    def write(text: str) -> None:
        path = tmp_path / "ip_local_port_range"
        path.write_text(text)
        monkeypatch.setattr(kv_events, "_EPHEMERAL_PORTS", path)

    return write


def namespace(**given) -> argparse.Namespace:
    args = {"kv_events_config": None, "enable_prefix_caching": None, "data_parallel_size": 1, "port": 50051}
    return argparse.Namespace(**args | given)


def settings(**environ: str) -> Settings:
    return resolve([KV_EVENTS], None, environ)


def published_ports(config: SimpleNamespace) -> tuple[int, int]:
    found = re.fullmatch(r"tcp://\*:(\d+) tcp://127\.0\.0\.1:(\d+)", f"{config.endpoint} {config.replay_endpoint}")
    assert found is not None, config
    return int(found[1]), int(found[2])


def test_the_default_is_a_zmq_publisher_with_replay_below_the_ephemeral_ports(ephemeral, caplog):
    ephemeral("10400\t60999\n")
    caplog.set_level(logging.INFO)
    args = namespace()
    publish_by_default(args, settings())
    config = args.kv_events_config
    assert (config.enable_kv_cache_events, config.publisher) == (True, "zmq")
    port, replay = published_ports(config)
    assert port != replay
    assert min(port, replay) >= 10000
    assert max(port, replay) < 10400
    [record] = caplog.records
    assert record.levelno == logging.INFO
    for part in (config.endpoint, config.replay_endpoint, KV_EVENTS.variable):
        assert part in record.getMessage()


@pytest.mark.parametrize(
    ("text", "end"),
    [("20000\t60999\n", 20000), ("1024 65535", 32768), ("10000 65535", 32768), ("", 32768), ("none", 32768)],
)
def test_ports_are_drawn_up_to_the_ephemeral_range_where_it_leaves_any(ephemeral, text: str, end: int):
    ephemeral(text)
    assert kv_events._port_range() == range(10000, end)


def test_a_machine_that_does_not_tell_its_ephemeral_ports_has_the_usual_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(kv_events, "_EPHEMERAL_PORTS", tmp_path / "missing")
    assert kv_events._port_range() == range(10000, 32768)


def test_every_rank_has_a_port_of_its_own_for_events_and_for_replay(monkeypatch):
    block = free_ports(8, range(10000, 32768), ())
    monkeypatch.setattr(kv_events, "_port_range", lambda: block)
    args = namespace(data_parallel_size=4)
    publish_by_default(args, settings())
    port, replay = published_ports(args.kv_events_config)
    assert sorted([port + rank for rank in range(4)] + [replay + rank for rank in range(4)]) == list(block)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("interface", ["127.0.0.1", "0.0.0.0"])
def test_a_block_with_a_port_that_something_listens_on_is_not_taken(position: int, interface: str):
    block = free_ports(4, range(10000, 32768), ())
    assert block is not None
    with socket.socket() as listener:
        listener.bind((interface, block[position]))
        listener.listen()
        assert free_ports(4, block, ()) is None
    assert free_ports(4, block, ()) == block


def test_the_next_draw_finds_what_the_first_did_not():
    block = free_ports(5, range(10000, 32768), ())
    assert block is not None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", block[0]))
        listener.listen()
        assert free_ports(4, block, ()) == block[1:]


@pytest.mark.parametrize("owner", ["port", "master_port"])
def test_a_port_of_the_command_line_is_not_taken(monkeypatch, owner: str):
    block = free_ports(2, range(10000, 32768), ())
    assert block is not None
    monkeypatch.setattr(kv_events, "_port_range", lambda: block)
    args = namespace(**{"data_parallel_rpc_port": None, owner: block[1]})
    with pytest.raises(ConfigurationError):
        publish_by_default(args, settings())


def test_a_port_of_the_settings_is_not_taken(monkeypatch):
    block = free_ports(2, range(10000, 32768), ())
    assert block is not None
    monkeypatch.setattr(kv_events, "_port_range", lambda: block)
    given = {"kv_events": Value(True, Source.DEFAULT), "metrics_port": Value(block[0], Source.FLAG)}
    with pytest.raises(ConfigurationError):
        publish_by_default(namespace(), Settings(given))


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_free_block_is_one_line_that_names_both_ways_out(monkeypatch, ranks: int):
    block = free_ports(4, range(10000, 32768), ())
    monkeypatch.setattr(kv_events, "_port_range", lambda: block)
    args = namespace(data_parallel_size=ranks)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", block[3]))
        listener.listen()
        with pytest.raises(ConfigurationError) as caught:
            publish_by_default(args, settings())
    [line] = caught.value.lines
    assert KV_EVENTS.variable in line
    assert "--kv-events-config" in line
    assert "\n" not in line
    assert args.kv_events_config is None


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_the_variable_turns_it_off(text: str):
    args = namespace()
    publish_by_default(args, settings(**{KV_EVENTS.variable: text}))
    assert args.kv_events_config is None


def test_an_explicit_configuration_is_kept():
    given = SimpleNamespace(enable_kv_cache_events=False)
    args = namespace(kv_events_config=given)
    publish_by_default(args, settings())
    assert args.kv_events_config is given


def test_nothing_is_published_without_prefix_caching(caplog):
    caplog.set_level(logging.INFO)
    args = namespace(enable_prefix_caching=False)
    publish_by_default(args, settings())
    assert args.kv_events_config is None
    [record] = caplog.records
    assert "prefix caching is off" in record.getMessage()


def test_a_second_call_keeps_the_ports_of_the_first():
    args = namespace()
    publish_by_default(args, settings())
    first = args.kv_events_config
    publish_by_default(args, settings())
    assert args.kv_events_config is first


def publisher(endpoint: str, replay: str | None, topic: str = "", **other) -> SimpleNamespace:
    fields = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": topic}
    return SimpleNamespace(**fields | {"endpoint": endpoint, "replay_endpoint": replay} | other)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ("", "", "")),
        (publisher("tcp://*:1", "tcp://*:2", enable_kv_cache_events=False), ("", "", "")),
        (publisher("tcp://*:1", "tcp://*:2", publisher="null"), ("", "", "")),
        (publisher("tcp://*:5557", None, "kv"), ("tcp://127.0.0.1:5557", "", "kv")),
        (publisher("tcp://0.0.0.0:1", "tcp://*:2"), ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "")),
        (publisher("tcp://[::]:1", "tcp://[::]:2"), ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "")),
        (publisher("tcp://10.0.0.7:1", "tcp://127.0.0.1:2"), ("tcp://10.0.0.7:1", "tcp://127.0.0.1:2", "")),
        (publisher("tcp://[::1]:1", "ipc:///run/kv"), ("tcp://[::1]:1", "ipc:///run/kv", "")),
    ],
)
def test_a_relay_connects_to_this_host_where_the_publisher_binds_every_interface(config, expected):
    assert endpoints(config) == expected
