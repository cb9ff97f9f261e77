"""The settings of a vLLM worker."""

from ..hooks.settings import Setting, seconds
from ..serving.settings import MAX_MESSAGE_BYTES

IMPLEMENTATION = Setting(
    name="implementation",
    flag="--servicer-impl",
    variable="SMG_VLLM_SERVICER_IMPL",
    default="python",
    parse=str.casefold,
    accepted="python or rust (not in this release), or the name of a plugin's implementation",
)
DRAIN_SECS = Setting(
    name="drain_secs",
    variable="SMG_VLLM_SERVICER_DRAIN_SECS",
    default=5.0,
    parse=seconds,
    accepted="a number of seconds, 0 or more",
)
FLAGS = (IMPLEMENTATION,)
SETTINGS = (IMPLEMENTATION, DRAIN_SECS, MAX_MESSAGE_BYTES)
