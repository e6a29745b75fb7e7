"""The models of recipes: the section `model`, by its `kind`."""

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import structs

from rowwise.base.errors import SpecError
from rowwise.base.value import MAX_BATCH, MAX_DIM, check_max
from rowwise.tables.row_optimizers import RowOptimizer
from rowwise.tables.spec import Value

Interaction = Literal["attention", "convolution", "cross", "dot", "factorization", "linear"]
INTERACTION_KEYS: dict[Interaction, tuple[str, ...]] = {  # keys of `DhenConfig` by interaction
    "attention": ("heads", "ffn_ratio"),
    "convolution": ("kernel",),
    "dot": ("hidden",),
    "factorization": ("rank", "hidden"),
}


class _MlpModel(Value, frozen=True, kw_only=True):
    """Settings of all models with an MLP."""

    dropout: float = 0.0  # rate for the hidden layers of the MLP
    norm: Literal["batch", "layer"] | None = None  # normalisation of the MLP's hidden layers; batch: on one rank only


class DlrmConfig(_MlpModel, frozen=True, tag="dlrm", tag_field="kind"):
    """`rowwise.DLRM`. A last bottom layer of the tables' dim and a last top layer of one logit per label are added."""

    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 256)


class DeepFmConfig(_MlpModel, frozen=True, tag="deepfm", tag_field="kind"):
    """`rowwise.DeepFM` with a last deep layer of one logit per label."""

    deep: tuple[int, ...] = (400, 400, 400)


class DcnConfig(_MlpModel, frozen=True, tag="dcn", tag_field="kind"):
    """`rowwise.DCN` with a last deep layer of one logit per label."""

    deep: tuple[int, ...] = (512, 256)
    crosses: int = 3
    rank: int | None = None
    gated: bool = False  # whether cross layers are GDCN's
    structure: Literal["stacked", "parallel"] = "stacked"


class DhenConfig(_MlpModel, frozen=True, tag="dhen", tag_field="kind"):
    """`rowwise.DHEN` with a last top layer of one logit per label."""

    top: tuple[int, ...] = (256,)
    layers: int = 2  # interaction layers
    interactions: tuple[Interaction, ...] = ("cross", "linear")  # in each layer
    vectors: int | None = None  # vectors per sample after each layer; None: the number of features
    ensemble: Literal["concat", "sum", "weighted_sum"] = "concat"  # how a layer combines its interactions
    heads: int = 1  # attention heads
    ffn_ratio: int = 4  # hidden width of the feed-forward part of attention, in dims
    kernel: int = 5  # height and width of the convolution window, odd
    rank: int = 8  # rank of the factorization machines
    hidden: tuple[int, ...] = (128,)  # widths of the layers over dots, and over factorization machines


class DinConfig(_MlpModel, frozen=True, tag="din", tag_field="kind"):
    """`rowwise.DIN` with a last top layer of one logit per label."""

    top: tuple[int, ...] = (200, 80)
    # The target feature of each history feature; both are in tables with pooling: sequence
    histories: dict[str, str] = msgspec.field(default_factory=dict)
    attention: tuple[int, ...] = (80, 40)  # widths of the layers over a target and an item of a history


class DienConfig(_MlpModel, frozen=True, tag="dien", tag_field="kind"):
    """`rowwise.DIEN` with a last top layer of one logit per label."""

    top: tuple[int, ...] = (200, 80)
    # The target feature of each history feature, oldest item first; both are in tables with pooling: sequence
    histories: dict[str, str] = msgspec.field(default_factory=dict)
    auxiliary: float = 0.1  # factor of the loss of next items, which grows with the length of histories; 0: none

    def __post_init__(self) -> None:
        if not 0 <= self.auxiliary < math.inf:
            raise SpecError(f"model.auxiliary={self.auxiliary}", "a finite number, at least 0")


class WukongConfig(_MlpModel, frozen=True, tag="wukong", tag_field="kind"):
    """`rowwise.Wukong` with a last top layer of one logit per label."""

    top: tuple[int, ...] = (256,)
    layers: int = 2  # layers of factorization machines
    vectors: int | None = None  # vectors per sample after each layer; None: the number of features
    rank: int = 8  # rank of the factorization machines
    hidden: tuple[int, ...] = (128,)  # widths of the layers over a factorization machine


class MaskNetConfig(_MlpModel, frozen=True, tag="masknet", tag_field="kind"):
    """`rowwise.MaskNet` with a last top layer of one logit per label."""

    top: tuple[int, ...] = (256,)
    blocks: tuple[int, ...] = (64, 64, 64)  # widths of the blocks
    structure: Literal["parallel", "serial"] = "parallel"  # blocks side by side, or stacked
    reduction_ratio: int = 2  # width of the hidden layer of a mask over that of its output


class FinalMlpConfig(_MlpModel, frozen=True, tag="final_mlp", tag_field="kind"):
    """`rowwise.FinalMLP` of one logit per label."""

    first: tuple[int, ...] = (256, 64)  # widths of the first MLP
    second: tuple[int, ...] = (256, 64)  # widths of the second MLP
    heads: int = 2  # heads of the bilinear fusion of both outputs
    gate: int = 64  # width of the hidden layer of the gates


