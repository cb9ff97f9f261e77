"""Preprocessed images as SGLang's schedulers take them."""

from __future__ import annotations

from typing import Any

from ..wire.calls import MediaTensors, Tensor


def media_input(media: MediaTensors) -> Any:
    """The processor output of one call's images. The prompt holds the expanded placeholders already."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=torch_tensor(media.pixel_values),
        model_specific_data={name: torch_tensor(tensor) for name, tensor in media.tensors.items()},
        offsets=[(offset, offset + length - 1) for offset, length in media.placeholders],
    )
    return MultimodalProcessorOutput(mm_items=[item], im_token_id=media.token_id)


def torch_tensor(tensor: Tensor) -> Any:
    """A tensor over a copy of its bytes: torch writes where it reads."""
    import torch

    if not tensor.data:
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)
