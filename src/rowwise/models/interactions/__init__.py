"""Interactions: modules that make M vectors of a sample into L others, [B, M, D] to [B, L, D], one a file.

Layers of `DHEN` hold several of them; each can be used alone.
"""

from rowwise.models.interactions.attention import AttentionInteraction as AttentionInteraction
from rowwise.models.interactions.convolution import ConvolutionInteraction as ConvolutionInteraction
from rowwise.models.interactions.cross import CrossInteraction as CrossInteraction
from rowwise.models.interactions.dot import DotInteraction as DotInteraction
from rowwise.models.interactions.factorization import FactorizationInteraction as FactorizationInteraction
from rowwise.models.interactions.linear import LinearInteraction as LinearInteraction