class AutoIntConfig(_MlpModel, frozen=True, tag="autoint", tag_field="kind"):
    """`rowwise.AutoInt` with a last deep layer of one logit per label."""

    deep: tuple[int, ...] = (256,)
    layers: int = 2  # attention layers
    heads: int = 2  # attention heads
    width: int = 32  # dim of a vector after a layer


class XDeepFmConfig(_MlpModel, frozen=True, tag="xdeepfm", tag_field="kind"):
    """`rowwise.XDeepFM` with a last deep layer of one logit per label."""

    deep: tuple[int, ...] = (256,)
    products: tuple[int, ...] = (32, 32)  # vectors of each layer of products


class MmoeConfig(Value, frozen=True, tag="mmoe", tag_field="kind"):
    """`rowwise.MMoE`, one tower and logit per label."""

    experts: int = 4
    expert_sizes: tuple[int, ...] = (128, 64)
    tower: tuple[int, ...] = (32,)  # widths of the layers between a label's mixture and its logit
    dropout: float = 0.0  # rate for the hidden layers of the towers
    chain: bool = False  # each label happens only after the one before it, such as a sale after a click (ESMM)


class PleConfig(Value, frozen=True, tag="ple", tag_field="kind"):
    """`rowwise.PLE`, one tower and logit per label."""

    task_experts: int = 1  # experts of each label
    shared_experts: int = 2  # experts of all labels
    expert_sizes: tuple[int, ...] = (128, 64)
    levels: int = 1  # levels of experts
    tower: tuple[int, ...] = (32,)  # widths of the layers between a label's mixture and its logit
    dropout: float = 0.0  # rate for the hidden layers of the towers
    chain: bool = False  # each label happens only after the one before it, such as a sale after a click (ESMM)


class WideDeepConfig(_MlpModel, frozen=True, tag="wide_deep", tag_field="kind"):
    """`rowwise.WideDeep` with a last deep layer of one logit per label."""

    deep: tuple[int, ...] = (1024, 512, 256)
    wide: RowOptimizer | None = None  # optimizer of the wide part's weights; None: FTRL, as in the paper


class RetrievalConfig(Value, frozen=True, kw_only=True):
    """Settings of retrieval models, trained by an in-batch loss on rows with label 1."""

    item: str  # the feature with the item's id, one in each row
    loss: Literal["softmax", "bpr"] = "softmax"  # over all items of a batch, or over pairs of them
    temperature: float = 0.1  # divides the dot products
    correct: bool = True  # logQ correction for popular items
    hardest: int | None = None  # hard negatives per user, those with the largest corrected logits; None: all
    ks: tuple[int, ...] = (10, 50)  # cut-offs of recall@k and NDCG@k

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise SpecError(f"model.temperature={self.temperature}", "a finite number above 0")
        if self.hardest is not None and self.hardest < 1:
            raise SpecError(f"model.hardest={self.hardest}", "at least one negative, or null for all")
        check_max("model.", self, hardest=MAX_BATCH)


class ScaleConfig(Value, frozen=True):
    """A scale model, which chooses the size of each picture from its smallest copy (`rowwise.DynamicImageTower`)."""

    price: float = 0.05  # cost of the largest size's pixels and bytes, as a probability; 0: the most probable size wins
    similar: float = 0.95  # least cosine to the vector of the largest size for a size to be good enough
    widths: tuple[int, ...] = (8, 16)  # channels of its convolutions

    def __post_init__(self) -> None:
        if not (0 <= self.price <= 1 and 0 < self.similar <= 1):
            raise SpecError(
                f"model.item_pictures.choose: price={self.price}, similar={self.similar}",
                "a price from 0 to 1, and a cosine above 0, at most 1",
            )
        if not self.widths or min(self.widths) < 1:
            raise SpecError(f"model.item_pictures.choose: widths={list(self.widths)}", "widths of at least 1")


class PictureConfig(Value, frozen=True):
    """`rowwise.ImageTower` over pictures of the items, whose keys are the items' ids."""

    folder: str  # written by `rowwise data pictures`
    dim: int = 32  # dim of a picture's vector
    widths: tuple[int, ...] = (16, 32, 64, 64)  # channels of the convolutions
    sizes: tuple[int, ...] = ()  # sizes of copies to use, a subset of the folder's; empty: all
    choose: ScaleConfig | None = None  # chooses the size of each picture in evaluation; None: the largest for all

    def __post_init__(self) -> None:
        if self.dim < 1 or not self.widths or min(self.widths) < 1:
            raise SpecError(
                f"model.item_pictures: dim={self.dim}, widths={list(self.widths)}", "a dim and widths of at least 1"
            )
        if list(self.sizes) != sorted(set(self.sizes)):
            raise SpecError(f"model.item_pictures: sizes={list(self.sizes)}", "each size once, ascending")
        check_max("model.item_pictures.", self, dim=MAX_DIM)


