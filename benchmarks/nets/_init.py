"""Weight initialisation shared by the benchmark networks."""

from collections.abc import Iterable

from torch import nn

# He's 2, divided by E[gamma^2 / var] = 1.19, the power that `randomize_batchnorm` adds per layer.
RELU_GAIN = 1.7


def init_weights(model: nn.Module, branch_ends: Iterable[nn.Conv2d] = (), gain: float = RELU_GAIN) -> None:
    """Draws random weights that keep the activation scale roughly constant with depth.

    Convolution weights get variance `gain / fan_in`. Vision libraries use `fan_out`, which
    for a depthwise convolution counts every channel and makes the weights `sqrt(channels)` times
    too small; that only works while BatchNorm rescales each batch, and these networks are measured
    untrained in evaluation mode.

    Args:
        model: Changed in place.
        branch_ends: The last convolution of each residual branch. They are halved, so that an add
            grows the power by a quarter instead of doubling it.
        gain: A little more than `RELU_GAIN` suits activations that lose more power than a ReLU.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fan_in, power = module.in_features, 1.0
        elif isinstance(module, nn.ConvTranspose2d):
            # Stride equals kernel size here: an output pixel sees one tap of each input channel.
            fan_in, power = module.in_channels, gain
        elif isinstance(module, nn.Conv2d):
            fan_in, power = module.weight[0].numel(), gain
        else:
            continue
        nn.init.normal_(module.weight, std=(power / fan_in) ** 0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for conv in branch_ends:
        conv.weight.data.mul_(0.5)


def last_conv(branch: nn.Module) -> nn.Conv2d:
    """Finds the convolution that was registered last in `branch`."""
    return [module for module in branch.modules() if isinstance(module, nn.Conv2d)][-1]
