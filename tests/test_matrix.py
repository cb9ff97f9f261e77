"""tests/matrix.py, without building or serving anything."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import environments
import matrix
import pytest
from matrix import COLUMNS, Cell, Row, arguments_of, borrowed, main, probe, reason, table

PYTHON, OLD, NEW = COLUMNS


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Environments of a test's own, which are built by making their folder."""
    monkeypatch.setenv("SMG_TEST_ENVS", str(tmp_path / "envs"))

    def ensure(text: str) -> Path:
        path = environments.root() / environments.parse(text).folder
        path.mkdir(parents=True, exist_ok=True)
        return path / "bin" / "python"

    monkeypatch.setattr(environments, "ensure", ensure)
    return tmp_path / "envs"


@pytest.fixture
def cells(monkeypatch) -> dict[tuple[str, str], Cell]:
    """What each (release, column) comes to, ok where nothing is said; no worker is started."""
    told: dict[tuple[str, str], Cell] = {}

    def serve(environment, column, model, expected) -> Cell:
        return told.get((environment.spec.version, column.name), Cell("ok", 30.0, (1, 2)))

    monkeypatch.setattr(matrix, "serve_cell", serve)
    return told


def test_a_table_has_a_line_for_each_release_and_a_column_for_each_implementation():
    rows = [
        Row("0.31.0", {PYTHON.name: Cell("ok", 31.4, (1,)), OLD.name: Cell("a | b"), NEW.name: Cell("ok")}),
        Row("0.33.0", {PYTHON.name: Cell("seams: all found")}),
    ]
    assert table(rows, COLUMNS).split("\n") == [
        "| vLLM | python | rust, smg 1.12.0 | rust, smg 1.13.0 |",
        "|---|---|---|---|",
        r"| 0.31.0 | ok | a \| b | ok |",
        "| 0.33.0 | seams: all found |  |  |",
    ]
    assert table(rows[:1], [NEW]) == "| vLLM | rust, smg 1.13.0 |\n|---|---|\n| 0.31.0 | ok |"


def test_the_defaults_are_everything():
    options = arguments_of([])
    assert options.releases == ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
    assert options.implementations == ("python", "rust")
    assert (options.keep, options.json, options.sources) == (False, None, None)


def test_choices_come_once_and_in_order():
    options = arguments_of(["--releases", "0.31.0, 0.28.0,0.31.0", "--implementations", "rust", "--keep"])
    assert (options.releases, options.implementations, options.keep) == (("0.28.0", "0.31.0"), ("rust",), True)


