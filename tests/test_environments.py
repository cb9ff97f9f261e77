"""tests/environments.py, without building anything."""

import threading
from pathlib import Path

import environments
import pytest
from environments import BuildError, Environment, Spec, ensure, main, parse, recipe_fingerprint


def python_that(script: str, monkeypatch) -> None:
    """Let a new environment be a python that does this, and nothing else."""

    def create(self: Environment) -> None:
        self.state_file.unlink(missing_ok=True)
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.write_text(f"#!/bin/sh\n{script}\n")
        self.python.chmod(0o755)

    monkeypatch.setattr(Environment, "create", create)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Environments of a test's own, whose python succeeds at everything."""
    monkeypatch.setenv("SMG_TEST_ENVS", str(tmp_path / "envs"))
    python_that("exit 0", monkeypatch)
    return tmp_path / "envs"


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout with one module in each source folder."""
    path = tmp_path / "checkout"
    for name in environments.SOURCES:
        (path / name / "below").mkdir(parents=True)
        (path / name / "below" / "module.py").write_text("A = 1\n")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (path / name).write_text(name)
    monkeypatch.setattr(environments, "CHECKOUT", path)
    return path


def recipe(monkeypatch, install) -> None:
    """Let `install` be how MLX is installed."""
    monkeypatch.setitem(environments.ENGINES, "mlx", (install, ("data",)))


@pytest.mark.parametrize(
    ("text", "spec", "name"),
    [
        ("vllm", Spec("vllm", "0.32.0", False), "vllm-0.32.0"),
        ("vllm==0.28.0", Spec("vllm", "0.28.0", False), "vllm-0.28.0"),
        ("sglang", Spec("sglang", "0.5.23", False), "sglang-0.5.23"),
        ("mlx==0.31.0rc1", Spec("mlx", "0.31.0rc1", False), "mlx-0.31.0rc1"),
        ("upstream-vllm", Spec("vllm", "0.32.0", True), "upstream-vllm-0.32.0"),
        ("upstream-mlx==0.31.2", Spec("mlx", "0.31.2", True), "upstream-mlx-0.31.2"),
    ],
)
def test_specs(text, spec, name):
    assert parse(text) == spec
    assert spec.folder == name


@pytest.mark.parametrize(
    "text",
    ["", "tgi", "vllm=0.28.0", "vllm==", "vllm==../../x", "vllm==0.28.0 ", "upstream-", "upstream-upstream-vllm"],
)
def test_refused_specs_name_what_is_accepted(text, folder, capsys):
    assert main([text]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert repr(text) in err
    assert "[upstream-]{vllm,sglang,mlx}[==VERSION]" in err
    assert not folder.exists()


@pytest.mark.parametrize("arguments", [[], ["vllm", "mlx"]])
def test_usage(arguments, capsys):
    assert main(arguments) == 2
    assert "[upstream-]ENGINE[==VERSION]" in capsys.readouterr().err


def test_root_is_the_variable_or_the_users_cache(monkeypatch):
    monkeypatch.setenv("SMG_TEST_ENVS", "/a/envs")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b/cache")
    assert environments.root() == Path("/a/envs")
    monkeypatch.delenv("SMG_TEST_ENVS")
    assert environments.root() == Path("/b/cache/smg-grpc-servicer/envs")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/c/home")
    assert environments.root() == Path("/c/home/.cache/smg-grpc-servicer/envs")


@pytest.mark.parametrize("name", environments.SOURCES)
def test_checkout_fingerprint_follows_every_source(checkout, name):
    before = environments.checkout_fingerprint()
    (checkout / name / "below" / "module.py").write_text("A = 2\n")
    changed = environments.checkout_fingerprint()
    (checkout / name / "new.json").write_text("{}")
    assert len({before, changed, environments.checkout_fingerprint()}) == 3


def test_checkout_fingerprint_ignores_what_is_not_installed(checkout):
    before = environments.checkout_fingerprint()
    cache = checkout / "hooks" / "__pycache__"
    cache.mkdir()
    (cache / "module.cpython-311.pyc").write_bytes(b"1")
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_it.py").write_text("")
    assert environments.checkout_fingerprint() == before


def test_recipe_fingerprint_is_of_one_spec(monkeypatch):
    names = ("vllm", "vllm==0.28.0", "upstream-vllm", "sglang", "mlx", "upstream-mlx")
    before = {name: recipe_fingerprint(parse(name)) for name in names}
    assert len(set(before.values())) == len(names)

    def changed() -> set[str]:
        return {name for name in names if recipe_fingerprint(parse(name)) != before[name]}

    assert changed() == set()
    with monkeypatch.context() as patch:
        patch.setattr(environments, "UPSTREAM", ("another==1",))
        assert changed() == {"upstream-vllm", "upstream-mlx"}
    with monkeypatch.context() as patch:
        install, data = environments.ENGINES["sglang"]
        patch.setitem(environments.ENGINES, "sglang", (install, (*data, "another")))
        assert changed() == {"sglang"}


def test_a_whole_environment_is_used_again(folder, checkout, monkeypatch, capsys):
    built = []
    recipe(monkeypatch, lambda environment, version: built.append(version))
    for _ in range(2):
        assert main(["mlx"]) == 0
        assert capsys.readouterr().out == f"{folder}/mlx-0.31.3/bin/python\n"
    assert built == ["0.31.3"]
    (folder / "mlx-0.31.3" / "bin" / "python").unlink()
    ensure("mlx")
    assert built == ["0.31.3"] * 2
    recipe(monkeypatch, lambda environment, version: built.append("changed"))
    monkeypatch.setitem(environments.ENGINES, "mlx", (environments.ENGINES["mlx"][0], ("new data",)))
    ensure("mlx")
    assert built[2:] == ["changed"]


def test_the_checkout_is_installed_again_when_it_changed(folder, checkout, monkeypatch):
    recipe(monkeypatch, lambda environment, version: None)
    installed = []
    monkeypatch.setattr(Environment, "pip", lambda self, *arguments: installed.append(arguments))

    def requirements_then_wheel() -> list[bool]:
        ensure("mlx")
        taken, installed[:] = ["--no-deps" not in arguments for arguments in installed], []
        return taken

    assert requirements_then_wheel() == [True, False]
    assert requirements_then_wheel() == []
    (checkout / "wire" / "new.py").write_text("")
    assert requirements_then_wheel() == [False]
    (checkout / "pyproject.toml").write_text("[project]")
    assert requirements_then_wheel() == [True, False]
    ensure("upstream-mlx")
    assert [arguments[0] for arguments in installed] == [environments.UPSTREAM[0]]


def test_an_interrupted_install_of_the_checkout_is_done_again(folder, checkout, monkeypatch):
    recipe(monkeypatch, lambda environment, version: None)
    ensure("mlx")

    def fail(self: Environment, *arguments: str) -> None:
        raise KeyboardInterrupt

    module = checkout / "wire" / "below" / "module.py"
    before = module.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Environment, "pip", fail)
        module.write_text("A = 3\n")
        with pytest.raises(KeyboardInterrupt):
            ensure("mlx")
    module.write_text(before)
    installed = []
    monkeypatch.setattr(Environment, "pip", lambda self, *arguments: installed.append(arguments))
    ensure("mlx")
    assert installed


def test_a_failed_build_names_its_step_and_is_not_taken_for_whole(folder, checkout, monkeypatch, capfd):
    python_that('echo noise; echo "no matching version" >&2; exit 3', monkeypatch)
    assert main(["mlx==0.0.1"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "no matching version" in err
    assert "mlx-0.0.1: failed to install mlx-lm[cpu]==0.0.1" in err
    assert Environment(parse("mlx==0.0.1")).state() == {}
    with pytest.raises(BuildError):
        ensure("mlx==0.0.1")


def test_noise_of_a_build_stays_out_of_stdout(folder, monkeypatch, capfd):
    python_that('echo "WARNING: ignored"', monkeypatch)
    environment = Environment(parse("mlx"))
    environment.create()
    environment.say("a step")
    assert environment.run("warn", "-m", "pip") == "WARNING: ignored\n"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "mlx-0.31.3: a step\n")


def test_concurrent_calls_build_once(folder, checkout, monkeypatch, capfd):
    entered, built = threading.Event(), []

    def install(environment: Environment, version: str) -> None:
        built.append(version)
        entered.set()
        deadline.wait(0.3)

    deadline = threading.Event()
    recipe(monkeypatch, install)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(ensure("mlx"))) for _ in range(2)]
    threads[0].start()
    assert entered.wait(5)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert built == ["0.31.3"]
    assert paths == [folder / "mlx-0.31.3" / "bin" / "python"] * 2
    assert "mlx-0.31.3: waiting for another builder" in capfd.readouterr().err


def test_the_next_builder_waits_for_what_a_killed_one_left_running(folder, checkout, monkeypatch, capfd):
    python_that("sleep 0.3 >/dev/null 2>&1 &", monkeypatch)
    recipe(monkeypatch, lambda environment, version: environment.pip("something"))
    ensure("upstream-mlx")
    assert "waiting" not in capfd.readouterr().err
    ensure("upstream-mlx")
    assert "upstream-mlx-0.31.3: waiting for another builder" in capfd.readouterr().err


def test_a_damaged_state_means_a_new_build(folder):
    environment = Environment(parse("vllm"))
    environment.create()
    for text in ("", "{", "[1]", "7"):
        environment.state_file.write_text(text)
        assert environment.state() == {}
    environment.remember(built="x", checkout="y")
    environment.remember(checkout="")
    assert environment.state() == {"built": "x"}
