"""vLLM's command line with a Rust server that ignores the keywords it does not know.

The published package passes keywords that no published wheel has: with this it starts, and can be measured.
"""

import inspect
import runpy

import smg.servicer


def tolerant(server):
    known = inspect.signature(server).parameters

    def construct(*args, **kwargs):
        return server(*args, **{name: value for name, value in kwargs.items() if name in known})

    return construct


if __name__ == "__main__":
    smg.servicer.VllmGrpcServer = tolerant(smg.servicer.VllmGrpcServer)
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)
