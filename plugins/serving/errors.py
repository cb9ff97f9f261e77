"""Failures, and the one table that maps them to gRPC statuses."""

from __future__ import annotations

import grpc

from ..wire.calls import Finish, InvalidCall, UnsupportedCall

Code = grpc.StatusCode


class Failure(Exception):
    """Something went wrong, in a sentence a person can act on."""

    code = Code.INTERNAL
    trailers: tuple[tuple[str, str], ...] = ()


class Invalid(Failure):
    """The request cannot be served as it stands."""

    code = Code.INVALID_ARGUMENT


class Unsupported(Failure):
    """The engine or the model cannot do this."""

    code = Code.UNIMPLEMENTED


class Forbidden(Failure):
    """This caller may not do this."""

    code = Code.PERMISSION_DENIED


class NotFound(Failure):
    """What the request names is not there."""

    code = Code.NOT_FOUND


class AlreadyLive(Failure):
    """A call with this id is running."""

    code = Code.ALREADY_EXISTS


class Precondition(Failure):
    """The worker is not set up, or not in a state, for this."""

    code = Code.FAILED_PRECONDITION


class Rejected(Precondition):
    """The engine said no; an answer with a place for that says it there."""


class ConstraintFailed(Precondition):
    """The output constraint refused a token that the engine had sampled."""

    trailers = (("smg-constraint-failed", "engine"),)


class Overloaded(Failure):
    """A limit is reached; try again later."""

    code = Code.RESOURCE_EXHAUSTED


class Unavailable(Failure):
    """Not now, not here: another worker may serve it."""

    code = Code.UNAVAILABLE


class EngineDead(Unavailable):
    """The engine's process is gone."""


class Aborted(Failure):
    """Somebody ended the call on purpose."""

    code = Code.ABORTED


class TimedOut(Failure):
    """It took longer than it may."""

    code = Code.DEADLINE_EXCEEDED


class Internal(Failure):
    """The engine failed this request."""


_BY_HTTP_STATUS: dict[int, type[Failure]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    408: TimedOut,
    409: Precondition,
    422: Invalid,
    429: Overloaded,
    501: Unsupported,
    503: Unavailable,
    504: TimedOut,
}


def from_http_status(status: int, message: str) -> Failure:
    """The failure that an HTTP-coded exception stands for."""
    kind = _BY_HTTP_STATUS.get(status)
    if kind is None:
        kind = Invalid if 400 <= status < 500 else Internal
    return kind(message)


def of_finish(finish: Finish, otherwise: str) -> Failure:
    """The failure that a call's end stands for; `otherwise` is the sentence of one that has none."""
    message = finish.message or otherwise
    if finish.constraint_failed:
        return ConstraintFailed(message)
    if finish.status is not None:
        return from_http_status(finish.status, message)
    return Unavailable(message) if finish.retryable else Internal(message)


def known(error: BaseException) -> Failure | None:
    """`error` as a failure when the core itself knows it, else None: then the engine is asked."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, InvalidCall):
        return Invalid(str(error))
    if isinstance(error, UnsupportedCall):
        return Unsupported(str(error))
    if isinstance(error, TimeoutError):
        return TimedOut(str(error) or "timed out")
    return None
