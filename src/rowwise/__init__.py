"""rowwise trains recommendation models whose embedding tables outgrow one device.

Names are loaded when first used, so that what needs no tensors (plans, `--help`) starts without torch.
"""

from typing import TYPE_CHECKING

from rowwise.base.lazy import export_lazily

if TYPE_CHECKING:
    from rowwise.base.errors import BatchError as BatchError
    from rowwise.base.errors import CheckpointError as CheckpointError
    from rowwise.base.errors import DataError as DataError
    from rowwise.base.errors import GradientError as GradientError
    from rowwise.base.errors import IdError as IdError
    from rowwise.base.errors import NativeError as NativeError
    from rowwise.base.errors import RowwiseError as RowwiseError
    from rowwise.base.errors import SpecError as SpecError
    from rowwise.base.errors import StateError as StateError
    from rowwise.base.errors import UnknownIdWarning as UnknownIdWarning
    from rowwise.cli.notebook import FittedRun as FittedRun
    from rowwise.cli.notebook import fit as fit
    from rowwise.ingest.pictures import PictureFolder as PictureFolder
    from rowwise.ingest.pictures import write_pictures as write_pictures
    from rowwise.models.autoint import AutoInt as AutoInt
    from rowwise.models.dcn import DCN as DCN
    from rowwise.models.deepfm import DeepFM as DeepFM
    from rowwise.models.dhen import DHEN as DHEN
    from rowwise.models.dien import DIEN as DIEN
    from rowwise.models.din import DIN as DIN
    from rowwise.models.dlrm import DLRM as DLRM
    from rowwise.models.experts import PLE as PLE
    from rowwise.models.experts import MMoE as MMoE
    from rowwise.models.final_mlp import FinalMLP as FinalMLP
    from rowwise.models.frequency import ItemFrequency as ItemFrequency
    from rowwise.models.graph_tower import GraphSage as GraphSage
    from rowwise.models.graph_tower import GraphTower as GraphTower
    from rowwise.models.graph_tower import LightGCN as LightGCN
    from rowwise.models.graph_tower import user_item_graph as user_item_graph
    from rowwise.models.hstu import HSTU as HSTU
    from rowwise.models.image_tower import DynamicImageTower as DynamicImageTower
    from rowwise.models.image_tower import ImageTower as ImageTower
    from rowwise.models.image_tower import PictureCopies as PictureCopies
    from rowwise.models.image_tower import PictureTower as PictureTower
    from rowwise.models.masknet import MaskNet as MaskNet
    from rowwise.models.mlp import Linear as Linear
    from rowwise.models.mlp import Mlp as Mlp
    from rowwise.models.next_item import NextItem as NextItem
    from rowwise.models.retrieval import in_batch_bpr as in_batch_bpr
    from rowwise.models.retrieval import in_batch_softmax as in_batch_softmax
    from rowwise.models.retrieval import nearest_items as nearest_items
    from rowwise.models.retrieval import top_items as top_items
    from rowwise.models.sasrec import SASRec as SASRec
    from rowwise.models.two_tower import Tower as Tower
    from rowwise.models.two_tower import TwoTower as TwoTower
    from rowwise.models.wide import wide_tables as wide_tables
    from rowwise.models.wide_deep import WideDeep as WideDeep
    from rowwise.models.wukong import Wukong as Wukong
    from rowwise.models.xdeepfm import XDeepFM as XDeepFM
    from rowwise.parallel.plan import Plan as Plan
    from rowwise.parallel.plan import Tile as Tile
    from rowwise.recipes.asgi import asgi_app as asgi_app
    from rowwise.tables.batch import Batch as Batch
    from rowwise.tables.batch import Jagged as Jagged
    from rowwise.tables.embedding import Embeddings as Embeddings
    from rowwise.tables.embedding import Vectors as Vectors
    from rowwise.tables.ids.embeddings import MappedEmbeddings as MappedEmbeddings
    from rowwise.tables.ids.make import make_embeddings as make_embeddings
    from rowwise.tables.ids.managed.embeddings import ManagedEmbeddings as ManagedEmbeddings
    from rowwise.tables.managed import Managed as Managed
    from rowwise.tables.ops.interact import interact as interact
    from rowwise.tables.row_optimizers import Adagrad as Adagrad
    from rowwise.tables.row_optimizers import Adam as Adam
    from rowwise.tables.row_optimizers import Ftrl as Ftrl
    from rowwise.tables.row_optimizers import Lamb as Lamb
    from rowwise.tables.row_optimizers import RowWiseAdagrad as RowWiseAdagrad
    from rowwise.tables.row_optimizers import RowWiseAdam as RowWiseAdam
    from rowwise.tables.row_optimizers import Schedule as Schedule
    from rowwise.tables.row_optimizers import Sgd as Sgd
    from rowwise.tables.spec import Constant as Constant
    from rowwise.tables.spec import Normal as Normal
    from rowwise.tables.spec import Pooling as Pooling
    from rowwise.tables.spec import RowType as RowType
    from rowwise.tables.spec import Table as Table
    from rowwise.tables.spec import Topology as Topology
    from rowwise.tables.spec import Uniform as Uniform
    from rowwise.tables.spec import Wire as Wire

