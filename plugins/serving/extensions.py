"""Third parties' hooks as the servicer takes them; without a plugin there is nothing to call."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ..hooks import plugins
from ..wire.calls import Call, Usage
from .core import Admit, Finished

logger = logging.getLogger(__name__)


def admit(engine: str) -> Admit | None:
    """What asks every plugin whether a call may go on."""
    return partial(plugins.admit, engine) if plugins.has_hook("smg_admit") else None


def finished(engine: str) -> Finished | None:
    """What tells every plugin of a call that ended."""
    return partial(_finished, engine) if plugins.has_hook("smg_finished") else None


def interceptors(engine: str, args: Any) -> list[Any]:
    """The plugins' server interceptors, outermost first."""
    found = plugins.plugin_manager().hook.smg_interceptors(engine=engine, args=args)
    return [interceptor for several in found for interceptor in several or ()]


def _finished(engine: str, call: Call, usage: Usage, status: str) -> None:
    try:
        plugins.plugin_manager().hook.smg_finished(engine=engine, call=call, usage=usage, status=status)
    except Exception:
        logger.exception("a plugin's smg_finished failed")
