"""vLLM as a worker behind the SMG router."""

from __future__ import annotations

from typing import Any

_FROM_RUST = ("require_upstream_hook", "resolve_servicer_impl", "serve_rust", "upstream_hook_installed")

__all__ = list(_FROM_RUST)


def __getattr__(name: str) -> Any:
    """Load what launchers import by name at its first use."""
    if name in _FROM_RUST:
        from . import rust

        return getattr(rust, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