@pytest.mark.parametrize("arguments", [["--releases", "0.27.0"], ["--implementations", "python,go"], ["--releases="]])
def test_a_choice_that_there_is_not_is_named_with_those_that_there_are(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        arguments_of(arguments)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "is not one of" in said
    assert repr(arguments[-1].rpartition(",")[2].rpartition("=")[2]) in said


@pytest.mark.parametrize(
    ("existed", "keep", "stays"), [(False, False, False), (False, True, True), (True, False, True), (True, True, True)]
)
def test_an_environment_that_was_not_there_before_is_deleted(folder, existed, keep, stays):
    path = folder / "vllm-0.29.0"
    other = folder / "vllm-0.30.0"
    other.mkdir(parents=True)
    if existed:
        path.mkdir()
    with borrowed("0.29.0", keep) as environment:
        assert environment.path == path
        assert path.is_dir()
    assert path.exists() == stays
    assert other.exists()


def test_a_build_that_fails_is_a_row_and_leaves_nothing(folder, cells, monkeypatch):
    def ensure(text: str) -> Path:
        (folder / "vllm-0.29.0").mkdir(parents=True)
        raise environments.BuildError("vllm-0.29.0: failed to install torch\nnoise")

    monkeypatch.setattr(environments, "ensure", ensure)
    row = matrix.serve_row("0.29.0", [PYTHON, NEW], keep=False)
    assert {cell.result for cell in row.cells.values()} == {"environment: vllm-0.29.0: failed to install torch"}
    assert list(row.cells) == [PYTHON.name, NEW.name]
    assert not (folder / "vllm-0.29.0").exists()


def test_a_wheel_that_does_not_install_spoils_no_cell_before_it(folder, monkeypatch):
    def serve(environment, column, model, expected) -> Cell:
        if column is OLD:
            raise environments.BuildError("no such smg")
        return Cell("ok")

    monkeypatch.setattr(matrix, "serve_cell", serve)
    row = matrix.serve_row("0.29.0", COLUMNS, keep=False)
    assert [cell.result for cell in row.cells.values()] == [
        "ok",
        "environment: no such smg",
        "environment: no such smg",
    ]


def test_the_first_tokens_of_a_row_are_expected_of_its_other_cells(folder, monkeypatch):
    tokens = {PYTHON: (), OLD: (7, 8), NEW: (7, 9)}
    seen = []

    def serve(environment, column, model, expected) -> Cell:
        seen.append(expected)
        return Cell("ok", 1.0, tokens[column])

    monkeypatch.setattr(matrix, "serve_cell", serve)
    matrix.serve_row("0.29.0", COLUMNS, keep=False)
    assert seen == [(), (), (7, 8)]


def test_the_environments_that_tests_share_are_not_touched(folder, cells, tmp_path, capsys):
    shared = folder / "vllm-0.32.0"
    shared.mkdir(parents=True)
    (shared / "file").write_text("theirs")
    assert main(["--releases", "0.32.0", "--json", str(tmp_path / "cells.json")]) == 0
    assert [path.name for path in shared.iterdir()] == ["file"]
    assert not (folder / "matrix" / "vllm-0.32.0").exists()
    assert capsys.readouterr().out.splitlines()[-1] == "| 0.32.0 | ok | ok | ok |"
    assert '"start_secs": 30.0' in (tmp_path / "cells.json").read_text()


def test_a_cell_that_is_not_ok_is_exit_code_1(folder, cells, capsys):
    cells["0.28.0", NEW.name] = Cell("drain: exit code 1", 30.0)
    assert main(["--releases", "0.28.0,0.29.0"]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 0.28.0 | ok | ok | drain: exit code 1 |",
        "| 0.29.0 | ok | ok | ok |",
    ]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (AssertionError("it does not serve; the end of worker.log:\nline"), "it does not serve"),
        (AssertionError("first\nsecond"), "first"),
        (TimeoutError(), "TimeoutError"),
        (subprocess.TimeoutExpired(["/a/python", "-c"], 20.0), "still running after 20 s"),
        (ValueError("x" * 500), "x" * 117 + "..."),
    ],
)
def test_a_reason_is_short(error, text):
    assert reason(error) == text


def sources(folder: Path) -> Path:
    """A vLLM that has every place that we wrap, but for one."""
    for name, text in {
        "__init__": "",
        "utils/argparse_utils": "class FlexibleArgumentParser:\n    def parse_known_args(self): ...\n",
        "entrypoints/grpc_server": "def serve(args): ...\n",
    }.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_seams_that_sources_do_not_have_are_named(tmp_path):
    cell = probe(sources(tmp_path))
    assert not cell.ok
    names = cell.result.removeprefix("seams: ").removesuffix(" missing").split(", ")
    assert "vllm.launcher" in names
    assert "vllm.parser" not in names


def test_sources_without_the_engine_are_not_looked_for_elsewhere(tmp_path):
    assert not probe(tmp_path).ok
    assert "no vllm" in probe(tmp_path).result


def test_a_download_leaves_the_python_files(tmp_path, monkeypatch):
    def download(command, **options) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("-d") + 1])
        target.mkdir()
        with zipfile.ZipFile(target / "vllm-0.33.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("vllm/__init__.py", "")
            wheel.writestr("vllm/_C.so", "machine code")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(matrix.subprocess, "run", download)
    matrix.download_sources("0.33.0", tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()] == ["vllm/__init__.py"]


def test_a_download_that_fails_is_a_row(monkeypatch):
    monkeypatch.setattr(matrix.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    row = matrix.seams_row("0.33.0", None, PYTHON)
    assert row == Row("0.33.0", {PYTHON.name: Cell("seams: the download failed (exit 1)")})
