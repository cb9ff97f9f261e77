"""What an engine core sends to a remote front end, in the shape that released ones read.

vLLM 0.30 gave prompt logprobs a fifth array. smg up to 1.13.0 reads four, and drops the whole step that holds them:
the tokens of every other request in it too.
"""

from __future__ import annotations

from typing import Any

_LOGPROB_ARRAYS = 4


def encode_into(wrapped: Any, encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps MsgpackEncoder.encode_into, once a step on the core's output thread."""
    for output in getattr(args[0] if args else kwargs["obj"], "outputs", None) or ():
        logprobs = output.new_prompt_logprobs_tensors
        if logprobs is not None and all(array is None for array in logprobs[_LOGPROB_ARRAYS:]):
            output.new_prompt_logprobs_tensors = tuple(logprobs[:_LOGPROB_ARRAYS])
    return wrapped(*args, **kwargs)