class TwoTowerConfig(RetrievalConfig, frozen=True, kw_only=True, tag="two_tower", tag_field="kind"):
    """`rowwise.TwoTower`, with pictures of the items or without."""

    user_features: tuple[str, ...]
    item_features: tuple[str, ...] = ()  # beside `item`
    user_dense: tuple[str, ...] = ()
    item_dense: tuple[str, ...] = ()
    item_pictures: PictureConfig | None = None
    sizes: tuple[int, ...] = (128, 64)  # widths of the layers; empty: features are vectors, as in matrix factorisation


class GraphConfig(RetrievalConfig, frozen=True, kw_only=True, tag="graph", tag_field="kind"):
    """`rowwise.GraphTower` over the graph of the training rows whose label is 1."""

    user: str  # the feature with the user's id, one in each row
    encoder: Literal["lightgcn", "graphsage"] = "lightgcn"  # sums without weights, or layers over means
    layers: int = 3  # layers of lightgcn
    sizes: tuple[int, ...] = (64, 64)  # widths of the layers of graphsage
    sampled: int | None = None  # maximum edges into a node in evaluation; None: all
    sampled_by: Literal["first", "spread", "stride"] = "spread"  # of a node: first, evenly spaced, every 577th modulo

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("layers", "sampled"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"model.{name}={value}", "at least 1")


class _Sequences(Value, frozen=True):
    """Settings of sequence models: a row is a list of items, and each item is predicted from the items before it."""

    length: int = 50  # newest items of a list to read
    layers: int = 2  # attention layers
    heads: int = 1  # attention heads
    dropout: float = 0.2  # dropout rate
    negatives: int | None = None  # items sampled for each batch's softmax; None: all items
    ks: tuple[int, ...] = (10, 50)  # cut-offs of recall@k and NDCG@k
    leave_out_history: bool = False  # in evaluation, excludes the history of a list from the candidates

    def __post_init__(self) -> None:
        check_max("model.", self, length=MAX_DIM, negatives=MAX_BATCH)
        if self.negatives is not None and self.negatives < 1:
            raise SpecError(f"model.negatives={self.negatives}", "at least 1, or null for a softmax over all items")


class SasRecConfig(_Sequences, frozen=True, tag="sasrec", tag_field="kind"):
    """`rowwise.NextItem` over the encoder `rowwise.SASRec`."""


class HstuConfig(_Sequences, frozen=True, tag="hstu", tag_field="kind"):
    """`rowwise.NextItem` over the encoder `rowwise.HSTU`."""


class UserModel(Value, frozen=True, tag="own", tag_field="kind"):
    """The user's model class: `module` is path.py:Class, called with (embeddings, dense_features, tasks, **args)."""

    module: str
    args: dict[str, Any] = msgspec.field(default_factory=dict)


ClickModel = (
    DlrmConfig | DeepFmConfig | DcnConfig | DhenConfig | DinConfig | DienConfig | WukongConfig | MaskNetConfig
    | FinalMlpConfig | AutoIntConfig | XDeepFmConfig | MmoeConfig | PleConfig | WideDeepConfig
)  # fmt: skip
SequenceModel = SasRecConfig | HstuConfig
RankingModel = TwoTowerConfig | GraphConfig | SequenceModel  # models that rank items
Model = ClickModel | RankingModel | UserModel
WIDTHS = (
    "bottom",
    "top",
    "deep",
    "first",
    "second",
    "hidden",
    "blocks",
    "products",
    "expert_sizes",
    "tower",
    "sizes",
    "attention",
)
MLP_WIDTHS = ("bottom", "top", "deep", "hidden", "attention")  # any width is valid
COUNTS = (
    "crosses",
    "layers",
    "vectors",
    "rank",
    "heads",
    "width",
    "gate",
    "experts",
    "levels",
    "reduction_ratio",
    "ffn_ratio",
    "kernel",
)


def kind_of(model: Model) -> str:
    """The value of `model.kind`."""
    return str(model.__struct_config__.tag)


def pictures_of(model: object) -> PictureConfig | None:
    """The picture settings of a model, if it has any."""
    return model.item_pictures if isinstance(model, TwoTowerConfig) else None


def map_files(model: Model, code: Callable[[str], str], pictures: Callable[[str], str]) -> Model:
    """The model with mapped paths of the files that it reads: a user class, or a folder of pictures."""
    if isinstance(model, UserModel):
        return structs.replace(model, module=code(model.module))
    if isinstance(model, TwoTowerConfig) and model.item_pictures is not None:
        folder = pictures(model.item_pictures.folder)
        return structs.replace(model, item_pictures=structs.replace(model.item_pictures, folder=folder))
    return model


def layers_of(model: Model | str) -> dict[str, tuple[int, ...]]:
    """All widths and numbers of layers of a model, by key; skips counts that are None or 0."""
    if isinstance(model, (UserModel, str)):
        return {}
    widths: dict[str, tuple[int, ...]] = {key: getattr(model, key) for key in (*WIDTHS, "ks") if hasattr(model, key)}
    counts = {key: getattr(model, key, None) for key in COUNTS}
    return widths | {key: (count,) for key, count in counts.items() if count}
