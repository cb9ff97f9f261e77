"""What a worker that is served from Rust needs around it: ports, a socket directory, the wheel."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.hooks.settings import ConfigurationError, Settings, resolve
from smg_grpc_servicer.serving import settings as declared
from smg_grpc_servicer.serving.sockets import Reservation, from_here, socket_base
from smg_grpc_servicer.serving.wheel import Wheel, log_filter

PREFIX = "SMG_TEST"
NOBODY = 65534


# Ports and directories


def test_a_port_is_kept_until_it_is_released():
    kept = Reservation("127.0.0.1", 0, "port")
    with pytest.raises(ConfigurationError, match=f"other: cannot listen on {kept.address}: Address already in use"):
        Reservation("127.0.0.1", kept.port, "other")
    kept.release()
    kept.release()
    Reservation("127.0.0.1", kept.port, "other").release()


def test_an_offered_port_can_be_bound_by_a_server_and_not_found_free():
    kept = Reservation("127.0.0.1", 0, "port")
    kept.offer()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", kept.port))
    with socket.create_server(("127.0.0.1", kept.port)):  # with SO_REUSEADDR
        kept.release()


@pytest.mark.parametrize(
    ("host", "port", "sentence"),
    [("no.such.host.invalid", 1, "port: cannot listen on"), ("203.0.113.1", 1, "203.0.113.1:1: Cannot assign")],
)
def test_an_address_that_is_not_this_machines_is_refused(host, port, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        Reservation(host, port, "port")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("0.0.0.0:5", "127.0.0.1:5"),
        ("[::]:5", "[::1]:5"),
        ("[fe80::1]:5", "[fe80::1]:5"),
        ("10.0.0.1:5", "10.0.0.1:5"),
    ],
)
def test_a_client_on_this_machine_finds_the_server(address, local):
    assert from_here(address) == local


def at(directory: Path) -> Settings:
    return resolve([declared.SOCKET_DIRECTORY], None, {"SMG_ZMQ_SOCKET_DIR": str(directory)})


def test_a_socket_directory_is_made_for_this_user_alone(tmp_path):
    base = socket_base(at(tmp_path / "a" / "b"))
    assert base.parent.stat().st_mode & 0o777 == 0o700
    assert socket_base(at(tmp_path / "a" / "b")) == base


def as_nobody(work: Callable[[], Any]) -> str:
    """What work fails with, done as a user who is not root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            try:
                work()
                os.write(writer, b"nothing")
            except ConfigurationError as error:
                os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def own(tmp_path) -> Path:
    """A directory of the user that `as_nobody` is, and one on the way to it."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(folder.stat().st_mode | 0o011)
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    return folder


def test_a_socket_directory_that_cannot_be_written_is_refused(own):
    assert as_nobody(lambda: socket_base(at(own))) == "nothing"
    own.chmod(0o500)
    assert "is not writable" in as_nobody(lambda: socket_base(at(own)))
    assert "cannot be made: Permission denied" in as_nobody(lambda: socket_base(at(own / "below")))


def test_a_socket_directory_of_somebody_else_is_refused(own, tmp_path):
    if os.getuid() == 0:
        with pytest.raises(ConfigurationError, match=f"belongs to uid {NOBODY}"):
            socket_base(at(own))
    else:
        with pytest.raises(ConfigurationError, match="belongs to uid 0"):
            socket_base(at(Path("/")))


def a_file(path: Path) -> Path:
    path.write_text("")
    return path


def a_link(path: Path) -> Path:
    path.symlink_to(path.parent)
    return path


def an_open_one(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o755)
    return path


UNUSABLE = {
    "a file": (a_file, "cannot be made: File exists"),
    "below a file": (lambda path: a_file(path) / "below", "cannot be made: Not a directory"),
    "a link": (a_link, "is not a directory"),
    "open to others": (an_open_one, r"is open to others \(mode 0755\)"),
    "too long": (lambda path: path / ("x" * 100), r"is too long for a socket's address \(107 bytes\)"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_socket_directory_that_is_not_one_is_refused(tmp_path, what):
    make, sentence = UNUSABLE[what]
    with pytest.raises(ConfigurationError, match=f"SMG_ZMQ_SOCKET_DIR: '.*' {sentence}"):
        socket_base(at(make(tmp_path / "it")))


# The wheel


@pytest.fixture
def module(monkeypatch) -> types.ModuleType:
    module = types.ModuleType("smg.servicer")
    monkeypatch.setitem(sys.modules, "smg.servicer", module)
    return module


def test_a_wheel_without_the_server_is_told_apart_and_what_to_install_is_said(module, monkeypatch):
    sentence = r"--impl: 'rust' needs smg.servicer.S, and smg 1.13.0 has none .*; install 'smg>=1.12'"
    with pytest.raises(ConfigurationError, match=sentence):
        Wheel("S", "--impl")
    monkeypatch.setitem(sys.modules, "smg.servicer", None)
    with pytest.raises(ConfigurationError, match=sentence):
        Wheel("S", "--impl")


def test_settings_that_the_wheel_cannot_honour_are_one_line_each(module):
    class Server:
        def __init__(self, *, metrics_bind_address: str) -> None: ...

    module.S = Server  # type: ignore[attr-defined]
    known = (declared.MAX_MESSAGE_BYTES, *declared.rust(PREFIX))
    given = {"SILENCE_TIMEOUT_SECS": "5", "PREFILL_TOKENS_PER_SEC": "6", "METRICS_PORT": "7", "DRAIN_SECS": "8"}
    environment = {f"{PREFIX}_{name}": value for name, value in given.items()} | {"SMG_GRPC_MAX_MESSAGE_BYTES": "9"}
    lines = Wheel("S", "--impl").problems(resolve(known, None, environment), known)
    assert len(lines) == 3
    for line, name in zip(lines, ("SMG_GRPC_MAX_MESSAGE_BYTES", "SILENCE", "PREFILL"), strict=True):
        assert name in line
        assert re.search(r": [569](\.0)? cannot be honoured: S of smg 1.13.0 does not take \w+; install a newer", line)
    assert not Wheel("S", "--impl").problems(resolve(known, None, {}), known)


@pytest.mark.parametrize(
    ("level", "others", "ours"),
    [
        (logging.DEBUG, "warn", "debug"),
        (logging.INFO, "warn", "info"),
        (25, "warn", "warn"),
        (logging.WARNING, "warn", "warn"),
        (logging.CRITICAL, "error", "error"),
    ],
)
def test_a_logging_level_is_said_to_the_rust_server_in_its_notation(level, others, ours):
    first, *rest = log_filter(level).split(",")
    assert first == others
    assert f"engine_servicer={ours}" in rest
    assert "engine_servicer::vllm::engine=off" in rest
