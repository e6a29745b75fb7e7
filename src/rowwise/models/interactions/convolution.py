"""A convolution over a sample's vectors as an image of one channel: Y = W conv(X).

As a part of DHEN: Zhang et al. 2022, arXiv 2203.11014.
"""

from torch import Tensor, nn

from rowwise.base.errors import SpecError
from rowwise.models.interactions.linear import LinearInteraction


class ConvolutionInteraction(nn.Module):
    """Y = W conv(X), X an image of M x D.

    Args:
        vectors: M, input vectors of a sample.
        out: L, output vectors.
        dim: of a vector.
        kernel: height and width of the window; odd, so that the image keeps its size.
    """

    def __init__(self, vectors: int, out: int, dim: int, kernel: int = 5) -> None:
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise SpecError(f"kernel={kernel}", "an odd number")
        self.convolution = nn.Conv2d(1, 1, kernel, padding=kernel // 2, bias=False)  # a LayerNorm would remove the bias
        self.mix = LinearInteraction(vectors, out, dim)

    def forward(self, x_BMD: Tensor) -> Tensor:
        """[B, M, D] to [B, L, D]."""
        return self.mix(self.convolution(x_BMD.unsqueeze(1)).squeeze(1))
