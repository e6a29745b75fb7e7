"""The model of a recipe's section `model`: `make_click_model`, with a logit for each label; `make_sequence_model`."""

from typing import Any

from msgspec import structs
from torch import nn

from rowwise.errors import SpecError
from rowwise.hashing.make import AnyTables
from rowwise.models.autoint import AutoInt
from rowwise.models.dcn import DCN
from rowwise.models.deepfm import DeepFM
from rowwise.models.dhen import DHEN
from rowwise.models.din import DIN
from rowwise.models.dlrm import DLRM
from rowwise.models.experts import PLE, MMoE
from rowwise.models.final_mlp import FinalMLP
from rowwise.models.hstu import HSTU
from rowwise.models.masknet import MaskNet
from rowwise.models.next_item import NextItem
from rowwise.models.sasrec import SASRec
from rowwise.models.wide import wide_tables
from rowwise.models.wide_deep import WideDeep
from rowwise.models.wukong import Wukong
from rowwise.models.xdeepfm import XDeepFM
from rowwise.recipes.model_configs import (
    INTERACTION_KEYS,
    AutoIntConfig,
    ClickModel,
    DcnConfig,
    DeepFmConfig,
    DhenConfig,
    DinConfig,
    DlrmConfig,
    FinalMlpConfig,
    HstuConfig,
    MaskNetConfig,
    MmoeConfig,
    PleConfig,
    SasRecConfig,
    SequenceModel,
    WideDeepConfig,
    WukongConfig,
    XDeepFmConfig,
)

MODELS: dict[type, type[nn.Module]] = {
    AutoIntConfig: AutoInt,
    DcnConfig: DCN,
    DeepFmConfig: DeepFM,
    DhenConfig: DHEN,
    DinConfig: DIN,
    DlrmConfig: DLRM,
    FinalMlpConfig: FinalMLP,
    MaskNetConfig: MaskNet,
    MmoeConfig: MMoE,
    PleConfig: PLE,
    WideDeepConfig: WideDeep,
    WukongConfig: Wukong,
    XDeepFmConfig: XDeepFM,
}


ENCODERS: dict[type, type[SASRec] | type[HSTU]] = {SasRecConfig: SASRec, HstuConfig: HSTU}


def make_click_model(config: ClickModel, embeddings: AnyTables, dense_features: int, tasks: int) -> nn.Module:
    """The model of these settings; their keys are its arguments."""
    options: dict[str, Any] = structs.asdict(config)
    last = next((key for key in ("top", "deep") if key in options), None)
    if last is None:
        options["tasks"] = tasks
    else:
        options[last] = (*options[last], tasks)
    if isinstance(config, DlrmConfig):
        options["bottom"] = (*config.bottom, embeddings.tables[0].dim)
    if isinstance(config, DhenConfig):
        own = {kind: {key: options[key] for key in keys} for kind, keys in INTERACTION_KEYS.items()}
        options = {key: value for key, value in options.items() if not any(key in keys for keys in own.values())}
        options["options"] = own
    if isinstance(config, WideDeepConfig):
        options["wide"] = None if config.wide is None else wide_tables(embeddings.tables, tasks, config.wide)
    try:
        return MODELS[type(config)](embeddings, dense_features, **options)
    except SpecError as error:
        raise SpecError(f"model.kind={config.__struct_config__.tag}: {error}") from None


def make_sequence_model(config: SequenceModel, embeddings: AnyTables) -> NextItem:
    """The model of these settings, of the dim of its table."""
    options = {key: getattr(config, key) for key in ("length", "layers", "heads", "dropout")}
    try:
        return NextItem(embeddings, ENCODERS[type(config)](embeddings.tables[0].dim, **options))
    except SpecError as error:
        raise SpecError(f"model.kind={config.__struct_config__.tag}: {error}") from None
