"""Seams: wrapped wherever an engine's module is in its life, and undone without a trace."""

import importlib
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.hooks import seams
from smg_grpc_servicer.hooks.seams import Seam, State, bind, state, unbind

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules to import from, with their packages; forget them afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, source: str) -> None:
        *packages, module = name.split(".")
        folder = tmp_path
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{module}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    yield write
    for binding in list(seams._bindings.values()):
        unbind(binding.seam)
    seams._bindings.clear()
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def marks(mark: str = "wrapped") -> Callable[..., Any]:
    return lambda wrapped, instance, args, kwargs: (mark, wrapped(*args, **kwargs))


def seam(*targets: str, name: str = "demo.seam", wrapper: Any = None) -> Seam:
    return Seam(name, targets, "test", "all", wrapper or marks())


def run(folder: Path, *arguments: str) -> str:
    """Run a Python with `folder` on its path and return what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SERVE = "def serve():\n    return 'served'\n"


# --- the life of a module ------------------------------------------------------------------------------------------


def test_a_loaded_module_is_wrapped_at_once(write: Write) -> None:
    write("loaded", SERVE)
    module = importlib.import_module("loaded")
    assert bind(seam("loaded:serve")) is State.BOUND
    assert module.serve() == ("wrapped", "served")


def test_a_module_loaded_later_is_wrapped_before_its_importer_sees_it(write: Write) -> None:
    write("later", SERVE)
    assert bind(seam("later:serve")) is State.PENDING
    assert "later" not in sys.modules
    from later import serve  # type: ignore[import-not-found]

    assert serve() == ("wrapped", "served")
    assert state(seam("later:serve")) is State.BOUND


HALF = """
    from smg_grpc_servicer.hooks.seams import Seam, bind
    def mark(wrapped, instance, args, kwargs):
        return ("wrapped", wrapped(*args, **kwargs))
    during = bind(Seam("demo.seam", ("half:serve", "half:Server.run"), "test", "all", mark))
    def serve():
        return "served"
    class Server:
        def run(self):
            return "ran"
    def main():
        return serve()
