"""The in-place preparation of a model: each layer that must know about shards gets a class that does.

Nothing else changes: parameters stay the same objects under the same names, every layer stays an instance of its
diffusers class, and without an active shard each forward is that class's own.
"""

from __future__ import annotations

from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders import autoencoder_kl_qwenimage as qwen
from diffusers.models.autoencoders import autoencoder_kl_wan as wan
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from vaepar.errors import UnsupportedModeError
from vaepar.layers.attention import ShardFrameAttention, ShardSpatialAttention, check_attention
from vaepar.layers.blocks import ShardCausalResidualBlock, ShardResnetBlock2D
from vaepar.layers.conv import ShardCausalConv3d, ShardConv2d, pad_mode
from vaepar.layers.norm import ShardGroupNorm, ShardRMSNorm, ShardSiLU
from vaepar.layers.resample import ShardDownsample2D, ShardUpsample2D, ShardUpsampleConv, ShardZeroPad2d


class WanDistConv2d(ShardConv2d):
    """The 2-D convolutions of Wan's resampling."""


class WanDistCausalConv3d(ShardCausalConv3d, wan.WanCausalConv3d):
    """Wan's causal convolution."""


class WanDistZeroPad2d(ShardZeroPad2d):
    """The padding before Wan's strided convolutions."""


class WanDistRMSNorm(ShardRMSNorm, wan.WanRMS_norm):
    """Wan's norm over channels."""


class WanDistAttentionBlock(ShardFrameAttention, wan.WanAttentionBlock):
    """Wan's attention within a frame."""


class WanDistResidualBlock(ShardCausalResidualBlock, wan.WanResidualBlock):
    """Wan's residual block."""


class QwenImageDistCausalConv3d(ShardCausalConv3d, qwen.QwenImageCausalConv3d):
    """Qwen-Image's causal convolution."""


class QwenImageDistRMSNorm(ShardRMSNorm, qwen.QwenImageRMS_norm):
    """Qwen-Image's norm over channels."""


class QwenImageDistAttentionBlock(ShardFrameAttention, qwen.QwenImageAttentionBlock):
    """Qwen-Image's attention within a frame."""


class QwenImageDistResidualBlock(ShardCausalResidualBlock, qwen.QwenImageResidualBlock):
    """Qwen-Image's residual block."""


_SHARED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: ShardConv2d,
    nn.GroupNorm: ShardGroupNorm,
    nn.SiLU: ShardSiLU,
    nn.ZeroPad2d: ShardZeroPad2d,
    Attention: ShardSpatialAttention,
    ResnetBlock2D: ShardResnetBlock2D,
    Upsample2D: ShardUpsample2D,
    Downsample2D: ShardDownsample2D,
    qwen.QwenImageCausalConv3d: QwenImageDistCausalConv3d,
    qwen.QwenImageRMS_norm: QwenImageDistRMSNorm,
    qwen.QwenImageAttentionBlock: QwenImageDistAttentionBlock,
    qwen.QwenImageResidualBlock: QwenImageDistResidualBlock,
}

_WAN: dict[type[nn.Module], type[nn.Module]] = {
    **_SHARED,
    nn.Conv2d: WanDistConv2d,
    nn.ZeroPad2d: WanDistZeroPad2d,
    wan.WanCausalConv3d: WanDistCausalConv3d,
    wan.WanRMS_norm: WanDistRMSNorm,
    wan.WanAttentionBlock: WanDistAttentionBlock,
    wan.WanResidualBlock: WanDistResidualBlock,
}

_WAN_LAYERS = (wan.WanCausalConv3d, wan.WanRMS_norm, wan.WanAttentionBlock, wan.WanResample)

# Layers without children that treat every position alike, so that they need nothing from other ranks; empty lists.
_LOCAL = (
    *(nn.Linear, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.Mish, nn.Upsample, wan.AvgDown3D, wan.DupUp3D),
    *(nn.ModuleList, nn.ModuleDict, nn.Sequential),
)


