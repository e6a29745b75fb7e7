"""Reads TorchRec's collections: their tables, features, and the optimizers that a script has left on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)

from rowwise.base.errors import SpecError
from rowwise.tables.row_optimizers import Adagrad, Adam, RowOptimizer, RowWiseAdagrad, Sgd
from rowwise.tables.spec import Constant, Pooling, RowType, Table

KINDS: dict[EmbOptimType, type[RowOptimizer]] = {
    EmbOptimType.EXACT_SGD: Sgd,
    EmbOptimType.EXACT_ADAGRAD: Adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.ADAM: Adam,
}
KNOWN: dict[type[RowOptimizer], tuple[str, ...]] = {  # hyperparameters; of the others lr and eps
    Sgd: ("lr",),
    Adam: ("lr", "eps", "beta1", "beta2", "weight_decay"),
}
ROW_TYPES = {DataType.FP32: RowType.FP32, DataType.FP16: RowType.FP16, DataType.BF16: RowType.BF16}
# Of a sharder's `fused_params`: how FBGEMM stores and checks rows, which changes no result.
STORAGE = {
    "bounds_check_mode", "cache_algorithm", "cache_load_factor", "cache_reserved_memory", "enforce_hbm",
    "multipass_prefetch_config", "prefetch_pipeline",
}  # fmt: skip
NO_OPTIMIZER = "an optimizer by apply_optimizer_in_backward, or fused_params of the sharder"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """A table of a collection, as TorchRec describes it and as we do."""

    table: Table  # its features are the names of the outputs
    features: tuple[str, ...]  # of the batch
    init_rows: Callable[[Tensor], object]
    trained: bool  # whether the script gave it an optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSource:
    """A collection inside a module."""

    path: str
    kind: type[nn.Module]  # EmbeddingBagCollection or EmbeddingCollection
    configs: list[Any]
    weighted: bool
    returns_ids: bool  # whether the rows of sequences come with their ids
    tables: tuple[TableSource, ...]

    @property
    def pooled(self) -> bool:
        return self.kind is EmbeddingBagCollection

    @property
    def name(self) -> str:
        return f"collection {self.path!r}" if self.path else "the collection"


def find_collections(module: nn.Module, sharders: Sequence[Any] | None) -> list[CollectionSource]:
    """All collections of a module; `sharders` may have the hyperparameters of their optimizers."""
    fused = {sharder.module_type: getattr(sharder, "fused_params", None) or {} for sharder in sharders or ()}
    sources: list[CollectionSource] = []
    for path, child in module.named_modules():
        if type(child) in (EmbeddingBagCollection, EmbeddingCollection):
            sources.append(_read_collection(path, child, fused.get(type(child), {})))
        elif isinstance(child, (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)):
            got = f"module {path!r} is a {type(child).__name__}"
            raise SpecError(got, "EmbeddingBagCollection or EmbeddingCollection")
    return sources


def parameter_of(module: Any, table: str) -> nn.Parameter:
    """The rows of a table of TorchRec's collection."""
    return (module.embedding_bags if isinstance(module, EmbeddingBagCollection) else module.embeddings)[table].weight


def _read_collection(path: str, module: Any, fused_params: Mapping[str, Any]) -> CollectionSource:
    pooled = isinstance(module, EmbeddingBagCollection)
    configs = module.embedding_bag_configs() if pooled else module.embedding_configs()
    return CollectionSource(
        path=path,
        kind=type(module),
        configs=configs,
        weighted=pooled and module.is_weighted(),
        returns_ids=not pooled and module.need_indices(),
        tables=tuple(_read_tables(path, module, configs, fused_params)),
    )


def _read_tables(
    path: str, module: Any, configs: Sequence[Any], fused_params: Mapping[str, Any]
) -> Iterator[TableSource]:
    pooled = isinstance(module, EmbeddingBagCollection)
    for config, outputs in zip(configs, get_embedding_names_by_table(configs), strict=True):
        where = f"table {config.name!r} of module {path!r}"
        if config.data_type not in ROW_TYPES or config.use_virtual_table:
            kind = "a virtual table" if config.use_virtual_table else f"of data_type {config.data_type.name}"
            raise SpecError(f"{where} is {kind}", f"rows of {', '.join(kind.name for kind in ROW_TYPES)}")
        optimizer = _read_optimizer(where, parameter_of(module, config.name), fused_params)
        table = Table(
            name=config.name,
            rows=config.num_embeddings,
            dim=config.embedding_dim,
            features=tuple(outputs),
            pooling=_pooling(where, config, weighted=module.is_weighted()) if pooled else Pooling.SEQUENCE,
            optimizer=optimizer or Sgd(),
            init=Constant(),  # rows are copied, or drawn by the config's init_fn
            row_type=ROW_TYPES[config.data_type],
        )
        yield TableSource(
            table=table,
            features=tuple(config.feature_names),
            init_rows=config.init_fn,
            trained=optimizer is not None,
        )


def _pooling(where: str, config: Any, *, weighted: bool) -> Pooling:
    if not weighted:
        return Pooling(config.pooling.value.lower())
    if config.pooling is not PoolingType.SUM:
        raise SpecError(f"{where} pools weighted ids by {config.pooling.value}", "SUM, or is_weighted=False")
    return Pooling.WEIGHTED


def _read_optimizer(where: str, parameter: nn.Parameter, fused_params: Mapping[str, Any]) -> RowOptimizer | None:
    """The optimizer left on the parameter, with the sharder's hyperparameters as defaults; None without either."""
    classes, kwargs = (list(getattr(parameter, name, ())) for name in ("_optimizer_classes", "_optimizer_kwargs"))
    if len(classes) > 1:
        raise SpecError(f"{where} has {len(classes)} optimizers in its backward", "one")
    given = {key: value for key, value in fused_params.items() if key not in STORAGE}
    if classes:
        try:
            given |= {"optimizer": optimizer_type_to_emb_opt_type(classes[0]), **kwargs[0]}
        except ValueError:
            raise _unknown(where, classes[0].__name__) from None
    elif not given.keys() & {"optimizer", "lr", "learning_rate"}:
        return None
    kind = given.pop("optimizer", EmbOptimType.EXACT_SGD)
    if kind not in KINDS:
        raise _unknown(where, classes[0].__name__ if classes else getattr(kind, "name", kind))
    return _make(where, KINDS[kind], given)


def _make(where: str, kind: type[RowOptimizer], given: dict[str, Any]) -> RowOptimizer:
    """Our optimizer with FBGEMM's defaults and these hyperparameters."""
    if "betas" in given:
        given |= dict(zip(("beta1", "beta2"), given.pop("betas"), strict=True))
    if "learning_rate" in given:
        given["lr"] = given.pop("learning_rate")
    # FBGEMM applies it by default in Adam only, where it is decoupled as ours is.
    if kind is not Adam and not given.get("weight_decay", 0.0):
        given.pop("weight_decay", None)
    known = KNOWN.get(kind, ("lr", "eps"))
    unknown = [key for key in given if key not in known]
    if unknown:
        got = f"{where}: {kind.__name__} with {unknown[0]}={given[unknown[0]]!r}"
        raise SpecError(got, f"only {', '.join(known)}")
    make: Callable[..., RowOptimizer] = kind
    return make(**{"lr": 0.01, **given})


def _unknown(where: str, name: str) -> SpecError:
    known = ", ".join(kind.__name__ for kind in KINDS.values())
    return SpecError(f"{where}: no optimizer {name} here", f"one of {known}, by its name in torch or torchrec.optim")