"""


def test_a_half_imported_module_is_wrapped_for_from_import(write: Write) -> None:
    write("half", HALF)
    from half import Server, during, serve  # type: ignore[import-not-found]

    assert during is State.PENDING
    assert serve() == ("wrapped", "served")
    assert Server().run() == ("wrapped", "ran")
    assert type(sys.modules["half"]) is type(sys)


def test_a_half_imported_module_is_wrapped_for_its_own_functions(write: Write) -> None:
    write("half", HALF)
    from half import main

    assert main() == ("wrapped", "served")


def test_a_half_imported_module_is_bound_without_being_read(write: Write) -> None:
    write("half", HALF)
    __import__("half")
    assert state(seam("half:serve")) is State.BOUND


def test_a_half_imported_module_reads_as_before_while_it_lacks_the_attribute(write: Write) -> None:
    write("reader", "import sys\nhalf = sys.modules['half']\nseen = (hasattr(half, 'serve'), half.early)\n")
    write("half", "early = 1\n" + textwrap.dedent(HALF).replace("def serve", "import reader\ndef serve", 1))
    module = importlib.import_module("half")
    assert sys.modules["reader"].seen == (False, 1)
    assert module.serve() == ("wrapped", "served")


def test_a_half_imported_module_that_never_defines_it_is_missing_and_left_alone(write: Write) -> None:
    write("half", HALF.replace("half:serve", "half:other").replace("half:Server.run", "half:Server.other"))
    module = importlib.import_module("half")
    assert state(seam("half:other")) is State.MISSING
    assert type(module) is type(sys)


def test_unbinding_while_half_imported_leaves_no_trace(write: Write) -> None:
    unbinds = "serve():\n        return 'served'\n    from smg_grpc_servicer.hooks.seams import _bindings, unbind\n"
    unbinds += "    unbind(_bindings['demo.seam'].seam)\n    import sys\n    kind = type(sys.modules['half'])\n"
    write("half", HALF.replace('serve():\n        return "served"\n', unbinds, 1))
    module = importlib.import_module("half")
    assert module.kind is type(sys)
    assert module.main() == "served"


def test_an_import_that_fails_half_way_is_bound_when_it_is_tried_again(write: Write, tmp_path: Path) -> None:
    write("half", HALF + "\n    raise RuntimeError('no')\n")
    with pytest.raises(RuntimeError):
        importlib.import_module("half")
    assert state(seam("half:serve")) is State.PENDING
    write("half", SERVE + "# another size, so that no stale bytecode is taken\n")
    from half import serve

    assert serve() == ("wrapped", "served")


def test_an_attribute_that_a_loaded_module_lacks_is_missing(write: Write) -> None:
    write("without", "class Server: pass\n")
    importlib.import_module("without")
    assert bind(seam("without:serve", "without:Server.run", "nowhere:serve")) is State.MISSING


def test_a_type_that_cannot_be_changed_is_missing_and_raises_nothing() -> None:
    assert bind(seam("builtins:dict.get")) is State.MISSING
    unbind(seam())


# --- alternatives and repetition -----------------------------------------------------------------------------------


def test_every_target_that_exists_is_wrapped(write: Write) -> None:
    write("old", SERVE)
    write("new", SERVE)
    bind(seam("new:serve", "old:serve", "gone:serve"))
    assert importlib.import_module("old").serve() == ("wrapped", "served")
    assert importlib.import_module("new").serve() == ("wrapped", "served")


def test_a_module_that_only_passes_another_target_on_is_not_wrapped_twice(write: Write) -> None:
    write("new", SERVE)
    write("shim", "from new import serve\n")
    bind(seam("new:serve", "shim:serve"))
    shim = importlib.import_module("shim")
    assert shim.serve() == ("wrapped", "served")
    unbind(seam())
    assert shim.serve is sys.modules["new"].serve
    assert shim.serve() == "served"


def test_binding_twice_wraps_once_also_from_another_seam_of_that_name(write: Write) -> None:
    write("loaded", SERVE)
    module = importlib.import_module("loaded")
    bind(seam("loaded:serve"))
    bind(seam("loaded:serve"))
    bind(seam("loaded:serve", wrapper=marks("second")))
    assert module.serve() == ("wrapped", "served")


def test_binding_again_under_a_foreign_wrapper_wraps_once(write: Write) -> None:
    write("loaded", SERVE)
    module = importlib.import_module("loaded")
    bind(seam("loaded:serve"))
    ours = module.serve
    module.serve = lambda: ("foreign", ours())
    bind(seam("loaded:serve"))
    assert module.serve() == ("foreign", ("wrapped", "served"))
    unbind(seam())
    assert module.serve() == ("foreign", "served")


def test_two_seams_on_one_place_are_both_called(write: Write) -> None:
    write("loaded", SERVE)
    module = importlib.import_module("loaded")
    bind(seam("loaded:serve", name="a", wrapper=marks("a")))
    bind(seam("loaded:serve", name="b", wrapper=marks("b")))
    assert module.serve() == ("b", ("a", "served"))
    unbind(seam(name="a"))
    assert module.serve() == ("b", "served")


# --- undoing -------------------------------------------------------------------------------------------------------


def test_unbind_restores_the_very_object(write: Write) -> None:
    write("loaded", SERVE)
    module = importlib.import_module("loaded")
    original = module.serve
    bind(seam("loaded:serve"))
    unbind(seam())
    assert module.serve is original
    assert state(seam()) is State.UNBOUND


def test_unbind_makes_a_wrapper_that_somebody_holds_pass_on(write: Write) -> None:
    write("loaded", SERVE)
    bind(seam("loaded:serve"))
    from loaded import serve  # type: ignore[import-not-found]

    unbind(seam())
    assert serve() == "served"


def test_unbind_while_pending_leaves_a_later_import_alone(write: Write) -> None:
    write("later", SERVE)
    bind(seam("later:serve"))
    unbind(seam())
    assert type(importlib.import_module("later").serve) is type(marks)


def test_a_seam_can_be_bound_again_with_another_wrapper(write: Write) -> None:
    write("later", SERVE)
    bind(seam("later:serve"))
    unbind(seam())
    assert bind(seam("later:serve", wrapper=marks("second"))) is State.PENDING
    assert importlib.import_module("later").serve() == ("second", "served")


def test_unbinding_what_was_never_bound_does_nothing() -> None:
    unbind(seam("nowhere:serve", name="never"))
    assert state(seam("nowhere:serve", name="never")) is State.UNBOUND


# --- what can be wrapped -------------------------------------------------------------------------------------------

KINDS = """
    class Base:
        def inherited(self): return ("inherited", self.tag)
    class Server(Base):
        tag = 1
        def method(self): return ("method", self.tag)
        @classmethod
        def of_class(cls): return ("of_class", cls.tag)
        @staticmethod
        def static(): return ("static",)
    async def serve(): return "served"