def install_shards(*parts: nn.Module | None) -> None:
    """Give the layers of ``parts`` their sharded classes. Doing it again changes nothing.

    Args:
        parts: the coders and 1x1 convolutions of one VAE; None stands for a part that the model lacks.

    Raises:
        UnsupportedModeError: a layer is of a kind that a shard would compute wrongly; then nothing has changed.
    """
    classes: list[tuple[nn.Module, type[nn.Module]]] = []
    for part in parts:
        if part is None:
            continue
        table = _WAN if any(isinstance(module, _WAN_LAYERS) for module in part.modules()) else _SHARED
        for name, module in part.named_modules():
            new = _sharded_class(module, name, table)
            if new is not None:
                classes.append((module, new))
    for module, new in classes:
        module.__class__ = new
    for part in parts:
        for module in () if part is None else part.modules():
            _mark_loops(module)
            _mark_heads(module)


def _mark_heads(module: nn.Module) -> None:
    """Say of the last norm of a coder of diffusers' that only an activation and the last convolution read it."""
    if type(module).__module__.startswith("diffusers.") and "forward" not in vars(module):
        for norm in (getattr(module, "norm_out", None), getattr(module, "conv_norm_out", None)):
            if isinstance(norm, ShardGroupNorm | ShardRMSNorm):
                norm.read_once = True


def _mark_loops(module: nn.Module) -> None:
    """Say of each residual block whether it stands in a list that a module of diffusers' walks through.

    Nothing else there reads a block's input after it; what a wrapper around a block does is not known.
    """
    if isinstance(module, nn.ModuleList):
        return  # its owner has been asked
    own = type(module).__module__.startswith("diffusers.")
    for child in module.children():
        blocks = child if isinstance(child, nn.ModuleList) else (child,)
        for block in blocks:
            if isinstance(block, ShardResnetBlock2D | ShardCausalResidualBlock):
                block.sums_in_place = own and blocks is child


def _sharded_class(module: nn.Module, name: str, table: dict[type[nn.Module], type[nn.Module]]) -> type | None:
    """The class that ``module`` gets, None when it keeps its own."""
    _check(module, name)
    if type(module) is nn.Sequential and _is_upsample_conv(module):
        return ShardUpsampleConv
    new = table.get(type(module))
    known = isinstance(module, (*table.values(), *_LOCAL))
    reads = isinstance(module, nn.modules.conv._ConvNd | nn.GroupNorm)
    if new is None and not known and (reads or next(module.children(), None) is None):
        raise UnsupportedModeError(f"a spatial shard has no counterpart for layer '{name}' ({type(module).__name__})")
    if new is not None and "forward" in vars(module):
        raise UnsupportedModeError(
            f"a spatial shard cannot take the place of layer '{name}' ({type(module).__name__}), which has a forward "
            f"of its own; it was made around the layer as it is, which knows of no other rank"
        )
    return new


def _check(module: nn.Module, name: str) -> None:
    """Raise for settings of a known layer that its sharded class does not compute."""
    if isinstance(module, Attention):
        check_attention(module)
    if isinstance(module, nn.Conv2d):
        pad_mode(module.padding_mode)
    plain = True
    if isinstance(module, ResnetBlock2D):
        plain = module.time_emb_proj is None and module.upsample is None and module.downsample is None
        plain = plain and module.time_embedding_norm != "scale_shift"
    if isinstance(module, Upsample2D):
        plain = module.use_conv and module.interpolate and module.norm is None and _is_same_conv(module.conv)
    if isinstance(module, Downsample2D):
        plain = module.use_conv and module.norm is None
    if not plain:
        raise UnsupportedModeError(
            f"a spatial shard has no counterpart for this variant of {type(module).__name__}, layer '{name}'"
        )


def _is_upsample_conv(module: nn.Sequential) -> bool:
    children = list(module)
    if len(children) != 2 or not isinstance(children[0], nn.Upsample):
        return False
    factor = children[0].scale_factor
    doubles = factor in (2, (2.0, 2.0)) and children[0].mode in ("nearest", "nearest-exact")
    return doubles and _is_same_conv(children[1])


def _is_same_conv(module: object) -> bool:
    """True for a 3x3 convolution that keeps the size, with zeros around, the only kind that is joined to upsampling."""
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (3, 3)
        and module.stride == (1, 1)
        and module.dilation == (1, 1)
        and module.padding == (1, 1)
        and module.groups == 1
        and module.padding_mode == "zeros"
    )