__version__ = "0.2.0"

_HOMES = {
    "tables.batch": ("Batch", "Jagged"),
    "tables.embedding": ("Embeddings", "Vectors"),
    "base.errors": (
        "BatchError",
        "CheckpointError",
        "DataError",
        "GradientError",
        "IdError",
        "NativeError",
        "RowwiseError",
        "SpecError",
        "StateError",
        "UnknownIdWarning",
    ),
    "tables.ids.embeddings": ("MappedEmbeddings",),
    "tables.ids.make": ("make_embeddings",),
    "tables.ids.managed.embeddings": ("ManagedEmbeddings",),
    "ingest.pictures": ("PictureFolder", "write_pictures"),
    "tables.managed": ("Managed",),
    "models.autoint": ("AutoInt",),
    "models.dcn": ("DCN",),
    "models.deepfm": ("DeepFM",),
    "models.dhen": ("DHEN",),
    "models.dien": ("DIEN",),
    "models.din": ("DIN",),
    "models.dlrm": ("DLRM",),
    "models.experts": ("MMoE", "PLE"),
    "models.final_mlp": ("FinalMLP",),
    "models.frequency": ("ItemFrequency",),
    "models.graph_tower": ("GraphSage", "GraphTower", "LightGCN", "user_item_graph"),
    "models.hstu": ("HSTU",),
    "models.image_tower": ("DynamicImageTower", "ImageTower", "PictureCopies", "PictureTower"),
    "models.masknet": ("MaskNet",),
    "models.mlp": ("Linear", "Mlp"),
    "models.next_item": ("NextItem",),
    "models.retrieval": ("in_batch_bpr", "in_batch_softmax", "nearest_items", "top_items"),
    "models.sasrec": ("SASRec",),
    "models.two_tower": ("Tower", "TwoTower"),
    "models.wide": ("wide_tables",),
    "models.wide_deep": ("WideDeep",),
    "models.wukong": ("Wukong",),
    "models.xdeepfm": ("XDeepFM",),
    "tables.ops.interact": ("interact",),
    "parallel.plan": ("Plan", "Tile"),
    "cli.notebook": ("FittedRun", "fit"),
    "recipes.asgi": ("asgi_app",),
    "tables.row_optimizers": ("Adagrad", "Adam", "Ftrl", "Lamb", "RowWiseAdagrad", "RowWiseAdam", "Schedule", "Sgd"),
    "tables.spec": (
        "Constant",
        "Normal",
        "Pooling",
        "RowType",
        "Table",
        "Topology",
        "Uniform",
        "Wire",
    ),
}
__all__, __getattr__ = export_lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
