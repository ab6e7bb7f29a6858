"""U-Net (Ronneberger et al., 2015) with padded convolutions and BatchNorm."""

from collections import OrderedDict

import torch
from torch import nn

from ._init import init_weights


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    """Two times 3x3 convolution, BatchNorm, ReLU; the image keeps its size."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            norm1=nn.BatchNorm2d(outputs),
            relu1=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            norm2=nn.BatchNorm2d(outputs),
            relu2=nn.ReLU(inplace=True),
        )
    )


class UNet(nn.Module):
    """Four levels down, a bottleneck, four levels up, each fed the encoder's output at its size.

    One pooling module is called at all four levels. Height and width must be multiples of 16.
    """

    def __init__(self, in_channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.encoder1 = _double_conv(in_channels, width)
        self.encoder2 = _double_conv(width, 2 * width)
        self.encoder3 = _double_conv(2 * width, 4 * width)
        self.encoder4 = _double_conv(4 * width, 8 * width)
        self.pool = nn.MaxPool2d(2)
        self.bottleneck = _double_conv(8 * width, 16 * width)
        self.upconv4 = nn.ConvTranspose2d(16 * width, 8 * width, 2, stride=2)
        self.decoder4 = _double_conv(16 * width, 8 * width)
        self.upconv3 = nn.ConvTranspose2d(8 * width, 4 * width, 2, stride=2)
        self.decoder3 = _double_conv(8 * width, 4 * width)
        self.upconv2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.decoder2 = _double_conv(4 * width, 2 * width)
        self.upconv1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.decoder1 = _double_conv(2 * width, width)
        self.conv = nn.Conv2d(width, classes, 1)
        init_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        enc1 = self.encoder1(x)  # (B, width, H, W)
        enc2 = self.encoder2(self.pool(enc1))  # (B, 2 width, H/2, W/2)
        enc3 = self.encoder3(self.pool(enc2))  # (B, 4 width, H/4, W/4)
        enc4 = self.encoder4(self.pool(enc3))  # (B, 8 width, H/8, W/8)
        out = self.bottleneck(self.pool(enc4))  # (B, 16 width, H/16, W/16)
        out = self.decoder4(torch.cat((self.upconv4(out), enc4), dim=1))
        out = self.decoder3(torch.cat((self.upconv3(out), enc3), dim=1))
        out = self.decoder2(torch.cat((self.upconv2(out), enc2), dim=1))
        out = self.decoder1(torch.cat((self.upconv1(out), enc1), dim=1))
        return self.conv(out)  # (B, classes, H, W): logits


def unet(in_channels: int = 3, classes: int = 2, width: int = 32) -> UNet:
    """Builds a U-Net with random weights; the bottleneck has `16 * width` channels."""
    return UNet(in_channels, classes, width)