"""


@pytest.mark.parametrize("method", ["method", "of_class", "static", "inherited"])
def test_methods_of_every_kind_are_wrapped_and_restored(write: Write, method: str) -> None:
    write("kinds", KINDS)
    server = importlib.import_module("kinds").Server
    raw = vars(server).get(method)
    plain = getattr(server(), method)()
    bind(seam(f"kinds:Server.{method}"))
    assert getattr(server(), method)() == ("wrapped", plain)
    unbind(seam())
    assert vars(server).get(method) is raw
    assert getattr(server(), method)() == plain


def test_an_inherited_method_is_wrapped_on_the_named_class_alone(write: Write) -> None:
    write("kinds", KINDS)
    module = importlib.import_module("kinds")
    module.Base.tag = 0
    bind(seam("kinds:Server.inherited"))
    assert module.Base().inherited() == ("inherited", 0)
    assert module.Server().inherited() == ("wrapped", ("inherited", 1))


async def test_a_coroutine_function_is_wrapped(write: Write) -> None:
    write("kinds", KINDS)
    module = importlib.import_module("kinds")

    async def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return "wrapped", await wrapped(*args, **kwargs)

    bind(seam("kinds:serve", wrapper=around))
    assert await module.serve() == ("wrapped", "served")


def test_the_wrapper_gets_the_instance_and_the_arguments(write: Write) -> None:
    write("kinds", KINDS)
    module = importlib.import_module("kinds")
    seen: list[Any] = []
    bind(seam("kinds:Server.method", wrapper=lambda *all_of_it: seen.append(all_of_it)))
    server = module.Server()
    server.method(1, two=2)
    assert seen[0][1:] == (server, (1,), {"two": 2})


def test_a_wrapper_named_by_text_is_imported_at_the_first_call(write: Write) -> None:
    write("loaded", SERVE)
    write(
        "ours.wrapping", "class W:\n    @staticmethod\n    def serve(wrapped, instance, args, kwargs): return 'late'\n"
    )
    module = importlib.import_module("loaded")
    bind(seam("loaded:serve", wrapper="ours.wrapping:W.serve"))
    assert "ours.wrapping" not in sys.modules
    assert module.serve() == "late"


def test_a_wrapped_function_can_be_sent_to_a_spawned_process(write: Write) -> None:
    write("loaded", SERVE)
    module = importlib.import_module("loaded")
    bind(seam("loaded:serve"))
    assert pickle.loads(pickle.dumps(module.serve)) is module.serve


def test_binding_from_many_threads_wraps_once(write: Write) -> None:
    write("loaded", SERVE)
    module = importlib.import_module("loaded")
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        bind(seam("loaded:serve"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert module.serve() == ("wrapped", "served")


# --- __main__ ------------------------------------------------------------------------------------------------------

LAUNCHER = """
    import multiprocessing, sys
    from smg_grpc_servicer.hooks.seams import Seam, bind
    def mark(wrapped, instance, args, kwargs):
        return ("wrapped", wrapped(*args, **kwargs))
    launcher = Seam("demo.seam", ("engine.launcher:serve",), "test", "all", mark)
    early = bind(launcher)
    def serve():
        return "served"
    def child(answers):
        bind(launcher)
        answers.put(sys.modules["__main__"].serve())
    def main():
        late = bind(launcher)
        print(early.name, late.name, serve())
        if "spawn" in sys.argv:
            context = multiprocessing.get_context("spawn")
            answers = context.Queue()
            process = context.Process(target=child, args=(answers,))
            process.start()
            print(answers.get(timeout=30))
            process.join()
    if __name__ == "__main__":
        main()
"""


def test_a_launcher_run_as_a_module_is_wrapped_in_main(write: Write, tmp_path: Path) -> None:
    write("engine.launcher", LAUNCHER)
    assert run(tmp_path, "-m", "engine.launcher") == "MISSING BOUND ('wrapped', 'served')"


def test_a_launcher_run_by_its_file_is_wrapped_in_main(write: Write, tmp_path: Path) -> None:
    write("engine.launcher", LAUNCHER)
    assert run(tmp_path, "engine/launcher.py") == "MISSING BOUND ('wrapped', 'served')"


def test_a_script_of_the_same_file_name_elsewhere_is_left_alone(write: Write, tmp_path: Path) -> None:
    write("engine.launcher", SERVE)
    write("launcher", LAUNCHER)
    assert run(tmp_path, "launcher.py") == "PENDING PENDING served"


def test_a_spawned_childs_copy_of_the_launcher_is_left_alone(write: Write, tmp_path: Path) -> None:
    write("engine.launcher", LAUNCHER)
    assert run(tmp_path, "-m", "engine.launcher", "spawn").splitlines()[-1] == "served"


def test_importing_the_hooks_imports_neither_pluggy_nor_wrapt(tmp_path: Path) -> None:
    code = (
        "import sys, smg_grpc_servicer.hooks as hooks; from smg_grpc_servicer.hooks import Seam, Setting\n"
        "loaded = {'pluggy', 'wrapt', 'importlib_metadata', 'grpc'} & set(sys.modules)\n"
        "print(sorted(loaded), hooks.hookimpl.project_name)"
    )
    assert run(tmp_path, "-c", code) == "[] smg"
